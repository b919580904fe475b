"""Absorbed rows: attention of few tokens over all inputs, without projecting these by key and value.

scores = (W_k^T q) . x, output = W_v (sum p x) + (sum p) b_v: exact, and cheaper while G * H < E. The key's bias adds
the same to every score of a row, so the softmax loses it.

Letters: B batch, H heads, N tokens, D head size, E hidden size, G global tokens.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .plain import is_plain


class FewRows(NamedTuple):
    """Attention of few tokens over all inputs, with projections of their own.

    Args:
        layers: of queries, keys and values; those of keys and values are plain.
        places: (B * G) the few, counted over all rows of the batch.
        num_heads: H.
        bias: (B, 1, 1 or G, N) of what they may see, or None.
        dropout: of their probabilities.
    """

    layers: Sequence[Any]
    places: Tensor
    num_heads: int
    bias: Tensor | None
    dropout: float


class FewParameters(NamedTuple):
    """What `FewRows.layers` are made of, but for the key's bias. Queries may be made otherwise."""

    query_weight: Tensor | None
    key_weight: Tensor
    value_weight: Tensor
    query_bias: Tensor | None
    value_bias: Tensor | None


class Absorbed(NamedTuple):
    """Rows, and what their gradients need.

    Args:
        rows: (H, B * G, D).
        inputs: (B * G, E) of the few.
        query: (H, B * G, D), divided by sqrt(D).
        absorbed: (B, H * G, E) queries times the key's weight.
        probabilities: (B, H * G, N).
        kept: (B, H * G, N) the same after dropout.
        mixed: (B, H * G, E) inputs, weighted by what was kept.
    """

    rows: Tensor
    inputs: Tensor
    query: Tensor
    absorbed: Tensor
    probabilities: Tensor
    kept: Tensor
    mixed: Tensor


def absorbed_rows(x: Tensor, few: FewRows) -> Tensor:
    """(B * G, H, D) the rows of few tokens over all (B, N, E) inputs, by plain operations."""
    query, key, value = few.layers
    is_by_head = is_plain(query) and query.bias is not None
    own = (query.weight, query.bias) if is_by_head else (None, None)
    parameters = FewParameters(own[0], key.weight, value.weight, own[1], value.bias)
    rows = absorb(few, x, parameters).rows.transpose(0, 1)
    if torch.is_grad_enabled() and key.bias is not None:
        # Nothing depends on it, but whoever waits for the gradients of all parameters has to get its zeros.
        rows = rows + 0.0 * key.bias.view(few.num_heads, -1)
    return rows


def absorb(few: FewRows, x: Tensor, parameters: FewParameters) -> Absorbed:
    """Rows over all (B, N, E) inputs; queries come from their layer where the parameters don't hold its weight."""
    inputs = x.flatten(0, 1).index_select(0, few.places)
    query = None
    if parameters.query_weight is None:
        query = few.layers[0](inputs).unflatten(-1, (few.num_heads, -1)).transpose(0, 1)
        query = query / math.sqrt(query.shape[-1])
    full_x, full_inputs, query, *full = in_full(x, inputs, query, *parameters)
    parameters = FewParameters(*full)
    if query is None:
        query = _queries_by_head(few, full_inputs, parameters)
    return _attend_inputs(few, full_x, full_inputs, query, parameters)


def in_full(*tensors: Any) -> list[Any]:
    """Half precision on CPUs is kept in float32, which is no slower there."""
    if tensors[0].dtype.itemsize < 4 and tensors[0].device.type == "cpu":
        return [x if x is None else x.float() for x in tensors]
    return list(tensors)


def _queries_by_head(few: FewRows, inputs: Tensor, parameters: FewParameters) -> Tensor:
    assert parameters.query_weight is not None and parameters.query_bias is not None
    # A product per head: one for all heads would leave a single thread to read the whole weight.
    weight = _by_head(parameters.query_weight, few)
    added, scale = parameters.query_bias.view(few.num_heads, 1, -1), 1.0 / math.sqrt(weight.shape[1])
    inputs = inputs.expand(few.num_heads, -1, -1)
    return torch.baddbmm(added, inputs, weight.transpose(1, 2), beta=scale, alpha=scale)


def _by_head(weight: Tensor, few: FewRows) -> Tensor:
    """(E, E) to (H, D, E)."""
    return weight.view(few.num_heads, -1, weight.shape[-1])


def _attend_inputs(few: FewRows, x: Tensor, inputs: Tensor, query: Tensor, parameters: FewParameters) -> Absorbed:
    batch_size, num_heads = x.shape[0], few.num_heads
    absorbed = _to_rows(torch.bmm(query, _by_head(parameters.key_weight, few)), batch_size)
    scores = _times_inputs(absorbed, x)
    if few.bias is not None:
        scores = (scores.unflatten(1, (num_heads, -1)) + few.bias.to(scores.dtype)).flatten(1, 2)
    probabilities = torch.softmax(scores, -1, dtype=torch.float32 if x.dtype.itemsize < 4 else None).to(x.dtype)
    kept = F.dropout(probabilities, few.dropout) if few.dropout else probabilities
    mixed = _mix_inputs(kept, x)
    by_head, weight = _to_heads(mixed, num_heads), _by_head(parameters.value_weight, few).transpose(1, 2)
    if parameters.value_bias is None:
        rows = torch.bmm(by_head, weight)
    else:
        added = parameters.value_bias.view(num_heads, 1, -1)
        if few.dropout:
            added = added * _to_heads(kept.sum(-1, keepdim=True), num_heads)  # what is kept may not add up to 1
        rows = torch.baddbmm(added, by_head, weight)
    return Absorbed(rows, inputs, query, absorbed, probabilities, kept, mixed)


