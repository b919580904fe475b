"""Kernels: softmax attention over a plan's pieces, merged exactly into one softmax, forward and backward.

Each piece yields an output and the log-sum-exp of its scores. Two pieces merge without approximation:
`lse = logaddexp(l1, l2)`, `out = lerp(o1, o2, sigmoid(l2 - l1))`. Backward, every piece is given the merged output and
log-sum-exp, which makes its gradient the exact one. Only q, k, v, out and the log-sum-exp are kept in between.

Letters: B batch, N tokens, H heads, D head size, T tiles, Q queries per tile, K keys per tile.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .plan import Piece

# Queries worked on at a time. Measured on CPU: temporaries of this size are reused by the allocator instead of being
# mapped anew, which takes a quarter off the backward pass, and memory no longer grows with the length.
QUERIES_AT_A_TIME = 1024

_HAS_FUSED_CPU_KERNEL = all(
    hasattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}") for suffix in ("", "_backward")
)


class Tiles(NamedTuple):
    """Some tiles of one piece: queries (T, Q, H, D), keys and values (T, K, H, D), bias (T, 1 or H, Q, K) or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None


class TileGradients(NamedTuple):
    """Gradients in the shapes of `Tiles`."""

    query: Tensor
    key: Tensor
    value: Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Sequence[Piece],
    *,
    real: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of (B, N, H, D) queries over the edges of all pieces, with one softmax of q . k / sqrt(D).

    Args:
        real: (B, N) bool; the rows of other tokens give zeros.
        dropout: probability of dropping each attention probability after the softmax, as in RoBERTa.
    """
    # The sum makes a compiler read the number here: first read inside the function, it would not be known outside.
    return _Attend.apply(query, key, value, list(pieces), real, dropout + 0.0)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, pieces, real, dropout):
        with torch.autocast(query.device.type, enabled=False):
            out, lse, kept = _attend_forward(query, key, value, pieces, real, dropout)
        ctx.pieces, ctx.dropout = pieces, dropout
        ctx.save_for_backward(query, key, value, out, lse, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out):
        query, key, value, out, lse, *kept = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            grads = _attend_backward(grad_out, query, key, value, out, lse, kept, ctx.pieces, ctx.dropout)
        return *grads, None, None, None


def _attend_forward(query, key, value, pieces, real, dropout) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The merged output and log-sum-exp of all pieces, and which probabilities were kept."""
    merged: tuple[Tensor, Tensor] | None = None
    kept: list[Tensor] = []
    for piece in pieces:
        q, k, v = (_pick(x, piece.heads) for x in (query, key, value))
        sources = piece.key_source(k), piece.key_source(v)
        q_tiles = piece.split_queries(q)
        outs, lses = [], []
        for first, last in _chunks(piece):
            tiles = _tiles(piece, q_tiles, sources, first, last)
            keep = draw_keep_mask(tiles, dropout) if dropout else None
            kept += [] if keep is None else [keep]
            out, lse = _forward_kernel(tiles, keep, dropout)
            outs.append(out)
            lses.append(lse)
        joined = piece.join_queries(outs, 0.0), piece.join_queries(lses, torch.finfo(lses[0].dtype).min)
        if merged is None and piece.heads is not None:
            merged = _nothing_seen(query, joined[1])
        merged = joined if merged is None else _merge(merged, joined, piece.heads)
    assert merged is not None
    out, lse = merged
    if real is not None:
        # Padding sees nothing: its rows are zeros, and an infinite log-sum-exp makes every weight exp(-inf) backward.
        out = out.masked_fill(~real[..., None, None], 0.0)
        lse = lse.masked_fill(~real[..., None], torch.inf)
    return out.contiguous(), lse, kept


