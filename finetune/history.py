"""History: what a run logged, and the picture of it."""

from pathlib import Path
from typing import Any

History = list[dict[str, Any]]


def draw_history(history: History, path: Path, *, title: str, metric: str) -> None:
    """Training loss and the validation metric over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    loss_axis = figure.add_subplot()
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    scores = [(entry["step"], entry[metric]) for entry in history if metric in entry]
    if losses:
        loss_axis.plot(*zip(*losses, strict=True), color="tab:blue", alpha=0.35, linewidth=1)
        loss_axis.plot(*zip(*smoothed(losses), strict=True), color="tab:blue", label="training loss")
    loss_axis.set(xlabel="step", ylabel="training loss", title=title)
    loss_axis.grid(alpha=0.3)
    if scores:
        score_axis = loss_axis.twinx()
        score_axis.plot(*zip(*scores, strict=True), color="tab:orange", marker="o", label=f"validation {metric}")
        score_axis.set_ylabel(f"validation {metric}")
    figure.legend(loc="outside upper right", ncols=2)
    figure.savefig(path, dpi=120)


def smoothed(points: list[tuple[int, float]], weight: float = 0.8) -> list[tuple[int, float]]:
    """An exponential mean, so that the trend shows through the noise of single batches."""
    mean, result = points[0][1], []
    for step, value in points:
        mean = weight * mean + (1 - weight) * value
        result.append((step, mean))
    return result
