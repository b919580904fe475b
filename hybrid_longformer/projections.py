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
    return type(layer) is nn.Linear and not has_hooks and "_hf_hook" not in vars(layer)


def project(
    x: Tensor, layers: Sequence[nn.Module], places: Tensor | None = None, *, unbiased: nn.Linear | None = None
) -> tuple[Tensor, ...]:
    """Every layer's output for (B, N, E) inputs and, if asked for, the (M, E) inputs of the tokens `places` (M),
    counted over all rows.

    Args:
        unbiased: the layer whose bias nothing depends on. Where it is plain the bias is left out, which saves a pass
            over its output, and has a gradient of zeros.
    """
    if _takes_gradients_by_hand(x) and all(is_plain(layer) and layer.bias is not None for layer in layers):
        is_biased = [layer is not unbiased for layer in layers]
        weights, biases = (layer.weight for layer in layers), (layer.bias for layer in layers)
        return _Project.apply(x, places, is_biased, *weights, *biases)
    # Autograd and compiled graphs would lose sight of a bias that isn't used.
    leaves_out = unbiased is not None and is_plain(unbiased)
    leaves_out = leaves_out and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    outputs = tuple(F.linear(x, unbiased.weight) if unbiased is layer and leaves_out else layer(x) for layer in layers)
    return outputs if places is None else (*outputs, x.flatten(0, 1).index_select(0, places))


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
        return outputs if places is None else (*outputs, x.flatten(0, 1).index_select(0, places))

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
            if places is not None:
                grad_x.index_add_(0, places, grads[-1])
            grad_x = grad_x.view(x.shape)
        of_weights = [grad.T @ flat_x if needed[i] else None for i, grad in enumerate(flat_grads)]
        of_biases = [
            (grad.sum(0) if ctx.is_biased[i] else grad.new_zeros(grad.shape[1])) if needed[len(weights) + i] else None
            for i, grad in enumerate(flat_grads)
        ]
        return grad_x, None, None, *of_weights, *of_biases


