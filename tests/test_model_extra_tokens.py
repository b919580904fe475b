"""Extra global tokens (ETC) of every model class."""

import pytest
import torch
from torch.nn import functional as F

from hybrid_longformer import (
    HybridLongformerModel,
)
from tests.models import (
    PAD,
    both_backends,
    build,
    collate,
    encoder_of,
    every_class,
    gradients_of,
    largest,
    largest_difference,
    main_output,
    make_documents,
    make_inputs,
    results,
    rows_of_positions,
    run_model,
    token_classes,
)


@pytest.mark.parametrize("layers", [True, [1]], ids=["every layer", "one layer"])
@every_class
def test_extra_tokens_do_not_show_outside(model_class: type, layers: bool | list[int]) -> None:
    inputs = make_inputs(model_class)
    plain = run_model(build(model_class), inputs, output_hidden_states=layers)
    extended = run_model(build(model_class, num_extra_global_tokens=3), inputs, output_hidden_states=layers)
    assert main_output(extended).shape == main_output(plain).shape
    shapes = [
        [
            None if state is None else state.shape
            for state in outputs.get("hidden_states") or outputs.encoder_hidden_states
        ]
        for outputs in (plain, extended)
    ]
    assert shapes[0] == shapes[1]


@every_class
def test_extra_tokens_are_seen_by_all_and_ignore_padding(model_class: type) -> None:
    model, documents = build(model_class, num_extra_global_tokens=3), make_documents()
    right, left = (results(model, collate(model_class, documents, side=side)) for side in ("right", "left"))
    assert largest_difference(right, left) <= 1e-5
    with torch.no_grad():
        encoder_of(model).extra_global_tokens[1].neg_()
    changed = results(model, collate(model_class, documents))
    assert all(largest(a - b) > 1e-3 for a, b in zip(changed, right, strict=True))


@both_backends
@every_class
def test_extra_tokens_learn(model_class: type, implementation: str) -> None:
    model = build(model_class, num_extra_global_tokens=3, attn_implementation=implementation).train()
    gradient = gradients_of(model, make_inputs(model_class))
    (name,) = (each for each in gradient if each.endswith("extra_global_tokens"))
    assert gradient[name].abs().amax(1).min() > 1e-9


@token_classes
def test_extra_tokens_refuse_packed_rows(model_class: type) -> None:
    model, inputs = build(model_class, num_extra_global_tokens=3), make_inputs(model_class)
    halves = (torch.arange(inputs["input_ids"].shape[1]) > 12).long().expand_as(inputs["input_ids"])
    positions = torch.arange(inputs["input_ids"].shape[1]) - 13 * halves + 2
    for packing in ({"document_ids": halves}, {"position_ids": positions}):
        with pytest.raises(ValueError, match="num_extra_global_tokens=3 belong to one document"):
            model(**inputs, **packing)


@token_classes
def test_extra_tokens_take_positions_of_one_document(model_class: type) -> None:
    model, inputs = build(model_class, num_extra_global_tokens=3), make_inputs(model_class)
    given = results(model, inputs | {"position_ids": rows_of_positions(inputs)})
    assert largest_difference(given, results(model, inputs)) <= 1e-5


def test_extra_tokens_work_without_any_mask() -> None:
    model, document = build(HybridLongformerModel, num_extra_global_tokens=3), make_documents()[1]
    bare = run_model(model, {"input_ids": document.ids[None]}).last_hidden_state
    assert largest(bare - run_model(model, collate(HybridLongformerModel, [document])).last_hidden_state) <= 1e-5
    padded = {"input_ids": F.pad(document.ids[None], (0, 4), value=PAD)}
    padded["attention_mask"] = (padded["input_ids"] != PAD).long()
    assert largest(run_model(model, padded).last_hidden_state[:, :-4] - bare) <= 1e-5
