"""Summarisation of long documents, with an optional query that says what the summary is about.

python -m finetune.summarise --model my-hybrid-seq2seq --train-file papers.jsonl --output runs/summaries
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn

from .arguments import RunArguments, option
from .batches import IGNORED_LABEL
from .documents import Split, as_dataset, check_columns, read_rows, source_of
from .files import write_json
from .metrics import load_metric
from .task import Task
from .tokenising import tokenise


@dataclass(kw_only=True)
class SummariseArguments(RunArguments):
    """What a summarisation run can be told."""

    document_column: str = option("document", "column of the documents")
    summary_column: str = option("summary", "column of the summaries")
    query_column: str | None = option(None, "column of queries; a query stands before its document and is global")
    max_summary_tokens: int = option(256, "longest summary, in training and when generating")
    num_beams: int = option(4, "beams when generating; 1 for greedy")
    no_repeat_ngram: int = option(3, "no run of so many tokens is generated twice; 0 for no such rule")
    length_penalty: float = option(1.0, "above 1 favours longer summaries")
    validate_by_loss: bool = option(False, "choose the best model by its loss, which spares generating in between")


class SummaryRows:
    """Tokenised documents and summaries by number."""

    def __init__(self, dataset: Dataset, task: "Summarise"):
        self.dataset, self.task = dataset, task
        self.lengths = dataset["length"]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.task.finish(self.dataset[number])


class Summarise(Task):
    name = "summarise"
    auto_class = "AutoModelForSeq2SeqLM"
    arguments_class = SummariseArguments
    default_global = "question"
    lora_saved = ()

    def __init__(self, args: SummariseArguments):
        super().__init__(args)
        self.best_metric = "loss" if args.validate_by_loss else "rougeLsum"  # type: ignore[misc]
        self.higher_is_better = not args.validate_by_loss  # type: ignore[misc]

    def read(self, split: Split) -> SummaryRows:
        rows = read_rows(self.args, split)
        check_columns(rows, self.columns, f"{split} data ({source_of(self.args, split)})")
        dataset = self.limited(as_dataset(rows), split).select_columns(self.columns)
        encoded = tokenise(
            dataset,
            encode_rows,
            tokenizer=self.tokenizer,
            workers=self.args.preprocessing_workers,
            desc=split,
            **self.encoding,
        )
        return SummaryRows(encoded, self)

    def stream(self) -> "SummaryStream":
        rows = read_rows(self.args, "train", streaming=True)
        check_columns(rows, self.columns, "training stream")
        return SummaryStream(rows, self)

    @property
    def columns(self) -> list[str]:
        names = [self.args.document_column, self.args.summary_column, self.args.query_column]
        return [name for name in names if name is not None]

    @property
    def encoding(self) -> dict[str, Any]:
        args = self.args
        return {
            "document": args.document_column,
            "summary": args.summary_column,
            "query": args.query_column,
            "max_length": self.max_length,
            "max_summary_tokens": args.max_summary_tokens,
        }

    def finish(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of the data set as the batch wants it: with its global tokens, without what is for reading only."""
        mask = self.global_mask(len(row["input_ids"]), (0, row["query_end"]))
        return {"input_ids": row["input_ids"], "labels": row["labels"], **mask}

    def count_items(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != IGNORED_LABEL).sum()

    def evaluate(self, model: nn.Module, accelerator: Accelerator, split: Split, folder: Path | None) -> dict[str, Any]:
        rows = self.rows(split)
        generates = split == "test" or not self.args.validate_by_loss
        written: list[tuple[int, str]] = []
        totals = torch.zeros(2, device=accelerator.device, dtype=torch.float64)
        for numbers, batch in self.eval_batches(rows, rows.lengths, accelerator, f"{split} summaries"):
            count = self.count_items(batch)
            totals += torch.stack([model(**batch).loss.double() * count, count.double()])
            if generates:
                texts = self.generate(accelerator.unwrap_model(model), batch)
                written += list(zip(numbers, texts, strict=True))
        loss_sum, tokens = accelerator.reduce(totals, reduction="sum").tolist()
        metrics = {"loss": loss_sum / max(tokens, 1)}
        if generates:
            metrics |= self._rouge(rows.dataset, dict(gather_object(written)), folder)
        return metrics

    def generate(self, model: Any, batch: dict[str, Tensor]) -> list[str]:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        tokens = model.generate(
            **inputs,
            max_new_tokens=self.args.max_summary_tokens,
            num_beams=self.args.num_beams,
            no_repeat_ngram_size=self.args.no_repeat_ngram,
            length_penalty=self.args.length_penalty,
            early_stopping=self.args.num_beams > 1,
        )
        return [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def _rouge(self, dataset: Dataset, written: dict[int, str], folder: Path | None) -> dict[str, float]:
        order = sorted(written)
        references = [dataset[number]["reference"] for number in order]
        predictions = [written[number] for number in order]
        if folder is not None:
            pairs = zip(predictions, references, strict=True)
            write_json(folder / "summaries.json", [{"summary": one, "reference": other} for one, other in pairs])
        return load_metric("rouge").compute(predictions=predictions, references=references)

    def settings(self) -> dict[str, Any]:
        """What generating needs to know beside the model."""
        names = ("max_summary_tokens", "num_beams", "no_repeat_ngram", "length_penalty")
        return {name: getattr(self.args, name) for name in names} | {"max_length": self.max_length}


class SummaryStream:
    """Tokenised rows of a stream, one by one."""

    def __init__(self, rows: Any, task: Summarise):
        self.rows, self.task = rows, task

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            encoded = encode_rows(
                {name: [row[name]] for name in self.task.columns}, tokenizer=self.task.tokenizer, **self.task.encoding
            )
            yield self.task.finish({key: values[0] for key, values in encoded.items()})


def encode_rows(
    rows: dict[str, list],
    *,
    tokenizer: Any,
    document: str,
    summary: str,
    query: str | None,
    max_length: int,
    max_summary_tokens: int,
) -> dict[str, list]:
    """Documents behind their queries, if any, and summaries as labels; `query_end` is where the query stops."""
    texts = [rows[document]] if query is None else [rows[query], rows[document]]
    encoded = tokenizer(
        *texts,
        max_length=max_length,
        truncation=True if query is None else "only_second",
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    labels = tokenizer(text_target=rows[summary], max_length=max_summary_tokens, truncation=True)["input_ids"]
    return {
        "input_ids": encoded["input_ids"],
        "labels": labels,
        "length": [len(ids) for ids in encoded["input_ids"]],
        "query_end": [1 if query is None else query_end(encoded.sequence_ids(i)) for i in range(len(labels))],
        "reference": rows[summary],
    }


def query_end(sequence_ids: list[int | None]) -> int:
    """One behind the last token of the first sequence."""
    return len(sequence_ids) - sequence_ids[::-1].index(0) if 0 in sequence_ids else 1


if __name__ == "__main__":
    from .run import run

    sys.exit(run(Summarise))
