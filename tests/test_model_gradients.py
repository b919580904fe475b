"""Gradients of every model class, with and without checkpointing."""

import pytest
import torch

from hybrid_longformer import (
    HybridLongformerForConditionalGeneration,
    HybridLongformerForMultipleChoice,
)
from tests.models import (
    both_backends,
    build,
    encoder_of,
    every_class,
    gradients_of,
    largest,
    main_output,
    make_inputs,
)

# A bias that all keys of a row share adds the same to all its scores, and one that all choices share to all their
# logits: the softmax loses it.
NO_GRADIENT = ("key.bias", "key_global.bias")
NO_GRADIENT_BY_CLASS = {HybridLongformerForMultipleChoice: ("classifier.bias",)}


@both_backends
@every_class
def test_gradient_reaches_every_parameter(model_class: type, implementation: str) -> None:
    model = build(model_class, num_extra_global_tokens=2, attn_implementation=implementation).train()
    lost = NO_GRADIENT + NO_GRADIENT_BY_CLASS.get(model_class, ())
    for name, gradient in gradients_of(model, make_inputs(model_class)).items():
        if not name.endswith(lost):
            assert gradient is not None and gradient.isfinite().all() and largest(gradient) > 1e-9, name


@every_class
def test_only_global_projections_go_without_gradient_when_nothing_is_global(model_class: type) -> None:
    model, inputs = build(model_class).train(), make_inputs(model_class)
    inputs["global_attention_mask"] = torch.zeros_like(inputs["attention_mask"])
    gradients = gradients_of(model, inputs)
    missing = {name for name, gradient in gradients.items() if gradient is None}
    assert len(missing) == 2 * 6 and all("_global." in name for name in missing)
    lost = NO_GRADIENT + NO_GRADIENT_BY_CLASS.get(model_class, ())
    assert all(largest(gradients[name]) > 1e-9 for name in gradients.keys() - missing if not name.endswith(lost))


@every_class
def test_gradients_agree_between_backends(model_class: type) -> None:
    inputs = make_inputs(model_class)
    fast, oracle = (gradients_of(build(model_class, attn_implementation=name), inputs) for name in ("sdpa", "eager"))
    scale = max(1.0, max(largest(gradient) for gradient in oracle.values() if gradient is not None))
    for name, gradient in oracle.items():
        ours = torch.zeros(()) if fast[name] is None else fast[name]
        exact = torch.zeros(()) if gradient is None else gradient
        assert largest(ours - exact) <= 1e-5 * scale, name


@every_class
def test_gradients_can_be_kept_at_states_and_maps(model_class: type) -> None:
    """As in transformers, maps carry gradients on the eager backend; there they are what the output is made of."""
    model, inputs = build(model_class, attn_implementation="eager"), make_inputs(model_class)
    outputs = model(**inputs, output_hidden_states=True, output_attentions=True)
    kept = [
        tensor
        for key, tensors in outputs.items()
        if key.endswith(("hidden_states", "attentions"))
        for tensor in tensors[: -1 if key.endswith("hidden_states") else None]
    ]
    assert len(kept) == (4 + 6 if model_class is HybridLongformerForConditionalGeneration else 4)
    for tensor in kept:
        tensor.retain_grad()
    main_output(outputs).square().sum().backward()
    assert all(tensor.grad is not None and largest(tensor.grad) > 0 for tensor in kept)


@pytest.mark.parametrize("use_reentrant", [False, True])
@both_backends
@every_class
def test_gradient_checkpointing_changes_nothing(model_class: type, implementation: str, use_reentrant: bool) -> None:
    model = build(model_class, num_extra_global_tokens=1, attn_implementation=implementation).train()
    inputs = make_inputs(model_class)
    torch.manual_seed(0)
    plain = gradients_of(model, inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    calls = count_calls(encoder_of(model).encoder.layer[0].attention)
    torch.manual_seed(0)
    checkpointed = gradients_of(model, inputs)
    assert len(calls) == 2  # once forward and once more on the way back
    for name, gradient in plain.items():
        if gradient is not None:
            assert largest(checkpointed[name] - gradient) <= 1e-6, name


def count_calls(module: torch.nn.Module) -> list[int]:
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls
