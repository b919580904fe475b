"""Report: what became of every tensor, what the check found, and the model card that says both."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .saving import model_card

Action = Literal["copied", "tiled", "copied into *_global", "new", "dropped"]


@dataclass(frozen=True, kw_only=True)
class TensorFate:
    """What became of one tensor.

    Args:
        target: the tensor in the result, or None for one that was dropped.
        sources: the tensors of the source that it was made from.
        note: why it is new, dropped or otherwise remarkable.
    """

    target: str | None
    action: Action
    sources: tuple[str, ...] = ()
    note: str = ""

    @property
    def group(self) -> str:
        """The module, without the layer's number."""
        name = self.target or self.sources[0]
        return re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight").removesuffix(".bias")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """How far two models are apart after one stage of their computation."""

    name: str
    difference: float


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The largest differences between the source's outputs and the result's, in order of computation."""

    num_tokens: int
    stages: tuple[Stage, ...]

    @property
    def largest_difference(self) -> float:
        return max(stage.difference for stage in self.stages)

    def compared(self) -> str:
        """The stages in a few words: neighbouring layers together."""
        first: dict[str, str] = {}
        last: dict[str, str] = {}
        for stage in self.stages:
            kind, _, number = stage.name.rpartition(" ") if stage.name[-1].isdigit() else (stage.name, "", "")
            first.setdefault(kind, number)
            last[kind] = number
        return ", ".join(kind if not first[kind] else f"{kind}s {first[kind]} to {last[kind]}" for kind in first)


@dataclass(kw_only=True)
class ConversionReport:
    """Everything a conversion did.

    Args:
        source: what was converted.
        source_class: its class.
        target_class: the class of the result.
        fates: of every tensor of the source and of the result.
        verification: None when it was switched off.
        notes: what else the user should know.
    """

    source: str
    source_class: str
    target_class: str
    fates: list[TensorFate] = field(default_factory=list)
    verification: Verification | None = None
    notes: list[str] = field(default_factory=list)

    def has_new(self, module: str) -> bool:
        """Whether a tensor of this module starts from random values."""
        return any(fate.action == "new" and module in (fate.target or "").split(".") for fate in self.fates)

    def groups(self) -> list[dict[str, Any]]:
        """One row per group of tensors with the same fate: group, action, number of tensors, note."""
        rows: dict[tuple[str, str, str], int] = {}
        for fate in self.fates:
            key = (fate.group, fate.action, fate.note)
            rows[key] = rows.get(key, 0) + 1
        return [
            {"group": group, "action": action, "tensors": count, "note": note}
            for (group, action, note), count in rows.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the tensors one by one."""
        return asdict(self)

    def to_markdown(self, actions: Sequence[Action] | None = None) -> str:
        """The groups as a table; only those with one of `actions`, if given."""
        rows = [row for row in self.groups() if actions is None or row["action"] in actions]
        lines = [f"| {row['group']} | {row['tensors']} | {row['action']} | {row['note']} |" for row in rows]
        return "\n".join(["| tensors | number | what was done | note |", "|---|---|---|---|", *lines])

    def verification_text(self) -> str:
        if self.verification is None:
            return "not verified"
        return (
            f"largest difference to {self.source_class} over {self.verification.num_tokens:,} tokens in float32: "
            f"{self.verification.largest_difference:.1e} ({self.verification.compared()})"
        )

    def __str__(self) -> str:
        head = f"{self.source} ({self.source_class}) -> {self.target_class}"
        return "\n".join([head, "", self.to_markdown(), "", self.verification_text(), *self.notes])


def find_licence(folder: Path) -> str | None:
    """The licence a source folder declares: its card's, or the first line of its licence file."""
    card = folder / "README.md"
    if card.exists():
        declared = re.match(r"---\n(?:.*\n)*?license:\s*(\S.*)\n(?:.*\n)*?---", card.read_text(encoding="utf-8"))
        if declared:
            return declared[1].strip().strip("\"'")
    for path in sorted(folder.glob("LICEN[CS]E*")):
        lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
        return next((line for line in lines if line), None)
    return None


def conversion_card(model: Any, title: str, report: ConversionReport, licence: str | None) -> str:
    """The model's usual card with a chapter on where the weights come from."""
    return _with_metadata(model_card(model, title), report, licence) + "\n" + _origin(report, licence)


EXPORT_CARD = """\
---
library_name: transformers
tags:
- longformer
---

# {title}

{class_name} for documents of up to {max_tokens:,} tokens.

```python
from transformers import {class_name}

model = {class_name}.from_pretrained("path/or/hub-id")
```
"""


def export_card(model: Any, title: str, report: ConversionReport, licence: str | None) -> str:
    """The card of an exported Longformer."""
    config = model.config
    max_tokens = config.max_position_embeddings - config.pad_token_id - 1
    card = EXPORT_CARD.format(title=title, class_name=type(model).__name__, max_tokens=max_tokens)
    return _with_metadata(card, report, licence) + "\n" + _origin(report, licence)


def _with_metadata(card: str, report: ConversionReport, licence: str | None) -> str:
    lines = []
    if licence is not None and re.fullmatch(r"[a-z0-9.-]+", licence):
        lines.append(f"license: {licence}\n")
    if not Path(report.source).is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", report.source):
        lines.append(f"base_model: {report.source}\n")
    return card.replace("---\n", "---\n" + "".join(lines), 1)


def _origin(report: ConversionReport, licence: str | None) -> str:
    parts = [
        "## Where the weights come from\n",
        f"Converted from `{_public_name(report.source)}` ({report.source_class}). "
        f"Licence of the source: {licence or 'not stated there; ask its authors'}.\n",
        f"Check: {report.verification_text()}.\n",
        "All tensors were copied as they are, except:\n",
        report.to_markdown(["tiled", "copied into *_global", "new", "dropped"]),
        *(f"\n{note}" for note in report.notes),
    ]
    return "\n".join(parts) + "\n"


def _public_name(source: str) -> str:
    """A Hub id as it is; of a folder only its name, since a card should not tell where somebody keeps files."""
    return Path(source).name if Path(source).is_dir() else source
