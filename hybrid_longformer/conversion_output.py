"""Output: a folder that appears whole or not at all, and what is left of runs that were killed."""

import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .conversion_source import ConversionError

# Hidden neighbours of the output: .NAME.TOKEN.part is being written, .NAME.TOKEN.old is being replaced, and whoever
# does so holds .NAME.TOKEN.lock. The system frees the lock of a process that was killed.
_TOKEN_DIGITS = 8


def check_output(output: Path, *, overwrite: bool, source: Any) -> None:
    """Refuses an output that would lose something: other files, or the source itself."""
    if output.exists() and not output.is_dir():
        raise ConversionError(f"output {output} is a file: name a folder")
    if isinstance(source, str | os.PathLike) and Path(source).is_dir():
        here, there = output.resolve(), Path(source).resolve()
        if here == there or here in there.parents:
            raise ConversionError(f"output {output} holds the source {source}: name another folder")
    if not overwrite and output.is_dir() and any(output.iterdir()):
        raise ConversionError(f"output {output} has files in it: name another folder, or give overwrite to replace it")


@contextmanager
def whole_or_nothing(output: Path) -> Iterator[Path]:
    """A folder beside the output that takes its place at the end; whatever goes wrong before, it is removed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    beside, replaced, lock = _neighbours(output, uuid.uuid4().hex[:_TOKEN_DIGITS])
    held = FileLock(lock)
    try:
        with suppress(OSError, NotImplementedError):
            # Where files can't be locked, nobody takes this run for a dead one either.
            held.acquire()
        beside.mkdir()
        yield beside
        if output.exists():
            output.rename(replaced)
        beside.rename(output)
    finally:
        _settle(output, beside, replaced)
        held.release(force=True)
        lock.unlink(missing_ok=True)


def clear_leftovers(output: Path) -> None:
    """Removes what killed runs left beside this output; what a running one writes is locked and stays."""
    pattern = f".{glob.escape(output.name)}.{'[0-9a-f]' * _TOKEN_DIGITS}."
    left = [path for end in ("part", "old") for path in output.parent.glob(pattern + end)]
    for token in {path.suffixes[-2][1:] for path in left}:
        beside, replaced, lock = _neighbours(output, token)
        with suppress(Timeout, OSError, NotImplementedError), FileLock(lock, blocking=False):
            _settle(output, beside, replaced)
            lock.unlink(missing_ok=True)


def _neighbours(output: Path, token: str) -> tuple[Path, Path, Path]:
    beside, replaced, lock = (output.parent / f".{output.name}.{token}.{end}" for end in ("part", "old", "lock"))
    return beside, replaced, lock


def _settle(output: Path, beside: Path, replaced: Path) -> None:
    """Leaves either the new output or the one before in place, and nothing beside it."""
    shutil.rmtree(beside, ignore_errors=True)
    if replaced.exists() and not output.exists():
        replaced.rename(output)
    shutil.rmtree(replaced, ignore_errors=True)
