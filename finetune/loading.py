"""Loading: a tokenizer or a model from a folder or the Hub, with words about the folder where there is none."""

from pathlib import Path
from typing import Any


def load_pretrained(auto_class: Any, source: str, **options: Any) -> Any:
    """`auto_class.from_pretrained`, which by itself takes a folder that isn't there for a wrong Hub id."""
    try:
        return auto_class.from_pretrained(source, **options)
    except OSError as error:
        if Path(source).is_dir():
            raise
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"there is no folder {source}, and the Hub could not provide it either ({reason}): is the path right, and "
            "relative to where the command runs?"
        ) from error
