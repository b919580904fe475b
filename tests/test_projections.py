"""Projections with gradients by hand: exact, and never past a layer that is more than its weight."""

import pytest
import torch
from torch import nn

from hybrid_longformer.projections import absorbed_rows, is_plain, project


@pytest.mark.parametrize("places", [None, torch.tensor([[3, 0], [6, 1]])])
def test_project_has_the_gradients_of_its_layers(places: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8).double() for _ in range(3)]
    layers[1].weight.requires_grad_(False)
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    ours = project(x, layers, places)
    plain = [layer(x) for layer in layers]
    if places is not None:
        plain.append(torch.stack([x[0, places[0]], x[1, places[1]]]))
    parameters = [x, *(weight for layer in layers for weight in layer.parameters() if weight.requires_grad)]
    gradients = []
    for outputs in (ours, plain):
        total = sum((output**2 * (index + 1)).sum() for index, output in enumerate(outputs))
        gradients.append(torch.autograd.grad(total, parameters))
    assert len(ours) == len(plain)
    for one, other in zip((*ours, *gradients[0]), (*plain, *gradients[1]), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_bias_that_nothing_depends_on_is_left_out(with_gradients: bool) -> None:
    layers = [nn.Linear(8, 8) for _ in range(3)]
    x = torch.randn(2, 7, 8)
    with torch.set_grad_enabled(with_gradients):
        outputs = project(x, layers, unbiased=layers[1])
    assert torch.allclose(outputs[1] + layers[1].bias, layers[1](x), atol=1e-6)
    for index in (0, 2):
        assert torch.allclose(outputs[index], layers[index](x), atol=1e-6)
    if with_gradients:
        # Zeros, not None: several processes wait for every parameter's gradient.
        sum(output.sum() for output in outputs).backward()
        assert torch.equal(layers[1].bias.grad, torch.zeros(8))
        assert torch.allclose(layers[0].bias.grad, torch.full((8,), 14.0))


@pytest.mark.parametrize("with_gradients", [True, False])
def test_the_bias_stays_where_the_layer_has_to_be_called(with_gradients: bool) -> None:
    layers = [nn.Linear(8, 8) for _ in range(2)]
    layers[1].register_forward_hook(lambda *arguments: None)
    x = torch.randn(2, 7, 8)
    with torch.set_grad_enabled(with_gradients):
        assert torch.equal(project(x, layers, unbiased=layers[1])[1], layers[1](x))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_absorbed_rows_have_exact_gradients(dropout: float, has_bias: bool) -> None:
    torch.manual_seed(0)
    key, value = (nn.Linear(8, 8, bias=has_bias).double() for _ in range(2))
    x, q = torch.randn(2, 9, 8, dtype=torch.float64), torch.randn(2, 3, 2, 4, dtype=torch.float64)
    bias = torch.zeros(2, 1, 3, 9, dtype=torch.float64)
    bias[1, :, :, 5:] = torch.finfo(torch.float64).min
    values = (value.weight, value.bias) if has_bias else (value.weight,)

    def rows(x, q, *parameters):
        torch.manual_seed(1)  # the same drops at every call
        return absorbed_rows(x, q, key, value, bias=bias, dropout=dropout)

    inputs = (x.requires_grad_(), q.requires_grad_(), key.weight, *values)
    assert torch.autograd.gradcheck(rows, inputs)


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_layers_with_hooks_are_called(hook: str) -> None:
    calls = []
    layers = [nn.Linear(4, 4) for _ in range(3)]
    getattr(layers[2], hook)(lambda *arguments: calls.append(hook))
    assert is_plain(layers[0]) and not is_plain(layers[2])
    x = torch.randn(1, 5, 4, requires_grad=True)
    sum(output.sum() for output in project(x, layers)).backward()
    assert calls == [hook]
