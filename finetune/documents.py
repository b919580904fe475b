"""Documents: reads questions, summaries or plain text, from the Hub or from local files, in any of the usual forms.

Files: json (a list, lines, or nested SQuAD), jsonl, csv, parquet; .gz too. Hub data sets by name.
"""

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, IterableDataset, load_dataset

from .arguments import RunArguments

Split = Literal["train", "validation", "test"]
NOT_FOUND = -1
# How Python writes lists and dicts, which csv files hold when they were written without care.
PYTHON_NOTATION = re.compile(r"\s*(\{\s*'|\[\s*['{])")
BUILDERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question about one context; no answers means that the context has none.

    A start is NOT_FOUND for an answer that does not stand in the context word for word: it counts as right when answers
    are judged, but can't be learnt from.
    """

    id: str
    text: str
    context: str
    answers: list[str]
    starts: list[int]

    @property
    def is_learnable(self) -> bool:
        """Whether it has no answer, or one that is found."""
        return not self.answers or max(self.starts) > NOT_FOUND


def source_of(args: RunArguments, split: Split) -> str | None:
    """The file or Hub split that serves a split, or None where the run has none."""
    path = getattr(args, f"{split}_file")
    if path is not None:
        return path
    return getattr(args, f"{split}_split") if args.dataset is not None else None


def read_rows(args: RunArguments, split: Split, *, streaming: bool = False) -> Iterable[dict[str, Any]]:
    """The rows of a split as they stand in its source; nested SQuAD json is flattened."""
    path = getattr(args, f"{split}_file")
    if path is None:
        if args.dataset is None:
            raise ValueError(f"no data to read for {split}: give --{split}-file, or --dataset with a Hub name")
        return load_dataset(
            args.dataset, args.dataset_config, split=getattr(args, f"{split}_split"), streaming=streaming
        )
    return read_file(Path(path), streaming=streaming)


def read_file(path: Path, *, streaming: bool = False) -> Iterable[dict[str, Any]]:
    """The rows of one local file."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file: is the path right, and relative to where the command runs?")
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    builder = BUILDERS.get(suffixes[-1] if suffixes else "")
    if builder is None:
        raise ValueError(f"{path} ends in none of {', '.join(BUILDERS)} (.gz too): rename it or convert it")
    if builder == "json" and (nested := read_json_object(path)) is not None:
        return list(nested_rows(nested, path))
    return load_dataset(builder, data_files={"train": str(path)}, split="train", streaming=streaming)


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The file's one json object, if that's what it is; None for lists and for lines."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        first = file.readline()
        if not first.lstrip().startswith("{"):
            return None
        try:
            only = json.loads(first)
        except json.JSONDecodeError:
            return _parse(first + file.read(), path)
        return None if file.read(64).strip() else only


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is neither one json object nor one per line: {error}") from error


def nested_rows(nested: dict[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """SQuAD's articles, paragraphs and questions as flat rows; flat rows under `data` as they are."""
    if "data" not in nested:
        # A file of lines with one line looks the same.
        yield nested
        return
    for number, article in enumerate(_objects(nested["data"], f"{path}: data")):
        if "paragraphs" not in article:
            yield article
            continue
        for place, paragraph in enumerate(_objects(article["paragraphs"], f"{path}: paragraphs of article {number}")):
            if "context" not in paragraph:
                raise ValueError(f"{path}: paragraph {place} of article {number} has no context")
            for asked in _objects(paragraph.get("qas", []), f"{path}: qas of article {number}"):
                yield {"title": article.get("title"), "context": paragraph["context"], **asked}


def _objects(value: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"{what} must be a list of json objects, as in SQuAD, not {json.dumps(value)[:60]}")
    return value


def check_columns(rows: Iterable[dict[str, Any]], wanted: Sequence[str], where: str) -> None:
    """Refuses data that lack a column, naming the columns there are and how to name another."""
    names = getattr(rows, "column_names", None)
    if names is None:
        first = next(iter(rows), None)
        if first is None:
            raise ValueError(f"{where} is empty")
        names = list(first)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(
            f"{where} has no column {missing[0]!r}, only {', '.join(map(repr, names))}: name the right one "
            "with the --…-column arguments"
        )


def as_question(row: dict[str, Any], number: int, columns: "QuestionColumns") -> Question:
    """A flat row as a question, whichever of the usual forms its answers have."""
    context = row[columns.context] or ""
    texts, starts = answers_of(row.get(columns.answers), row, columns)
    found = [(text, locate(text, start, context)) for text, start in zip(texts, starts, strict=True) if text]
    return Question(
        id=str(row.get("id", number)),
        text=str(row[columns.question] or "").strip(),
        context=context,
        answers=[text for text, _ in found],
        starts=[start for _, start in found],
    )


@dataclass(frozen=True, kw_only=True)
class QuestionColumns:
    question: str = "question"
    context: str = "context"
    answers: str = "answers"


def answers_of(answers: Any, row: dict[str, Any], columns: QuestionColumns) -> tuple[list[str], list[int | None]]:
    """SQuAD's {text: [...], answer_start: [...]}, a list of {text, answer_start}, texts alone, or json of these."""
    if isinstance(answers, str):
        answers = _answers_in(answers, row, columns)
    if answers is None:
        answers = []
    if isinstance(answers, dict):
        texts = _as_list(answers.get("text"))
        starts = _as_list(answers.get("answer_start")) or [None] * len(texts)
    else:
        each = _as_list(answers)
        texts = [str(answer["text"] if isinstance(answer, dict) else answer) for answer in each]
        starts = [answer.get("answer_start") if isinstance(answer, dict) else None for answer in each]
    if len(texts) != len(starts):
        raise ValueError(f"row {row.get('id')!r} has {len(texts)} answer texts but {len(starts)} answer starts")
    return texts, starts


def _answers_in(text: str, row: dict[str, Any], columns: QuestionColumns) -> Any:
    """Json of a dict or list; any other text is the answer itself, be it a number."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        if PYTHON_NOTATION.match(text):
            raise ValueError(
                f"{columns.answers}={text[:60]!r} of row {row.get('id')!r} is written as Python writes it, which only "
                "Python can read: write json (json.dumps), or use jsonl or parquet"
            ) from error
        return [text]
    return parsed if isinstance(parsed, dict | list) else [text]


def _as_list(value: Any) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) or hasattr(value, "tolist") else [value]


def locate(text: str, start: int | None, context: str) -> int:
    """Where the answer stands: at `start` if it does, else its first place in the context, or NOT_FOUND."""
    return start if start is not None and context.startswith(text, start) else context.find(text)


def take(rows: Sequence[Any], limit: int | None, *, spread: bool) -> Sequence[Any]:
    """At most `limit` rows: the first ones, or some from all over."""
    if limit is None or limit >= len(rows):
        return rows
    places = [number * len(rows) // limit for number in range(limit)] if spread else list(range(limit))
    return rows.select(places) if isinstance(rows, Dataset) else [rows[place] for place in places]


def as_dataset(rows: Iterable[dict[str, Any]]) -> Dataset | IterableDataset:
    return rows if isinstance(rows, Dataset | IterableDataset) else Dataset.from_list(list(rows))
