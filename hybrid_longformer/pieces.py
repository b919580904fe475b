"""Pieces: the parts of a plan. Each cuts its queries into tiles and says which keys every tile reads.

- `WholePiece` (short inputs): every query of a row reads the whole row;
- `WindowPiece`: runs of neighbouring tokens read the tokens around them, through views: nothing is copied or padded;
- `GatheredPiece`: tiles read keys by index: random blocks and global tokens.

Pieces yield chunks of tiles to work on at a time, read tensors of (B, N, ...) for a chunk, and write or add what was
computed back to its place.

Letters: B batch, N tokens, H heads, D head size, T tiles, Q queries per tile, K keys per tile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .pattern import ceil_div


def some_heads(x: Tensor, heads: list[int] | None, *, dim: int = 2) -> Tensor:
    """A view of (B, N, H, ...) with the heads [first, end, step] only, or all of them."""
    return x if heads is None else x[(slice(None),) * dim + (slice(*heads),)]


def heads_by_dilation(dilation_per_head: Sequence[int]) -> list[tuple[int, list[int] | None]]:
    """Each dilation with the [first, end, step] of heads that have it, several times if one such run isn't enough."""
    found: list[tuple[int, list[int] | None]] = []
    for dilation in sorted(set(dilation_per_head)):
        heads = [head for head, own in enumerate(dilation_per_head) if own == dilation]
        steps = {later - earlier for earlier, later in pairwise(heads)}
        if len(heads) == len(dilation_per_head):
            found.append((dilation, None))
        elif len(steps) <= 1:
            found.append((dilation, [heads[0], heads[-1] + 1, *(steps or {1})]))
        else:
            found += [(dilation, [head, head + 1, 1]) for head in heads]
    return found


