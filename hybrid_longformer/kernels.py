"""Kernels: softmax attention over a plan's pieces, merged exactly into one softmax, forward and backward.

Each piece yields an output and the log-sum-exp of its scores. Two pieces merge without approximation:
`lse = logaddexp(l1, l2)`, `out = lerp(o1, o2, sigmoid(l2 - l1))`. Backward, every piece is given the merged output and
log-sum-exp, which makes its gradient the exact one. Only q, k, v, out and the log-sum-exp are kept in between.

Letters: B batch, N tokens, H heads, D head size, T tiles, Q queries per tile, K keys per tile.
"""

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
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of (B, N, H, D) queries over the edges of all pieces, with one softmax.

    Args:
        real: (B, N) bool; the rows of other tokens give zeros.
        dropout: probability of dropping each attention probability after the softmax, as in RoBERTa.
    """
    return _Attend.apply(query, key, value, list(pieces), real, scale, dropout)  # type: ignore[no-any-return]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, pieces, real, scale, dropout):
        with torch.autocast(query.device.type, enabled=False):
            out, lse, kept = _attend_forward(query, key, value, pieces, real, scale, dropout)
        ctx.pieces, ctx.scale, ctx.dropout = pieces, scale, dropout
        ctx.save_for_backward(query, key, value, out, lse, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out):  # type: ignore[override]
        query, key, value, out, lse, *kept = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            grads = _attend_backward(grad_out, query, key, value, out, lse, kept, ctx.pieces, ctx.scale, ctx.dropout)
        return *grads, None, None, None, None


def _attend_forward(query, key, value, pieces, real, scale, dropout) -> tuple[Tensor, Tensor, list[Tensor]]:
    out = lse = None
    kept: list[Tensor] = []
    for piece in pieces:
        q, k, v = (_pick(x, piece.heads) for x in (query, key, value))
        sources = piece.key_source(k), piece.key_source(v)
        q_tiles = piece.split_queries(q)
        outs, lses = [], []
        for first, last in _chunks(piece):
            tiles = _tiles(piece, q_tiles, sources, first, last)
            if dropout:
                keep = draw_keep_mask(tiles, dropout)
                kept.append(keep)
                part, part_lse = explicit_forward(tiles, scale, keep, dropout)
            else:
                part, part_lse = forward_kernel(query)(tiles, scale)
            outs.append(part)
            lses.append(part_lse)
        piece_out = piece.join_queries(outs, 0.0)
        piece_lse = piece.join_queries(lses, torch.finfo(lses[0].dtype).min)
        if piece.heads is not None and out is None:
            out = torch.zeros_like(query)
            lse = piece_lse.new_full(query.shape[:-1], torch.finfo(piece_lse.dtype).min)
        out, lse = _merge(out, lse, piece_out, piece_lse, piece.heads)
    if real is not None:
        # Padding sees nothing: its rows are zeros, and an infinite log-sum-exp makes every weight exp(-inf) backward.
        out = out.masked_fill(~real[..., None, None], 0.0)
        lse = lse.masked_fill(~real[..., None], torch.inf)
    return out.contiguous(), lse, kept


def _attend_backward(grad_out, query, key, value, out, lse, kept, pieces, scale, dropout) -> list[Tensor]:
    sum_dtype = torch.promote_types(query.dtype, torch.float32)
    grads = [torch.zeros_like(x, dtype=sum_dtype) for x in (query, key, value)]
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
            if dropout:
                part = explicit_backward(tiles, *results, scale, next(kept), dropout)
            else:
                part = backward_kernel(query)(tiles, *results, scale)
            grad_queries.append(part.query)
            for total, grad in zip(totals, part[1:], strict=True):
                piece.add_key_tiles(total, grad, first, last)
        joined = piece.join_queries(grad_queries, 0.0), *(piece.join_keys(total) for total in totals)
        for grad, part_grad in zip(grads, joined, strict=True):
            if piece.heads is None:
                grad += part_grad
            else:
                grad[:, :, piece.heads] += part_grad.to(sum_dtype)
    return [grad.to(query.dtype) for grad in grads]


def _chunks(piece: Piece) -> Iterator[tuple[int, int]]:
    """Ranges of tiles to work on at a time. A graph that is being traced takes all at once: it can't loop over lengths."""
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


