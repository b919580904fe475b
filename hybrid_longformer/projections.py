"""Projections around attention, with gradients of the input summed in one place instead of one tensor per use.

Autograd would make a gradient of (B, N, E) for each of the six uses of the input, then add them up. Both functions here
are exact, and fall back to plain operations where a graph is compiled, exported or autocast.

Letters: B batch, H heads, N tokens, D head size, E hidden size, G global tokens.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is its weight and bias and nothing else. Adapters, quantised layers and layers whose weights a
    hook brings in have to be called."""
    has_hooks = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return type(layer) is nn.Linear and not has_hooks and not hasattr(layer, "_hf_hook")


def project(
    x: Tensor, layers: Sequence[nn.Module], places: Tensor | None = None, *, unbiased: nn.Linear | None = None
) -> tuple[Tensor, ...]:
    """Every layer's output for (B, N, E) inputs and, if asked for, the inputs of the tokens `places` (B, G).

    Args:
        unbiased: the layer whose bias nothing depends on. Where it is plain the bias is left out, which saves a pass
            over its output, and has a gradient of zeros.
    """
    if places is not None:
        places = places[..., None].expand(-1, -1, x.shape[-1])
    if _takes_gradients_by_hand(x) and all(is_plain(layer) and layer.bias is not None for layer in layers):
        is_biased = [layer is not unbiased for layer in layers]
        weights, biases = (layer.weight for layer in layers), (layer.bias for layer in layers)
        return _Project.apply(x, places, is_biased, *weights, *biases)
    # Autograd and compiled graphs would lose sight of a bias that isn't used.
    leaves_out = unbiased is not None and is_plain(unbiased)
    leaves_out = leaves_out and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    outputs = tuple(F.linear(x, unbiased.weight) if unbiased is layer and leaves_out else layer(x) for layer in layers)
    return outputs if places is None else (*outputs, x.gather(1, places))


