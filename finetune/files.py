"""Files that appear whole or not at all: written beside their place, then renamed into it."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which takes the place of `path` if nothing goes wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with whole_file(path) as part:
        part.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def replace_folder(part: Path, folder: Path) -> None:
    """Puts a finished folder in its place; what stood there before goes only when the new one is ready."""
    old = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.old")
    if folder.exists():
        os.replace(folder, old)
    os.replace(part, folder)
    shutil.rmtree(old, ignore_errors=True)
