"""Answers: the best spans of a question over all windows of its document, or none, with the text's own characters."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .files import write_json
from .metrics.long_qa.squad_scores import best_threshold, token_f1
from .windows import TokenisedContext

N_BEST = 20
MAX_ANSWER_TOKENS = 128


@dataclass(frozen=True)
class WindowScores:
    """A window's logits of context tokens first_token to last_token, both inside, and what is said for no answer."""

    question_id: str
    first_token: int
    last_token: int
    start_logits: np.ndarray
    end_logits: np.ndarray
    null_score: float

    def __post_init__(self) -> None:
        expected = self.last_token - self.first_token + 1
        if not len(self.start_logits) == len(self.end_logits) == expected:
            raise ValueError(
                f"question {self.question_id!r}: {len(self.start_logits)} start and {len(self.end_logits)} end logits "
                f"for tokens {self.first_token} to {self.last_token}: give one per token of the context, no others"
            )
        # -inf is how a model rules a token out; anything else that isn't finite would win or spoil every comparison.
        spoilt = [bool(np.isnan(logits).any() or np.isposinf(logits).any()) for logits in self._logits()]
        if any(spoilt) or not np.isfinite(self.null_score):
            raise ValueError(
                f"question {self.question_id!r}: logits of tokens {self.first_token} to {self.last_token} are not "
                f"finite (no answer: {self.null_score}): the model diverged, or its half-precision overflows"
            )

    def _logits(self) -> tuple[np.ndarray, np.ndarray]:
        return self.start_logits, self.end_logits


@dataclass(frozen=True)
class TokenSpans:
    """The best token spans found so far for one question, best first, `last` inside; and the lowest null score."""

    first: np.ndarray
    last: np.ndarray
    score: np.ndarray
    null_score: float


