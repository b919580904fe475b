"""Plots: the picture of a report: time over length, and the others' time and memory over the hybrid's."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from .report import (
    DENSE,
    FORWARD,
    HF_BIGBIRD,
    HF_LONGFORMER,
    HF_MODERNBERT,
    HF_ROBERTA,
    HYBRID,
    MODES,
    TRAINING,
)

COLORS = {
    HF_LONGFORMER: "tab:orange",
    DENSE: "tab:gray",
    HF_ROBERTA: "tab:gray",
    HF_BIGBIRD: "tab:green",
    HF_MODERNBERT: "tab:purple",
    HYBRID: "tab:blue",
}
LINE_STYLES = {FORWARD: "-", TRAINING: "--"}


def draw(report: dict[str, Any], path: Path, *, subject: str) -> None:
    """Two panels, from the report alone."""
    figure = Figure(figsize=(14, 7), layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, ratio_axes = figure.subplots(1, 2)
    draw_times(time_axes, report["times"], report["scaling"])
    time_axes.set_title(f"Time of {subject}, dropout 0")
    draw_ratios(ratio_axes, ratio_bars(report))
    figure.savefig(path, dpi=120)


def draw_times(axes: Axes, times: list[dict[str, Any]], scaling: list[dict[str, Any]]) -> None:
    """Best time over length without dropout, one color per contender."""
    for contender, color in COLORS.items():
        for mode, style in LINE_STYLES.items():
            # The rows of `times` come last: where both have a length, contenders were measured side by side there.
            points = {
                row["length"]: row["best_seconds"]
                for row in scaling + times
                if row["contender"] == contender and row["mode"] == mode
            }
            if points:
                axes.plot(sorted(points), [points[length] for length in sorted(points)], style, color=color, marker="o")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({row["length"] for row in scaling + times})
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel="tokens", ylabel="seconds, best round")
    axes.grid(alpha=0.3)
    shown = {row["contender"] for row in scaling + times}
    handles = [Line2D([], [], color=color, marker="o", label=name) for name, color in COLORS.items() if name in shown]
    handles += [Line2D([], [], color="black", linestyle=style, label=mode) for mode, style in LINE_STYLES.items()]
    axes.legend(handles=handles, loc="upper left")


def ratio_bars(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Label of each group of bars to the ratio of each contender."""
    bars: dict[str, dict[str, float]] = {}
    for section, key, what in (("times", "best_ratio", "time"), ("memory", "growth_ratio", "memory")):
        rows = [row for row in report[section] if row["contender"] != HYBRID and row[key]]
        for row in sorted(rows, key=lambda row: (row["length"], MODES.index(row["mode"]))):
            label = f"{what}, {row['length']} tokens\n{row['mode']}"
            bars.setdefault(label, {})[row["contender"]] = row[key]
    return bars


def draw_ratios(axes: Axes, bars: dict[str, dict[str, float]]) -> None:
    """A group of bars for each length and mode, the first on top; the line at 1 is the hybrid."""
    height = 0.8 / max(map(len, bars.values()), default=1)
    for place, ratios in enumerate(bars.values()):
        for offset, (contender, ratio) in enumerate(sorted(ratios.items())):
            y = place + (offset - (len(ratios) - 1) / 2) * height
            # From 1, so that what is slower and what is faster point in opposite directions.
            axes.barh(y, ratio - 1, height, left=1, color=COLORS[contender])
            axes.annotate(
                f"{ratio:.2f}",
                (ratio, y),
                xytext=(3 if ratio >= 1 else -3, 0),
                textcoords="offset points",
                ha="left" if ratio >= 1 else "right",
                va="center",
                fontsize=8,
            )
    axes.set_xscale("log")
    axes.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color=COLORS[HYBRID], linewidth=2)
    values = [1.0, *(ratio for ratios in bars.values() for ratio in ratios.values())]
    axes.set_xlim(min(values) / 1.5, max(values) * 1.5)
    ticks = [
        tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if min(values) / 1.5 <= tick <= max(values) * 1.5
    ]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(title="Other / hybrid: right of the line the hybrid is better", xlabel="times the hybrid's")
    axes.grid(axis="x", alpha=0.3)
    shown = {name for ratios in bars.values() for name in ratios}
    names = [name for name in COLORS if name in shown]
    axes.legend(handles=[Line2D([], [], color=COLORS[name], linewidth=6, label=name) for name in names])
