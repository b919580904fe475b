"""Metrics shipped with the project, loaded by `evaluate` from their folders without network.

| name | what it gives |
|---|---|
| long_qa | exact match and F1 as in SQuAD v1 and v2, in percent |
| rouge | ROUGE-1, -2, -L and -Lsum through rouge-score, in percent |
| perplexity_from_loss | perplexity from losses and the number of tokens behind each |
| masked_accuracy | share of masked tokens that are guessed right, in percent |

A module is copied into Hugging Face's module cache (HF_MODULES_CACHE) when it is loaded, so each folder stands alone.
"""

from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent
METRICS = ("long_qa", "masked_accuracy", "perplexity_from_loss", "rouge")


def load_metric(name: str) -> Any:
    """The metric of this name as an `evaluate.EvaluationModule` of its own for this process; nothing is downloaded.

    Example:
        >>> load_metric("perplexity_from_loss").compute(predictions=[2.0, 1.0], references=[30, 10])
        {'perplexity': 5.75..., 'loss': 1.75}
    """
    if name not in METRICS:
        raise ValueError(f"there is no metric {name!r}: choose one of {', '.join(METRICS)}")
    # Imported late: the scores themselves are used where `evaluate` isn't needed.
    import evaluate

    # In memory, because files in the cache would be shared by all processes of a run.
    return evaluate.load(str(_FOLDER / name), keep_in_memory=True)
