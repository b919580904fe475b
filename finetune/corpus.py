"""Real prose that every Python has: the help topics of `pydoc_data`, as documents for masked-LM adaptation.

python -m finetune.corpus --split train --output topics.jsonl
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics

from .contract_values import SPLITS
from .files import whole_file

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


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m finetune.corpus", description=help_topics.__doc__)
    parser.add_argument("--output", type=Path, required=True, help="jsonl file of `id` and `text`, one topic per line")
    parser.add_argument("--split", choices=SPLITS, help="the topics of one split (default: all)")
    parser.add_argument("--at-least", type=int, default=0, metavar="N", help="characters a topic must have (0)")
    args = parser.parse_args(arguments)
    lines = [json.dumps(asdict(topic)) + "\n" for topic in help_topics(split=args.split, at_least=args.at_least)]
    with whole_file(args.output) as part:
        part.write_text("".join(lines), encoding="utf-8")
    print(f"{args.output}: {len(lines)} topics")


if __name__ == "__main__":
    main()
