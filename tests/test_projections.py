"""Projections with gradients by hand: exact, and never past a layer that is more than its weight."""

import pytest
import torch
from torch import nn

from hybrid_longformer.projections import absorbed_rows, is_plain, project


@pytest.mark.parametrize("places", [None, torch.tensor([3, 0, 13, 8])])
def test_project_has_the_gradients_of_its_layers(places: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8).double() for _ in range(3)]
    layers[1].weight.requires_grad_(False)
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    ours = project(x, layers, places)
    plain = [layer(x) for layer in layers]
    if places is not None:
        plain.append(x.flatten(0, 1)[places])
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
@pytest.mark.parametrize(("batch_size", "length"), [(2, 9), (1, 9), (1, 8), (1, 3)])
def test_absorbed_rows_have_exact_gradients(dropout: float, has_bias: bool, batch_size: int, length: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=has_bias).double() for _ in range(3)]
    x = torch.randn(batch_size, length, 8, dtype=torch.float64)
    global_x = torch.randn(batch_size * 3, 8, dtype=torch.float64)
    bias = torch.zeros(batch_size, 1, 3, length, dtype=torch.float64)
    bias[-1, :, :, length // 2 :] = torch.finfo(torch.float64).min

    def rows(x, global_x, *parameters):
        torch.manual_seed(1)  # the same drops at every call
        return absorbed_rows(x, global_x, layers, num_heads=2, bias=bias, dropout=dropout)

    # The softmax loses the key's bias.
    parameters = [p for layer in layers for p in layer.parameters() if p is not layers[1].bias]
    inputs = (x.requires_grad_(), global_x.requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(rows, inputs)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("length", [2, 12, 13])
def test_absorbed_rows_are_those_of_projected_keys_and_values(batch_size: int, length: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8).double() for _ in range(3)]
    x = torch.randn(batch_size, length, 8, dtype=torch.float64)
    global_x = x[:, :2]
    rows = absorbed_rows(x, global_x.flatten(0, 1), layers, num_heads=2, bias=None, dropout=0.0)
    q, k, v = (
        layer(y).unflatten(-1, (2, 4)).transpose(1, 2) for layer, y in zip(layers, (global_x, x, x), strict=True)
    )
    expected = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
    assert torch.allclose(rows, expected, atol=1e-12)


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_layers_with_hooks_are_called(hook: str) -> None:
    calls = []
    layers = [nn.Linear(4, 4) for _ in range(3)]
    getattr(layers[2], hook)(lambda *arguments: calls.append(hook))
    assert is_plain(layers[0]) and not is_plain(layers[2])
    x = torch.randn(1, 5, 4, requires_grad=True)
    sum(output.sum() for output in project(x, layers)).backward()
    assert calls == [hook]
