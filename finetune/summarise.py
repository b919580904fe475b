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

from hybrid_longformer import HybridLongformerConfig

from .arguments import RunArguments, option
from .batches import IGNORED_LABEL
from .documents import Split, as_dataset, check_columns, read_rows, source_of
from .files import write_json
from .metrics import load_metric
from .processes import is_sharded
from .task import Task
from .tokenising import tokenise


@dataclass(kw_only=True)
class SummariseArguments(RunArguments):
    """What a summarisation run can be told."""

    document_column: str = option("document", "column of the documents")
    summary_column: str = option("summary", "column of the summaries")
    query_column: str | None = option(None, "column of queries; a query stands before its document and is global")
    max_query_tokens: int = option(128, "longer queries are cut")
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
        self._check_summary_length()

    def _check_summary_length(self) -> None:
        limit = longest_output(self.config)
        if limit is not None and self.args.max_summary_tokens > limit:
            raise ValueError(
                f"max_summary_tokens={self.args.max_summary_tokens} is more than the {limit} tokens that "
                f"{self.args.model} can write: lower it"
            )

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
            "max_query_tokens": args.max_query_tokens,
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
            count = self.count_items(batch) * bool(numbers)
            totals += torch.stack([model(**batch).loss.double() * count, count.double()])
            if generates:
                texts = self.generate(accelerator.unwrap_model(model), batch, in_step=is_sharded(accelerator))
                written += list(zip(numbers, texts, strict=False))
        loss_sum, tokens = accelerator.reduce(totals, reduction="sum").tolist()
        metrics = {"loss": loss_sum / max(tokens, 1)}
        if generates:
            folder = folder if accelerator.is_main_process else None
            metrics |= self._rouge(rows.dataset, dict(gather_object(written)), folder)
        return metrics

    def generate(self, model: Any, batch: dict[str, Tensor], *, in_step: bool = False) -> list[str]:
        """Summaries of a batch.

        Args:
            in_step: every process goes on until the longest summary of all is done, as sharded models need it.
        """
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        tokens = model.generate(**inputs, **self.generation, synced_gpus=in_step)
        return [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    @property
    def generation(self) -> dict[str, Any]:
        """How summaries are generated, in transformers' words."""
        args = self.args
        options = {
            "max_new_tokens": args.max_summary_tokens,
            "num_beams": args.num_beams,
            "no_repeat_ngram_size": args.no_repeat_ngram,
        }
        beams_only = {"length_penalty": args.length_penalty, "early_stopping": True}
        return options | (beams_only if args.num_beams > 1 else {})

    def finish_model(self, model: Any) -> None:
        """Lets `generate` write what was evaluated, without being told."""
        model.generation_config.update(**self.generation)

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
        for row in self.task.first_rows(self.rows):
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
    max_query_tokens: int,
) -> dict[str, list]:
    """Documents behind their queries, if any, and summaries as labels; `query_end` is where the query stops."""
    if None in rows[summary]:
        raise ValueError(f"{rows[summary].count(None)} rows have no {summary}: leave them out, or fill them in")
    texts = [[text or "" for text in rows[document]]]
    if query is not None:
        room = min(max_query_tokens, max_length // 2)
        texts.insert(0, [cut_text(tokenizer, text or "", room) for text in rows[query]])
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


def cut_text(tokenizer: Any, text: str, max_tokens: int) -> str:
    """As much of a text as its first tokens stand for."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text if len(offsets) <= max_tokens else text[: offsets[max_tokens - 1][1]]


def longest_output(config: Any) -> int | None:
    """Tokens that a decoder with a table of positions can write; None where nothing limits them."""
    if isinstance(config, HybridLongformerConfig):
        return config.decoder_max_position_embeddings - config.position_offset
    names = ("max_decoder_position_embeddings", "max_position_embeddings")
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def query_end(sequence_ids: list[int | None]) -> int:
    """One behind the last token of the first sequence."""
    return len(sequence_ids) - sequence_ids[::-1].index(0) if 0 in sequence_ids else 1


if __name__ == "__main__":
    from .run import run

    sys.exit(run(Summarise))
