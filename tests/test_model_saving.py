"""Saving, loading and fresh weights of every model class."""

import pytest
import torch
import transformers

from hybrid_longformer import (
    HybridLongformerForMaskedLM,
    HybridLongformerForTokenClassification,
    HybridLongformerModel,
)
from tests.models import (
    AUTO_CLASSES,
    build,
    encoder_of,
    every_class,
    largest,
    main_output,
    make_inputs,
    run_model,
    tiny_config,
)


@every_class
def test_saved_models_load_by_class_and_by_auto_class(model_class: type, tmp_path) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    model.save_pretrained(tmp_path)
    before = main_output(run_model(model, inputs))
    for loader in (model_class, getattr(transformers, AUTO_CLASSES[model_class])):
        loaded, report = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is model_class and not loaded.training
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(main_output(run_model(loaded, inputs)), before)


@every_class
def test_heads_take_the_weights_of_a_base_checkpoint(model_class: type, tmp_path) -> None:
    base = build(HybridLongformerModel, seed=1)
    base.save_pretrained(tmp_path)
    model = model_class.from_pretrained(tmp_path)
    weights = encoder_of(model).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in base.state_dict().items() if name in weights)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@every_class
def test_base_model_takes_the_weights_of_any_head(model_class: type, tmp_path) -> None:
    model, inputs = build(model_class), make_inputs(HybridLongformerModel)
    model.save_pretrained(tmp_path)
    base = HybridLongformerModel.from_pretrained(tmp_path)
    state = run_model(encoder_of(model), inputs).last_hidden_state
    assert torch.equal(run_model(base, inputs).last_hidden_state, state)


def test_new_parameters_are_initialised_when_a_checkpoint_lacks_them(tmp_path) -> None:
    build(HybridLongformerModel, separate_global_projections=False).save_pretrained(tmp_path)
    model = HybridLongformerForTokenClassification.from_pretrained(
        tmp_path, num_extra_global_tokens=50, separate_global_projections=True, initializer_range=0.3
    )
    query_global = model.hybrid_longformer.encoder.layer[0].attention.self.query_global
    for weight in (model.hybrid_longformer.extra_global_tokens, query_global.weight, model.classifier.weight):
        assert weight.std().item() == pytest.approx(0.3, rel=0.2)
    assert largest(query_global.bias) == 0


def test_fresh_weights_have_the_configured_spread() -> None:
    model = HybridLongformerForMaskedLM(tiny_config(initializer_range=0.05, num_extra_global_tokens=20))
    for name, parameter in model.named_parameters():
        if "norm" in name.lower():
            assert torch.all(parameter == (1 if name.endswith("weight") else 0)), name
        elif name.endswith("bias"):
            assert largest(parameter) == 0, name
        elif parameter.numel() > 500:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.15), name
