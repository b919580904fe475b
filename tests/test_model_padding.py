"""Padding, company and packing change nothing, whatever the model class."""

import pytest
import torch

from hybrid_longformer import (
    HybridLongformerForMultipleChoice,
    HybridLongformerModel,
)
from tests.models import (
    CLASSES,
    NUM_CHOICES,
    TOKEN_CLASSES,
    both_backends,
    build,
    collate,
    every_class,
    largest,
    largest_difference,
    main_output,
    make_documents,
    make_inputs,
    name_of,
    results,
    rows_of_positions,
    run_model,
    token_classes,
)


@both_backends
@every_class
def test_company_and_padding_change_nothing(model_class: type, implementation: str) -> None:
    """Every document says the same alone, among others, and padded on either side; so does the pooler."""
    model, documents = build(model_class, attn_implementation=implementation), make_documents()
    group = NUM_CHOICES if model_class is HybridLongformerForMultipleChoice else 1
    groups = [documents[start : start + group] for start in range(0, len(documents), group)]
    alone = [results(model, collate(model_class, one))[0] for one in groups]
    for side in ("right", "left"):
        together = results(model, collate(model_class, documents, side=side))
        assert largest_difference(together, alone) <= 1e-5


@every_class
def test_default_global_tokens_ignore_padding(model_class: type) -> None:
    model = build(model_class)
    right, left = (
        results(model, make_inputs(model_class, side=side, with_globals=False)) for side in ("right", "left")
    )
    assert largest_difference(right, left) <= 1e-5


@every_class
def test_what_stands_under_padding_changes_nothing(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    noise = 100 * torch.randn(embeddings.shape) * (inputs["attention_mask"] == 0)[..., None]
    clean = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
    first, second = (results(model, clean | {"inputs_embeds": each}) for each in (embeddings, embeddings + noise))
    assert noise.any() and largest_difference(first, second) <= 1e-6


def test_pooler_reads_the_first_real_token() -> None:
    model = build(HybridLongformerModel)
    right, left = (run_model(model, make_inputs(HybridLongformerModel, side=side)) for side in ("right", "left"))
    assert largest(right.pooler_output - left.pooler_output) <= 1e-5
    assert torch.equal(right.pooler_output, model.pooler(right.last_hidden_state[:, 0]))
    starts = make_inputs(HybridLongformerModel, side="left")["attention_mask"].argmax(1)
    assert torch.equal(left.pooler_output, model.pooler(left.last_hidden_state[torch.arange(len(starts)), starts]))


@pytest.mark.parametrize("told_by", ["document_ids", "position_ids"])
@token_classes
def test_packed_documents_say_the_same_as_apart(model_class: type, told_by: str) -> None:
    model, documents = build(model_class), make_documents()
    apart = [main_output(run_model(model, collate(model_class, [document])))[0] for document in documents]
    lengths = [len(document) for document in documents]
    packing = {
        "document_ids": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None],
        "position_ids": torch.cat([torch.arange(length) + 2 for length in lengths])[None],
    }
    packed = {
        "input_ids": torch.cat([document.ids for document in documents])[None],
        "global_attention_mask": torch.cat([document.global_marks for document in documents])[None],
        told_by: packing[told_by],
    }
    outputs = main_output(run_model(model, packed))[0].split(lengths)
    assert largest_difference(outputs, apart) <= 1e-5


@pytest.mark.parametrize("model_class", [each for each in CLASSES if each not in TOKEN_CLASSES], ids=name_of)
@pytest.mark.parametrize("told_by", ["document_ids", "position_ids"])
def test_heads_with_one_answer_per_row_refuse_packed_rows(model_class: type, told_by: str) -> None:
    inputs = make_inputs(model_class)
    halves = torch.arange(inputs["input_ids"].shape[-1]) % 10 + 2
    with pytest.raises(ValueError, match=f"{told_by} pack several documents into one row: give each document its own"):
        build(model_class)(**inputs, **{told_by: halves.expand_as(inputs["input_ids"])})


@token_classes
def test_given_positions_of_one_document_equal_the_default(model_class: type) -> None:
    """One row of positions serves the whole batch, as elsewhere in transformers."""
    model = build(model_class)
    inputs = make_inputs(model_class)
    default = results(model, inputs)
    positions = torch.arange(2, 2 + inputs["input_ids"].shape[1])[None]
    given = results(model, inputs | {"position_ids": positions.expand(len(inputs["input_ids"]), -1)})
    assert largest_difference(given, default) <= 1e-5
    assert largest_difference(results(model, inputs | {"position_ids": positions}), default) <= 1e-5
    roberta = rows_of_positions(inputs)
    assert largest_difference(results(model, inputs | {"position_ids": roberta}), default) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
@every_class
def test_masks_of_any_dtype(model_class: type, dtype: torch.dtype) -> None:
    model, inputs = build(model_class, num_extra_global_tokens=1), make_inputs(model_class)
    masks = {name: inputs[name].to(dtype) for name in ("attention_mask", "global_attention_mask")}
    assert torch.equal(main_output(run_model(model, inputs | masks)), main_output(run_model(model, inputs)))
