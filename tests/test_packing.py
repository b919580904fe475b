"""Packed rows give each document its own result, and the collator makes them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_longformer import HybridLongformerForMaskedLM, PackingCollator, unpack
from hybrid_longformer.packing import first_fit_decreasing
from tests.models import build


def small_model() -> HybridLongformerForMaskedLM:
    return build(HybridLongformerForMaskedLM)


def features(lengths: list[int]) -> list[dict]:
    generator = torch.Generator().manual_seed(sum(lengths))
    result = []
    for length in lengths:
        ids = torch.randint(3, 60, (length,), generator=generator)
        is_global = (torch.rand(length, generator=generator) < 0.05).long()
        labels = torch.where(torch.rand(length, generator=generator) < 0.3, ids, -100)
        result.append({"input_ids": ids, "global_attention_mask": is_global, "labels": labels})
    return result


@settings(max_examples=15)
@given(st.lists(st.integers(1, 180), min_size=1, max_size=6))
def test_packed_documents_equal_documents_alone(lengths: list[int]) -> None:
    model, documents = small_model(), features(lengths)
    collator = PackingCollator(max_length=200, pad_token_id=1)
    batch = collator(documents)
    with torch.no_grad():
        packed = unpack(model(**batch).logits, batch["document_ids"], batch["attention_mask"])
    order = [index for row in first_fit_decreasing(lengths, 200) for index in row]
    assert len(packed) == len(lengths)
    for result, index in zip(packed, order, strict=True):
        alone = {key: value[None] for key, value in documents[index].items() if key != "labels"}
        with torch.no_grad():
            assert (result - model(**alone).logits[0]).abs().max() <= 1e-5


def test_packed_loss_is_the_loss_of_all_labelled_tokens() -> None:
    model, documents = small_model(), features([50, 120, 30])
    packed = model(**PackingCollator(max_length=200, pad_token_id=1)(documents)).loss
    losses, counts = [], []
    for document in documents:
        alone = {key: value[None] for key, value in document.items()}
        counts.append((document["labels"] != -100).sum())
        losses.append(model(**alone).loss * counts[-1])
    assert (packed - sum(losses) / sum(counts)).abs() <= 1e-5


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30))
def test_rows_hold_every_document_once_and_never_too_much(lengths: list[int]) -> None:
    rows = first_fit_decreasing(lengths, 100)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 100 for row in rows)
    # First fit never leaves two rows half empty.
    assert sum(sum(lengths[index] for index in row) <= 50 for row in rows) <= 1


def test_collator_pads_and_marks() -> None:
    batch = PackingCollator(max_length=16, pad_token_id=9, pad_to_multiple_of=8)(
        [{"input_ids": [3, 4], "labels": [-100, 4]}, {"input_ids": [5, 6, 7], "labels": [5, -100, -100]}]
    )
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6, 7, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 4, 5, -100, -100, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1, 1, 2, 2, 2]]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([], "no documents to pack"),
        ([{"input_ids": list(range(11))}], "document of 11 tokens does not fit into rows of max_length=10"),
        ([{"input_ids": [1, 2], "start_positions": 1}], "start_positions is one number per document"),
        ([{"input_ids": [1, 2], "labels": [1]}], "document 0 has 2 tokens but its 'labels'"),
        ([{"labels": [1]}], r"document 0 has the keys \['labels'\], but \['input_ids', 'labels'\] are expected"),
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], r"document 1 has the keys \['input_ids', 'labels'\]"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], r"document 1 has the keys \['input_ids'\]"),
    ],
)
def test_collator_refuses_what_it_cannot_pack(features: list[dict], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingCollator(max_length=10, pad_token_id=1)(features)


@pytest.mark.parametrize(("max_length", "multiple"), [(10, 8), (8, 0), (0, 1)])
def test_rows_are_never_padded_beyond_their_limit(max_length: int, multiple: int) -> None:
    with pytest.raises(
        ValueError, match=f"max_length={max_length} must be a multiple of pad_to_multiple_of={multiple}"
    ):
        PackingCollator(max_length=max_length, pad_token_id=1, pad_to_multiple_of=multiple)
