"""Tables: saved results as the Markdown tables of the README and the docs.

python -m benchmarks.tables
"""

import json
from pathlib import Path
from typing import Any

from .report import FORWARD, HYBRID, MODES, TRAINING, TRAINING_DROPOUT, find_row

RESULTS = Path(__file__).parent / "results"
MODE_NAMES = {FORWARD: "forward", TRAINING: "training", TRAINING_DROPOUT: "training, dropout 0.1"}
# Which ratio each benchmark is told by, and which stands in brackets: many rounds are worth their best.
RATIOS = {"attention": ("best_ratio", "median_ratio"), "models": ("median_ratio", "best_ratio")}


def ratio_table(name: str) -> str:
    """Times and memory of all contenders over the hybrid's: a row per length and mode, a column per contender."""
    report = json.loads((RESULTS / f"{name}.json").read_text())
    contenders = list(dict.fromkeys(row["contender"] for row in report["times"] if row["contender"] != HYBRID))
    lines = [["", *contenders], ["---"] * (len(contenders) + 1)]
    for length in sorted({row["length"] for row in report["times"]}):
        for section, keys, what in (("times", RATIOS[name], ""), ("memory", ("growth_ratio",), ", peak memory")):
            for mode in MODES:
                rows = [find_row(report[section], contender=x, mode=mode, length=length) for x in contenders]
                if any(rows):
                    title = f"{length:,} tokens, {MODE_NAMES[mode]}{what}"
                    lines.append([title, *(cell(row, keys) for row in rows)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def cell(row: dict[str, Any], keys: tuple[str, ...]) -> str:
    """The first ratio, and the second in brackets."""
    ratios = [short(row[key]) for key in keys if row.get(key)]
    return " ".join([*ratios[:1], *(f"({ratio})" for ratio in ratios[1:])])


def short(ratio: float) -> str:
    """Two digits where they tell something."""
    return f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


if __name__ == "__main__":
    for name in RATIOS:
        print(f"{name}\n\n{ratio_table(name)}\n")