def _attend_backward(grad_out, query, key, value, out, lse, kept, pieces, dropout) -> list[Tensor]:
    """The gradients of query, key and value: the sum of what every piece says."""
    sum_dtype = torch.promote_types(query.dtype, torch.float32)
    grads: list[Tensor] = []
    kept = iter(kept)
    for piece in pieces:
        q, k, v, o, grad_o, piece_lse = (_pick(x, piece.heads) for x in (query, key, value, out, grad_out, lse))
        sources = piece.key_source(k), piece.key_source(v)
        totals = [torch.zeros_like(source, dtype=sum_dtype) for source in sources]
        q_tiles, o_tiles, grad_tiles = (piece.split_queries(x) for x in (q, o, grad_o))
        lse_tiles = piece.split_log_sum_exp(piece_lse)
        grad_queries = []
        for first, last in _chunks(piece):
            tiles = _tiles(piece, q_tiles, sources, first, last)
            results = o_tiles[first:last], lse_tiles[first:last], grad_tiles[first:last]
            part = _backward_kernel(tiles, *results, next(kept) if dropout else None, dropout)
            grad_queries.append(part.query)
            for total, grad in zip(totals, part[1:], strict=True):
                piece.add_key_tiles(total, grad, first, last)
        joined = [piece.join_queries(grad_queries, 0.0).to(sum_dtype), *map(piece.join_keys, totals)]
        grads = _add_gradients(grads, joined, query, piece.heads)
    return [grad.to(query.dtype) for grad in grads]


