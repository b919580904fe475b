"""How well the demo's model answers questions about generated contracts of each size."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .contracts import Contract, generate_contracts

_LONGEST_ANSWER = 24
# Contracts per size, for choosing the threshold and for testing with it.
_CONTRACTS = {"small": (12, 40), "medium": (8, 24)}


@dataclass(frozen=True)
class Guess:
    """The best answer to a question, by how much it beats "no answer", and what would have been right."""

    text: str
    margin: float
    right: str

    def f1(self, threshold: float) -> float:
        """F1 of words, 1 if rightly nothing is said. Case, articles and punctuation don't occur in these answers."""
        said, right = (Counter(text.split()) for text in (self.text if self.margin > threshold else "", self.right))
        if not said or not right:
            return float(said == right)
        return 2 * (said & right).total() / (said.total() + right.total())


@torch.no_grad()
def guess_answers(
    model: Any, tokenizer: Any, contracts: Sequence[Contract], *, with_global_tokens: bool = True
) -> list[Guess]:
    """Answers all questions of the contracts, those of one contract together."""
    model.eval()
    guesses = []
    for contract in contracts:
        questions = [question.question for question in contract.questions]
        inputs = tokenizer(questions, [contract.text] * len(questions), padding=True, return_tensors="pt")
        global_mask = None if with_global_tokens else torch.zeros_like(inputs["input_ids"])
        outputs = model(**inputs, global_attention_mask=global_mask)
        for number, question in enumerate(contract.questions):
            encoding = inputs.encodings[number]
            context = [place for place, sequence in enumerate(encoding.sequence_ids) if sequence == 1]
            start, end = outputs.start_logits[number], outputs.end_logits[number]
            first, last, score = _best_span(start[context], end[context])
            text = contract.text[encoding.offsets[context[first]][0] : encoding.offsets[context[last]][1]].strip()
            guesses.append(Guess(text, score - float(start[0] + end[0]), (question.answers or [""])[0]))
    return guesses


def _best_span(start: torch.Tensor, end: torch.Tensor) -> tuple[int, int, float]:
    """First and last place of the highest sum of a start and an end that is not far behind it."""
    padded = torch.nn.functional.pad(end, (0, _LONGEST_ANSWER - 1), value=-torch.inf)
    best_end, reach = padded.unfold(0, _LONGEST_ANSWER, 1).max(1)
    first = int((start + best_end).argmax())
    return first, first + int(reach[first]), float(start[first] + best_end[first])


def mean_f1(guesses: Sequence[Guess], threshold: float) -> float:
    return sum(guess.f1(threshold) for guess in guesses) / len(guesses)


def best_threshold(guesses: Sequence[Guess]) -> float:
    """The margin that an answer needs for the best F1."""
    return max([0.0, *(guess.margin for guess in guesses)], key=lambda threshold: mean_f1(guesses, threshold))


def evaluate_by_length(model: Any, tokenizer: Any, *, seed: int = 1_000) -> dict[str, dict[str, float]]:
    """F1 of SQuAD v2 on test contracts of each size that fits, with the threshold tuned on validation contracts."""
    results = {}
    for size, (num_validation, num_test) in _CONTRACTS.items():
        validation = generate_contracts(size=size, split="validation", count=num_validation, seed=seed)
        threshold = best_threshold(guess_answers(model, tokenizer, list(validation)))
        test = list(generate_contracts(size=size, split="test", count=num_test, seed=seed))
        lengths = [len(tokenizer(contract.text)["input_ids"]) for contract in test]
        guesses = guess_answers(model, tokenizer, test)
        answerable = [guess for guess in guesses if guess.right]
        results[size] = {
            "shortest": min(lengths),
            "longest": max(lengths),
            "questions": len(guesses),
            "f1": mean_f1(guesses, threshold),
            "f1_answerable": mean_f1(answerable, threshold),
        }
    return results