def as_bias(edges: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where there is an edge, else the lowest number: finite, so that a row without any edge makes no NaN."""
    lowest = torch.finfo(dtype).min
    if dtype == torch.get_default_dtype():
        return torch.where(edges, 0.0, lowest)
    return torch.zeros(edges.shape, dtype=dtype, device=edges.device).masked_fill_(~edges, lowest)


def without_spare(flat: Tensor, shape: tuple[int, int]) -> Tensor:
    """A (B, N, ...) view of (B * N + 1, ...), whose last place is for writing what nobody needs."""
    return flat[:-1].unflatten(0, shape)


class RowChunk(NamedTuple):
    """The rows first..last-1 of a batch."""

    first: int
    last: int


@dataclass(kw_only=True)
class WholePiece:
    """One tile per row, which reads the whole row.

    Args:
        shape: (B, N).
        bias: (B or 1, H or 1, N, N), or None when every key may be read.
        drawn: (B or 1, N, M) 1 for each of a row's M blocks that is drawn for a token and not seen by the bias, or
            None. Layers that differ in their random blocks then share one bias, and make their own when they run.
        key_blocks: (B or 1, M, N) 1 for the keys of each block that the bias may hide, or None.
    """

    shape: tuple[int, int]
    bias: Tensor | None
    drawn: Tensor | None = None
    key_blocks: Tensor | None = None

    # Only windows with different dilations serve some heads alone.
    heads = None

    @property
    def scores_per_head(self) -> int:
        """T * Q * K."""
        return self.shape[0] * self.shape[1] * self.shape[1]

    def chunks(self, queries_at_a_time: int) -> Iterator[RowChunk]:
        step = max(1, queries_at_a_time // self.shape[1])
        return (RowChunk(row, min(row + step, self.shape[0])) for row in range(0, self.shape[0], step))

    def queries(self, x: Tensor, chunk: RowChunk) -> Tensor:
        return x[chunk.first : chunk.last]

    log_sum_exp = queries

    def keys(self, x: Tensor, chunk: RowChunk, room: None = None) -> Tensor:
        return self.queries(x, chunk)

    def room_for_keys(self, x: Tensor, queries_at_a_time: int) -> None:
        """Views need none."""

    def chunk_bias(self, chunk: RowChunk) -> Tensor | None:
        bias = None if self.bias is None else self._rows(self.bias, chunk)
        if bias is None or self.drawn is None or self.key_blocks is None:
            return bias
        seen = torch.bmm(self._rows(self.drawn, chunk), self._rows(self.key_blocks, chunk))[:, None]
        # The lowest number and the largest add up to 0. In place where that can be: mapping memory takes longer.
        room = seen if bias.shape[1] == 1 else None
        return torch.add(bias, seen, alpha=torch.finfo(bias.dtype).max, out=room)

    def _rows(self, x: Tensor, chunk: RowChunk) -> Tensor:
        return x if x.shape[0] == 1 else x[chunk.first : chunk.last]

    def write_queries(self, flat: Tensor, tiles: Tensor, chunk: RowChunk) -> None:
        without_spare(flat, self.shape)[chunk.first : chunk.last] = tiles

    def add_keys(self, total: Tensor, tiles: Tensor, chunk: RowChunk) -> None:
        total[chunk.first : chunk.last] += tiles


class WindowChunk(NamedTuple):
    """One tile of several rows, or neighbouring tiles of one row, which then all read as many keys.

    Tokens count within their residue class: all tokens of a row when the dilation is 1.
    """

    rows: slice
    residue: int
    tiles: slice
    queries: slice
    keys: slice
    columns: slice  # of the band


@dataclass(kw_only=True)
class WindowPiece:
    """Each tile of Q tokens reads the tokens around it; at the ends of a row there are fewer.

    A dilation d runs the same window on every d-th token.

    Args:
        shape: (B, N).
        dilation: d.
        heads: [first, end, step] of the heads this piece serves, or None for all.
        queries_per_tile: Q.
        before: how many tokens before it a token sees.
        after: how many tokens after it a token sees.
        band: (Q, before + Q + after) the bias of a tile amid a row, where nothing but the window hides a key.
        key_bias: (B, N) the bias of keys that no window may read, or None.
        document: (B, N) the document of each token, or None when a row is one.
    """

    shape: tuple[int, int]
    dilation: int
    heads: list[int] | None
    queries_per_tile: int
    before: int
    after: int
    band: Tensor
    key_bias: Tensor | None = None
    document: Tensor | None = None

    def halved(self) -> "WindowPiece":
        """The same edges in tiles half as large, which read fewer keys that no query of theirs sees. Gradients want
        larger ones, as those of keys that several tiles read have to be added up."""
        size = max(self.queries_per_tile // 2, min(self.queries_per_tile, 16))
        return replace(self, queries_per_tile=size, band=self.band[:size, : self.before + size + self.after])

    @property
    def tiles_per_class(self) -> int:
        """Of a row's largest residue class."""
        return ceil_div(self.shape[1], self.dilation * self.queries_per_tile)

    @property
    def scores_per_head(self) -> int:
        """T * Q * K, as if no tile were cut short by the end of its row."""
        return self.shape[0] * self.dilation * self.tiles_per_class * self.band.numel()

    def chunks(self, queries_at_a_time: int) -> Iterator[WindowChunk]:
        (batch_size, length), size = self.shape, self.queries_per_tile
        step = max(1, queries_at_a_time // size)
        for residue in range(min(self.dilation, length)):
            tokens = ceil_div(length - residue, self.dilation)
            num_tiles = ceil_div(tokens, size)
            # The tiles amid a row read as many keys each, so that one strided view reaches several of them.
            first = min(ceil_div(self.before, size), num_tiles)
            last = max((tokens - self.after) // size, first)
            for tile in (*range(first), *range(last, num_tiles)):
                for row in range(0, batch_size, step):
                    yield self._chunk(slice(row, min(row + step, batch_size)), residue, tile, tile + 1, tokens)
            for row in range(batch_size):
                for tile in range(first, last, step):
                    yield self._chunk(slice(row, row + 1), residue, tile, min(tile + step, last), tokens)

    def _chunk(self, rows: slice, residue: int, first: int, last: int, tokens: int) -> WindowChunk:
        start, end = first * self.queries_per_tile, min(last * self.queries_per_tile, tokens)
        first_key, last_key = max(start - self.before, 0), min(end + self.after, tokens)
        column = first_key - (start - self.before)
        num_keys = last_key - first_key if last == first + 1 else self.band.shape[1]
        return WindowChunk(
            rows=rows,
            residue=residue,
            tiles=slice(first, last),
            queries=slice(start, end),
            keys=slice(first_key, last_key),
            columns=slice(column, column + num_keys),
        )

    def _view(self, x: Tensor, chunk: WindowChunk, first: int, count: int) -> Tensor:
        """A view of (B, N, ...) as (T, count, ...): from each tile, tokens that start with `first` in the first one."""
        row_stride, token_stride, *strides = x.stride()
        num_rows, num_tiles = chunk.rows.stop - chunk.rows.start, chunk.tiles.stop - chunk.tiles.start
        step = self.dilation * token_stride
        start = chunk.rows.start * row_stride + chunk.residue * token_stride + first * step
        # In one step: slicing and unfolding take as long as some kernels.
        return x.as_strided(
            (num_rows * num_tiles, count, *x.shape[2:]),
            (row_stride if num_rows > 1 else step * self.queries_per_tile, step, *strides),
            x.storage_offset() + start,
        )

    def queries(self, x: Tensor, chunk: WindowChunk) -> Tensor:
        """(B, N, ...) to a view of (T, Q, ...)."""
        return self._view(x, chunk, chunk.queries.start, self._num_queries(chunk))

    log_sum_exp = queries

    def room_for_keys(self, x: Tensor, queries_at_a_time: int) -> None:
        """Views need none."""

    def keys(self, x: Tensor, chunk: WindowChunk, room: None = None) -> Tensor:
        """(B, N, ...) to a view of (T, K, ...), whose tiles overlap."""
        return self._view(x, chunk, chunk.keys.start, chunk.columns.stop - chunk.columns.start)

    def _num_queries(self, chunk: WindowChunk) -> int:
        """Of each tile; the last one of a row may be cut short."""
        return min(chunk.queries.stop - chunk.queries.start, self.queries_per_tile)

    def chunk_bias(self, chunk: WindowChunk) -> Tensor:
        """(T or 1, 1, Q, K): inside the window, of the own document, and not hidden."""
        bias = self.band[: self._num_queries(chunk), chunk.columns][None]
        if self.key_bias is not None:
            key_bias = self.keys(self.key_bias, chunk)
            # Mostly nothing is hidden, and all tiles share the band. Other devices would have to wait for the answer.
            if key_bias.device.type != "cpu" or key_bias.any():
                bias = torch.minimum(bias, key_bias[:, None])
        if self.document is not None:
            own, other = self.queries(self.document, chunk), self.keys(self.document, chunk)
            bias = torch.where(own[:, :, None] == other[:, None], bias, torch.finfo(bias.dtype).min)
        return bias[:, None]

    def write_queries(self, flat: Tensor, tiles: Tensor, chunk: WindowChunk) -> None:
        self.queries(without_spare(flat, self.shape), chunk).copy_(tiles)

    def add_keys(self, total: Tensor, tiles: Tensor, chunk: WindowChunk) -> None:
        """The adjoint of `keys`: adds (T, K, ...) to where the keys were read from."""
        for place, tile in zip(self.keys(total, chunk), tiles, strict=True):
            place += tile


class TileChunk(NamedTuple):
    """The tiles first..last-1 of all."""

    first: int
    last: int


@dataclass(kw_only=True)
class GatheredPiece:
    """Each tile reads keys by index.

    Args:
        shape: (B, N).
        queries_per_tile: Q.
        bias: (T, H or 1, Q, K).
        key_index: (T, K) flat index of the keys.
        query_index: (T * Q) flat index of the token in each query slot, B * N where there is none; or None when tiles
            are runs of tokens that cover the rows one after the other.
        heads: [first, end, step] of the heads this piece serves, or None for all.
    """

    shape: tuple[int, int]
    queries_per_tile: int
    bias: Tensor
    key_index: Tensor
    query_index: Tensor | None = None
    heads: list[int] | None = None

    @property
    def scores_per_head(self) -> int:
        """T * Q * K."""
        return self.key_index.numel() * self.queries_per_tile

    def chunks(self, queries_at_a_time: int) -> Iterator[TileChunk]:
        num_tiles = self.key_index.shape[0]
        if torch.compiler.is_exporting():
            # A graph for all lengths can't loop over them.
            return iter([TileChunk(0, num_tiles)])
        step = self._tiles_at_a_time(queries_at_a_time)
        return (TileChunk(first, min(first + step, num_tiles)) for first in range(0, num_tiles, step))

    def _tiles_at_a_time(self, queries_at_a_time: int) -> int:
        return max(1, queries_at_a_time // self.queries_per_tile)

    def _slots(self, chunk: TileChunk) -> slice:
        return slice(chunk.first * self.queries_per_tile, chunk.last * self.queries_per_tile)

    def _query_tokens(self, chunk: TileChunk) -> Tensor:
        """(T * Q) the index of the token in each slot, and of any token in slots that hold none."""
        assert self.query_index is not None
        return self.query_index[self._slots(chunk)].clamp(max=self.shape[0] * self.shape[1] - 1)

    def queries(self, x: Tensor, chunk: TileChunk) -> Tensor:
        """(B, N, ...) to (T, Q, ...)."""
        flat = x.flatten(0, 1)
        taken = flat[self._slots(chunk)] if self.query_index is None else flat[self._query_tokens(chunk)]
        return taken.unflatten(0, (-1, self.queries_per_tile))

    def log_sum_exp(self, lse: Tensor, chunk: TileChunk) -> Tensor:
        """As `queries`, with +inf in slots that hold no token: exp(score - inf) = 0, so they weigh nothing."""
        tiles = self.queries(lse, chunk)
        if self.query_index is None:
            return tiles
        is_empty = self.query_index[self._slots(chunk)] == self.shape[0] * self.shape[1]
        return tiles.masked_fill(is_empty.view(*tiles.shape[:2], 1), torch.inf)

    def room_for_keys(self, x: Tensor, queries_at_a_time: int) -> Tensor | None:
        """Memory for the keys of one chunk after the other: mapping it anew takes longer than copying them."""
        if torch.compiler.is_exporting():
            return None
        num_tiles = min(self._tiles_at_a_time(queries_at_a_time), self.key_index.shape[0])
        return x.new_empty(num_tiles * self.key_index.shape[1], *x.shape[2:])

    def keys(self, x: Tensor, chunk: TileChunk, room: Tensor | None = None) -> Tensor:
        """(B, N, ...) to (T, K, ...)."""
        index = self.key_index[chunk.first : chunk.last]
        out = None if room is None else room[: index.numel()]
        return torch.index_select(x.flatten(0, 1), 0, index.flatten(), out=out).unflatten(0, index.shape)

    def chunk_bias(self, chunk: TileChunk) -> Tensor:
        return self.bias[chunk.first : chunk.last]

    def write_queries(self, flat: Tensor, tiles: Tensor, chunk: TileChunk) -> None:
        """Puts back what `queries` read and was changed in place; views of runs of tokens are in their place."""
        if self.query_index is not None:
            flat.index_copy_(0, self.query_index[self._slots(chunk)], tiles.flatten(0, 1))

    def add_queries(self, total: Tensor, tiles: Tensor, chunk: TileChunk) -> None:
        """Adds (T, Q, ...) to the tokens; slots that hold none must be zero."""
        if self.query_index is None:
            total.flatten(0, 1)[self._slots(chunk)] += tiles.flatten(0, 1)
        else:
            _add_rows(total, self._query_tokens(chunk), tiles)

    def add_keys(self, total: Tensor, tiles: Tensor, chunk: TileChunk) -> None:
        _add_rows(total, self.key_index[chunk.first : chunk.last].flatten(), tiles)


def _add_rows(total: Tensor, index: Tensor, tiles: Tensor) -> None:
    # Adding rows that don't lie in one piece takes many times as long as making them so.
    total.flatten(0, 1).index_add_(0, index, tiles.flatten(0, 1).to(total.dtype).contiguous())


Piece = WholePiece | WindowPiece | GatheredPiece

_PIECE_CLASSES: tuple[type, ...] = (WholePiece, WindowPiece, GatheredPiece)


def pack_pieces(pieces: Sequence[Piece]) -> tuple[list[Tensor], list[int]]:
    """Pieces as flat lists of tensors and integers, the only things an operator of torch can be given."""
    tensors: list[Tensor] = []
    layout: list[int] = []
    for piece in pieces:
        layout.append(_PIECE_CLASSES.index(type(piece)))
        for entry in fields(piece):
            value = getattr(piece, entry.name)
            if isinstance(value, Tensor):
                tensors.append(value)
            numbers = [] if value is None or isinstance(value, Tensor) else value
            numbers = [numbers] if isinstance(numbers, int | torch.SymInt) else list(numbers)
            # -1: nothing; -2: the next tensor; otherwise how many integers follow.
            layout += [-1 if value is None else -2 if isinstance(value, Tensor) else len(numbers), *numbers]
    return tensors, layout


def unpack_pieces(tensors: Sequence[Tensor], layout: Sequence[int]) -> list[Piece]:
    """The inverse of `pack_pieces`."""
    next_tensor, next_number = iter(tensors), iter(layout)
    pieces: list[Piece] = []
    for kind in next_number:
        values: dict[str, Any] = {}
        for entry in fields(_PIECE_CLASSES[kind]):
            count = next(next_number)
            if count < 0:
                values[entry.name] = None if count == -1 else next(next_tensor)
                continue
            numbers = [next(next_number) for _ in range(count)]
            as_written = {"shape": tuple, "heads": list}.get(entry.name, lambda numbers: numbers[0])
            values[entry.name] = as_written(numbers)
        pieces.append(_PIECE_CLASSES[kind](**values))
    return pieces
