"""Attend: a plan's pieces, each through its kernel, merged exactly into one softmax.

Two pieces merge without approximation: `lse = logaddexp(l1, l2)`, `out = lerp(o1, o2, sigmoid(l2 - l1))`. Backward,
every piece is given the merged output and log-sum-exp, which makes its gradient the exact one. Only q, k, v, out and
the log-sum-exp (and which probabilities dropout kept) are held in between; pieces write outputs and add gradients where
they belong, a few tiles at a time.

Letters: B batch, N tokens, H heads, D head size, G global tokens, T tiles, Q queries per tile, K keys per tile.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import Tiles, backward_kernel, can_fuse, draw_keep_mask, forward_kernel
from .pieces import (
    GatheredPiece,
    Piece,
    RowChunk,
    WholePiece,
    WindowPiece,
    pack_pieces,
    some_heads,
    unpack_pieces,
    without_spare,
)
from .plain import no_autocast

# Queries worked on at a time. Measured on CPU: temporaries of this size stay in the cache and are reused by the
# allocator instead of being mapped anew (twice as many gathered keys took a fifth longer, often double), and memory
# does not grow with the length. Other devices want fewer and larger calls.
QUERIES_AT_A_TIME_ON_CPU = 256
QUERIES_AT_A_TIME_WITH_DROPOUT_ON_CPU = 512
# Forward, windows are views and make no temporaries but their results.
WINDOW_QUERIES_AT_A_TIME_ON_CPU = 1024
QUERIES_AT_A_TIME = 4096
# The log-sum-exp of rows that are not the pieces' own: it makes every weight exp(-inf), so they have no gradient.
UNSEEN = torch.inf


class OtherRows(NamedTuple):
    """Rows that pieces don't compute: `values` (M, H, D) go to the tokens `places` (M), counted over all rows of the
    batch; all of them or, unless that is None, those where `is_used` (M)."""

    values: Tensor
    places: Tensor
    is_used: Tensor | None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Sequence[Piece],
    *,
    real: Tensor | None = None,
    other_rows: OtherRows | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of (B, N, H, D) queries over the edges of all pieces, with one softmax of q . k / sqrt(D).

    Args:
        real: (B, N) bool; the rows of other tokens give zeros.
        other_rows: rows to put in place of what the pieces say.
        dropout: probability of dropping each attention probability after the softmax, as in RoBERTa.
    """
    # The fused kernel takes it for granted that the numbers of a head stand side by side.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if torch.compiler.is_compiling():
        out = _attend_in_graph(query, key, value, pieces, real, dropout)
        return out if other_rows is None else put_rows(out, other_rows)
    if torch.is_grad_enabled():
        return _Attend.apply(query, key, value, *(other_rows or (None, None, None)), list(pieces), real, dropout)
    with no_autocast(query):
        out, _, _ = attend_forward(query, key, value, pieces, real, dropout)
    return out if other_rows is None else put_rows(out, other_rows, in_place=True)


def _queries_at_a_time(piece: Piece, x: Tensor, dropout: float, *, is_forward: bool) -> int:
    if x.device.type != "cpu":
        return QUERIES_AT_A_TIME
    if dropout:
        return QUERIES_AT_A_TIME_WITH_DROPOUT_ON_CPU
    is_view_only = is_forward and isinstance(piece, WindowPiece)
    return WINDOW_QUERIES_AT_A_TIME_ON_CPU if is_view_only else QUERIES_AT_A_TIME_ON_CPU


def _attend_in_graph(query, key, value, pieces, real, dropout) -> Tensor:
    if torch.compiler.is_exporting():
        return attend_forward(query, key, value, pieces, real, dropout)[0]
    tensors, layout = pack_pieces(pieces)
    return _attend_operator(query, key, value, tensors, layout, real, dropout)[0]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, rows, places, is_used, pieces, real, dropout):
        with no_autocast(query):
            out, lse, kept = attend_forward(query, key, value, pieces, real, dropout)
        if rows is not None:
            put_rows(out, OtherRows(rows, places, is_used), in_place=True)
            unseen = lse.new_full(rows.shape[:-1], UNSEEN)
            put_rows(lse, OtherRows(unseen, places, is_used), in_place=True)
        ctx.pieces, ctx.dropout, ctx.places, ctx.is_used = pieces, dropout, places, is_used
        ctx.save_for_backward(query, key, value, out, lse, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out):
        query, key, value, out, lse, *kept = ctx.saved_tensors
        with no_autocast(query):
            grads = attend_backward(grad_out, query, key, value, out, lse, kept, ctx.pieces, ctx.dropout)
        return *grads, _other_rows_gradient(grad_out, ctx.places, ctx.is_used), *[None] * 5


