"""Pretrains the demo's small model on generated contracts, from single clauses to whole documents.

    python -m finetune.demo_pretraining OUTPUT

Each stage reads longer excerpts than the one before; most excerpts are put at random positions behind their question,
so that the whole position table is used from the beginning. A run that was stopped continues behind its last finished
stage.
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Encoding
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hybrid_longformer import HybridLongformerForQuestionAnswering

from .contract_excerpts import Excerpt, write_excerpt, write_whole
from .contracts import generate_contracts
from .demo_evaluation import ask_all, evaluate_by_length
from .demo_start import new_model, train_tokenizer
from .files import replace_folder

_NO_LABEL = -1.0
_TRUTH_FILE = "truth_outputs.safetensors"
# How much is looked at behind every stage, and the seed of those contracts.
_REPORTED_EXCERPTS, _REPORTED_CONTRACTS, _SEED = 100, 4, 2_000
_COMMAND = "python -m finetune.demo_pretraining OUTPUT"
CARD = """\
---
library_name: transformers
pipeline_tag: question-answering
tags:
- hybrid_longformer
- long-document
---

# Demo model

The starting point of the demo: a question-answering model for up to {max_tokens:,} tokens; the question is global.
It has {layers} layers, hidden size {hidden_size}, {heads} heads, window {window}, {random_blocks} random block(s) of
{block_size} tokens, and {parameters:,} parameters, stored in half precision and loaded in single precision.

```python
from hybrid_longformer import HybridLongformerForQuestionAnswering

model = HybridLongformerForQuestionAnswering.from_pretrained("finetune/demo_model")
```

## How it was made

    {command}

pretrains it on the training split of generated contracts (`finetune/contracts.py`), from single clauses to whole
documents of at most {most_words} words, and prints the figures below.

## What it reaches, before any fine-tuning

F1 as in SQuAD v2 on generated test contracts, a third of whose questions have no answer (saying nothing scores 0.333);
the threshold is tuned on validation contracts.

| contracts | tokens | questions | F1 | F1 of answerable questions |
|---|---|---|---|---|
{rows}

Names and values of the test contracts occur in no other split, but all splits share the same kinds of clause and the
same ways to word clauses and questions. The figures say that the question is matched with far evidence among near
misses; they say nothing of contracts that people wrote. It is no model of English.
"""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One lesson: how long the excerpts are and for how long they are learnt.

    Args:
        name: of the folder that it leaves.
        clauses: least and largest number per excerpt; None for whole contracts.
        words: least and largest number per whole contract.
        near_misses: the share of distractors that are near misses.
        steps: optimiser steps.
        learning_rate: at the first and at the last step.
        warm_up: steps until the learning rate is reached.
        tokens: per step, padding included.
        shifted: the share of excerpts that begin at a random position. The others begin right behind their question, as
            they will in use, where words are hard to tell from the question's at first.
    """

    name: str
    steps: int
    clauses: tuple[int, int] | None = None
    words: tuple[int, int] = (0, 0)
    near_misses: float = 0.5
    learning_rate: tuple[float, float] = (1e-3, 1e-3)
    warm_up: int = 30
    tokens: int = 4_096
    shifted: float = 1.0

    def excerpt(self, rng: random.Random, split: str) -> Excerpt:
        if self.clauses is None:
            return write_whole(rng, split=split, words=self.words)
        return write_excerpt(rng, split=split, clauses=self.clauses, near_misses=self.near_misses)


STAGES = (
    Stage(name="1-clause", clauses=(1, 1), near_misses=0.6, steps=250, warm_up=100),
    Stage(name="2-clauses", clauses=(1, 2), steps=300),
    Stage(name="4-clauses", clauses=(1, 4), steps=400),
    Stage(name="8-clauses", clauses=(2, 8), steps=400, shifted=0.75),
    Stage(name="15-clauses", clauses=(6, 15), steps=400, shifted=0.75, learning_rate=(1e-3, 7e-4), tokens=6_000),
    Stage(name="contracts", words=(300, 900), steps=300, shifted=0.75, learning_rate=(7e-4, 1e-4), tokens=6_000),
)


@dataclass(frozen=True)
class Row:
    """An excerpt as tokens, with the answer's first and last (0: no answer) and the truth of every token's clause."""

    input_ids: list[int]
    context_start: int
    answer: tuple[int, int]
    truths: list[list[float]]


def encode(tokenizer: PreTrainedTokenizerFast, excerpts: Sequence[Excerpt]) -> list[Row]:
    """Rows of question and excerpt."""
    encoded = tokenizer([excerpt.question for excerpt in excerpts], [excerpt.text for excerpt in excerpts])
    return [_as_row(excerpt, encoding) for excerpt, encoding in zip(excerpts, encoded.encodings, strict=True)]


