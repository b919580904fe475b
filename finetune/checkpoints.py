"""Checkpoints of a run: whole or absent, the oldest removed, the best one kept, and found again by --resume."""

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError

from .files import read_json, replace_folder, write_json

STATE_FILE = "run_state.json"
# All weights in float32; of those that are trained two moments of AdamW, and some room.
BYTES_PER_PARAMETER, BYTES_PER_TRAINED_PARAMETER = 4, 9


@dataclass(kw_only=True)
class RunState:
    """Where a run stands, beside what Accelerate keeps of model, optimiser, schedule and random numbers."""

    step: int = 0
    rows_per_step: int | None = None
    best_value: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0
    minutes: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints in a run's folder.

    Args:
        folder: of the run.
        accelerator: every process takes part in saving and loading; the main one writes what is common.
        keep: how many checkpoints to keep, beside the best.
    """

    def __init__(self, folder: Path, *, accelerator: Accelerator, keep: int):
        self.folder = folder / "checkpoints"
        self.accelerator = accelerator
        self.keep = keep

    def found(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return whole_checkpoints(self.folder)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, state: RunState) -> None:
        """Writes the checkpoint beside its place, then renames it and removes those no longer wanted."""
        part = self.folder / f".step-{state.step:08d}.part"
        if self.accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        try:
            self.accelerator.save_state(str(part))
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                write_json(part / STATE_FILE, asdict(state))
                replace_folder(part, self.path(state.step))
                self._remove_old(state)
        except (OSError, RuntimeError, SafetensorError) as error:
            # Each library has its own name for a full disk.
            shutil.rmtree(part, ignore_errors=True)
            raise SystemExit(
                f"the checkpoint of step {state.step} could not be written to {self.folder}: {error}\n"
                "What was saved before is whole: make room and go on with --resume."
            ) from error
        self.accelerator.wait_for_everyone()

    def load(self, path: Path) -> RunState:
        self.accelerator.load_state(str(path))
        return RunState(**read_json(path / STATE_FILE))

    def load_newest(self) -> RunState | None:
        """Goes to the newest whole checkpoint; None if there is none."""
        found = self.found()
        return self.load(found[-1]) if found else None

    def _remove_old(self, state: RunState) -> None:
        best = None if state.best_step is None else self.path(state.best_step)
        others = [path for path in self.found() if path != best]
        for path in others[: -self.keep]:
            shutil.rmtree(path, ignore_errors=True)


def whole_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / STATE_FILE).is_file())


def prepare_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuses to mix two runs, and finds out now whether the folder can be written to."""
    previous = [name for name in RUN_FILES if (folder / name).exists()]
    if previous and overwrite:
        for name in RUN_FILES:
            remove(folder / name)
    elif previous and not resume:
        raise ValueError(
            f"{folder} holds an earlier run ({previous[0]}): go on with --resume, remove it with --overwrite, or name "
            "another output"
        )
    elif folder.is_dir() and not previous and any(folder.iterdir()):
        raise ValueError(f"{folder} holds files that are no run of this program: name another output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{folder} can't be written to: {error}") from error


# What a run writes; nothing else in its folder is ever removed.
RUN_FILES = (
    "run.json",
    "checkpoints",
    "logs",
    "predictions",
    "model",
    "metrics.json",
    "history.json",
    "training_curve.png",
    "not_finite.json",
)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_room(folder: Path, *, parameters: int, trained_parameters: int, keep: int) -> None:
    """Refuses a run whose checkpoints can't fit on the disk, before any time is spent on it."""
    # One more than are kept while the newest is written, and the best one.
    each = parameters * BYTES_PER_PARAMETER + trained_parameters * BYTES_PER_TRAINED_PARAMETER
    needed = each * (keep + 2)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"{folder} has {free / 1e9:.1f} GB free, but {keep + 2} checkpoints of this model need about "
            f"{needed / 1e9:.1f} GB: make room, lower --keep-checkpoints, or name another output"
        )
