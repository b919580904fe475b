"""Masked-LM adaptation: what a converted checkpoint needs to learn its new positions and the language of new documents.

python -m finetune.mlm --model my-hybrid --train-file papers.jsonl --text-column document --output runs/adapted
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from .arguments import RunArguments, option
from .batches import IGNORED_LABEL
from .documents import Split, as_dataset, check_columns, read_rows, source_of
from .metrics import load_metric
from .task import Task
from .tokenising import tokenise


@dataclass(kw_only=True)
class MaskedLMArguments(RunArguments):
    """What a masked-LM run can be told."""

    text_column: str = option("text", "column of the documents")
    mask_share: float = option(0.15, "share of the tokens to predict; of these 80% are masked, 10% replaced, 10% kept")
    min_window: int = option(32, "a document's last window is left out if it is shorter than this")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mask_share < 1:
            raise ValueError(f"mask_share={self.mask_share} must be between 0 and 1")


class TextRows:
    """Windows of documents by number."""

    def __init__(self, dataset: Dataset, task: "MaskedLM"):
        self.dataset, self.task = dataset, task
        self.lengths = dataset["length"]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.task.finish(self.dataset[number]["input_ids"])


class MaskedLM(Task):
    name = "mlm"
    auto_class = "AutoModelForMaskedLM"
    arguments_class = MaskedLMArguments
    best_metric = "perplexity"
    higher_is_better = False
    lora_saved = ("lm_head",)

    def load_model(self) -> PreTrainedModel:
        model = super().load_model()
        if "lm_head.layer_norm.weight" in self.new_weights:
            calm_new_head(model)
        return model

    def read(self, split: Split) -> TextRows:
        rows = read_rows(self.args, split)
        check_columns(rows, [self.args.text_column], f"{split} data ({source_of(self.args, split)})")
        dataset = self.limited(as_dataset(rows), split).select_columns([self.args.text_column])
        encoded = tokenise(
            dataset,
            encode_texts,
            tokenizer=self.tokenizer,
            workers=self.args.preprocessing_workers,
            desc=split,
            **self.encoding,
        )
        return TextRows(encoded, self)

    def stream(self) -> "TextStream":
        rows = read_rows(self.args, "train", streaming=True)
        check_columns(rows, [self.args.text_column], "training stream")
        return TextStream(rows, self)

    @property
    def encoding(self) -> dict[str, Any]:
        return {
            "column": self.args.text_column,
            "max_length": self.max_length,
            "min_window": self.args.min_window,
        }

    def finish(self, input_ids: list[int]) -> dict[str, Any]:
        return {"input_ids": input_ids, **self.global_mask(len(input_ids))}

    def collate(self, rows: Any) -> dict[str, Any]:
        masked = [self.mask(row) for row in rows]
        batch: dict[str, Any] = super().collate(masked)
        if "logits_at_labels" in self._accepted:
            batch["logits_at_labels"] = True
        return batch

    def mask(self, row: dict[str, Any]) -> dict[str, Any]:
        """Hides tokens by numbers that depend on the seed, the row and the batch alone, so that runs repeat."""
        random = np.random.default_rng([self.args.seed, row["row_id"], row["draw"]])
        ids = np.array(row["input_ids"])
        chosen = (random.random(len(ids)) < self.args.mask_share) & ~np.isin(ids, self.tokenizer.all_special_ids)
        labels = np.where(chosen, ids, IGNORED_LABEL)
        lot = random.random(len(ids))
        others = random.integers(0, len(self.tokenizer), len(ids))
        ids = np.where(chosen & (lot < 0.8), self.tokenizer.mask_token_id, ids)
        ids = np.where(chosen & (lot >= 0.9), others, ids)
        return {**row, "input_ids": ids, "labels": labels}

    def count_items(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != IGNORED_LABEL).sum()

    def evaluate(self, model: nn.Module, accelerator: Accelerator, split: Split, folder: Path | None) -> dict[str, Any]:
        rows = self.rows(split)
        # Per batch: its mean loss, and for every masked token what was predicted and what is right.
        seen: list[tuple[float, list[int], list[int]]] = []
        for numbers, batch in self.eval_batches(rows, rows.lengths, accelerator, f"{split} masked tokens"):
            outputs = model(**batch)
            labelled = batch["labels"] != IGNORED_LABEL
            logits = outputs.logits if outputs.logits.dim() == 2 else outputs.logits[labelled]
            if numbers and labelled.any():
                seen.append((outputs.loss.item(), logits.argmax(-1).tolist(), batch["labels"][labelled].tolist()))
        seen = gather_object(seen)
        perplexity = load_metric("perplexity_from_loss").compute(
            predictions=[loss for loss, _, _ in seen], references=[len(right) for _, _, right in seen]
        )
        accuracy = load_metric("masked_accuracy").compute(
            predictions=[token for _, predicted, _ in seen for token in predicted],
            references=[token for _, _, right in seen for token in right],
        )
        return {**perplexity, **accuracy}

    def settings(self) -> dict[str, Any]:
        return {"max_length": self.max_length}


class TextStream:
    """Windows of a stream's documents, one by one."""

    def __init__(self, rows: Any, task: MaskedLM):
        self.rows, self.task = rows, task

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self.task.first_rows(self.rows):
            texts = {self.task.args.text_column: [row[self.task.args.text_column]]}
            for ids in encode_texts(texts, tokenizer=self.task.tokenizer, **self.task.encoding)["input_ids"]:
                yield self.task.finish(ids)


@torch.no_grad()
def calm_new_head(model: Any) -> None:
    """Lets a new head begin with logits of about unit spread, whatever the scale of the embeddings it is tied to.

    Those of encoders that were never trained as language models may be large: the head would begin far worse than
    guessing, and unlearn that first.
    """
    spread = model.get_output_embeddings().weight.norm(dim=-1).mean()
    model.lm_head.layer_norm.weight.div_(spread)


def encode_texts(rows: dict[str, list], *, tokenizer: Any, column: str, max_length: int, min_window: int) -> dict:
    """Every document in windows of at most `max_length` tokens, each between its special tokens; none spans two."""
    encoded = tokenizer(
        [text or "" for text in rows[column]],
        truncation=True,
        max_length=max_length,
        return_overflowing_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    documents = encoded["overflow_to_sample_mapping"]
    special = tokenizer.num_special_tokens_to_add()
    windows = []
    for number, ids in enumerate(encoded["input_ids"]):
        is_first = number == 0 or documents[number] != documents[number - 1]
        if len(ids) > special and (is_first or len(ids) >= min_window):
            windows.append(ids)
    return {"input_ids": windows, "length": [len(window) for window in windows]}


if __name__ == "__main__":
    from .run import run

    sys.exit(run(MaskedLM))