def _as_row(excerpt: Excerpt, encoding: Encoding) -> Row:
    context = [place for place, sequence in enumerate(encoding.sequence_ids) if sequence == 1]
    spans = [encoding.offsets[place] for place in context]
    end = excerpt.answer_start + len(excerpt.answer)
    inside = [place for place, (a, b) in zip(context, spans, strict=True) if excerpt.answer_start < b and a < end]
    truths = [[_NO_LABEL] * 3] * len(encoding.ids)
    clauses = iter(excerpt.clauses)
    clause = next(clauses)
    for place, (start, _) in zip(context, spans, strict=True):
        while start > clause.end:
            clause = next(clauses)
        if start >= clause.start:
            bits = (clause.right_kind, clause.right_party, clause.in_force)
            truths[place] = [_NO_LABEL if bit is None else float(bit) for bit in bits]
    answer = (inside[0], inside[-1]) if excerpt.answer else (0, 0)
    return Row(encoding.ids, context[0], answer, truths)


def batches(stage: Stage, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[list[Row]]:
    """Endless batches of rows of like length, each as large as the stage's number of tokens allows."""
    drawn = 64
    while True:
        rows = encode(tokenizer, [stage.excerpt(rng, "train") for _ in range(drawn)])
        rows.sort(key=lambda row: len(row.input_ids))
        found: list[list[Row]] = [[]]
        for row in rows:
            if found[-1] and len(row.input_ids) * (len(found[-1]) + 1) > stage.tokens:
                found.append([])
            found[-1].append(row)
        # About six batches at a time, whatever the length of the rows.
        drawn = max(6, drawn * 6 // len(found))
        rng.shuffle(found)
        yield from found


def collate(
    rows: Sequence[Row], *, pad_token_id: int, max_positions: int, shifted: float, rng: random.Random
) -> dict[str, Tensor]:
    """The model's inputs; this share of excerpts begins at a random position behind its question."""
    length = max(len(row.input_ids) for row in rows)
    input_ids = torch.full((len(rows), length), pad_token_id)
    position_ids = torch.arange(2, length + 2).repeat(len(rows), 1)
    for number, row in enumerate(rows):
        input_ids[number, : len(row.input_ids)] = torch.tensor(row.input_ids)
        if rng.random() < shifted:
            position_ids[number, row.context_start :] += rng.randint(0, max_positions - 2 - length)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != pad_token_id).long(),
        "position_ids": position_ids,
    }


class Lesson(nn.Module):
    """The model with one more output, needed here only: the truth about every token's clause."""

    def __init__(self, model: HybridLongformerForQuestionAnswering):
        super().__init__()
        self.model = model
        self.truth_outputs = nn.Linear(model.config.hidden_size, 3)

    def forward(self, inputs: dict[str, Tensor], rows: Sequence[Row]) -> Tensor:
        """The loss of the answers' places, and of the clauses' truths."""
        outputs = self.model(**inputs, output_hidden_states=True)
        padding = inputs["attention_mask"] == 0
        loss = torch.zeros(())
        for logits, side in ((outputs.start_logits, 0), (outputs.end_logits, 1)):
            places = torch.tensor([row.answer[side] for row in rows])
            loss = loss + F.cross_entropy(logits.masked_fill(padding, -1e4), places) / 2
        return loss + self._truth_loss(outputs.hidden_states[-1], rows)

    def _truth_loss(self, hidden_states: Tensor, rows: Sequence[Row]) -> Tensor:
        labels = torch.full((*hidden_states.shape[:2], 3), _NO_LABEL)
        for number, row in enumerate(rows):
            labels[number, : len(row.truths)] = torch.tensor(row.truths)
        counted = (labels != _NO_LABEL).float()
        losses = F.binary_cross_entropy_with_logits(
            self.truth_outputs(hidden_states), labels.clamp(min=0), weight=counted, reduction="none"
        )
        return (losses.sum((0, 1)) / counted.sum((0, 1)).clamp(min=1)).sum()


