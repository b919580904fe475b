"""Real prose that every Python has: the help topics of `pydoc_data`, as documents for masked-LM adaptation."""

from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data import topics

from .contract_values import SPLITS

# Out of ten topics, in alphabetical order, one is for validation and one for testing.
_PLACES = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}


@dataclass(frozen=True)
class Topic:
    """One help topic, as `help("NAME")` shows it."""

    id: str
    text: str


def help_topics(*, split: str | None = None, at_least: int = 0) -> Iterator[Topic]:
    """Python's help topics, all or those of one split, leaving out those with fewer characters than `at_least`."""
    if split is not None and split not in SPLITS:
        raise ValueError(f"split={split!r} is not one of {', '.join(SPLITS)}")
    places = range(10) if split is None else _PLACES[split]
    for number, name in enumerate(sorted(topics.topics)):
        text = topics.topics[name].strip()
        if number % 10 in places and len(text) >= at_least:
            yield Topic(name, text)
