"""Generated contracts: long English documents with questions, answers far from them, distractors and summaries.

A contract is a list of numbered clauses. Some carry a fact that one can ask for; some carry such a fact and say that
they are superseded; the rest carry none. A question names a kind of clause and, mostly, a party. It has an answer when
a clause of that kind for that party is in force, and none when there is no such clause, or only the other party's, or
only a superseded one. Whether a clause is the right one can be told from that clause and the question alone.

    python -m finetune.contracts OUTPUT --size medium --train 200 --validation 20 --test 40
"""

import argparse
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .contract_clauses import KINDS, ClauseKind
from .contract_prose import FILLERS, OPENINGS, ROLES, SUMMARY_OPENING, SUPERSEDED, TAILS, TITLES
from .contract_values import SPLITS, values_of_split


@dataclass(frozen=True)
class ContractSize:
    """How long a contract is, and how many questions it gets."""

    words: int
    questions: int


SIZES = {
    "small": ContractSize(words=420, questions=6),
    "medium": ContractSize(words=1_790, questions=9),
    "large": ContractSize(words=4_500, questions=12),
}
# Parts of all clauses; the rest have no fact at all.
_SHARE_IN_FORCE, _SHARE_SUPERSEDED = 0.45, 0.25
_WORDS_PER_CLAUSE = 32
# However long the contract, some slots stay free, so that there is something to ask in vain.
_MOST_SLOTS_IN_FORCE = 0.65
_UNANSWERABLE = 1 / 3
_FACTS_IN_SUMMARY = 6


@dataclass(frozen=True)
class Question:
    """A question about a contract; without answers it has none there."""

    id: str
    question: str
    answers: list[str]
    answer_starts: list[int]


@dataclass(frozen=True)
class Contract:
    """A document with questions about it and a summary of it."""

    id: str
    text: str
    questions: list[Question]
    summary: str


@dataclass(frozen=True)
class Slot:
    """What one can ask for: a kind of clause, and the party it binds ("" if it binds both)."""

    kind: ClauseKind
    party: str


@dataclass(frozen=True)
class Clause:
    """One numbered clause; `value_start` is where its value stands in its text, if it has one."""

    heading: str
    text: str
    slot: Slot | None = None
    value: str = ""
    value_start: int = -1
    in_force: bool = False


class ContractWriter:
    """Writes the clauses and questions of one contract; no value of a kind is used twice in it."""

    def __init__(self, *, rng: random.Random, split: str):
        if split not in SPLITS:
            raise ValueError(f"split={split!r} is not one of {', '.join(SPLITS)}")
        self.rng = rng
        self.split = split
        self.roles = rng.choice(ROLES)
        self.slots = [Slot(kind, party) for kind in KINDS for party in (self.roles if kind.binds_one_party else ("",))]
        self._used: set[tuple[str, str]] = set()

    def value(self, sort: str, *, kind: str = "") -> str:
        """A value of the split's own, new to this kind of clause."""
        values = values_of_split(sort, self.split)
        fresh = self.rng.choice(values)
        while (kind, fresh) in self._used:
            fresh = self.rng.choice(values)
        self._used.add((kind, fresh))
        return fresh

    def fact(self, slot: Slot, *, in_force: bool) -> Clause:
        """A clause with something to ask for, in force or marked as superseded."""
        value = self.value(slot.kind.value, kind=slot.kind.name)
        text = self._name_parties(self.rng.choice(slot.kind.clauses), slot.party)
        if not in_force:
            text = self.rng.choice(SUPERSEDED).replace("{clause}", text)
            text = text.replace("{date}", self.value("date", kind=slot.kind.name))
        if self.rng.random() < 0.4:
            text = f"{text} {self.rng.choice(TAILS)}"
        start = text.index("{value}")
        return Clause(slot.kind.heading, text.replace("{value}", value), slot, value, start, in_force)

    def filler(self) -> Clause:
        """A clause with nothing to ask for."""
        heading, text = self.rng.choice(FILLERS)
        return Clause(heading, self._name_parties(text, self.rng.choice(self.roles)))

    def ask(self, slot: Slot) -> str:
        """A question for what a slot holds."""
        return self._name_parties(self.rng.choice(slot.kind.questions), slot.party)

    def near_misses(self, slot: Slot) -> list[Slot]:
        """Slots that are easily taken for this one: the other party's, and those with the same sort of value."""
        same_kind = [other for other in self.slots if other.kind is slot.kind and other != slot]
        same_sort = [other for other in self.slots if other.kind.value == slot.kind.value and other.kind != slot.kind]
        return same_kind * 2 + same_sort

    def _name_parties(self, text: str, party: str) -> str:
        other = self.roles[1] if party == self.roles[0] else self.roles[0]
        text = text.replace("{party}", party).replace("{other}", other)
        return text[0].upper() + text[1:]


