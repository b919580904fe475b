"""Perplexity from mean losses and the number of tokens that each is the mean of."""

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """\
Perplexity: e to the mean loss per token. Batches count by their tokens, so the result doesn't depend on how texts were
batched.
"""
_INPUTS = """
Args:
    predictions: mean cross-entropy losses in nats, one per batch or text.
    references: how many tokens each is the mean of; for masked language models the masked ones.
Returns:
    perplexity, loss (the mean over all tokens).
Examples:
    >>> metric = evaluate.load("finetune/metrics/perplexity_from_loss")
    >>> metric.compute(predictions=[0.0, 1.0], references=[1, 3])["loss"]
    0.75
"""


class PerplexityFromLoss(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        losses, tokens = np.asarray(predictions, dtype=np.float64), np.asarray(references, dtype=np.int64)
        if tokens.min() < 0 or not tokens.sum():
            raise ValueError(
                f"{tokens.sum()} tokens in {len(tokens)} batches, the smallest of {tokens.min()}: "
                "perplexity needs losses of at least one token, and no negative counts"
            )
        # A batch without a masked token has 0/0 for its loss, and counts nothing.
        counted = tokens > 0
        loss = float((losses[counted] * tokens[counted]).sum() / tokens.sum())
        with np.errstate(over="ignore"):
            return {"perplexity": float(np.exp(loss)), "loss": loss}