def put_rows(x: Tensor, rows: OtherRows, *, in_place: bool = False) -> Tensor:
    """(B, N, ...) with those rows in their places. Unused ones point at other tokens, which stay as they are."""
    flat = x.view(-1, *x.shape[2:]) if in_place else x.flatten(0, 1)
    values = rows.values.to(x.dtype)
    if rows.is_used is not None:
        is_used = rows.is_used.view(-1, *[1] * (x.dim() - 2))
        values = torch.where(is_used, values, flat.index_select(0, rows.places))
    if not in_place:
        return flat.index_copy(0, rows.places, values).view(x.shape)
    flat.index_copy_(0, rows.places, values)
    return x


def _other_rows_gradient(grad_out: Tensor, places: Tensor | None, is_used: Tensor | None) -> Tensor | None:
    if places is None:
        return None
    taken = grad_out.flatten(0, 1).index_select(0, places)
    return taken if is_used is None else taken.masked_fill_(~is_used[:, None, None], 0.0)


def attend_forward(query, key, value, pieces, real, dropout) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The merged output and log-sum-exp of all pieces, and which probabilities were kept."""
    kept: list[Tensor] = []
    if _is_one_call(pieces, query, dropout):
        out, lse = forward_kernel(_whole_tiles(pieces[0], query, key, value), None, 0.0)
    else:
        flat_out, flat_lse = _new_results(query, pieces)
        for piece in pieces:
            # With dropout, backward goes through the same tiles.
            tiled = piece.halved() if isinstance(piece, WindowPiece) and not dropout else piece
            kept += _add_piece(tiled, query, key, value, flat_out, flat_lse, dropout)
        out, lse = (_drop_spare(flat, query.shape[:2]) for flat in (flat_out, flat_lse))
    if real is not None:
        out.masked_fill_(~real[..., None, None], 0.0)
        lse.masked_fill_(~real[..., None], UNSEEN)
    return out, lse, kept


def _is_one_call(pieces: Sequence[Piece], query: Tensor, dropout: float) -> bool:
    """Whether one fused call does it all, with results of the right shape already."""
    piece = pieces[0]
    # A bias that has yet to be made is made for a row at a time.
    is_whole = isinstance(piece, WholePiece) and (piece.drawn is None or piece.shape[0] == 1)
    return is_whole and not dropout and can_fuse(query)


def _whole_tiles(piece: Any, query: Tensor, key: Tensor, value: Tensor) -> Tiles:
    return Tiles(query, key, value, piece.chunk_bias(RowChunk(0, piece.shape[0])))


def _new_results(query: Tensor, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    """Room for the output (B * N + 1, H, D) and log-sum-exp (B * N + 1, H), with a spare place at the end."""
    places = query.shape[0] * query.shape[1] + 1
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    if isinstance(pieces[0], GatheredPiece):
        # Others write every place before anything is merged.
        lowest = torch.finfo(lse_dtype).min
        return query.new_zeros(places, *query.shape[2:]), query.new_full(
            (places, query.shape[2]), lowest, dtype=lse_dtype
        )
    return query.new_empty(places, *query.shape[2:]), query.new_empty(places, query.shape[2], dtype=lse_dtype)


def _drop_spare(flat: Tensor, shape: tuple[int, int]) -> Tensor:
    if torch.compiler.is_exporting():
        return without_spare(flat, shape)
    # Not a view: autograd refuses to change a view in place that a custom function returned.
    return flat.resize_(*shape, *flat.shape[1:])


def _add_piece(piece: Piece, query, key, value, flat_out, flat_lse, dropout: float) -> list[Tensor]:
    """Writes or merges one piece's results; returns which probabilities it kept, if any were dropped."""
    q, k, v = (some_heads(x, piece.heads) for x in (query, key, value))
    flats = [some_heads(x, piece.heads, dim=1) for x in (flat_out, flat_lse)]
    keep = _KeepMask(_new_keep_mask(piece, q)) if dropout else None
    for chunk, tiles in _chunks_of_tiles(piece, q, k, v, dropout, is_forward=True):
        chunk_keep = None
        if keep is not None:
            chunk_keep = keep.next_part(tiles)
            draw_keep_mask(chunk_keep, dropout)
        results = forward_kernel(tiles, chunk_keep, dropout)
        if isinstance(piece, GatheredPiece):
            out, lse = (piece.queries(without_spare(flat, piece.shape), chunk) for flat in flats)
            _merge(out, lse, *results)
            results = out, lse
        for flat, result in zip(flats, results, strict=True):
            piece.write_queries(flat, result, chunk)
    return [] if keep is None else [keep.flat]