def join_clauses(clauses: Sequence[Clause], *, opening: str = "", first_number: int = 1) -> tuple[str, list[int]]:
    """The text of numbered clauses, and where each one's value stands in it (-1: it has none)."""
    text, starts = opening, []
    for number, clause in enumerate(clauses, start=first_number):
        text += f"{number}. {clause.heading}. "
        starts.append(len(text) + clause.value_start if clause.slot else -1)
        text += clause.text + "\n"
    return text, starts


def generate_contracts(*, size: str, split: str, count: int, seed: int = 0) -> Iterator[Contract]:
    """Contracts of a size ("small", "medium", "large"; about 600, 2,400 and 6,000 tokens) for a split.

    The same arguments give the same contracts. Names and values of one split occur in no other.
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r} is not one of {', '.join(SIZES)}")
    for index in range(count):
        name = f"{split}-{size}-{seed}-{index}"
        yield _write_contract(ContractWriter(rng=random.Random(name), split=split), SIZES[size], name)


def _write_contract(writer: ContractWriter, size: ContractSize, name: str) -> Contract:
    opening, names = write_opening(writer)
    clauses = choose_clauses(writer, size.words)
    text, starts = join_clauses(clauses, opening=opening)
    in_force = {
        clause.slot: (clause.value, start) for clause, start in zip(clauses, starts, strict=True) if clause.in_force
    }
    questions = []
    for number, slot in enumerate(choose_questions(writer, clauses, size.questions)):
        answers = [in_force[slot]] if slot in in_force else []
        questions.append(
            Question(f"{name}-{number}", writer.ask(slot), [value for value, _ in answers], [at for _, at in answers])
        )
    return Contract(name, text, questions, _summarise(clauses, SUMMARY_OPENING.format(**names)))


def write_opening(writer: ContractWriter) -> tuple[str, dict[str, str]]:
    """Title and parties, and the names that were chosen for them."""
    names = {"first": writer.roles[0], "second": writer.roles[1]}
    names |= {f"{which}_name": writer.value("company", kind="party") for which in ("first", "second")}
    title, opening = writer.rng.choice(TITLES), writer.rng.choice(OPENINGS)
    return f"{title}\n{opening.format(date=writer.value('date'), **names)}\n", names


def choose_clauses(writer: ContractWriter, words: int) -> list[Clause]:
    """Clauses in any order, about as many words as wanted."""
    rng, about = writer.rng, words / _WORDS_PER_CLAUSE
    num_in_force = round(min(about * _SHARE_IN_FORCE, len(writer.slots) * _MOST_SLOTS_IN_FORCE))
    clauses = [writer.fact(slot, in_force=True) for slot in rng.sample(writer.slots, num_in_force)]
    # Drawn apart from those in force: an old version tells nothing of whether there is a new one.
    old = rng.sample(writer.slots * 3, min(round(about * _SHARE_SUPERSEDED), len(writer.slots) * 2))
    clauses += [writer.fact(slot, in_force=False) for slot in old]
    while sum(len(clause.text.split()) + 3 for clause in clauses) < words:
        clauses.append(writer.filler())
    rng.shuffle(clauses)
    return clauses


def choose_questions(writer: ContractWriter, clauses: Sequence[Clause], count: int) -> list[Slot]:
    """Slots to ask for, a third of them empty; half of the empty ones have a near miss in the contract."""
    rng = writer.rng
    filled = [clause.slot for clause in clauses if clause.slot and clause.in_force]
    written = {clause.slot for clause in clauses if clause.slot}
    kinds = {slot.kind.name for slot in written}
    empty = [slot for slot in writer.slots if slot not in filled]
    tempting = [slot for slot in empty if slot in written or slot.kind.name in kinds]
    num_empty = round(count * _UNANSWERABLE)
    chosen = rng.sample(tempting, min(len(tempting), (num_empty + 1) // 2))
    chosen += rng.sample([slot for slot in empty if slot not in chosen], num_empty - len(chosen))
    chosen += rng.sample(filled, min(len(filled), count - num_empty))
    rng.shuffle(chosen)
    return chosen


def _summarise(clauses: Sequence[Clause], opening: str) -> str:
    """Facts in force from the whole length of the contract, in its order."""
    facts = [clause for clause in clauses if clause.in_force]
    step = max(1, len(facts) / _FACTS_IN_SUMMARY)
    chosen = [facts[int(place * step)] for place in range(min(len(facts), _FACTS_IN_SUMMARY))]
    sentences = [opening]
    for clause in chosen:
        assert clause.slot is not None
        sentence = clause.slot.kind.summary.format(party=clause.slot.party, value=clause.value)
        sentences.append(sentence[0].upper() + sentence[1:] + ".")
    return " ".join(sentences)


def write_dataset(
    folder: str | os.PathLike,
    *,
    size: str,
    train: int,
    validation: int,
    test: int,
    seed: int = 0,
) -> dict[str, int]:
    """Writes so many contracts for each split: SPLIT.json (nested SQuAD v2) and SPLIT-summaries.jsonl.

    The folder must be new or empty; it appears whole or not at all. Returns the number of questions per split.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty folder: choose another one, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        num_questions = {}
        for split, count in zip(SPLITS, (train, validation, test), strict=True):
            contracts = list(generate_contracts(size=size, split=split, count=count, seed=seed))
            _write_split(draft, split, contracts)
            num_questions[split] = sum(len(contract.questions) for contract in contracts)
        draft.chmod(0o755)
        draft.replace(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return num_questions


def _write_split(folder: Path, split: str, contracts: Sequence[Contract]) -> None:
    squad = {"version": "v2.0", "data": [_as_squad(contract) for contract in contracts]}
    (folder / f"{split}.json").write_text(json.dumps(squad, ensure_ascii=False), encoding="utf-8")
    with (folder / f"{split}-summaries.jsonl").open("w", encoding="utf-8") as file:
        for contract in contracts:
            row = {"id": contract.id, "document": contract.text, "summary": contract.summary}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _as_squad(contract: Contract) -> dict:
    questions = [
        {
            "id": question.id,
            "question": question.question,
            "answers": [
                {"text": text, "answer_start": start}
                for text, start in zip(question.answers, question.answer_starts, strict=True)
            ],
            "is_impossible": not question.answers,
        }
        for question in contract.questions
    ]
    return {"title": contract.id, "paragraphs": [{"context": contract.text, "qas": questions}]}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m finetune.contracts", description=write_dataset.__doc__)
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--size", choices=SIZES, default="medium", help="of every contract (default: medium)")
    parser.add_argument("--train", type=int, default=200, metavar="N", help="contracts for training (200)")
    parser.add_argument("--validation", type=int, default=20, metavar="N", help="contracts for validation (20)")
    parser.add_argument("--test", type=int, default=40, metavar="N", help="contracts for testing (40)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other contracts (0)")
    options = vars(parser.parse_args(arguments))
    folder = options.pop("output")
    num_questions = write_dataset(folder, **options)
    for split, questions in num_questions.items():
        print(f"{folder / split}.json: {options[split]} contracts, {questions} questions")


if __name__ == "__main__":
    main()
