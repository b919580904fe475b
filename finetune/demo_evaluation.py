"""How well the demo's model answers questions about generated contracts of each size, by the scripts' own measure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .answers import AnswerCollector, Prediction, choose, tune_threshold
from .batches import pad_rows
from .contracts import Contract, generate_contracts
from .metrics.long_qa.squad_scores import token_f1
from .windows import PairLayout, question_windows, tokenise_context, tokenise_question

_LONGEST_ANSWER = 24
# Contracts per size, for choosing the threshold and for testing with it.
_CONTRACTS = {"small": (12, 40), "medium": (8, 24)}


@dataclass(frozen=True)
class Asked:
    """What was answered to each question, and what would have been right (nothing, for some)."""

    predictions: dict[str, Prediction]
    references: dict[str, list[str]]

    def best_threshold(self) -> float:
        """What "no answer" must score more than the best answer, for the best F1."""
        return tune_threshold(self.predictions, self.references)[0]

    def f1(self, threshold: float, *, answerable_only: bool = False) -> float:
        """Mean F1 as in SQuAD v2, 0 to 1."""
        scores = [
            token_f1(choose(self.predictions[key].nbest, threshold=threshold).text, right)
            for key, right in self.references.items()
            if right or not answerable_only
        ]
        return sum(scores) / len(scores)


@torch.no_grad()
def ask_all(model: Any, tokenizer: Any, contracts: Sequence[Contract], *, with_global_tokens: bool = True) -> Asked:
    """Answers all questions of the contracts, those of one contract together."""
    model.eval()
    asked = Asked({}, {})
    for number, contract in enumerate(contracts):
        context = tokenise_context(tokenizer, contract.text)
        keys = [f"{number}-{place}" for place in range(len(contract.questions))]
        windows = [
            {**_whole_window(tokenizer, question.question, context), "question_id": key}
            for key, question in zip(keys, contract.questions, strict=True)
        ]
        inputs = pad_rows(
            [{"input_ids": window["input_ids"]} for window in windows], pad_token_id=tokenizer.pad_token_id
        )
        global_mask = None if with_global_tokens else torch.zeros_like(inputs["input_ids"])
        outputs = model(**inputs, global_attention_mask=global_mask)
        collector = AnswerCollector(n_best=1, max_answer_tokens=_LONGEST_ANSWER)
        collector.add(windows, outputs.start_logits, outputs.end_logits)
        for key, question in zip(keys, contract.questions, strict=True):
            asked.predictions[key] = collector.finish(key, context=context, text=contract.text)
            asked.references[key] = question.answers
    return asked


def _whole_window(tokenizer: Any, question: str, context: Any) -> dict[str, Any]:
    """Question and contract as one input."""
    (window,) = question_windows(
        tokenise_question(tokenizer, question),
        context,
        layout=PairLayout.of(tokenizer),
        max_length=tokenizer.model_max_length,
        stride=0,
    )
    return window


def evaluate_by_length(model: Any, tokenizer: Any, *, seed: int = 1_000) -> dict[str, dict[str, float]]:
    """F1 of SQuAD v2 on test contracts of each size that fits, with the threshold tuned on validation contracts."""
    results = {}
    for size, (num_validation, num_test) in _CONTRACTS.items():
        validation, test = (
            list(generate_contracts(size=size, split=split, count=count, seed=seed))
            for split, count in (("validation", num_validation), ("test", num_test))
        )
        threshold = ask_all(model, tokenizer, validation).best_threshold()
        asked = ask_all(model, tokenizer, test)
        lengths = [len(tokenizer(contract.text)["input_ids"]) for contract in test]
        results[size] = {
            "shortest": min(lengths),
            "longest": max(lengths),
            "questions": len(asked.references),
            "f1": asked.f1(threshold),
            "f1_answerable": asked.f1(threshold, answerable_only=True),
        }
    return results
