"""Exact match and F1 for extractive question answering, as SQuAD v1 and v2 count them, for any script."""

import datasets
import evaluate
import numpy as np

from .squad_scores import best_threshold, exact_match, token_f1

_DESCRIPTION = """\
Exact match and F1 of SQuAD v1 and v2, in percent. In scripts written without spaces (Chinese, Japanese, Thai, …) every
character is a word, and punctuation of all scripts is ignored; everything else is counted as SQuAD's script does it.
"""
_INPUTS = """
Args:
    predictions: {id, prediction_text}; "" stands for no answer.
    references: {id, answers: {text, answer_start}}; empty lists for questions without an answer.
    no_answer_scores: {id: number}, larger the more is said for "no answer", a probability or a score difference.
    no_answer_threshold: questions with a larger no_answer_score count as unanswered; none do if not given.
Returns:
    exact, f1, total; HasAns_… of questions that have an answer and NoAns_… of those that have none, where there are
    any; with no_answer_scores also best_exact, best_exact_thresh, best_f1, best_f1_thresh.
Examples:
    >>> metric = evaluate.load("finetune/metrics/long_qa")
    >>> predictions = [{"id": "1", "prediction_text": "the red fox"}]
    >>> references = [{"id": "1", "answers": {"text": ["Red fox!"], "answer_start": [4]}}]
    >>> metric.compute(predictions=predictions, references=references)["f1"]
    100.0
"""
_CITATION = """\
@inproceedings{rajpurkar-etal-2018-know,
    title = "Know What You Don't Know: Unanswerable Questions for {SQ}u{AD}",
    author = "Rajpurkar, Pranav and Jia, Robin and Liang, Percy",
    booktitle = "ACL",
    year = "2018"
}
"""


class LongQA(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        answers = {"text": datasets.List(text), "answer_start": datasets.List(datasets.Value("int64"))}
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": {"id": text, "prediction_text": text},
                    "references": {"id": text, "answers": answers},
                }
            ),
        )

    def _compute(self, predictions, references, no_answer_scores=None, no_answer_threshold=None):
        predicted = {key: row["prediction_text"] for key, row in _by_id(predictions, "predictions").items()}
        right = {key: row["answers"]["text"] for key, row in _by_id(references, "references").items()}
        _check_same(
            predicted, right, "a prediction or a reference", 'predict every question once, with "" for no answer'
        )
        doubts = None
        if no_answer_scores is not None:
            _check_same(no_answer_scores, right, "a no_answer_score or a reference", "score every question once")
            doubts = np.array([no_answer_scores[key] for key in right], dtype=np.float64)
        elif no_answer_threshold is not None:
            raise ValueError(f"no_answer_threshold={no_answer_threshold} needs no_answer_scores: give both or neither")
        has_answer = np.array([bool(answers) for answers in right.values()])
        result: dict[str, float] = {}
        best: dict[str, float] = {}
        for name, score in (("exact", exact_match), ("f1", token_f1)):
            answered = np.array([score(predicted[key], answers) for key, answers in right.items()])
            unanswered = np.array([score("", answers) for answers in right.values()])
            if doubts is not None:
                threshold, mean = best_threshold(doubts, answered, unanswered)
                best |= {f"best_{name}": 100.0 * mean, f"best_{name}_thresh": threshold}
            if no_answer_threshold is not None:
                answered = np.where(doubts > no_answer_threshold, unanswered, answered)
            result |= _means(name, answered, has_answer)
        return {**result, **_counts(has_answer), **best}


def _check_same(some, others, what, remedy):
    unmatched = sorted(some.keys() ^ others.keys())
    if unmatched:
        raise ValueError(f"{len(unmatched)} questions have {what} but not both, {unmatched[0]!r} among them: {remedy}")


def _by_id(rows, what):
    by_id = {row["id"]: row for row in rows}
    if len(by_id) < len(rows):
        raise ValueError(f"{len(rows)} {what} but {len(by_id)} different ids: give each question once")
    return by_id


def _groups(has_answer):
    groups = {"": np.ones_like(has_answer), "HasAns_": has_answer, "NoAns_": ~has_answer}
    return {prefix: group for prefix, group in groups.items() if group.any()}


def _means(name, scores, has_answer):
    return {f"{prefix}{name}": 100.0 * float(scores[group].mean()) for prefix, group in _groups(has_answer).items()}


def _counts(has_answer):
    return {f"{prefix}total": int(group.sum()) for prefix, group in _groups(has_answer).items()}
