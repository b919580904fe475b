"""Embeddings of every model class: replaced, resized, tied, and given in place of tokens."""

import math

import pytest
import torch

from hybrid_longformer import (
    HybridLongformerForConditionalGeneration,
    HybridLongformerModel,
)
from tests.models import (
    TIED_CLASSES,
    VOCABULARY,
    build,
    encoder_of,
    every_class,
    largest,
    largest_difference,
    main_output,
    make_inputs,
    make_labels,
    results,
    run_model,
    tied_classes,
)


@every_class
def test_input_embeddings_can_be_read_and_replaced(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    words = encoder_of(model).embeddings.word_embeddings
    assert model.get_input_embeddings() is words
    before = main_output(run_model(model, inputs))
    changed = torch.nn.Embedding(VOCABULARY, 32)
    model.set_input_embeddings(changed)
    assert model.get_input_embeddings() is changed and encoder_of(model).embeddings.word_embeddings is changed
    assert not torch.allclose(main_output(run_model(model, inputs)), before)
    model.set_input_embeddings(words)
    assert torch.equal(main_output(run_model(model, inputs)), before)


@pytest.mark.parametrize("scale_embedding", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@every_class
def test_embedded_inputs_equal_token_ids(model_class: type, side: str, scale_embedding: bool) -> None:
    model, inputs = build(model_class, scale_embedding=scale_embedding), make_inputs(model_class, side=side)
    embedded = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
    embedded["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"])
    if model_class is HybridLongformerForConditionalGeneration:
        target = embedded.pop("decoder_input_ids")
        embedded["decoder_inputs_embeds"] = model.decoder.get_input_embeddings()(target)
    assert largest_difference(results(model, embedded), results(model, inputs)) <= 1e-6


def test_scaled_embeddings_are_scaled() -> None:
    plain, scaled = build(HybridLongformerModel), build(HybridLongformerModel, scale_embedding=True)
    with torch.no_grad():
        scaled.embeddings.word_embeddings.weight.div_(math.sqrt(32))
    inputs = make_inputs(HybridLongformerModel)
    assert largest_difference(results(plain, inputs), results(scaled, inputs)) <= 1e-5


@pytest.mark.parametrize("new_size", [VOCABULARY + 7, VOCABULARY - 20])
@every_class
def test_vocabulary_can_be_resized(model_class: type, new_size: int, tmp_path) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    inputs |= make_labels(model_class, inputs)
    inputs = {name: tensor.clamp(max=new_size - 1) for name, tensor in inputs.items()}
    before = results(model, inputs)
    model.resize_token_embeddings(new_size)
    assert model.config.vocab_size == new_size
    assert model.get_input_embeddings().weight.shape == (new_size, 32)
    after = results(model, inputs)
    if model_class in TIED_CLASSES:
        kept = min(new_size, VOCABULARY)
        before, after = ([one[..., :kept] for one in each] for each in (before, after))
        assert main_output(run_model(model, inputs)).shape[-1] == new_size
    assert largest_difference(before, after) <= 1e-6
    assert (
        main_output(run_model(model, inputs | {"input_ids": inputs["input_ids"].clamp(min=new_size - 1)}))
        .isfinite()
        .all()
    )
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    assert torch.equal(main_output(run_model(loaded, inputs)), main_output(run_model(model, inputs)))


def tied_weights(model) -> list[torch.Tensor]:
    others = [model.decoder.word_embeddings.weight] if hasattr(model, "decoder") else []
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight, *others]


@tied_classes
def test_tied_weights_stay_tied(model_class: type, tmp_path) -> None:
    model = build(model_class)
    model.resize_token_embeddings(VOCABULARY + 3)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    loaded.resize_token_embeddings(VOCABULARY + 5)
    for each in (model, loaded):
        assert len({weight.data_ptr() for weight in tied_weights(each)}) == 1
    with torch.no_grad():
        loaded.get_input_embeddings().weight.add_(1.0)
    assert torch.equal(*tied_weights(loaded)[:2])


@tied_classes
def test_untied_weights_stay_apart(model_class: type, tmp_path) -> None:
    model, inputs = build(model_class, tie_word_embeddings=False), make_inputs(model_class)
    before = [weight.detach().clone() for weight in tied_weights(model)]
    logits = main_output(run_model(model, inputs))
    model.resize_token_embeddings(VOCABULARY + 3)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    for each in (model, loaded):
        weights = tied_weights(each)
        assert len({weight.data_ptr() for weight in weights}) == len(weights)
        assert all(torch.equal(weight[:VOCABULARY], old) for weight, old in zip(weights, before, strict=True))
        assert largest(main_output(run_model(each, inputs))[..., :VOCABULARY] - logits) <= 1e-6
