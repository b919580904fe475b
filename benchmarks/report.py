"""Report: what was measured, as rows with ratios to the hybrid's, judged against targets, printed and saved.

Ratios are other / hybrid: above 1 the hybrid is faster or smaller.
"""

import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

HF_LONGFORMER, DENSE, HYBRID = "HF Longformer", "dense SDPA", "hybrid"
HF_ROBERTA, HF_BIGBIRD, HF_MODERNBERT = "HF RoBERTa", "HF BigBird", "HF ModernBERT"
# Inference has no dropout, so the forward pass is one mode.
FORWARD, TRAINING, TRAINING_DROPOUT = "forward", "forward+backward", "forward+backward, dropout 0.1"
MODES = (FORWARD, TRAINING, TRAINING_DROPOUT)

Row = dict[str, Any]
# What a number taken from the best runs is by their medians.
MEDIAN_OF = {"best_ratio": "median_ratio", "exponent": "median_exponent"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure."""

    contender: str
    mode: str
    length: int

    def __str__(self) -> str:
        return f"{self.contender}, N={self.length} {self.mode}"


@dataclass(kw_only=True)
class Results:
    """What was measured so far: seconds of every run, MiB of memory, and what was left out."""

    command: str
    name: str = "attention"
    # Runs beside other busy processes are not worth much, so the file should show it.
    load_at_start: float = field(default_factory=lambda: os.getloadavg()[0])
    times: dict[Case, list[float]] = field(default_factory=dict)
    scaling: dict[Case, list[float]] = field(default_factory=dict)
    memory: dict[Case, dict[str, float]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        memory = [asdict(case) | numbers for case, numbers in self.memory.items()]
        scaling = _time_rows(self.scaling)
        report: dict[str, Any] = {
            "command": self.command,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cpu_count": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_at_start": self.load_at_start,
            "times": _with_ratios(_time_rows(self.times), best_seconds="best_ratio", median_seconds="median_ratio"),
            "memory": _with_ratios(memory, growth_mib="growth_ratio"),
            "scaling": scaling,
            "exponents": list(_exponents(scaling)),
            "skipped": self.skipped,
        }
        return report | {"targets": [target.judge(report) for target in TARGETS if self.name == "attention"]}

    def save(self, output: Path) -> None:
        """Writes beside and renames, so that a reader never meets half a file."""
        output.mkdir(parents=True, exist_ok=True)
        beside = output / f"{self.name}.json.new"
        beside.write_text(json.dumps(self.report(), indent=1) + "\n")
        beside.replace(output / f"{self.name}.json")


def _time_rows(samples: dict[Case, list[float]]) -> list[Row]:
    return [
        asdict(case)
        | {"best_seconds": min(seconds), "median_seconds": statistics.median(seconds), "rounds": len(seconds)}
        for case, seconds in samples.items()
    ]


def _with_ratios(rows: list[Row], **ratio_names: str) -> list[Row]:
    """Adds each row's value over the hybrid's of the same mode and length, None where that is missing."""
    for row in rows:
        ours = find_row(rows, contender=HYBRID, mode=row["mode"], length=row["length"])
        for name, ratio_name in ratio_names.items():
            row[ratio_name] = row[name] / ours[name] if ours.get(name) else None
    return rows


def _exponents(rows: list[Row]) -> Iterator[Row]:
    """The slope of log time over log length, between the shortest and the longest input of each mode."""
    for mode in MODES:
        points = sorted((row for row in rows if row["mode"] == mode), key=lambda row: row["length"])
        if len(points) > 1:
            short, long = points[0], points[-1]
            best, median = (
                math.log(long[name] / short[name]) / math.log(long["length"] / short["length"])
                for name in ("best_seconds", "median_seconds")
            )
            lengths = {"shortest": short["length"], "longest": long["length"]}
            yield {"mode": mode, **lengths, "exponent": best, "median_exponent": median}


def find_row(rows: list[Row], **wanted: Any) -> Row:
    """The first row with these values, or an empty one."""
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), {})


@dataclass(frozen=True, kw_only=True)
class Target:
    """A number of the report, found by section, row and key, and the limit it should keep."""

    text: str
    limit: float
    is_upper_limit: bool = False
    section: str
    row: Row
    key: str

    def judge(self, report: dict[str, Any]) -> Row:
        row = find_row(report[self.section], **self.row)
        measured = row.get(self.key)
        return {
            "target": self.text,
            "measured": measured,
            "by_median": row.get(MEDIAN_OF.get(self.key, "")),
            "verdict": "not measured" if measured is None else "met" if self.is_met(measured) else "missed",
        }

    def is_met(self, measured: float) -> bool:
        return measured <= self.limit if self.is_upper_limit else measured >= self.limit


def _ratio_target(contender: str, mode: str, *, length: int, limit: float, key: str = "best_ratio") -> Target:
    section = "memory" if key == "growth_ratio" else "times"
    return Target(
        text=f"N={length} {mode}: {'memory' if section == 'memory' else 'time'} of {contender} / ours >= {limit:.3f}",
        limit=limit,
        section=section,
        row={"contender": contender, "mode": mode, "length": length},
        key=key,
    )


def _exponent_target(mode: str, *, limit: float) -> Target:
    return Target(
        text=f"{mode}: exponent of time from 4096 to 65536 tokens <= {limit:.3f}",
        limit=limit,
        is_upper_limit=True,
        section="exponents",
        row={"mode": mode, "shortest": 4096, "longest": 65536},
        key="exponent",
    )


TARGETS = [
    _ratio_target(HF_LONGFORMER, FORWARD, length=4096, limit=3.2),
    _ratio_target(HF_LONGFORMER, TRAINING, length=4096, limit=4.3),
    _ratio_target(HF_LONGFORMER, TRAINING_DROPOUT, length=4096, limit=2.5),
    _ratio_target(HF_LONGFORMER, TRAINING, length=4096, limit=3.0, key="growth_ratio"),
    _ratio_target(HF_LONGFORMER, TRAINING_DROPOUT, length=4096, limit=3.0, key="growth_ratio"),
    _exponent_target(FORWARD, limit=1.1),
    _exponent_target(TRAINING, limit=1.1),
    # Ours may take 10% longer than dense attention where that does no more work.
    _ratio_target(DENSE, FORWARD, length=512, limit=1 / 1.1),
    _ratio_target(DENSE, TRAINING, length=512, limit=1 / 1.1),
]


def format_report(report: dict[str, Any]) -> str:
    """The report as text, without the sections that are still empty."""
    sections = (
        ("Time, seconds: best (median) and other / hybrid", map(_time_line, report["times"])),
        (
            "Peak training memory, MiB: whole process, growth, and growth other / hybrid",
            map(_memory_line, report["memory"]),
        ),
        ("Scaling of the hybrid, seconds: best (median)", map(_time_line, report["scaling"])),
        ("Exponent of time over length: best (median)", map(_exponent_line, report["exponents"])),
        ("Skipped", report["skipped"]),
        ("Targets", map(_target_line, report["targets"])),
    )
    return "\n".join(filter(None, (_format_section(title, lines) for title, lines in sections)))


def _format_section(title: str, lines: Iterable[str]) -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"{title}\n{body}" if body else ""


def _case_columns(row: Row) -> str:
    return f"{row['length']:6d}  {row['mode']:30s}{row['contender']:16s}"


def _time_line(row: Row) -> str:
    line = f"{_case_columns(row)}{row['best_seconds']:9.4f} ({row['median_seconds']:9.4f})"
    return line + (f"{row['best_ratio']:8.2f}x ({row['median_ratio']:6.2f}x)" if row.get("best_ratio") else "")


def _memory_line(row: Row) -> str:
    line = f"{_case_columns(row)}{row['peak_mib']:9.0f}{row['growth_mib']:9.0f}"
    return line + (f"{row['growth_ratio']:8.2f}x" if row["growth_ratio"] else "")


def _exponent_line(row: Row) -> str:
    exponents = f"{row['exponent']:.3f} ({row['median_exponent']:.3f})"
    return f"{exponents}  {row['mode']}, {row['shortest']} to {row['longest']} tokens"


def _target_line(target: Row) -> str:
    measured = "" if target["measured"] is None else f"; measured {target['measured']:.3f}"
    by_median = "" if target["by_median"] is None else f" (by median {target['by_median']:.3f})"
    return f"{target['verdict']:13s}{target['target']}{measured}{by_median}"
