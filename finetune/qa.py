"""Extractive question answering on documents of any length.

    python -m finetune.qa --model my-hybrid --train-file train.json --validation-file validation.json --output runs/qa

A document longer than the model is read in overlapping windows, and the answer is chosen over all of them.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn

from .answers import AnswerCollector, Prediction, choose, tune_threshold, write_nbest
from .arguments import RunArguments, option
from .documents import Question, QuestionColumns, Split, as_question, check_columns, read_rows, source_of
from .files import write_json
from .metrics import load_metric
from .metrics.long_qa.squad_scores import token_f1
from .task import Task
from .tokenising import tokenise
from .windows import (
    PairLayout,
    TokenisedContext,
    choose_training_windows,
    question_rng,
    question_windows,
    tokenise_context,
    tokenise_question,
    training_windows,
)


@dataclass(kw_only=True)
class QAArguments(RunArguments):
    """What a question-answering run can be told."""

    question_column: str = option("question", "column of the questions, in flat data")
    context_column: str = option("context", "column of the documents, in flat data")
    answers_column: str = option("answers", "column of the answers, in flat data")
    stride: int = option(256, "tokens that neighbouring windows of a document share")
    max_question_tokens: int = option(128, "longer questions are cut")
    max_answer_tokens: int = option(64, "longest answer that is looked for")
    negatives_per_question: float | None = option(
        None, "windows without the answer to train on, per question and on average; all if not given"
    )
    nbest: int = option(10, "answers to keep for each question in nbest.json")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A window: which question, which part of its context, and where the answer stands in the input."""

    question: int
    first: int
    stop: int
    start: int
    end: int


class WindowRows:
    """Windows behind their questions, assembled when asked for: only places are kept, and each context once."""

    def __init__(self, task: "QA", questions: Sequence[Question], *, for_training: bool, desc: str):
        self.task, self.questions = task, questions
        numbers: dict[str, int] = {}
        self.context_of = [numbers.setdefault(question.context, len(numbers)) for question in questions]
        self.contexts = tokenise(
            Dataset.from_dict({"context": list(numbers)}),
            encode_contexts,
            tokenizer=task.tokenizer,
            workers=task.args.preprocessing_workers,
            desc=desc,
        ).with_format("numpy")
        self.question_ids = [tokenise_question(task.tokenizer, question.text) for question in questions]
        self.context = lru_cache(maxsize=4)(self._context)
        self.places: list[Place] = []
        self.lengths: list[int] = []
        for number in range(len(questions)):
            self._cut(number, for_training)

    def _context(self, number: int) -> TokenisedContext:
        row = self.contexts[number]
        return TokenisedContext(row["input_ids"], row["starts"], row["ends"])

    def _cut(self, number: int, for_training: bool) -> None:
        context = self.context(self.context_of[number])
        windows = self.task.windows(self.questions[number], self.question_ids[number], context, for_training)
        for window in windows:
            place = Place(
                question=number,
                first=window["first_token"],
                stop=window["last_token"] + 1,
                start=window.get("start_positions", 0),
                end=window.get("end_positions", 0),
            )
            self.places.append(place)
            self.lengths.append(len(window["input_ids"]))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        place = self.places[number]
        context = self.context(self.context_of[place.question])
        question_ids = self.question_ids[place.question][: self.task.args.max_question_tokens]
        window = self.task.layout.assemble(question_ids, context.input_ids[place.first : place.stop])
        return self.task.finish({**window, "start_positions": place.start, "end_positions": place.end})

    def facts(self, number: int) -> dict[str, Any]:
        """What the answers' collector wants to know of a window."""
        place, layout = self.places[number], self.task.layout
        num_question = min(len(self.question_ids[place.question]), self.task.args.max_question_tokens)
        return {
            "question_id": str(place.question),
            "first_token": place.first,
            "last_token": place.stop - 1,
            "context_offset": len(layout.before) + num_question + len(layout.between),
            "null_position": layout.null_position(num_question, place.stop - place.first),
        }