def _merge(out, lse, piece_out, piece_lse, heads) -> tuple[Tensor, Tensor]:
    if out is None:
        return piece_out, piece_lse
    old_out, old_lse = _pick(out, heads), _pick(lse, heads)
    weight = torch.sigmoid(piece_lse - old_lse)[..., None]
    merged = torch.lerp(old_out.to(weight.dtype), piece_out.to(weight.dtype), weight).to(out.dtype)
    merged_lse = torch.logaddexp(old_lse, piece_lse)
    if heads is None:
        return merged, merged_lse
    out[:, :, heads], lse[:, :, heads] = merged, merged_lse
    return out, lse


def forward_kernel(query: Tensor):
    """The fastest kernel for these queries: (tiles, scale) -> (T, Q, H, D) outputs, (T, Q, H) log-sum-exps."""
    return fused_forward if _can_fuse(query) else explicit_forward


def backward_kernel(query: Tensor):
    return fused_backward if _can_fuse(query) else explicit_backward


def _can_fuse(query: Tensor) -> bool:
    return _HAS_FUSED_CPU_KERNEL and query.device.type == "cpu" and not torch.compiler.is_exporting()


def fused_forward(tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in tiles[:3])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=tiles.bias, scale=scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


def fused_backward(tiles: Tiles, out: Tensor, lse: Tensor, grad_out: Tensor, scale: float) -> TileGradients:
    q, k, v, out, lse, grad_out = (x.transpose(1, 2) for x in (*tiles[:3], out, lse, grad_out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, False, attn_mask=tiles.bias, scale=scale
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


def explicit_forward(
    tiles: Tiles, scale: float, keep: Tensor | None = None, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The fused kernel's twin in plain operations: any device, and dropout on the probabilities."""
    outs, lses = [], []
    for heads in _head_groups(tiles):
        q, k, v, scores = _scores(tiles, heads, scale)
        largest = scores.amax(-1)
        probabilities = torch.softmax(scores, -1)
        # The largest probability is exp(largest - lse).
        lses.append(largest - probabilities.amax(-1).log())
        if keep is not None:
            probabilities = probabilities * keep[:, heads]
        outs.append(torch.matmul(probabilities.to(v.dtype), v))
    out = torch.cat(outs, 1).transpose(1, 2) / (1.0 - dropout)
    return out.to(tiles.query.dtype), torch.cat(lses, 1).transpose(1, 2)


def explicit_backward(
    tiles: Tiles,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    scale: float,
    keep: Tensor | None = None,
    dropout: float = 0.0,
) -> TileGradients:
    grads: list[list[Tensor]] = [[], [], []]
    # What every score's gradient has in common: sum_j p_ij dp_ij, which equals out_i . grad_out_i.
    common = (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1)
    for heads in _head_groups(tiles):
        q, k, v, scores = _scores(tiles, heads, scale)
        g = grad_out[:, :, heads].transpose(1, 2).to(v.dtype)
        probabilities = (scores - lse[:, :, heads].transpose(1, 2)[..., None]).exp_()
        grad_scores = torch.matmul(g, v.transpose(-1, -2)).to(scores.dtype)
        dropped = probabilities
        if keep is not None:
            factor = keep[:, heads] * (1.0 / (1.0 - dropout))
            dropped = probabilities * factor
            grad_scores = grad_scores * factor
        grad_scores = (grad_scores - common[:, :, heads].transpose(1, 2)[..., None]) * (probabilities * scale)
        grad_scores, dropped = grad_scores.to(v.dtype), dropped.to(v.dtype)
        grads[0].append(torch.matmul(grad_scores, k))
        grads[1].append(torch.matmul(grad_scores.transpose(-1, -2), q))
        grads[2].append(torch.matmul(dropped.transpose(-1, -2), g))
    return TileGradients(*(torch.cat(parts, 1).transpose(1, 2) for parts in grads))


def _head_groups(tiles: Tiles) -> Iterator[slice]:
    """One head at a time on CPUs, whose caches then hold the scores; all at once elsewhere."""
    num_heads = tiles.query.shape[2]
    step = 1 if tiles.query.device.type == "cpu" and not torch.compiler.is_compiling() else num_heads
    return (slice(head, head + step) for head in range(0, num_heads, step))


def _scores(tiles: Tiles, heads: slice, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (T, h, Q, D), k and v (T, h, K, D) of some heads, and their biased scores (T, h, Q, K) in at least float32."""
    q, k, v = (x[:, :, heads].transpose(1, 2) for x in tiles[:3])
    score_dtype = torch.promote_types(q.dtype, torch.float32)
    if q.device.type == "cpu":
        q, k, v = (x.to(score_dtype) for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)).to(score_dtype) * scale
    if tiles.bias is not None:
        scores = scores + (tiles.bias[:, heads] if tiles.bias.shape[1] > 1 else tiles.bias)
    return q, k, v, scores
