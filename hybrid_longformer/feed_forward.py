"""Feed-forward: the two projections of a layer's wide half, for some tokens at a time.

What is wide is then made, used and forgotten in the cache instead of being mapped, written and read back for all tokens
at once. For gradients only the input of the activation is kept; the activation is worked out again, which takes less
time than keeping its output.

Letters: B batch, N tokens, E hidden size, F feed-forward size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import ACT2CLS

from .plain import is_in_graph, is_plain, no_autocast

# Fewer would add up the gradients of the weights more often, more would leave the cache.
TOKENS_AT_A_TIME = 1024
# These say the same of a number whenever and beside whatever they are asked; others may not.
_KNOWN_ACTIVATIONS = {nn.GELU, *(entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values())}


def can_divide(x: Tensor, up: nn.Module, activation: nn.Module, down: nn.Module) -> bool:
    """Whether tokens may be taken some at a time: CPUs gain by it; in half precision sums of sums would lose digits."""
    is_worth_it = x.device.type == "cpu" and x.dtype.itemsize >= 4 and not is_in_graph(x)
    layers_are_plain = all(is_plain(layer) and layer.bias is not None for layer in (up, down))
    return is_worth_it and layers_are_plain and _can_be_repeated(activation)


def _can_be_repeated(activation: nn.Module) -> bool:
    is_known = type(activation) in _KNOWN_ACTIVATIONS and not getattr(activation, "inplace", False)
    return is_known and not any(True for _ in activation.parameters())


def feed_forward(x: Tensor, up: nn.Linear, activation: nn.Module, down: nn.Linear) -> Tensor:
    """(B, N, E) down(activation(up(x)))."""
    parameters = up.weight, up.bias, down.weight, down.bias
    if torch.is_grad_enabled():
        return _FeedForward.apply(x, activation, *parameters)
    return _forward(x, activation, *parameters, keeps_wide=False)[0]


def _parts(num_tokens: int) -> Iterator[slice]:
    return (slice(first, first + TOKENS_AT_A_TIME) for first in range(0, num_tokens, TOKENS_AT_A_TIME))


def _forward(x, activation, up_weight, up_bias, down_weight, down_bias, *, keeps_wide: bool) -> tuple[Tensor, Tensor]:
    """The output, and the (B * N, F) input of the activation or, unless it is kept, that of the last tokens."""
    flat_x = x.flatten(0, -2)
    num_tokens = len(flat_x)
    wide = x.new_empty(num_tokens if keeps_wide else min(num_tokens, TOKENS_AT_A_TIME), len(up_weight))
    out = torch.empty_like(flat_x)
    for part in _parts(num_tokens):
        own_x = flat_x[part]
        own_wide = wide[part] if keeps_wide else wide[: len(own_x)]
        torch.addmm(up_bias, own_x, up_weight.T, out=own_wide)
        torch.addmm(down_bias, activation(own_wide), down_weight.T, out=out[part])
    return out.view(x.shape), wide


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, activation, up_weight, up_bias, down_weight, down_bias):
        out, wide = _forward(x, activation, up_weight, up_bias, down_weight, down_bias, keeps_wide=True)
        ctx.activation = activation
        ctx.save_for_backward(x, wide, up_weight, down_weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out):
        with no_autocast(grad_out):
            return _backward(ctx, grad_out)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, wide, up_weight, down_weight = ctx.saved_tensors
    flat_x, grad_out = x.flatten(0, -2), grad_out.flatten(0, -2)
    needs_x, _, *needed = ctx.needs_input_grad
    grad_x = torch.empty_like(flat_x) if needs_x else None
    sources = up_weight, up_weight[:, 0], down_weight
    up_grad, up_bias_grad, down_grad = (
        torch.zeros_like(source) if needs else None for source, needs in zip(sources, needed[:3], strict=True)
    )
    for part in _parts(len(flat_x)):
        own_grad = grad_out[part]
        own_wide = wide[part].detach().requires_grad_()
        with torch.enable_grad():
            activated = ctx.activation(own_wide)
        (grad_wide,) = torch.autograd.grad(activated, own_wide, own_grad @ down_weight)
        if down_grad is not None:
            down_grad.addmm_(own_grad.T, activated.detach())
        if up_grad is not None:
            up_grad.addmm_(grad_wide.T, flat_x[part])
        if up_bias_grad is not None:
            up_bias_grad += grad_wide.sum(0)
        if grad_x is not None:
            torch.mm(grad_wide, up_weight, out=grad_x[part])
    down_bias_grad = grad_out.sum(0) if needed[3] else None
    grad_x = None if grad_x is None else grad_x.view(x.shape)
    return grad_x, None, up_grad, up_bias_grad, down_grad, down_bias_grad
