"""Excerpts of generated contracts, from one clause to a whole document, for learning step by step to match a question.

Beside the answer an excerpt says of every clause how it relates to the question. That is a lesson from each clause
instead of one from each document, and it takes apart what the answer needs all at once.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .contracts import (
    Clause,
    Contract,
    ContractWriter,
    Question,
    Slot,
    choose_clauses,
    choose_questions,
    join_clauses,
    write_opening,
)

# Of the clauses that are near misses, so many are old versions of the very clause that is asked for.
_SHARE_OLD_VERSIONS = 0.33
_SHARE_FILLERS = 0.3
_SHARE_IN_FORCE = 0.7


@dataclass(frozen=True)
class ClauseTruth:
    """Where a clause stands in the text, and how it relates to the question; None where that can't be said."""

    start: int
    end: int
    right_kind: bool
    right_party: bool | None
    in_force: bool | None


@dataclass(frozen=True)
class Excerpt:
    """A text with one question; `answer_start` is -1 if there is no answer."""

    question: str
    text: str
    answer: str
    answer_start: int
    clauses: list[ClauseTruth]

    def as_contract(self) -> Contract:
        """The same as a document with one question."""
        answers = [(self.answer, self.answer_start)] if self.answer else []
        question = Question("0", self.question, [text for text, _ in answers], [start for _, start in answers])
        return Contract("excerpt", self.text, [question], "")


def write_excerpt(
    rng: random.Random, *, split: str, clauses: tuple[int, int], near_misses: float, answerable: float = 0.55
) -> Excerpt:
    """Some clauses out of a contract.

    Args:
        clauses: least and largest number of them.
        near_misses: the share of distractors that are easily taken for the right clause.
        answerable: the share of questions that have an answer.
    """
    writer = ContractWriter(rng=rng, split=split)
    slot = rng.choice(writer.slots)
    chosen = [writer.fact(slot, in_force=True)] if rng.random() < answerable else []
    for _ in range(rng.randint(*clauses) - len(chosen)):
        chosen.append(_distractor(writer, slot, near_misses))
    rng.shuffle(chosen)
    return _as_excerpt(writer, slot, chosen, first_number=rng.randint(1, 60))


def write_whole(rng: random.Random, *, split: str, words: tuple[int, int]) -> Excerpt:
    """A whole contract of so many words, with one of its questions."""
    writer = ContractWriter(rng=rng, split=split)
    opening, _ = write_opening(writer)
    clauses = choose_clauses(writer, rng.randint(*words))
    return _as_excerpt(writer, rng.choice(choose_questions(writer, clauses, 6)), clauses, opening=opening)


def _distractor(writer: ContractWriter, slot: Slot, near_misses: float) -> Clause:
    rng = writer.rng
    in_force = rng.random() < _SHARE_IN_FORCE
    if rng.random() < near_misses:
        if rng.random() < _SHARE_OLD_VERSIONS:
            return writer.fact(slot, in_force=False)
        return writer.fact(rng.choice(writer.near_misses(slot)), in_force=in_force)
    if rng.random() < _SHARE_FILLERS:
        return writer.filler()
    return writer.fact(rng.choice([other for other in writer.slots if other != slot]), in_force=in_force)


def _as_excerpt(
    writer: ContractWriter, slot: Slot, clauses: Sequence[Clause], *, opening: str = "", first_number: int = 1
) -> Excerpt:
    text, starts = join_clauses(clauses, opening=opening, first_number=first_number)
    answer, answer_start = "", -1
    for clause, start in zip(clauses, starts, strict=True):
        if clause.slot == slot and clause.in_force:
            answer, answer_start = clause.value, start
    truths, at = [], len(opening)
    for clause in clauses:
        end = text.index("\n", at)
        truths.append(_compare(clause, slot, at, end))
        at = end + 1
    return Excerpt(writer.ask(slot), text, answer, answer_start, truths)


def _compare(clause: Clause, slot: Slot, start: int, end: int) -> ClauseTruth:
    if clause.slot is None:
        return ClauseTruth(start, end, False, None, None)
    right_party = clause.slot.party == slot.party if clause.slot.party and slot.party else None
    return ClauseTruth(start, end, clause.slot.kind is slot.kind, right_party, clause.in_force)
