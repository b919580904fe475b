"""The README is true: its Python runs as it stands, its files and commands exist."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForQuestionAnswering

from benchmarks.tables import ratio_table
from hybrid_longformer.cli import main

from .finetuning import write_questions, write_summaries

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def save_roberta(folder: Path) -> None:
    """Somebody's own RoBERTa: the README's `my-roberta`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["who", "signs", "this", "agreement", "is", "signed", "by", "the", "parties", "below", "?", "."]
    vocabulary = {token: index for index, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    special |= {"sep_token": "</s>", "cls_token": "<s>", "mask_token": "<mask>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **special)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=514,
        type_vocab_size=1,
    )
    RobertaForQuestionAnswering(config).save_pretrained(folder)


def test_python_blocks_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_roberta(tmp_path / "my-roberta")
    names: dict = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "my-hybrid" / "modeling_hybrid_longformer.py").exists()
    assert names["inputs"]["input_ids"].shape[1] > 512
    assert (names["by_default"].start_logits - names["by_choice"].start_logits).abs().max() > 0
    assert (names["attention_map"].sum(-1) - 1).abs().max() < 1e-5
    assert (tmp_path / "map.png").stat().st_size > 10_000


def shell_lines() -> list[list[str]]:
    """The README's commands of this project, word by word, in blocks and in the text."""
    lines = README.splitlines() + re.findall(r"`(hybrid-longformer [^`\n]+)`", README)
    return [shlex.split(line) for line in lines if line.startswith("hybrid-longformer ")]


@pytest.mark.slow
def test_commands_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_roberta(tmp_path / "my-roberta")
    for name, numbers in (("train", range(4)), ("dev", range(4, 6))):
        write_questions(tmp_path / f"{name}.json", numbers)
        write_summaries(tmp_path / f"{name}.jsonl", numbers)
    commands = sorted(shell_lines(), key=lambda words: words[1])  # what is converted is fine-tuned then
    assert [words[1] for words in commands] == ["convert", "convert", "finetune", "finetune"]
    for words in commands:
        fewer_steps = ["--max-steps", "2"] if words[1] == "finetune" else []
        assert main([*words[1:], *fewer_steps]) == 0, words
    for output in ("qa", "summaries"):
        assert (tmp_path / "runs" / output / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("page", "name"), [("README.md", "models"), ("docs/benchmarks.md", "models"), ("docs/benchmarks.md", "attention")]
)
def test_tables_show_the_saved_results(page: str, name: str) -> None:
    text, report = (ROOT / page).read_text(), json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    assert ratio_table(name) in text
    assert report["command"] in " ".join(text.split())


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in DOCS)])
def test_linked_files_and_headings_exist(page: str) -> None:
    for target, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text()):
        linked = (ROOT / page).parent / target if target else ROOT / page
        assert linked.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], heading


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?\bmake (\w+)", README):
        if target not in ("and", "them"):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