def attend_backward(grad_out, query, key, value, out, lse, kept, pieces, dropout) -> list[Tensor]:
    """The gradients of query, key and value: the sum of what every piece says."""
    if _is_one_call(pieces, query, dropout):
        tiles = _whole_tiles(pieces[0], query, key, value)
        return list(backward_kernel(tiles, out, lse, grad_out, None, 0.0))
    sum_dtype = torch.promote_types(query.dtype, torch.float32)
    # Windows write every query's gradient before others add to it.
    new = [query.new_zeros if isinstance(pieces[0], GatheredPiece) else query.new_empty, key.new_zeros, value.new_zeros]
    grads = [allocate(query.shape, dtype=sum_dtype) for allocate in new]
    for index, piece in enumerate(pieces):
        inputs = [some_heads(x, piece.heads) for x in (query, key, value, out, lse, grad_out)]
        keep = _KeepMask(kept[index]) if dropout else None
        _add_piece_gradients(piece, inputs, [some_heads(x, piece.heads) for x in grads], keep, dropout)
    return [grad.to(query.dtype) for grad in grads]


def _add_piece_gradients(piece: Piece, inputs: list[Tensor], grads: list[Tensor], keep, dropout: float) -> None:
    query, key, value, out, lse, grad_out = inputs
    for chunk, tiles in _chunks_of_tiles(piece, query, key, value, dropout, is_forward=False):
        results = piece.queries(out, chunk), piece.log_sum_exp(lse, chunk), piece.queries(grad_out, chunk)
        part = backward_kernel(tiles, *results, None if keep is None else keep.next_part(tiles), dropout)
        if isinstance(piece, GatheredPiece):
            piece.add_queries(grads[0], part.query, chunk)
        else:
            piece.queries(grads[0], chunk).copy_(part.query)
        piece.add_keys(grads[1], part.key, chunk)
        piece.add_keys(grads[2], part.value, chunk)


def _new_keep_mask(piece: Piece, query: Tensor) -> Tensor:
    """A byte for every score of a piece."""
    return torch.empty(piece.scores_per_head * query.shape[2], dtype=torch.uint8, device=query.device)


class _KeepMask:
    """Which probabilities of a piece dropout keeps: what its chunks of tiles take, one after the other."""

    def __init__(self, flat: Tensor):
        self.flat = flat
        self.start = 0

    def next_part(self, tiles: Tiles) -> Tensor:
        """(T, H, Q, K) of the next chunk's tiles."""
        num_tiles, num_queries, num_heads, _ = tiles.query.shape
        shape = num_tiles, num_heads, num_queries, tiles.key.shape[1]
        start, self.start = self.start, self.start + math.prod(shape)
        return self.flat[start : self.start].view(shape)


def _chunks_of_tiles(
    piece: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float, *, is_forward: bool
) -> Iterator[tuple[Any, Tiles]]:
    """What to work on at a time: each chunk, of the piece's own kind, with its tiles, which hold until the next one."""
    at_a_time = _queries_at_a_time(piece, query, dropout, is_forward=is_forward)
    rooms = [piece.room_for_keys(x, at_a_time) for x in (key, value)]
    for chunk in piece.chunks(at_a_time):
        keys, values = (piece.keys(x, chunk, room) for x, room in zip((key, value), rooms, strict=True))
        yield chunk, Tiles(piece.queries(query, chunk), keys, values, piece.chunk_bias(chunk))


def _merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Makes the first output and log-sum-exp those of both, in place, as one softmax."""
    weight = torch.sigmoid(other_lse - lse)[..., None]
    if out.dtype == weight.dtype:
        out.lerp_(other_out, weight)
    else:
        out.copy_(torch.lerp(out.to(weight.dtype), other_out.to(weight.dtype), weight))
    lse.copy_(torch.logaddexp(lse, other_lse))


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
    return [out.contiguous(), lse.contiguous(), *kept]


@_attend_operator.register_fake
def _(query, key, value, tensors, layout, real, dropout):
    lse = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    pieces = unpack_pieces(tensors, layout) if dropout else []
    kept = [_new_keep_mask(piece, some_heads(query, piece.heads)) for piece in pieces]
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
