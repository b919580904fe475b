"""Share of masked tokens that are guessed right."""

import datasets
import evaluate
import numpy as np

_IGNORED = -100
_DESCRIPTION = "Share of masked tokens that are guessed right, in percent; tokens labelled -100 don't count."
_INPUTS = """
Args:
    predictions: token ids, flat or as rows of any lengths.
    references: labels in the same shape, -100 where nothing was masked.
Returns:
    masked_accuracy, total (masked tokens).
Examples:
    >>> metric = evaluate.load("finetune/metrics/masked_accuracy")
    >>> metric.compute(predictions=[5, 6, 7], references=[5, -100, 8])["masked_accuracy"]
    50.0
"""


class MaskedAccuracy(evaluate.Metric):
    def _info(self):
        token = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": kind, "references": kind}) for kind in (token, datasets.List(token))
            ],
        )

    def _compute(self, predictions, references):
        guessed, right = _flat(predictions), _flat(references)
        if guessed.shape != right.shape:
            raise ValueError(f"{guessed.size} predicted tokens but {right.size} labels: give one label per token")
        masked = right != _IGNORED
        if not masked.any():
            raise ValueError(f"all {right.size} labels are {_IGNORED}: nothing was masked, so nothing can be right")
        return {
            "masked_accuracy": 100.0 * float((guessed[masked] == right[masked]).mean()),
            "total": int(masked.sum()),
        }


def _flat(rows):
    return np.concatenate([np.atleast_1d(np.asarray(row, dtype=np.int64)) for row in rows])