@dataclass(frozen=True)
class Answer:
    """`text[start:end]` of the document; start and end are None and the text is empty for "no answer"."""

    text: str
    start: int | None
    end: int | None
    score: float
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What is answered, and what else could have been: nbest has "no answer" among it, probabilities add up to 1."""

    text: str
    start: int | None
    end: int | None
    probability: float
    score: float
    null_score: float
    nbest: tuple[Answer, ...]

    @property
    def best_answer(self) -> Answer | None:
        """The best answer with a text, chosen or not."""
        return next((answer for answer in self.nbest if answer.start is not None), None)

    @property
    def score_difference(self) -> float:
        """How much more is said for "no answer" than for the best answer; inf where there is none."""
        best = self.best_answer
        return float("inf") if best is None else self.null_score - best.score


def window_spans(
    window: WindowScores, *, n_best: int = N_BEST, max_answer_tokens: int = MAX_ANSWER_TOKENS
) -> TokenSpans:
    """The n best spans of a window of at most max_answer_tokens, exactly, without looking at all pairs.

    A span among the n best begins at one of the n tokens from which the best span begins highest; only their ends are
    looked through.
    """
    _check_limits(n_best, max_answer_tokens)
    start, end = (np.asarray(logits, dtype=np.float64) for logits in (window.start_logits, window.end_logits))
    reach = min(max_answer_tokens, len(end))
    if not reach:
        empty = np.zeros(0, dtype=np.int64)
        return TokenSpans(empty, empty, np.zeros(0), float(window.null_score))
    first = _highest(start + _highest_within(end, reach), n_best)
    last = first[:, None] + np.arange(reach)
    scores = np.where(last < len(end), start[first, None] + end[np.minimum(last, len(end) - 1)], -np.inf)
    chosen = _highest(scores.ravel(), n_best)
    chosen = chosen[np.isfinite(scores.ravel()[chosen])]
    rows = chosen // reach
    return TokenSpans(
        first[rows] + window.first_token,
        last.ravel()[chosen] + window.first_token,
        scores.ravel()[chosen],
        float(window.null_score),
    )


def _check_limits(n_best: int, max_answer_tokens: int) -> None:
    if n_best < 1 or max_answer_tokens < 1:
        raise ValueError(f"n_best={n_best} and max_answer_tokens={max_answer_tokens}: both must be at least 1")


def _highest(values: np.ndarray, count: int) -> np.ndarray:
    """Places of the highest values, highest first, the earliest of equal ones first."""
    if count < len(values):
        # All that are as high as the last one taken, so that which of equal ones is taken doesn't depend on numpy.
        limit = np.partition(values, len(values) - count)[len(values) - count]
        places = np.flatnonzero(values >= limit)
    else:
        places = np.arange(len(values))
    return places[np.argsort(-values[places], kind="stable")][:count]


def _highest_within(values: np.ndarray, reach: int) -> np.ndarray:
    """For each place the highest of the `reach` values from there on, by doubling the distance looked at."""
    highest, seen = values.copy(), 1
    while seen < reach:
        step = min(seen, reach - seen)
        highest[:-step] = np.maximum(highest[:-step], highest[step:])
        seen += step
    return highest


def merge_spans(found: Sequence[TokenSpans], *, n_best: int) -> TokenSpans:
    """The best of several; a span found in overlapping windows keeps its best score."""
    first, last, score = (
        np.concatenate([getattr(spans, name) for spans in found]) for name in ("first", "last", "score")
    )
    order = np.lexsort((last, first, -score))
    pairs = np.stack([first[order], last[order]])
    kept = order[np.sort(np.unique(pairs, axis=1, return_index=True)[1])][:n_best]
    return TokenSpans(first[kept], last[kept], score[kept], min(spans.null_score for spans in found))


def best_spans(
    windows: Sequence[WindowScores],
    context: TokenisedContext,
    text: str,
    *,
    n_best: int = N_BEST,
    max_answer_tokens: int = MAX_ANSWER_TOKENS,
) -> tuple[Answer, ...]:
    """The n best answers of one question over all windows of its document, and "no answer", best first.

    The score of a span is the sum of its two logits, that of "no answer" the lowest of all windows. Probabilities are
    a softmax over these scores.
    """
    collector = AnswerCollector(n_best=n_best, max_answer_tokens=max_answer_tokens)
    for window in windows:
        collector.add_window(window)
    if len(collector.collected) != 1:
        raise ValueError(
            f"windows of {len(collector.collected)} questions: give those of one, or use AnswerCollector for many"
        )
    return collector.finish(windows[0].question_id, context=context, text=text).nbest


def _answers(spans: TokenSpans, context: TokenisedContext, text: str, n_best: int) -> tuple[Answer, ...]:
    """Spans as text: those of the same characters count once, those of white space only not at all."""
    starts, ends = context.starts[spans.first], context.ends[spans.last]
    scores: dict[tuple[int, int] | None, float] = {}
    for start, end, score in zip(starts.tolist(), ends.tolist(), spans.score.tolist(), strict=True):
        if start < end and len(scores) < n_best:
            scores.setdefault((start, end), score)
    scores[None] = spans.null_score
    weights = np.exp(np.array(list(scores.values())) - max(scores.values()))
    probabilities = (weights / weights.sum()).tolist()
    answers = [
        Answer("", None, None, score, probability)
        if place is None
        else Answer(text[slice(*place)], *place, score, probability)
        for (place, score), probability in zip(scores.items(), probabilities, strict=True)
    ]
    return tuple(sorted(answers, key=lambda answer: -answer.score))


def choose(nbest: Sequence[Answer], *, threshold: float | None = 0.0) -> Prediction:
    """Takes the best answer, or none if "no answer" scores higher by more than the threshold.

    Args:
        nbest: from `best_spans`, or the nbest of a prediction that another threshold chose.
        threshold: from `tune_threshold`; None where every question has an answer (SQuAD v1).
    """
    null = next(answer for answer in nbest if answer.start is None)
    best = next((answer for answer in nbest if answer.start is not None), null)
    if threshold is not None and null.score - best.score > threshold:
        best = null
    return Prediction(
        text=best.text,
        start=best.start,
        end=best.end,
        probability=best.probability,
        score=best.score,
        null_score=null.score,
        nbest=tuple(nbest),
    )


def tune_threshold(
    predictions: Mapping[str, Prediction],
    references: Mapping[str, Sequence[str]],
    metric: Callable[[str, Sequence[str]], float] = token_f1,
) -> tuple[float, float]:
    """The threshold with which `choose` gives the best v2 score on these questions, and that score in percent.

    Args:
        predictions: by question, chosen with any threshold.
        references: by question, the texts that are right; none for questions without an answer.
        metric: score of one text against the right ones, 0 to 1.
    """
    missing = sorted(predictions.keys() ^ references.keys())
    if missing:
        raise ValueError(
            f"{len(missing)} questions have a prediction or a reference but not both, {missing[0]!r} among them: "
            "tune on questions that have both"
        )
    differences, if_answered, if_not = [], [], []
    for question_id, prediction in predictions.items():
        best, right = prediction.best_answer, references[question_id]
        differences.append(prediction.score_difference)
        if_answered.append(metric("" if best is None else best.text, right))
        if_not.append(metric("", right))
    threshold, score = best_threshold(differences, if_answered, if_not)
    # Halfway to the next question: the threshold itself is the least sure answer of these questions, and on others
    # answers that are as right may be a little less sure.
    above = [difference for difference in differences if threshold < difference < float("inf")]
    halfway = (threshold + min(above)) / 2 if above else threshold
    return halfway, 100.0 * score


def write_nbest(path: str | os.PathLike, predictions: Mapping[str, Prediction]) -> None:
    """Writes `{question: [{text, start, end, score, probability}, …]}`, best first, whole or not at all."""
    value = {question: [asdict(answer) for answer in prediction.nbest] for question, prediction in predictions.items()}
    write_json(Path(path), value)


class AnswerCollector:
    """Takes logits batch by batch, keeps of each question only its best spans, and answers when asked.

    Windows may come in any order, and twice: what counts is the best score of a span. Processes that saw different
    windows of a question put what they have together with `update`.

    Example:
        >>> collector = AnswerCollector(n_best=20, max_answer_tokens=128)
        >>> for batch in batches:
        ...     output = model(**batch.inputs)
        ...     collector.add(batch.windows, output.start_logits, output.end_logits)
        >>> for part in gather_object([collector.collected]):
        ...     collector.update(part)
        >>> prediction = collector.finish("question 1", context=tokenised, text=document)
    """

    def __init__(self, *, n_best: int = N_BEST, max_answer_tokens: int = MAX_ANSWER_TOKENS):
        _check_limits(n_best, max_answer_tokens)
        self.n_best, self.max_answer_tokens = n_best, max_answer_tokens
        self.collected: dict[str, TokenSpans] = {}

    @property
    def _kept(self) -> int:
        """More than n_best, because spans of the same characters will count once."""
        return 2 * self.n_best

    def add(self, windows: Sequence[Mapping[str, Any]], start_logits: Any, end_logits: Any) -> None:
        """A batch of logits (B, N), arrays or tensors, whose rows are these windows.

        Args:
            windows: with question_id, first_token, last_token, context_offset and null_position, as
                `question_windows` gives them.
        """
        starts, ends = _as_array(start_logits), _as_array(end_logits)
        if starts.shape != ends.shape or len(starts) != len(windows):
            raise ValueError(
                f"{len(windows)} windows with start logits {starts.shape} and end logits {ends.shape}: "
                "give one row of both for each window"
            )
        for window, start, end in zip(windows, starts, ends, strict=True):
            offset, null = window["context_offset"], window["null_position"]
            inside = np.s_[offset : offset + window["last_token"] - window["first_token"] + 1]
            self.add_window(
                WindowScores(
                    question_id=window["question_id"],
                    first_token=window["first_token"],
                    last_token=window["last_token"],
                    start_logits=start[inside],
                    end_logits=end[inside],
                    null_score=float(start[null] + end[null]),
                )
            )

    def add_window(self, window: WindowScores) -> None:
        spans = window_spans(window, n_best=self._kept, max_answer_tokens=self.max_answer_tokens)
        self.update({window.question_id: spans})

    def update(self, collected: Mapping[str, TokenSpans]) -> None:
        """Adds what another collector (or this one before) has collected."""
        for question_id, spans in collected.items():
            before = self.collected.get(question_id)
            found = [spans] if before is None else [before, spans]
            self.collected[question_id] = merge_spans(found, n_best=self._kept)

    def finish(
        self, question_id: str, *, context: TokenisedContext, text: str, threshold: float | None = 0.0
    ) -> Prediction:
        """The prediction for a question all of whose windows have come; its spans are forgotten."""
        if question_id not in self.collected:
            raise KeyError(f"no window of question {question_id!r} has come, or it is finished already")
        spans = self.collected.pop(question_id)
        return choose(_answers(spans, context, text, self.n_best), threshold=threshold)


def _as_array(logits: Any) -> np.ndarray:
    """Float64 from arrays and from tensors of any dtype and device."""
    if hasattr(logits, "detach"):
        logits = logits.detach().float().cpu().numpy()
    return np.asarray(logits, dtype=np.float64)