def _chunks(piece: Piece) -> Iterator[tuple[int, int]]:
    """Ranges of tiles to work on at a time. A graph being traced takes all at once: it can't loop over lengths."""
    if torch.compiler.is_compiling():
        return iter([(0, piece.num_tiles)])
    step = max(1, QUERIES_AT_A_TIME // piece.queries_per_tile)
    return ((first, min(first + step, piece.num_tiles)) for first in range(0, piece.num_tiles, step))


def _tiles(piece: Piece, q_tiles: Tensor, sources: tuple[Tensor, Tensor], first: int, last: int) -> Tiles:
    key, value = (piece.key_tiles(source, first, last) for source in sources)
    bias = None if piece.bias is None else piece.bias[first:last]
    return Tiles(q_tiles[first:last], key, value, bias)


def _pick(x: Tensor, heads: list[int] | None) -> Tensor:
    return x if heads is None else x[:, :, heads]


def _nothing_seen(query: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of no edges at all, for pieces that serve some heads only to merge into."""
    return torch.zeros_like(query), lse.new_full(query.shape[:-1], torch.finfo(lse.dtype).min)


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], heads: list[int] | None) -> tuple[Tensor, Tensor]:
    """Two outputs and log-sum-exps as one softmax; `other` may hold some heads only."""
    (out, lse), (other_out, other_lse) = one, other
    own_lse = _pick(lse, heads)
    weight = torch.sigmoid(other_lse - own_lse)[..., None]
    merged = torch.lerp(_pick(out, heads).to(weight.dtype), other_out.to(weight.dtype), weight).to(out.dtype)
    merged_lse = torch.logaddexp(own_lse, other_lse)
    if heads is None:
        return merged, merged_lse
    out[:, :, heads], lse[:, :, heads] = merged, merged_lse
    return out, lse


def _add_gradients(grads: list[Tensor], parts: list[Tensor], query: Tensor, heads: list[int] | None) -> list[Tensor]:
    if heads is not None:
        grads = grads or [torch.zeros_like(query, dtype=part.dtype) for part in parts]
        for grad, part in zip(grads, parts, strict=True):
            grad[:, :, heads] += part
        return grads
    return [grad.add_(part) for grad, part in zip(grads, parts, strict=True)] if grads else parts


def _forward_kernel(tiles: Tiles, keep: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """(T, Q, H, D) outputs and (T, Q, H) log-sum-exps by the fastest kernel that can."""
    if keep is None and _can_fuse(tiles):
        return fused_forward(tiles)
    return explicit_forward(tiles, keep, dropout)


def _backward_kernel(tiles: Tiles, out, lse, grad_out, keep, dropout: float) -> TileGradients:
    if keep is None and _can_fuse(tiles):
        return fused_backward(tiles, out, lse, grad_out)
    return explicit_backward(tiles, out, lse, grad_out, keep, dropout)


def _can_fuse(tiles: Tiles) -> bool:
    return _HAS_FUSED_CPU_KERNEL and tiles.query.device.type == "cpu" and not torch.compiler.is_exporting()


def fused_forward(tiles: Tiles) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in tiles[:3])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=tiles.bias)
    return out.transpose(1, 2), lse.transpose(1, 2)


def fused_backward(tiles: Tiles, out: Tensor, lse: Tensor, grad_out: Tensor) -> TileGradients:
    q, k, v, out, lse, grad_out = (x.transpose(1, 2) for x in (*tiles[:3], out, lse, grad_out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, False, attn_mask=tiles.bias
    )
    return TileGradients(*(grad.transpose(1, 2) for grad in grads))


def draw_keep_mask(tiles: Tiles, dropout: float) -> Tensor:
    """(T, H, Q, K) bool, True with probability 1 - dropout."""
    count, queries, heads, _ = tiles.query.shape
    shape = (count, heads, queries, tiles.key.shape[1])
    if torch.compiler.is_compiling() or tiles.query.device.type != "cpu":
        return torch.rand(shape, device=tiles.query.device) >= dropout
    # Four 16-bit decisions from each 64-bit draw over the whole range: a fifth of the time of bernoulli_.
    numel = count * heads * queries * shape[-1]
    words = torch.empty(-(-numel // 4), dtype=torch.int64).random_(-(2**63), None)
    return (words.view(torch.int16)[:numel] >= round(dropout * 2**16) - 2**15).view(shape)


def explicit_forward(tiles: Tiles, keep: Tensor | None = None, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """The fused kernel's twin in plain operations: any device, and dropout on the probabilities."""
    outs, lses = [], []
    for heads in _head_groups(tiles):
        _, _, v, scores = _scores(tiles, heads)
        largest = scores.amax(-1)
        probabilities = torch.softmax(scores, -1)
        # The largest probability is exp(largest - lse).
        lses.append(largest - probabilities.amax(-1).log())
        if keep is not None:
            probabilities = probabilities * keep[:, heads]
        outs.append(torch.matmul(probabilities.to(v.dtype), v))
    out = _join_heads(outs) / (1.0 - dropout)
    return out.to(tiles.query.dtype), _join_heads(lses)


def explicit_backward(
    tiles: Tiles,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    keep: Tensor | None = None,
    dropout: float = 0.0,
) -> TileGradients:
    grads: list[list[Tensor]] = [[], [], []]
    # What every score's gradient has in common: sum_j p_ij dp_ij, which equals out_i . grad_out_i.
    common = (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1)
    for heads in _head_groups(tiles):
        q, k, v, scores = _scores(tiles, heads)
        g = grad_out[:, :, heads].transpose(1, 2).to(v.dtype)
        probabilities = (scores - lse[:, :, heads].transpose(1, 2)[..., None]).exp_()
        grad_scores = torch.matmul(g, v.transpose(-1, -2)).to(scores.dtype)
        dropped = probabilities
        if keep is not None:
            factor = keep[:, heads] * (1.0 / (1.0 - dropout))
            dropped = probabilities * factor
            grad_scores = grad_scores * factor
        grad_scores = (grad_scores - common[:, :, heads].transpose(1, 2)[..., None]) * (probabilities * score_scale(q))
        grad_scores, dropped = grad_scores.to(v.dtype), dropped.to(v.dtype)
        grads[0].append(torch.matmul(grad_scores, k))
        grads[1].append(torch.matmul(grad_scores.transpose(-1, -2), q))
        grads[2].append(torch.matmul(dropped.transpose(-1, -2), g))
    return TileGradients(*map(_join_heads, grads))


def _join_heads(parts: list[Tensor]) -> Tensor:
    """(T, h, Q, ...) of consecutive heads to (T, Q, H, ...)."""
    return torch.cat([part.transpose(1, 2) for part in parts], 2)


def score_scale(query: Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1])


def _head_groups(tiles: Tiles) -> Iterator[slice]:
    """One head at a time on CPUs, whose caches then hold the scores; all at once elsewhere."""
    num_heads = tiles.query.shape[2]
    step = 1 if tiles.query.device.type == "cpu" and not torch.compiler.is_compiling() else num_heads
    return (slice(head, head + step) for head in range(0, num_heads, step))


def _scores(tiles: Tiles, heads: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (T, h, Q, D), k and v (T, h, K, D) of some heads, and their biased scores (T, h, Q, K) in at least float32."""
    q, k, v = (x[:, :, heads].transpose(1, 2) for x in tiles[:3])
    score_dtype = torch.promote_types(q.dtype, torch.float32)
    if q.device.type == "cpu":
        q, k, v = (x.to(score_dtype) for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)).to(score_dtype) * score_scale(q)
    if tiles.bias is not None:
        scores = scores + (tiles.bias[:, heads] if tiles.bias.shape[1] > 1 else tiles.bias)
    return q, k, v, scores
