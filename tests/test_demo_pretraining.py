"""The demo's pretraining: right labels, heads that find what is alike, stages that resume."""

import random

import pytest
import torch

from finetune import demo_evaluation, demo_pretraining
from finetune.answers import Answer, Prediction, choose
from finetune.contract_excerpts import write_excerpt, write_whole
from finetune.demo_evaluation import Asked
from finetune.demo_pretraining import Stage, batches, collate, encode, pretrain, publish
from finetune.demo_start import new_model, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def make_excerpts(count: int = 40):
    rng = random.Random(0)
    excerpts = [write_excerpt(rng, split="train", clauses=(1, 6), near_misses=0.5) for _ in range(count)]
    return [*excerpts, *(write_whole(rng, split="train", words=(300, 400)) for _ in range(5))]


def test_tokenizer_is_like_robertas_and_cuts_numbers_into_digits(tokenizer):
    pair = tokenizer("Who?", "1,250 euros")
    tokens = tokenizer.convert_ids_to_tokens(pair["input_ids"])
    assert tokens[0] == "<s>" and tokens[-1] == "</s>" and tokens.count("</s>") == 3
    assert [token for token in tokens if token.isdigit()] == list("1250")
    assert set(pair) == {"input_ids", "attention_mask"}
    text = "Nothing is lost: äöü, 中文, 3.50 percent.\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_rows_carry_the_answer_and_the_truth_of_each_clause(tokenizer):
    excerpts = make_excerpts()
    for excerpt, row in zip(excerpts, encode(tokenizer, excerpts), strict=True):
        first, last = row.answer
        if not excerpt.answer:
            assert row.answer == (0, 0)
            continue
        assert tokenizer.decode(row.input_ids[first : last + 1]).strip() == excerpt.answer
        # The right clause is of the right kind and party, and in force; where both parties are bound, none is right.
        assert row.truths[first] in ([1.0, 1.0, 1.0], [1.0, -1.0, 1.0])
        assert row.truths[0] == [-1.0] * 3
    truths = [truth for row in encode(tokenizer, excerpts) for truth in row.truths]
    for bit in range(3):
        assert {truth[bit] for truth in truths} == {-1.0, 0.0, 1.0}


def test_without_an_answer_no_clause_is_right():
    for excerpt in make_excerpts(200):
        right = [clause for clause in excerpt.clauses if clause.right_kind and clause.right_party is not False]
        assert any(clause.in_force for clause in right) == bool(excerpt.answer)


def test_batches_are_full_and_shifted_excerpts_stay_inside_the_table(tokenizer):
    stage, rng = Stage(name="x", clauses=(1, 3), steps=1, tokens=2_000), random.Random(0)
    found = batches(stage, tokenizer, rng)
    starts = set()
    for rows in (next(found) for _ in range(20)):
        inputs = collate(rows, pad_token_id=1, max_positions=600, shifted=0.8, rng=rng)
        assert inputs["input_ids"].numel() <= stage.tokens
        assert inputs["position_ids"].max() < 600
        for number, row in enumerate(rows):
            assert inputs["position_ids"][number, 0] == 2
            starts.add(int(inputs["position_ids"][number, row.context_start]) - row.context_start - 2)
    assert 0 in starts and len(starts) > 100


def test_untrained_heads_attend_to_copies_and_to_neighbours():
    torch.manual_seed(0)
    model = new_model(vocab_size=500).eval()
    input_ids = torch.randint(5, 500, (1, 64))
    input_ids[0, 60] = input_ids[0, 3]
    global_mask = torch.zeros_like(input_ids)
    global_mask[0, :5] = 1
    attention = model(input_ids, global_attention_mask=global_mask, output_attentions=True).attentions
    copies, neighbours = attention[0][0, :2, 60], attention[0][0, 2:, 40]
    others = [place for place in range(64) if place not in (3, 60)]
    assert (copies[:, 3] > 2 * copies[:, others].max(-1).values).all()
    assert (neighbours[:, 30:51].sum(-1) > 2 * neighbours[:, 9:30].sum(-1)).all()


def guess(text: str, score: float) -> Prediction:
    """An answer whose score is so much above that of no answer."""
    return choose([Answer(text, 0, len(text), score, 0.5), Answer("", None, None, 0.0, 0.5)])


def test_threshold_and_f1():
    predictions = {"a": guess("30 days", 2.0), "b": guess("9 days", 1.0), "c": guess("5 hours", 3.0)}
    asked = Asked(predictions, {"a": ["30 days"], "b": [], "c": ["5 days"]})
    assert asked.f1(0.0) == pytest.approx(1.5 / 3)
    assert -2.0 < asked.best_threshold() < -1.0
    assert asked.f1(asked.best_threshold()) == pytest.approx(2.5 / 3)
    assert asked.f1(-1.5, answerable_only=True) == pytest.approx(1.5 / 2)


def test_stages_resume_and_publish(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo_pretraining, "_REPORTED_EXCERPTS", 2)
    monkeypatch.setattr(demo_pretraining, "_REPORTED_CONTRACTS", 1)
    monkeypatch.setattr(demo_evaluation, "_CONTRACTS", {"small": (1, 1)})
    stages = [Stage(name=name, clauses=(1, 2), steps=2, tokens=500) for name in ("first", "second")]
    whole = pretrain(tmp_path / "whole", stages)
    pretrain(tmp_path / "parts", stages[:1])
    parts = pretrain(tmp_path / "parts", stages)
    assert "continuing behind" in capsys.readouterr().out
    for name in ("model.safetensors", "truth_outputs.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    measured = publish(parts, tmp_path / "model")
    assert 0 <= measured["small"]["f1"] <= 1
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert f"| small | {measured['small']['shortest']}" in card and "finetune.demo_pretraining" in card