def _takes_gradients_by_hand(x: Tensor) -> bool:
    is_in_graph = torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
    return torch.is_grad_enabled() and not is_in_graph


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, places, is_biased, *parameters):
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        ctx.is_biased = is_biased
        ctx.save_for_backward(x, places, *weights)
        outputs = tuple(
            F.linear(x, weight, bias if counts else None)
            for weight, bias, counts in zip(weights, biases, is_biased, strict=True)
        )
        return outputs if places is None else (*outputs, x.gather(1, places))

    @staticmethod
    def backward(ctx: Any, *grads):
        x, places, *weights = ctx.saved_tensors
        needs_x, _, _, *needed = ctx.needs_input_grad
        flat_x, flat_grads = x.flatten(0, -2), [grad.flatten(0, -2) for grad in grads[: len(weights)]]
        grad_x = None
        if needs_x:
            grad_x = torch.mm(flat_grads[0], weights[0])
            for grad, weight in zip(flat_grads[1:], weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
            grad_x = grad_x.view(x.shape)
            if places is not None:
                grad_x.scatter_add_(1, places, grads[-1])
        of_weights = [grad.T @ flat_x if needed[i] else None for i, grad in enumerate(flat_grads)]
        of_biases = [
            (grad.sum(0) if ctx.is_biased[i] else grad.new_zeros(grad.shape[1])) if needed[len(weights) + i] else None
            for i, grad in enumerate(flat_grads)
        ]
        return grad_x, None, None, *of_weights, *of_biases


def absorbed_rows(
    x: Tensor, q: Tensor, key: nn.Linear, value: nn.Linear, *, bias: Tensor | None, dropout: float
) -> Tensor:
    """(B, G, H, D) attention of few queries over all (B, N, E) inputs, without projecting these by `key` and `value`:
    scores = (W_k^T q) . x, output = W_v (sum p x) + (sum p) b_v.

    The key's bias adds the same to every score of a row, so the softmax loses it.

    Args:
        q: (B, G, H, D).
        bias: (B, 1, 1 or G, N) of what they may see, or None.
    """
    # Half precision inputs are kept in float32 where that is no slower.
    dtype = torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype
    value_bias = None if value.bias is None else value.bias.to(dtype)
    inputs = (x.to(dtype), q.to(dtype), key.weight.to(dtype), value.weight.to(dtype), value_bias)
    if _takes_gradients_by_hand(x):
        return _Absorb.apply(*inputs, bias, dropout)
    return _absorb(*inputs, bias, dropout)[0]


def _absorb(x, q, key_weight, value_weight, value_bias, bias, dropout: float) -> tuple[Tensor, ...]:
    """The rows, and what their gradients need: absorbed queries, probabilities, which were kept, and mixed inputs."""
    batch_size, num_rows, num_heads, head_size = q.shape
    key_weight, value_weight = (weight.unflatten(0, (num_heads, head_size)) for weight in (key_weight, value_weight))
    by_head = q.permute(2, 0, 1, 3).reshape(num_heads, -1, head_size)  # (H, B * G, D)
    nothing = q.new_zeros(1, 1, 1)
    absorbed = torch.baddbmm(nothing, by_head, key_weight, alpha=1.0 / math.sqrt(head_size))
    absorbed = _to_rows(absorbed, batch_size)  # (B, H * G, E)
    scores = _times_inputs(absorbed, x)  # (B, H * G, N)
    if bias is not None:
        scores = (scores.unflatten(1, (num_heads, num_rows)) + bias.to(scores.dtype)).flatten(1, 2)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
    kept = F.dropout(probabilities, dropout) if dropout else probabilities
    mixed = torch.bmm(kept, x)  # (B, H * G, E)
    added = nothing if value_bias is None else value_bias.view(num_heads, 1, head_size)
    if dropout:
        added = added * _to_heads(kept.sum(-1, keepdim=True), num_heads)  # what is kept may not add up to 1
    rows = torch.baddbmm(added, _to_heads(mixed, num_heads), value_weight.transpose(1, 2))  # (H, B * G, D)
    rows = rows.view(num_heads, batch_size, num_rows, head_size).permute(1, 2, 0, 3)
    return rows, absorbed, probabilities, kept, mixed


def _times_inputs(few: Tensor, x: Tensor) -> Tensor:
    """(B, H * G, E) times (B, N, E) to (B, H * G, N); the product the other way round takes half as long again."""
    return torch.bmm(x, few.transpose(1, 2)).transpose(1, 2)


def _to_rows(x: Tensor, batch_size: int) -> Tensor:
    """(H, B * G, E) to (B, H * G, E)."""
    return x.unflatten(1, (batch_size, -1)).transpose(0, 1).flatten(1, 2)


def _to_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, H * G, E) to (H, B * G, E)."""
    return x.unflatten(1, (num_heads, -1)).transpose(0, 1).flatten(1, 2)


class _Absorb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, q, key_weight, value_weight, value_bias, bias, dropout):
        rows, *rest = _absorb(x, q, key_weight, value_weight, value_bias, bias, dropout)
        ctx.dropout = dropout
        ctx.save_for_backward(x, q, key_weight, value_weight, value_bias, *rest)
        return rows

    @staticmethod
    def backward(ctx: Any, grad_rows):
        x, q, key_weight, value_weight, value_bias, absorbed, probabilities, kept, mixed = ctx.saved_tensors
        batch_size, num_rows, num_heads, head_size = q.shape
        heads = (num_heads, head_size)
        grad = grad_rows.permute(2, 0, 1, 3).flatten(1, 2)  # (H, B * G, D)
        grad_mixed = _to_rows(torch.bmm(grad, value_weight.unflatten(0, heads)), batch_size)  # (B, H * G, E)
        grad_value_weight = torch.bmm(grad.transpose(1, 2), _to_heads(mixed, num_heads)).flatten(0, 1)
        grad_kept = _times_inputs(grad_mixed, x).contiguous()  # (B, H * G, N)
        grad_value_bias = None
        if value_bias is not None:
            of_bias = grad
            if ctx.dropout:
                of_bias = grad * _to_heads(kept.sum(-1, keepdim=True), num_heads)
                of_total = (grad_rows * value_bias.view(heads)).sum(-1).transpose(1, 2).flatten(1)  # (B, H * G)
                grad_kept = grad_kept + of_total[..., None]
            grad_value_bias = of_bias.sum(1).flatten()
        # With dropout, p * grad_p = kept * grad_kept: what was kept holds the factor 1 / (1 - dropout).
        weighted = kept * grad_kept
        grad_scores = weighted - probabilities * weighted.sum(-1, keepdim=True)
        grad_x = torch.bmm(
            torch.cat([grad_scores, kept], 1).transpose(1, 2), torch.cat([absorbed, grad_mixed], 1)
        )  # both uses of the input at once
        grad_absorbed = _to_heads(torch.bmm(grad_scores, x), num_heads)  # (H, B * G, E)
        scale = 1.0 / math.sqrt(head_size)
        grad_q = torch.bmm(grad_absorbed, key_weight.unflatten(0, heads).transpose(1, 2)) * scale
        by_head = q.permute(2, 3, 0, 1).flatten(2) * scale  # (H, D, B * G)
        grad_key_weight = torch.bmm(by_head, grad_absorbed).flatten(0, 1)
        grad_q = grad_q.unflatten(1, (batch_size, num_rows)).permute(1, 2, 0, 3)
        return grad_x, grad_q, grad_key_weight, grad_value_weight, grad_value_bias, None, None
