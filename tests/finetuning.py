"""What the tests of fine-tuning share: a small tokenizer, small models on disk, and small files of data."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import hybrid_longformer
from hybrid_longformer import HybridLongformerConfig

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
COLOURS = ["red", "green", "blue", "white", "black", "brown"]
ANIMALS = ["fox", "dog", "cat", "hen", "owl", "pig", "cow", "bee"]
FILLER = "It rains all day and nobody goes out to see what there is. "


def document(number: int, *, filler: int = 3) -> str:
    """Sentences that say which animal has which colour, between others that say nothing."""
    facts = [f"The {animal} is {colour_of(number, place)}. " for place, animal in enumerate(ANIMALS)]
    return "".join(fact + FILLER * (filler if place % 3 == 0 else 0) for place, fact in enumerate(facts)).strip()


def colour_of(number: int, place: int) -> str:
    return COLOURS[(number * 7 + place * 5 + number // 3) % len(COLOURS)]


def squad_article(number: int, *, filler: int = 3) -> dict[str, Any]:
    """Two questions with an answer and one without."""
    text = document(number, filler=filler)
    asked = []
    for place in (number % 8, (number + 3) % 8):
        fact = f"The {ANIMALS[place]} is "
        answer = {"text": colour_of(number, place), "answer_start": text.index(fact) + len(fact)}
        asked.append((f"What colour is the {ANIMALS[place]}?", [answer]))
    asked.append(("What colour is the whale?", []))
    qas = [
        {"id": f"{number}-{place}", "question": question, "answers": answers, "is_impossible": not answers}
        for place, (question, answers) in enumerate(asked)
    ]
    return {"title": str(number), "paragraphs": [{"context": text, "qas": qas}]}


def write_questions(path: Path, numbers: range, *, filler: int = 3) -> Path:
    data = [squad_article(number, filler=filler) for number in numbers]
    path.write_text(json.dumps({"version": "v2.0", "data": data}), encoding="utf-8")
    return path


def write_summaries(path: Path, numbers: range) -> Path:
    rows = [
        {"id": number, "document": document(number), "summary": f"The fox is {colour_of(number, 0)}.", "query": "fox?"}
        for number in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with RoBERTa's special tokens, trained on the documents above."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([document(number) for number in range(8)] + ["What colour is the whale?"], trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = {"bos": "<s>", "eos": "</s>", "cls": "<s>", "sep": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=510,
        **{f"{name}_token": token for name, token in names.items()},
    )


def save_model(folder: Path, head: str, **changes: Any) -> Path:
    """A checkpoint of the class `HybridLongformerFor<head>` without dropout, and the tokenizer."""
    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "attention_window": 16,
        "num_random_blocks": 1,
        "block_size": 8,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **changes,
    }
    model_class = getattr(hybrid_longformer, f"HybridLongformerFor{head}")
    model_class(HybridLongformerConfig(**settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_work(root: Path) -> Path:
    """Checkpoints for every task, with a licence, and data to train and validate them on."""
    save_model(root / "qa", "QuestionAnswering")
    save_model(root / "summarise", "ConditionalGeneration")
    save_model(root / "mlm", "MaskedLM")
    for task in ("qa", "summarise", "mlm"):
        (root / task / "LICENSE").write_text("MIT License\n")
    for name, numbers in (("train", range(16)), ("validation", range(16, 20))):
        write_questions(root / f"{name}.json", numbers)
        write_summaries(root / f"{name}.jsonl", numbers)
    return root


def arguments(work: Path, task: str) -> list[str]:
    """What a run on that data is told, but for its output."""
    suffix = "json" if task == "qa" else "jsonl"
    own = {
        "qa": ["--max-length", "160", "--stride", "32"],
        "summarise": ["--max-summary-tokens", "10", "--num-beams", "1"],
        "mlm": ["--text-column", "document", "--max-length", "128", "--global-attention", "every:16"],
    }[task]
    files = ["--train-file", str(work / f"train.{suffix}"), "--validation-file", str(work / f"validation.{suffix}")]
    return [
        "--model",
        str(work / task),
        *files,
        *own,
        "--learning-rate",
        "1e-3",
        "--batch-size",
        "4",
        "--log-steps",
        "1",
        "--report-to",
        "none",
    ]
