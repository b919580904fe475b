"""Attend: a plan's pieces, each through its kernel, merged exactly into one softmax.

Two pieces merge without approximation: `lse = logaddexp(l1, l2)`, `out = lerp(o1, o2, sigmoid(l2 - l1))`. Backward,
every piece is given the merged output and log-sum-exp, which makes its gradient the exact one. Only q, k, v, out and
the log-sum-exp (and which probabilities dropout kept) are held in between.

Letters: B batch, N tokens, H heads, D head size, T tiles, Q queries per tile, K keys per tile.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .kernels import Tiles, backward_kernel, draw_keep_mask, forward_kernel
from .plan import Piece, pack_pieces, unpack_pieces

# Queries worked on at a time. Measured on CPU: temporaries of this size are reused by the allocator instead of being
# mapped anew, which takes a quarter off the backward pass, and memory no longer grows with the length.
QUERIES_AT_A_TIME = 512


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
    if torch.compiler.is_exporting():
        return attend_forward(query, key, value, pieces, real, dropout)[0]
    if torch.compiler.is_compiling():
        tensors, layout = pack_pieces(pieces)
        return _attend_operator(query, key, value, tensors, layout, real, dropout)[0]
    return _Attend.apply(query, key, value, list(pieces), real, dropout)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, pieces, real, dropout):
        with torch.autocast(query.device.type, enabled=False):
            out, lse, kept = attend_forward(query, key, value, pieces, real, dropout)
        ctx.pieces, ctx.dropout = pieces, dropout
        ctx.save_for_backward(query, key, value, out, lse, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out):
        query, key, value, out, lse, *kept = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            grads = attend_backward(grad_out, query, key, value, out, lse, kept, ctx.pieces, ctx.dropout)
        return *grads, None, None, None


def attend_forward(query, key, value, pieces, real, dropout) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The merged output and log-sum-exp of all pieces, and which probabilities were kept."""
    merged: tuple[Tensor, Tensor] | None = None
    kept: list[Tensor] = []
    for piece in pieces:
        q, k, v = (_pick(x, piece.heads) for x in (query, key, value))
        sources = piece.key_source(k), piece.key_source(v)
        q_tiles = piece.split_queries(q)
        keep = _new_keep_mask(piece, q_tiles) if dropout else None
        kept += [] if keep is None else [keep]
        outs, lses = [], []
        for first, last in _chunks(piece):
            tiles = _tiles(piece, q_tiles, sources, first, last)
            if keep is not None:
                keep[first:last] = draw_keep_mask(keep[first:last].shape, dropout, keep.device)
            out, lse = forward_kernel(tiles, None if keep is None else keep[first:last], dropout)
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


def attend_backward(grad_out, query, key, value, out, lse, kept, pieces, dropout) -> list[Tensor]:
    """The gradients of query, key and value: the sum of what every piece says."""
    grads: list[Tensor] = []
    for index, piece in enumerate(pieces):
        inputs = [_pick(x, piece.heads) for x in (query, key, value, out, lse, grad_out)]
        parts = _piece_gradients(piece, inputs, kept[index] if dropout else None, dropout)
        grads = _add_gradients(grads, parts, query, piece.heads)
    return [grad.to(query.dtype) for grad in grads]


def _piece_gradients(piece: Piece, inputs: list[Tensor], keep: Tensor | None, dropout: float) -> list[Tensor]:
    """What one piece says; a function of its own, so that its temporaries are gone before the next piece's come."""
    query, key, value, out, lse, grad_out = inputs
    sum_dtype = torch.promote_types(query.dtype, torch.float32)
    sources = piece.key_source(key), piece.key_source(value)
    totals = [torch.zeros_like(source, dtype=sum_dtype) for source in sources]
    q_tiles, o_tiles, grad_tiles = (piece.split_queries(x) for x in (query, out, grad_out))
    lse_tiles = piece.split_log_sum_exp(lse)
    grad_queries = []
    for first, last in _chunks(piece):
        tiles = _tiles(piece, q_tiles, sources, first, last)
        results = o_tiles[first:last], lse_tiles[first:last], grad_tiles[first:last]
        part = backward_kernel(tiles, *results, None if keep is None else keep[first:last], dropout)
        grad_queries.append(part.query)
        for total, grad in zip(totals, part[1:], strict=True):
            piece.add_key_tiles(total, grad, first, last)
    return [piece.join_queries(grad_queries, 0.0).to(sum_dtype), *map(piece.join_keys, totals)]


def _new_keep_mask(piece: Piece, q_tiles: Tensor) -> Tensor:
    """(T, H, Q, K), to be drawn chunk by chunk."""
    shape = (piece.num_tiles, q_tiles.shape[2], piece.queries_per_tile, piece.keys_per_tile)
    return torch.empty(shape, dtype=torch.bool, device=q_tiles.device)


def _chunks(piece: Piece) -> Iterator[tuple[int, int]]:
    """Ranges of tiles to work on at a time. A graph being exported takes all at once: it can't loop over lengths."""
    if torch.compiler.is_exporting():
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


# One operator for torch.compile, which then neither unrolls the loop over tiles nor recompiles for every length. Its
# name holds the module's, since a checkpoint's own copy of this file may be loaded beside the installed one.
_NAMESPACE = f"hybrid_longformer_{zlib.crc32(__name__.encode()):08x}"


@torch.library.custom_op(f"{_NAMESPACE}::attend", mutates_args=())
def _attend_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    layout: list[int],
    real: Tensor | None,
    dropout: float,
) -> list[Tensor]:
    """Output, log-sum-exp and, with dropout, what was kept of each piece."""
    pieces = unpack_pieces(tensors, layout)
    out, lse, kept = attend_forward(query, key, value, pieces, real, dropout)
    return [out, lse.contiguous(), *kept]


@_attend_operator.register_fake
def _(query, key, value, tensors, layout, real, dropout):
    lse = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    pieces = unpack_pieces(tensors, layout) if dropout else []
    kept = [_new_keep_mask(piece, _pick(query, piece.heads)) for piece in pieces]
    return [torch.empty_like(query, memory_format=torch.contiguous_format), lse, *kept]


@torch.library.custom_op(f"{_NAMESPACE}::attend_backward", mutates_args=())
def _attend_backward_operator(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    results: list[Tensor],
    tensors: list[Tensor],
    layout: list[int],
    dropout: float,
) -> list[Tensor]:
    out, lse, *kept = results
    pieces = unpack_pieces(tensors, layout)
    grads = attend_backward(grad_out, query, key, value, out, lse, kept, pieces, dropout)
    return [grad.contiguous() for grad in grads]


@_attend_backward_operator.register_fake
def _(grad_out, query, key, value, results, tensors, layout, dropout):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]


def _remember(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    query, key, value, tensors, layout, _, dropout = inputs
    ctx.save_for_backward(query, key, value, *output, *tensors)
    ctx.num_results, ctx.layout, ctx.dropout = len(output), layout, dropout


def _operator_backward(ctx: Any, grads: list[Tensor | None]):
    query, key, value, *rest = ctx.saved_tensors
    results, tensors = rest[: ctx.num_results], rest[ctx.num_results :]
    grad_q, grad_k, grad_v = _attend_backward_operator(
        grads[0], query, key, value, results, tensors, ctx.layout, ctx.dropout
    )
    return grad_q, grad_k, grad_v, [None] * len(tensors), None, None, None


_attend_operator.register_autograd(_operator_backward, setup_context=_remember)
