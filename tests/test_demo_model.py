"""The checkpoint that the demo starts from: small, loaded in single precision, and able to answer from far away."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from finetune.contracts import generate_contracts
from finetune.demo_evaluation import ask_all
from hybrid_longformer import HybridLongformerForQuestionAnswering

FOLDER = Path(__file__).parents[1] / "finetune" / "demo_model"
TOKENS = {"small": (500, 800), "medium": (2_200, 2_600), "large": (5_500, 6_500)}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.mark.parametrize("size", TOKENS)
def test_contracts_are_as_long_as_promised(size, tokenizer):
    for split in ("train", "test"):
        for contract in generate_contracts(size=size, split=split, count=8, seed=9):
            assert TOKENS[size][0] <= len(tokenizer(contract.text)["input_ids"]) <= TOKENS[size][1]


def test_checkpoint_is_small_has_a_card_and_no_code_of_its_own():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 5e6
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "python -m finetune.demo_pretraining" in card and "| medium |" in card
    assert not list(FOLDER.glob("*.py"))


def test_model_answers_by_reading_the_question_from_far_away(tokenizer):
    """With its global tokens taken away, the same model sees no question where the answers are."""
    torch.manual_seed(0)
    model = HybridLongformerForQuestionAnswering.from_pretrained(FOLDER)
    assert model.dtype == torch.float32
    contracts = list(generate_contracts(size="small", split="test", count=8, seed=9))
    hybrid, local = (
        ask_all(model, tokenizer, contracts, with_global_tokens=with_global) for with_global in (True, False)
    )
    assert hybrid.f1(hybrid.best_threshold()) > 0.85
    assert local.f1(local.best_threshold()) < 0.6