class QA(Task):
    name = "qa"
    auto_class = "AutoModelForQuestionAnswering"
    arguments_class = QAArguments
    best_metric = "f1"
    default_global = "question"
    lora_saved = ("qa_outputs",)

    def __init__(self, args: QAArguments):
        super().__init__(args)
        self.layout = PairLayout.of(self.tokenizer)
        self.columns = QuestionColumns(
            question=args.question_column, context=args.context_column, answers=args.answers_column
        )
        # A question gets no answer where "no answer" scores higher by more than this; tuned when validating. None where
        # every question has an answer.
        self.threshold: float | None = 0.0

    def read(self, split: Split) -> WindowRows:
        rows = read_rows(self.args, split)
        check_columns(rows, astuple(self.columns), f"{split} data ({source_of(self.args, split)})")
        questions = self.limited([as_question(row, number, self.columns) for number, row in enumerate(rows)], split)
        if split == "train":
            questions = learnable(questions)
        return WindowRows(self, questions, for_training=split == "train", desc=split)

    def stream(self) -> "WindowStream":
        rows = read_rows(self.args, "train", streaming=True)
        check_columns(rows, astuple(self.columns), "training stream")
        return WindowStream(self, rows)

    def windows(
        self, question: Question, question_ids: np.ndarray, context: TokenisedContext, for_training: bool
    ) -> list[dict[str, Any]]:
        """A question's windows: all of them, or those to train on with the answer's place in each."""
        sizes: dict[str, Any] = {
            "layout": self.layout,
            "max_length": self.max_length,
            "stride": self.args.stride,
            "max_question_tokens": self.args.max_question_tokens,
        }
        if not for_training:
            return question_windows(question_ids, context, **sizes)
        answers: dict[str, list] = {"text": question.answers, "answer_start": question.starts}
        return choose_training_windows(
            training_windows(question_ids, context, answers, **sizes),
            negatives_per_question=self.args.negatives_per_question,
            rng=question_rng(self.args.seed, question.id),
        )

    def finish(self, window: dict[str, Any]) -> dict[str, Any]:
        """An assembled window as a row of a batch, with its global tokens."""
        kept = ("input_ids", "token_type_ids", "start_positions", "end_positions")
        row = {key: window[key] for key in kept if key in window}
        return {**row, **self.global_mask(len(row["input_ids"]), (0, window["question_span"][1]))}

    def count_items(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(batch["input_ids"].shape[0])

    def evaluate(self, model: nn.Module, accelerator: Accelerator, split: Split, folder: Path | None) -> dict[str, Any]:
        rows = self.rows(split)
        predictions = self.predict(model, accelerator, rows, f"{split} answers")
        references = {str(number): question.answers for number, question in enumerate(rows.questions)}
        if split == "validation":
            all_answered = all(references.values())
            self.threshold = None if all_answered else tune_threshold(predictions, references)[0]
        chosen = {key: choose(one.nbest, threshold=self.threshold) for key, one in predictions.items()}
        if folder is not None and accelerator.is_main_process:
            ids = unique_ids(rows.questions)
            by_id = {ids[int(key)]: one for key, one in chosen.items()}
            write_nbest(folder / "nbest.json", by_id)
            write_json(folder / "predictions.json", {key: one.text for key, one in by_id.items()})
        metrics = qa_metrics({key: one.text for key, one in chosen.items()}, references)
        return metrics | best_answer_scores(predictions, references)

    def predict(self, model: nn.Module, accelerator: Accelerator, rows: WindowRows, what: str) -> dict[str, Prediction]:
        """The best answers to every question, by its number, over all windows and processes."""
        collector = AnswerCollector(n_best=self.args.nbest, max_answer_tokens=self.args.max_answer_tokens)
        for numbers, batch in self.eval_batches(rows, rows.lengths, accelerator, what):
            inputs = {key: value for key, value in batch.items() if not key.endswith("_positions")}
            outputs = model(**inputs)
            logits = (outputs.start_logits[: len(numbers)], outputs.end_logits[: len(numbers)])
            collector.add([rows.facts(number) for number in numbers], *logits)
        for collected in gather_object([collector.collected]) if accelerator.num_processes > 1 else []:
            collector.update(collected)
        return {
            str(number): collector.finish(
                str(number), context=rows.context(rows.context_of[number]), text=question.context
            )
            for number, question in enumerate(rows.questions)
        }

    def settings(self) -> dict[str, Any]:
        """What answering needs to know beside the model."""
        names = ("stride", "max_question_tokens", "max_answer_tokens")
        known = {name: getattr(self.args, name) for name in names}
        return {
            "max_length": self.max_length,
            "threshold": self.threshold,
            "global_attention": self.global_placement,
            **known,
        }


def qa_metrics(texts: dict[str, str], references: dict[str, list[str]]) -> dict[str, float]:
    """EM and F1 over all questions, and over those with and without an answer."""
    return load_metric("long_qa").compute(
        predictions=[{"id": key, "prediction_text": text} for key, text in texts.items()],
        references=[
            {"id": key, "answers": {"text": answers, "answer_start": [0] * len(answers)}}
            for key, answers in references.items()
        ],
    )


def best_answer_scores(predictions: dict[str, Prediction], references: dict[str, list[str]]) -> dict[str, float]:
    """F1 of the best answers to questions that have one, as if no threshold had kept any back."""
    best = {key: one.best_answer for key, one in predictions.items() if references[key]}
    if not best:
        return {}
    scores = [token_f1("" if answer is None else answer.text, references[key]) for key, answer in best.items()]
    return {"HasAns_best_f1": 100.0 * sum(scores) / len(scores)}


def learnable(questions: Sequence[Question]) -> list[Question]:
    """Leaves out what can't be learnt from, and says how much that is."""
    kept = [question for question in questions if question.is_learnable]
    if len(kept) < len(questions):
        print(
            f"note: {len(questions) - len(kept)} of {len(questions)} training questions are left out, because none of "
            "their answers stands in the document word for word",
            file=sys.stderr,
        )
    return kept


def unique_ids(questions: Sequence[Question]) -> list[str]:
    """The questions' ids; one that was there before gets a number."""
    seen: Counter[str] = Counter()
    ids = []
    for question in questions:
        seen[question.id] += 1
        ids.append(question.id if seen[question.id] == 1 else f"{question.id}#{seen[question.id]}")
    return ids


class WindowStream:
    """Training windows of a stream of questions, one by one; questions on one document share its tokens."""

    def __init__(self, task: QA, rows: Any):
        self.task, self.rows = task, rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        tokens = lru_cache(maxsize=4)(partial(tokenise_context, self.task.tokenizer))
        for number, row in enumerate(self.task.first_rows(self.rows)):
            question = as_question(row, number, self.task.columns)
            if not question.is_learnable:
                continue
            ids = tokenise_question(self.task.tokenizer, question.text)
            for window in self.task.windows(question, ids, tokens(question.context), for_training=True):
                yield self.task.finish(window)


def encode_contexts(rows: dict[str, list], *, tokenizer: Any) -> dict[str, list]:
    tokens = [tokenise_context(tokenizer, context) for context in rows["context"]]
    return {
        "input_ids": [one.input_ids for one in tokens],
        "starts": [one.starts for one in tokens],
        "ends": [one.ends for one in tokens],
    }


if __name__ == "__main__":
    from .run import run

    sys.exit(run(QA))