def absorbed_rows(
    x: Tensor,
    global_x: Tensor,
    layers: Sequence[Any],
    *,
    num_heads: int,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """(B * G, H, D) attention of few tokens over all (B, N, E) inputs, without projecting these by key and value:
    scores = (W_k^T q) . x, output = W_v (sum p x) + (sum p) b_v.

    The key's bias adds the same to every score of a row, so the softmax loses it.

    Args:
        global_x: (B * G, E) the inputs of the few.
        layers: of queries, keys and values; those of keys and values are plain.
        bias: (B, 1, 1 or G, N) of what they may see, or None.
    """
    query, key, value = layers
    inputs = [x, _queries_by_head(global_x, query, num_heads), key.weight, value.weight, value.bias]
    if x.dtype.itemsize < 4 and x.device.type == "cpu":
        # Half precision inputs are kept in float32 where that is no slower.
        inputs = [y if y is None else y.float() for y in inputs]
    inputs += [bias, dropout]
    rows = _Absorb.apply(*inputs) if _takes_gradients_by_hand(x) else _absorb(*inputs)[0]
    return rows.transpose(0, 1)


def _queries_by_head(x: Tensor, layer: Any, num_heads: int) -> Tensor:
    """(H, B * G, D) queries of (B * G, E) inputs, divided by sqrt(D)."""
    head_size = x.shape[-1] // num_heads
    scale = 1.0 / math.sqrt(head_size)
    if not is_plain(layer) or layer.bias is None:
        return layer(x).unflatten(-1, (num_heads, head_size)).transpose(0, 1) * scale
    # A product per head: one for all heads would leave a single thread to read the whole weight.
    weight = layer.weight.view(num_heads, head_size, -1).transpose(1, 2)
    added = layer.bias.view(num_heads, 1, head_size)
    return torch.baddbmm(added, x.expand(num_heads, -1, -1), weight, beta=scale, alpha=scale)


def _absorb(x, q, key_weight, value_weight, value_bias, bias, dropout: float) -> tuple[Tensor, ...]:
    """The (H, B * G, D) rows, and what their gradients need: absorbed queries, probabilities, which were kept, and
    mixed inputs."""
    batch_size, (num_heads, _, head_size) = x.shape[0], q.shape
    key_weight, value_weight = (weight.view(num_heads, head_size, -1) for weight in (key_weight, value_weight))
    absorbed = _to_rows(torch.bmm(q, key_weight), batch_size)  # (B, H * G, E)
    scores = _times_inputs(absorbed, x)  # (B, H * G, N)
    if bias is not None:
        scores = (scores.unflatten(1, (num_heads, -1)) + bias.to(scores.dtype)).flatten(1, 2)
    probabilities = torch.softmax(scores, -1, dtype=torch.float32 if x.dtype.itemsize < 4 else None).to(x.dtype)
    kept = F.dropout(probabilities, dropout) if dropout else probabilities
    mixed = _mix_inputs(kept, x)  # (B, H * G, E)
    by_head, value_weight = _to_heads(mixed, num_heads), value_weight.transpose(1, 2)
    if value_bias is None:
        return torch.bmm(by_head, value_weight), absorbed, probabilities, kept, mixed
    added = value_bias.view(num_heads, 1, head_size)
    if dropout:
        added = added * _to_heads(kept.sum(-1, keepdim=True), num_heads)  # what is kept may not add up to 1
    return torch.baddbmm(added, by_head, value_weight), absorbed, probabilities, kept, mixed


# Products of few rows with all inputs of a single document keep one thread of a CPU busy, unless they are cut up.
PARTS_OF_INPUTS = 4


def _is_cut_up(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    batch_size, length, hidden_size = x.shape
    return batch_size == 1 and length >= PARTS_OF_INPUTS and hidden_size % PARTS_OF_INPUTS == 0


def _times_inputs(few: Tensor, x: Tensor) -> Tensor:
    """(B, H * G, E) times (B, N, E) to (B, H * G, N)."""
    if not _is_cut_up(x):
        # The product the other way round takes half as long again.
        return torch.bmm(x, few.transpose(1, 2)).transpose(1, 2)
    num_rest = x.shape[1] % PARTS_OF_INPUTS
    runs, rest = x.split([x.shape[1] - num_rest, num_rest], 1)
    runs = runs.view(PARTS_OF_INPUTS, -1, x.shape[-1]).transpose(1, 2)  # (parts, E, N / parts)
    products = torch.bmm(few.expand(PARTS_OF_INPUTS, -1, -1), runs).transpose(0, 1).flatten(1)[None]
    return torch.cat([products, torch.bmm(few, rest.transpose(1, 2))], -1) if num_rest else products


def _mix_inputs(weights: Tensor, x: Tensor) -> Tensor:
    """(B, H * G, N) weights of (B, N, E) inputs to their (B, H * G, E) sums."""
    if not _is_cut_up(x):
        return torch.bmm(weights, x)
    parts = x[0].view(x.shape[1], PARTS_OF_INPUTS, -1).transpose(0, 1)  # (parts, N, E / parts)
    return torch.bmm(weights.expand(PARTS_OF_INPUTS, -1, -1), parts).transpose(0, 1).flatten(1)[None]


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
        batch_size, (num_heads, _, head_size) = x.shape[0], q.shape
        key_weight, value_weight = (weight.view(num_heads, head_size, -1) for weight in (key_weight, value_weight))
        grad_mixed = _to_rows(torch.bmm(grad_rows, value_weight), batch_size)  # (B, H * G, E)
        grad_value_weight = torch.bmm(grad_rows.transpose(1, 2), _to_heads(mixed, num_heads)).flatten(0, 1)
        grad_kept = _times_inputs(grad_mixed, x).contiguous()  # (B, H * G, N)
        grad_value_bias = None
        if value_bias is not None:
            of_bias = grad_rows
            if ctx.dropout:
                of_bias = grad_rows * _to_heads(kept.sum(-1, keepdim=True), num_heads)
                of_total = (grad_rows * value_bias.view(num_heads, 1, head_size)).sum(-1, keepdim=True)
                grad_kept = grad_kept + _to_rows(of_total, batch_size)
            grad_value_bias = of_bias.sum(1).flatten()
        # With dropout, p * grad_p = kept * grad_kept: what was kept holds the factor 1 / (1 - dropout).
        weighted = kept * grad_kept
        grad_scores = weighted - probabilities * weighted.sum(-1, keepdim=True)
        grad_x = torch.bmm(
            torch.cat([grad_scores, kept], 1).transpose(1, 2), torch.cat([absorbed, grad_mixed], 1)
        )  # both uses of the input at once
        grad_absorbed = _to_heads(_mix_inputs(grad_scores, x), num_heads)  # (H, B * G, E)
        grad_q = torch.bmm(grad_absorbed, key_weight.transpose(1, 2))
        grad_key_weight = torch.bmm(q.transpose(1, 2), grad_absorbed).flatten(0, 1)
        return grad_x, grad_q, grad_key_weight, grad_value_weight, grad_value_bias, None, None
