"""Projections with gradients by hand: exact, and never past a layer that is more than its weight."""

import pytest
import torch
from torch import nn

from hybrid_longformer.absorbed import FewRows, absorbed_rows
from hybrid_longformer.plain import is_plain
from hybrid_longformer.projections import project


def few_rows(layers: list, places: list[int], **options) -> FewRows:
    options = {"bias": None, "dropout": 0.0, **options}
    return FewRows(layers=layers, places=torch.tensor(places), num_heads=2, **options)


@pytest.mark.parametrize("places", [None, [3, 0, 13, 8], [3, 10]])
def test_project_has_the_gradients_of_its_layers(places: list[int] | None) -> None:
    torch.manual_seed(0)
    layers, own_layers = ([nn.Linear(8, 8).double() for _ in range(3)] for _ in range(2))
    layers[1].weight.requires_grad_(False)
    own_layers[2].bias.requires_grad_(False)
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    few = None if places is None else few_rows(own_layers, places)
    ours = project(x, layers, few)
    plain = [layer(x) for layer in layers]
    if few is not None:
        plain.append(absorbed_rows(x, few))
    used = [*layers, *own_layers] if few else layers
    parameters = [x, *(weight for layer in used for weight in layer.parameters() if weight.requires_grad)]
    gradients = []
    for outputs in (ours, plain):
        total = sum((output**2 * (index + 1)).sum() for index, output in enumerate(outputs))
        found = torch.autograd.grad(total, parameters, allow_unused=outputs is plain)
        # No row depends on the bias of its keys: zeros by hand, nothing by autograd.
        gradients.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)])
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
@pytest.mark.parametrize("num_few", [1, 3])
def test_absorbed_rows_have_exact_gradients(
    dropout: float, has_bias: bool, batch_size: int, length: int, num_few: int
) -> None:
    torch.manual_seed(0)
    layers, own_layers = ([nn.Linear(8, 8, bias=has_bias).double() for _ in range(3)] for _ in range(2))
    x = torch.randn(batch_size, length, 8, dtype=torch.float64)
    bias = torch.zeros(batch_size, 1, num_few, length, dtype=torch.float64)
    bias[-1, :, :, length // 2 :] = torch.finfo(torch.float64).min
    places = [row * length + token for row in range(batch_size) for token in range(num_few)]
    few = few_rows(own_layers, places, bias=bias, dropout=dropout)

    def rows(x, *parameters):
        torch.manual_seed(1)  # the same drops at every call
        return project(x, layers, few)[-1]

    # The softmax loses the key's bias.
    parameters = [p for layer in own_layers for p in layer.parameters() if p is not own_layers[1].bias]
    assert torch.autograd.gradcheck(rows, (x.requires_grad_(), *parameters))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_of_absorbed_rows_are_near_the_exact_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8).to(dtype) for _ in range(6)]
    x = torch.randn(2, 7, 8, dtype=dtype)
    gradients = []
    for precision in (dtype, torch.float64):
        layers = [layer.to(precision) for layer in layers]
        inputs = x.detach().to(precision, copy=True).requires_grad_()
        project(inputs, layers[:3], few_rows(layers[3:], [0, 8]))[-1].square().sum().backward()
        gradients.append([inputs.grad, *(layer.weight.grad for layer in layers[3:])])
        for layer in layers:
            layer.zero_grad()
    for half, exact in zip(*gradients, strict=True):
        assert half.dtype == dtype
        assert (half - exact).abs().max() <= 0.02 * exact.abs().max()


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("length", [2, 12, 13])
def test_absorbed_rows_are_those_of_projected_keys_and_values(batch_size: int, length: int, is_called: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8).double() for _ in range(3)]
    if is_called:
        layers[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
    x = torch.randn(batch_size, length, 8, dtype=torch.float64)
    places = [row * length + token for row in range(batch_size) for token in range(2)]
    rows = absorbed_rows(x, few_rows(layers, places))
    q, k, v = (
        layer(y).unflatten(-1, (2, 4)).transpose(1, 2) for layer, y in zip(layers, (x[:, :2], x, x), strict=True)
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