def train_stage(stage: Stage, lesson: Lesson, tokenizer: PreTrainedTokenizerFast) -> None:
    """Runs a stage's steps."""
    rng = random.Random(stage.name)
    optimizer = torch.optim.AdamW(_parameter_groups(lesson), lr=stage.learning_rate[0], betas=(0.9, 0.98))
    lesson.train()
    max_positions, found = lesson.model.config.max_position_embeddings, batches(stage, tokenizer, rng)
    bar = tqdm(range(stage.steps), desc=stage.name, unit="step")
    for step in bar:
        first, last = stage.learning_rate
        rate = first + (last - first) * step / stage.steps
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / stage.warm_up)
        rows = next(found)
        inputs = collate(
            rows, pad_token_id=tokenizer.pad_token_id, max_positions=max_positions, shifted=stage.shifted, rng=rng
        )
        loss = lesson(inputs, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(lesson.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", rows=len(rows), refresh=False)


def _parameter_groups(lesson: Lesson) -> list[dict]:
    """Weight decay for matrices only. Positions stay as they are: no stage sees all of them often enough."""
    lesson.model.hybrid_longformer.embeddings.position_embeddings.requires_grad_(False)
    learnt = [(name, weight) for name, weight in lesson.named_parameters() if weight.requires_grad]
    is_matrix = [weight.dim() > 1 and "embeddings" not in name for name, weight in learnt]
    return [
        {"params": [w for (_, w), matrix in zip(learnt, is_matrix, strict=True) if matrix], "weight_decay": 0.01},
        {"params": [w for (_, w), matrix in zip(learnt, is_matrix, strict=True) if not matrix], "weight_decay": 0.0},
    ]


def pretrain(folder: Path, stages: Sequence[Stage] = STAGES, *, seed: int = 0) -> Path:
    """Runs the stages that `folder` does not hold yet; returns the folder of the last one."""
    torch.manual_seed(seed)
    tokenizer, lesson, done = _start(folder, stages)
    for number, stage in enumerate(stages):
        if number >= done:
            print(f"stage {number + 1} of {len(stages)}: {stage.name}")
            train_stage(stage, lesson, tokenizer)
            _report_stage(stage, lesson.model, tokenizer)
            _save_stage(folder / "stages" / stage.name, lesson, tokenizer)
    return folder / "stages" / stages[-1].name


def _report_stage(
    stage: Stage, model: HybridLongformerForQuestionAnswering, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Prints F1 on held-out excerpts of the stage's own length and on medium contracts."""
    rng = random.Random("report")
    excerpts = [stage.excerpt(rng, "validation").as_contract() for _ in range(_REPORTED_EXCERPTS)]
    contracts = list(generate_contracts(size="medium", split="validation", count=_REPORTED_CONTRACTS, seed=_SEED))
    for name, documents in ((stage.name, excerpts), ("medium contracts", contracts)):
        asked = ask_all(model, tokenizer, documents)
        f1 = asked.f1(asked.best_threshold())
        print(f"  {name}, held out: F1 {f1:.3f} on {len(asked.references)} questions")


def _start(folder: Path, stages: Sequence[Stage]) -> tuple[PreTrainedTokenizerFast, Lesson, int]:
    """Tokenizer and model as the last finished stage left them, and the number of finished stages."""
    finished = [stage.name for stage in stages if (folder / "stages" / stage.name).is_dir()]
    if not finished:
        tokenizer = train_tokenizer()
        return tokenizer, Lesson(new_model(len(tokenizer))), 0
    place = folder / "stages" / finished[-1]
    print(f"continuing behind {place}")
    lesson = Lesson(HybridLongformerForQuestionAnswering.from_pretrained(place, dtype=torch.float32))
    lesson.truth_outputs.load_state_dict(load_file(place / _TRUTH_FILE))
    return AutoTokenizer.from_pretrained(place), lesson, len(finished)


def _save_stage(folder: Path, lesson: Lesson, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes the stage's folder beside its place and renames it, so that a folder is always a finished stage."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    lesson.model.save_pretrained(part, tokenizer=tokenizer)
    save_file(lesson.truth_outputs.state_dict(), part / _TRUTH_FILE)
    replace_folder(part, folder)


def publish(stage_folder: Path, folder: Path) -> dict[str, dict[str, float]]:
    """Writes the checkpoint to ship: weights in half precision, config, tokenizer and card; returns what was measured.

    The weights are measured as shipped: rounded to half precision, computed in single precision.
    """
    tokenizer = AutoTokenizer.from_pretrained(stage_folder)
    model = HybridLongformerForQuestionAnswering.from_pretrained(stage_folder, dtype=torch.float16)
    measured = evaluate_by_length(model.float(), tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    model.half()
    save_file(
        {name: weight.contiguous() for name, weight in model.state_dict().items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    # What the config says wins over the file: loading gives float32. The code stays where it is, in the package.
    model.config.dtype = torch.float32
    model.config.architectures = [type(model).__name__]
    model.config.to_json_file(folder / "config.json")
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(demo_card(model, measured), encoding="utf-8")
    (folder / "metrics.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return measured


def demo_card(model: HybridLongformerForQuestionAnswering, measured: dict[str, dict[str, float]]) -> str:
    """The checkpoint's card: how it was made, what it reaches, and what that does and does not show."""
    config = model.config
    rows = [
        f"| {size} | {found['shortest']:,} to {found['longest']:,} | {found['questions']} | {found['f1']:.3f} | "
        f"{found['f1_answerable']:.3f} |"
        for size, found in measured.items()
    ]
    return CARD.format(
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        window=config.attention_window,
        random_blocks=config.num_random_blocks,
        block_size=config.block_size,
        parameters=model.num_parameters(),
        max_tokens=config.max_tokens,
        most_words=STAGES[-1].words[1],
        command=_COMMAND,
        rows="\n".join(rows),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m finetune.demo_pretraining", description=__doc__)
    parser.add_argument("output", type=Path, help="folder for the stages and, in `model`, the finished checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="of the untrained weights (0)")
    parser.add_argument("--threads", type=int, help="CPU threads to use (default: torch's)")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    last = pretrain(options.output, seed=options.seed)
    for size, found in publish(last, options.output / "model").items():
        print(f"{size}: F1 {found['f1']:.3f} on {found['questions']} questions")


if __name__ == "__main__":
    main()
