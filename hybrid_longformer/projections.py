"""Projections around attention, with gradients of the input summed in one place instead of one tensor per use.

Autograd would make a gradient of (B, N, E) for each of the six uses of the input, then add them up. What is done here
is exact, and falls back to plain operations where a graph is compiled, exported or autocast.

Letters: B batch, H heads, N tokens, D head size, E hidden size, G global tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .absorbed import Absorbed, FewParameters, FewRows, absorb, absorb_backward, absorbed_rows, in_full
from .plain import is_in_graph, is_plain, no_autocast


def project(
    x: Tensor, layers: Sequence[nn.Module], few: FewRows | None = None, *, unbiased: nn.Linear | None = None
) -> tuple[Tensor, ...]:
    """Every layer's output for (B, N, E) inputs and, if asked for, the (B * G, H, D) rows of few tokens.

    Args:
        unbiased: the layer whose bias nothing depends on. Where it is plain the bias is left out, which saves a pass
            over its output, and has a gradient of zeros.
    """
    if sum(layer is unbiased for layer in layers) > 1:
        unbiased = None  # it makes something else as well, which its bias matters to
    all_layers = layers if few is None else (*layers, *few.layers)
    by_hand = torch.is_grad_enabled() and not is_in_graph(x)
    if by_hand and all(is_plain(layer) and layer.bias is not None for layer in all_layers):
        is_biased = [layer is not unbiased for layer in layers]
        weights, biases = (layer.weight for layer in all_layers), (layer.bias for layer in all_layers)
        return _Project.apply(x, few, is_biased, *weights, *biases)
    # Autograd and compiled graphs would lose sight of a bias that isn't used.
    leaves_out = unbiased is not None and is_plain(unbiased)
    leaves_out = leaves_out and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    outputs = tuple(F.linear(x, unbiased.weight) if unbiased is layer and leaves_out else layer(x) for layer in layers)
    return outputs if few is None else (*outputs, absorbed_rows(x, few))


class _Project(torch.autograd.Function):
    """Parameters are the weights of all layers, then their biases; those of the few rows' layers stand last."""

    @staticmethod
    def forward(ctx: Any, x, few, is_biased, *parameters):
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        outputs = [F.linear(x, weights[i], biases[i] if counts else None) for i, counts in enumerate(is_biased)]
        saved: Sequence[Tensor] = ()
        if few is not None:
            absorbed = absorb(few, x, FewParameters._make((*weights[-3:], biases[-3], biases[-1])))
            outputs.append(absorbed.rows.transpose(0, 1).to(x.dtype))
            saved = (biases[-1], *absorbed[1:])
        ctx.few, ctx.is_biased, ctx.num_weights = few, is_biased, len(weights)
        ctx.save_for_backward(x, *weights, *saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads):
        with no_autocast(grads[0]):
            return _backward(ctx, *grads)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    x, *saved = ctx.saved_tensors
    weights, saved = saved[: ctx.num_weights], saved[ctx.num_weights :]
    num_layers = len(ctx.is_biased)
    needs_x, _, _, *needed = ctx.needs_input_grad
    flat_x, flat_grads = x.flatten(0, -2), [grad.flatten(0, -2) for grad in grads[:num_layers]]
    grad_x = None
    if needs_x:
        grad_x = torch.mm(flat_grads[0], weights[0])
        for grad, weight in zip(flat_grads[1:], weights[1:num_layers], strict=True):
            grad_x.addmm_(grad, weight)
        grad_x = grad_x.view(x.shape)
    of_weights = [grad.T @ flat_x if needed[i] else None for i, grad in enumerate(flat_grads)]
    of_biases = [
        (grad.sum(0) if counts else torch.zeros_like(grad[0])) if needed[len(weights) + i] else None
        for i, (grad, counts) in enumerate(zip(flat_grads, ctx.is_biased, strict=True))
    ]
    if ctx.few is not None:
        value_bias, *absorbed = saved
        grad_rows, full_x, *own_weights, value_bias = in_full(grads[-1], x, *weights[num_layers:], value_bias)
        parameters = FewParameters._make((*own_weights, None, value_bias))
        of_few = absorb_backward(ctx.few, grad_rows, full_x, parameters, Absorbed(grad_rows, *absorbed), grad_x)
        of_weights += of_few[0]
        of_biases += of_few[1]
    return grad_x, None, None, *of_weights, *of_biases