def absorb_backward(
    few: FewRows, grad_rows: Tensor, x: Tensor, parameters: FewParameters, saved: Absorbed, grad_x: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of the layers' weights and of their biases; that of the inputs is added to `grad_x` (B, N, E),
    unless that is None.

    Args:
        grad_rows: (B * G, H, D).
        x: (B, N, E), and as precise as everything in `saved`.
    """
    batch_size, num_heads, scale = x.shape[0], few.num_heads, 1.0 / math.sqrt(saved.query.shape[-1])
    _, inputs, query, absorbed, probabilities, kept, mixed = saved
    grad_rows = grad_rows.transpose(0, 1)  # (H, B * G, D)
    grad_mixed = _to_rows(torch.bmm(grad_rows, _by_head(parameters.value_weight, few)), batch_size)  # (B, H * G, E)
    grad_kept = _times_inputs(grad_mixed, x)  # (B, H * G, N)
    grad_value_bias = grad_rows
    if few.dropout:
        assert parameters.value_bias is not None
        grad_value_bias = grad_rows * _to_heads(kept.sum(-1, keepdim=True), num_heads)
        grad_total = (grad_rows * parameters.value_bias.view(num_heads, 1, -1)).sum(-1, keepdim=True)
        grad_kept = grad_kept + _to_rows(grad_total, batch_size)
    # With dropout, p * grad_p = kept * grad_kept: what was kept holds the factor 1 / (1 - dropout).
    weighted = kept * grad_kept
    grad_scores = weighted - probabilities * weighted.sum(-1, keepdim=True)
    grad_absorbed = _to_heads(_mix_inputs(grad_scores, x), num_heads)  # (H, B * G, E)
    grad_query = torch.bmm(grad_absorbed, _by_head(parameters.key_weight, few).transpose(1, 2)) * scale
    if grad_x is not None:
        assert parameters.query_weight is not None
        # Both uses of all inputs at once.
        left, right = torch.cat([grad_scores, kept], 1).transpose(1, 2), torch.cat([absorbed, grad_mixed], 1)
        _add_product(grad_x, left, right)
        grad_inputs = torch.bmm(grad_query, _by_head(parameters.query_weight, few)).sum(0)
        grad_x.view(-1, x.shape[-1]).index_add_(0, few.places, grad_inputs.to(grad_x.dtype))
    of_weights = [
        _outer(grad_query, inputs.expand(num_heads, -1, -1)),
        _outer(query, grad_absorbed),
        _outer(grad_rows, _to_heads(mixed, num_heads)),
    ]
    grad_query_bias, grad_value_bias = (grad.sum(1).flatten() for grad in (grad_query, grad_value_bias))
    return of_weights, [grad_query_bias, torch.zeros_like(grad_query_bias), grad_value_bias]


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """(H, M, D) and (H, M, E) to their (H * D, E) products over M."""
    left = left.transpose(1, 2)
    # The product of a column and a row takes half the time as a multiplication.
    return (left * right if right.shape[1] == 1 else torch.bmm(left, right)).flatten(0, 1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product of left and right to a total that may be less precise."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total += torch.bmm(left, right)


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
    _, length, hidden_size = x.shape
    num_rest = length % PARTS_OF_INPUTS
    runs = x[:, : length - num_rest] if num_rest else x
    runs = runs.view(PARTS_OF_INPUTS, -1, hidden_size).transpose(1, 2)  # (parts, E, N / parts)
    products = (
        torch.bmm(few.expand(PARTS_OF_INPUTS, -1, -1), runs).transpose(0, 1).reshape(few.shape[0], few.shape[1], -1)
    )
    if not num_rest:
        return products
    return torch.cat([products, torch.bmm(few, x[:, length - num_rest :].transpose(1, 2))], -1)


def _mix_inputs(weights: Tensor, x: Tensor) -> Tensor:
    """(B, H * G, N) weights of (B, N, E) inputs to their (B, H * G, E) sums."""
    if not _is_cut_up(x):
        return torch.bmm(weights, x)
    _, length, hidden_size = x.shape
    parts = x.view(length, PARTS_OF_INPUTS, -1).transpose(0, 1)  # (parts, N, E / parts)
    return torch.bmm(weights.expand(PARTS_OF_INPUTS, -1, -1), parts).transpose(0, 1).reshape(1, -1, hidden_size)


def _to_rows(x: Tensor, batch_size: int) -> Tensor:
    """(H, B * G, E) to (B, H * G, E)."""
    num_heads, num_few, size = x.shape
    if batch_size == 1:
        return x.reshape(1, -1, size)
    return x.view(num_heads, batch_size, num_few // batch_size, size).transpose(0, 1).reshape(batch_size, -1, size)


def _to_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, H * G, E) to (H, B * G, E)."""
    batch_size, _, size = x.shape
    if batch_size == 1:
        return x.view(num_heads, -1, size)
    return x.view(batch_size, num_heads, -1, size).transpose(0, 1).reshape(num_heads, -1, size)
