"""Plans: one batch's edges laid out in tiles, so that a backend can compute them block by block in O(N).

A layer's plan is a list of pieces with no edge in common. A piece cuts the queries into tiles and says which keys each
tile reads, with a bias of 0 where there is an edge and the dtype's lowest number where there is none:

- `WindowPiece`: tiles of consecutive tokens read an overlapping view of the keys, no copy;
- `GatheredPiece`: tiles read keys by index: random blocks, global tokens, or (short inputs) every key.

Letters: B batch, N tokens, H heads, D head size, G global tokens, R random blocks, S block size,
T tiles, Q queries per tile, K keys per tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .batch import Batch
from .pattern import AttentionPattern, ceil_div, dense_mask


@dataclass(kw_only=True)
class WindowPiece:
    """Each tile of Q tokens reads the K tokens around it. A dilation d runs the same window on every d-th token.

    All rows lie end to end, so one strided view reaches every tile; the bias hides the neighbouring rows.

    Args:
        shape: (B, N).
        dilation: d.
        heads: the heads this piece serves, or None for all.
        queries_per_tile: Q.
        side_tiles: how many tiles of keys are read before a tile's own, and after it.
        bias: (T, 1, Q, K).
    """

    shape: tuple[int, int]
    dilation: int
    heads: list[int] | None
    queries_per_tile: int
    side_tiles: int
    bias: Tensor | None = None

    @property
    def keys_per_tile(self) -> int:
        return (2 * self.side_tiles + 1) * self.queries_per_tile

    @property
    def row_length(self) -> int:
        """Tokens of one row's residue class, padded to whole tiles."""
        tiles = ceil_div(self.shape[1], self.dilation * self.queries_per_tile)
        return tiles * self.queries_per_tile

    @property
    def num_tiles(self) -> int:
        return self.shape[0] * self.dilation * self.row_length // self.queries_per_tile

    def lay_out(self, x: Tensor) -> Tensor:
        """(B, N, ...) to (B * d * row_length, ...): rows end to end, each residue class by itself."""
        trailing = x.shape[2:]
        missing = self.row_length * self.dilation - self.shape[1]
        x = pad(x, (0, 0) * len(trailing) + (0, missing))
        if self.dilation > 1:
            x = x.unflatten(1, (self.row_length, self.dilation)).transpose(1, 2)
        return x.reshape(-1, *trailing)

    def take_back(self, x: Tensor) -> Tensor:
        """The inverse of `lay_out`, without the padding."""
        batch_size, length = self.shape
        trailing = x.shape[1:]
        if self.dilation > 1:
            x = x.view(batch_size, self.dilation, self.row_length, *trailing).transpose(1, 2)
        return x.reshape(batch_size, -1, *trailing)[:, :length]

    def split_queries(self, x: Tensor) -> Tensor:
        """(B, N, ...) to (T, Q, ...)."""
        return self.lay_out(x).unflatten(0, (self.num_tiles, self.queries_per_tile))

    def split_log_sum_exp(self, lse: Tensor) -> Tensor:
        return self.split_queries(lse)

    def join_queries(self, tiles: Sequence[Tensor], fill: float) -> Tensor:
        """(T, Q, ...), as consecutive parts, to (B, N, ...). Every token has its place, so nothing needs the fill."""
        return self.take_back(torch.cat([part.flatten(0, 1) for part in tiles]))

    def key_source(self, x: Tensor) -> Tensor:
        """What `key_tiles` reads from: the laid out keys with room for the first and last window."""
        margin = self.side_tiles * self.queries_per_tile
        x = self.lay_out(x)
        return pad(x, (0, 0) * (x.dim() - 1) + (margin, margin))

    def key_tiles(self, source: Tensor, first: int, last: int) -> Tensor:
        """The keys of tiles first..last-1, (T, K, ...)."""
        rows = source[first * self.queries_per_tile : (last - 1) * self.queries_per_tile + self.keys_per_tile]
        return rows.unfold(0, self.keys_per_tile, self.queries_per_tile).movedim(-1, 1)

    def add_key_tiles(self, total: Tensor, tiles: Tensor, first: int, last: int) -> None:
        """The adjoint of `key_tiles`: adds (T, K, ...) to where the keys were read from."""
        total_tiles = total.unflatten(0, (-1, self.queries_per_tile))
        parts = tiles.unflatten(1, (-1, self.queries_per_tile))
        for shift in range(2 * self.side_tiles + 1):
            total_tiles[first + shift : last + shift] += parts[:, shift]

    def join_keys(self, total: Tensor) -> Tensor:
        """The adjoint of `key_source`."""
        margin = self.side_tiles * self.queries_per_tile
        return self.take_back(total[margin : total.shape[0] - margin])

    def window_bias(self, batch: Batch, pattern: AttentionPattern, dtype: torch.dtype) -> Tensor:
        """(T, 1, Q, K): inside the window, the row, the document and the past if causal, and not read as a global."""
        device = batch.position.device
        tile_start = torch.arange(self.num_tiles, device=device)[:, None] * self.queries_per_tile  # (T, 1)
        query = torch.arange(self.queries_per_tile, device=device)[:, None]  # (Q, 1)
        key = torch.arange(self.keys_per_tile, device=device) - self.side_tiles * self.queries_per_tile  # (K)
        in_window = (query - key).abs() <= pattern.window // 2
        if pattern.is_causal:
            in_window = in_window & (key <= query)
        own_row = (tile_start + key).div(self.row_length, rounding_mode="floor") == tile_start // self.row_length
        readable = self.key_tiles(self.key_source(batch.ordinary_keys), 0, self.num_tiles)  # (T, K)
        edges = in_window & (own_row & readable)[:, None]
        if batch.document is not None:
            keys_document = self.key_tiles(self.key_source(batch.document), 0, self.num_tiles)
            edges = edges & (self.split_queries(batch.document)[:, :, None] == keys_document[:, None])
        return as_bias(edges, dtype)[:, None]


@dataclass(kw_only=True)
class GatheredPiece:
    """Each tile reads keys by index.

    Args:
        shape: (B, N).
        queries_per_tile: Q.
        bias: (T, 1 or H, Q, K), or None when every key may be read.
        query_index: (T * Q) flat index of the token in each query slot, or None when tiles are runs of tokens that
            cover the rows one after the other.
        unused_slots: (T, Q) slots that hold no query of this piece.
        slot_of_token: (B * N) flat slot of each token; T * Q for tokens that have none.
        key_index: (T, K) flat index of the keys, or None when a tile reads its whole row (T = B, K = N).
    """

    shape: tuple[int, int]
    queries_per_tile: int
    bias: Tensor | None
    query_index: Tensor | None = None
    unused_slots: Tensor | None = None
    slot_of_token: Tensor | None = None
    key_index: Tensor | None = None
    heads: list[int] | None = None

    @property
    def num_tiles(self) -> int:
        slots = self.shape[0] * self.shape[1] if self.query_index is None else self.query_index.shape[0]
        return slots // self.queries_per_tile

    @property
    def keys_per_tile(self) -> int:
        return self.shape[1] if self.key_index is None else self.key_index.shape[1]

    def split_queries(self, x: Tensor) -> Tensor:
        """(B, N, ...) to (T, Q, ...)."""
        taken = x.flatten(0, 1)
        if self.query_index is not None:
            taken = taken.index_select(0, self.query_index)
        return taken.unflatten(0, (self.num_tiles, self.queries_per_tile))

    def split_log_sum_exp(self, lse: Tensor) -> Tensor:
        """As `split_queries`, with +inf in unused slots: exp(score - inf) = 0, so they weigh nothing."""
        tiles = self.split_queries(lse)
        return tiles if self.unused_slots is None else tiles.masked_fill(self.unused_slots[..., None], torch.inf)

    def join_queries(self, tiles: Sequence[Tensor], fill: float) -> Tensor:
        """(T, Q, ...), as consecutive parts, to (B, N, ...); tokens without a slot get `fill`."""
        if self.slot_of_token is None:
            return torch.cat(list(tiles)).view(*self.shape, *tiles[0].shape[2:])
        filler = tiles[0].new_full((1, *tiles[0].shape[2:]), fill)
        slots = torch.cat([*(part.flatten(0, 1) for part in tiles), filler])
        return slots.index_select(0, self.slot_of_token).unflatten(0, self.shape)

    def key_source(self, x: Tensor) -> Tensor:
        return x if self.key_index is None else x.flatten(0, 1)

    def key_tiles(self, source: Tensor, first: int, last: int) -> Tensor:
        """The keys of tiles first..last-1, (T, K, ...)."""
        if self.key_index is None:
            return source[first:last]
        index = self.key_index[first:last]
        return source.index_select(0, index.flatten()).unflatten(0, index.shape)

    def add_key_tiles(self, total: Tensor, tiles: Tensor, first: int, last: int) -> None:
        """The adjoint of `key_tiles`: adds (T, K, ...) to where the keys were read from."""
        if self.key_index is None:
            total[first:last] += tiles
        else:
            total.index_add_(0, self.key_index[first:last].flatten(), tiles.flatten(0, 1).to(total.dtype))

    def join_keys(self, total: Tensor) -> Tensor:
        """The adjoint of `key_source`."""
        return total if self.key_index is None else total.unflatten(0, self.shape)


Piece = WindowPiece | GatheredPiece

_PIECE_CLASSES: tuple[type, type] = (WindowPiece, GatheredPiece)


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


@dataclass(kw_only=True)
class LayerPlan:
    """One layer's attention for one batch: the pattern, the batch's facts, and (for tiled backends) the pieces."""

    pattern: AttentionPattern
    batch: Batch
    pieces: list[Piece]


def build_plans(
    patterns: Sequence[AttentionPattern], batch: Batch, *, dtype: torch.dtype, with_pieces: bool = True
) -> list[LayerPlan]:
    """The plan of every layer. Layers share whatever their patterns have in common; random blocks are each one's own.

    Args:
        dtype: of the queries and keys, so that a bias is converted once and not in every layer.
        with_pieces: False for backends that need no tiles.
    """
    if not with_pieces:
        return [LayerPlan(pattern=pattern, batch=batch, pieces=[]) for pattern in patterns]
    builder = _PieceBuilder(batch, dtype)
    return [LayerPlan(pattern=pattern, batch=batch, pieces=builder.pieces(pattern)) for pattern in patterns]


class _PieceBuilder:
    """Builds pieces and remembers those that several layers share."""

    def __init__(self, batch: Batch, dtype: torch.dtype):
        self.batch = batch
        self.dtype = dtype
        self.shared: dict[tuple, list[Piece]] = {}
        self.slots: dict[tuple[int, int], RandomSlots] = {}

    def pieces(self, pattern: AttentionPattern) -> list[Piece]:
        length, num_global = self.batch.shape[1], self.batch.num_global_slots
        # An exported graph serves all lengths, so it may not choose by this one's.
        is_exporting = torch.compiler.is_exporting()
        draws_blocks = pattern.num_random_blocks > 0 and (is_exporting or length >= pattern.shortest_random_document)
        random_keys = pattern.num_random_blocks * pattern.block_size if draws_blocks else 0
        # Reading every key is no more work than reading the tiles' keys: still O(N), and one piece instead of three.
        if not is_exporting and length <= _window_tile(pattern.window)[2] + random_keys + num_global:
            return self._once((pattern,), lambda: [whole_piece(pattern, self.batch, self.dtype)])
        windows = self._once(
            (pattern.window, pattern.dilation_per_head, pattern.is_causal),
            lambda: window_pieces(pattern, self.batch, self.dtype),
        )
        # Few global tokens ride along with the random blocks, which saves a pass over all queries.
        globals_ride = draws_blocks and self.batch.document is None and num_global <= pattern.block_size
        rest: list[Piece] = []
        if draws_blocks:
            rest.append(self._random_piece(pattern, with_globals=globals_ride and num_global > 0))
        if num_global and not globals_ride:
            rest += self._once(("global", pattern.is_causal), lambda: [global_piece(pattern, self.batch, self.dtype)])
        return windows + rest

    def _once(self, key, build) -> list[Piece]:
        if key not in self.shared:
            self.shared[key] = build()
        return self.shared[key]

    def _random_piece(self, pattern: AttentionPattern, *, with_globals: bool) -> GatheredPiece:
        key = (pattern.block_size, pattern.shortest_random_document)
        if key not in self.slots:
            self.slots[key] = lay_out_documents(self.batch, *key)
        return random_piece(pattern, self.batch, self.slots[key], self.dtype, with_globals=with_globals)


def whole_piece(pattern: AttentionPattern, batch: Batch, dtype: torch.dtype) -> GatheredPiece:
    """One tile per row that reads the whole row."""
    batch_size, length = batch.shape
    device = batch.position.device
    is_full = length <= pattern.window // 2 + 1 and max(pattern.dilation_per_head) == 1
    is_limited = batch.real is not None or batch.document is not None or pattern.is_causal
    bias = None
    if is_limited or not is_full:
        edges = dense_mask(
            batch.edges(pattern), batch_size=batch_size, num_heads=pattern.num_heads, length=length, device=device
        )
        bias = as_bias(edges, dtype)
    return GatheredPiece(shape=batch.shape, queries_per_tile=length, bias=bias)


def window_pieces(pattern: AttentionPattern, batch: Batch, dtype: torch.dtype) -> list[Piece]:
    """One window piece per distinct dilation, each for the heads that have it."""
    queries_per_tile, side_tiles, _ = _window_tile(pattern.window)
    dilations = sorted(set(pattern.dilation_per_head))
    pieces: list[Piece] = []
    for dilation in dilations:
        heads = [head for head, own in enumerate(pattern.dilation_per_head) if own == dilation]
        piece = WindowPiece(
            shape=batch.shape,
            dilation=dilation,
            heads=heads if len(dilations) > 1 else None,
            queries_per_tile=queries_per_tile,
            side_tiles=side_tiles,
        )
        piece.bias = piece.window_bias(batch, pattern, dtype)
        pieces.append(piece)
    return pieces


def _window_tile(window: int) -> tuple[int, int, int]:
    """Queries per tile, tiles of keys on each side, keys per tile. Measured: W / 4 wastes little in large tiles."""
    queries_per_tile = 16
    while queries_per_tile < 128 and queries_per_tile * 8 <= window:
        queries_per_tile *= 2
    side_tiles = ceil_div(window // 2, queries_per_tile)
    return queries_per_tile, side_tiles, (2 * side_tiles + 1) * queries_per_tile


def global_piece(pattern: AttentionPattern, batch: Batch, dtype: torch.dtype) -> GatheredPiece:
    """Every query reads the global tokens of its row (of its document, when packed; of its past, when causal)."""
    assert batch.global_index is not None and batch.is_global_slot is not None
    edges = batch.is_global_slot[:, None]  # (B, 1, G)
    if batch.document is not None:
        edges = edges & (batch.document[:, :, None] == batch.document.gather(1, batch.global_index)[:, None])
    if pattern.is_causal:
        query = torch.arange(batch.shape[1], device=edges.device)[:, None]
        edges = edges & (batch.global_index[:, None] <= query)
    return GatheredPiece(
        shape=batch.shape,
        queries_per_tile=batch.shape[1],
        bias=as_bias(edges, dtype).expand(-1, batch.shape[1], -1)[:, None],
        key_index=_flat(batch.global_index, batch),
    )


@dataclass(kw_only=True)
class RandomSlots:
    """Documents laid out block by block, each from a block boundary, so that random blocks are whole blocks.

    Args:
        token: (B, M) the token in each slot (any token in unused slots).
        is_used: (B, M).
        slot_of_token: (B, N) the slot of each token; M for tokens that have none.
        block: (B, M / S) the index of each block in its document.
        num_blocks: (B, M / S) the number of blocks of that document; 0 for unused blocks.
    """

    token: Tensor
    is_used: Tensor
    slot_of_token: Tensor
    block: Tensor
    num_blocks: Tensor


def lay_out_documents(batch: Batch, block_size: int, shortest_random_document: int) -> RandomSlots:
    """Gives every document its slots. Packed documents too short for random blocks get none, which bounds M."""
    batch_size, length = batch.shape
    total_blocks = ceil_div(length, block_size)
    num_blocks = batch.num_blocks(block_size)
    slot = batch.position
    has_slot = torch.ones_like(slot, dtype=torch.bool) if batch.real is None else batch.real
    if batch.document is not None:
        # A document with random blocks wastes less than one block, and there are at most this many such documents.
        total_blocks = length // block_size + length // shortest_random_document + 1
        has_slot = has_slot & (batch.document_length >= shortest_random_document)
        starts_document = has_slot & (batch.position == 0)
        first_block = torch.where(starts_document, num_blocks, 0).cumsum(1) - num_blocks
        slot = slot + first_block * block_size
    total_slots = total_blocks * block_size
    slot_of_token = torch.where(has_slot, slot, total_slots)
    index = torch.arange(length, device=slot.device).expand(batch_size, length)
    empty = torch.zeros(batch_size, total_slots + 1, dtype=torch.long, device=slot.device)
    token = empty.scatter(1, slot_of_token, index)[:, :total_slots]
    is_used = empty.scatter(1, slot_of_token, 1)[:, :total_slots].bool()
    first_token, block_is_used = token[:, ::block_size], is_used[:, ::block_size]
    return RandomSlots(
        token=token,
        is_used=is_used,
        slot_of_token=slot_of_token,
        block=batch.position.gather(1, first_token) // block_size,
        num_blocks=torch.where(block_is_used, num_blocks.gather(1, first_token), 0),
    )


def random_keys(pattern: AttentionPattern, batch: Batch, slots: RandomSlots) -> tuple[Tensor, Tensor]:
    """The R * S keys that each block of a document reads, and which of them are edges; each (B, M / S, R * S)."""
    size = pattern.block_size
    drawn = pattern.draw(slots.block, slots.num_blocks)  # (B, M / S, R)
    # Blocks count within their document; the document's first block stands `block` places before this one.
    here = torch.arange(drawn.shape[1], device=drawn.device)
    place = (drawn + (here - slots.block)[..., None]).clamp(min=0)
    key_slot = (place[..., None] * size + torch.arange(size, device=drawn.device)).flatten(1)  # (B, M * R)
    key = slots.token.gather(1, key_slot)
    is_drawn = (drawn >= 0)[..., None].expand(-1, -1, -1, size).flatten(1)
    edges = is_drawn & slots.is_used.gather(1, key_slot) & batch.ordinary_keys.gather(1, key)
    return key.unflatten(1, (drawn.shape[1], -1)), edges.unflatten(1, (drawn.shape[1], -1))


def random_piece(
    pattern: AttentionPattern, batch: Batch, slots: RandomSlots, dtype: torch.dtype, *, with_globals: bool
) -> GatheredPiece:
    """Each block of a document reads the blocks drawn for it, and the global tokens if they ride along."""
    size = pattern.block_size
    batch_size, total_slots = slots.token.shape
    key, edges = random_keys(pattern, batch, slots)
    total_blocks = key.shape[1]
    if with_globals:
        assert batch.global_index is not None and batch.is_global_slot is not None
        key = torch.cat([key, batch.global_index[:, None].expand(-1, total_blocks, -1)], dim=-1)
        edges = torch.cat([edges, batch.is_global_slot[:, None].expand(-1, total_blocks, -1)], dim=-1)
    edges = edges[:, :, None]  # (B, M / S, 1, K)
    if pattern.is_causal:
        edges = edges & (key[:, :, None] <= slots.token.view(batch_size, total_blocks, size, 1))
    bias = as_bias(edges, dtype).flatten(0, 1)[:, None].expand(-1, -1, size, -1)
    key_index = _flat(key, batch).flatten(0, 1)
    has_gaps = torch.compiler.is_compiling() or batch.shape[1] != total_slots
    if batch.real is None and batch.document is None and not has_gaps:
        # Slots are the tokens as they stand: nothing to gather. (A compiled graph does not ask: it serves all lengths.)
        return GatheredPiece(shape=batch.shape, queries_per_tile=size, bias=bias, key_index=key_index)
    no_slot = slots.slot_of_token == total_slots
    offset = torch.arange(batch_size, device=key.device)[:, None] * total_slots
    return GatheredPiece(
        shape=batch.shape,
        queries_per_tile=size,
        bias=bias,
        query_index=_flat(slots.token, batch).flatten(),
        unused_slots=~slots.is_used.view(-1, size),
        slot_of_token=torch.where(no_slot, batch_size * total_slots, slots.slot_of_token + offset).flatten(),
        key_index=key_index,
    )


def as_bias(edges: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where there is an edge, else the lowest number: finite, so that a row without any edge makes no NaN."""
    return torch.zeros(edges.shape, dtype=dtype, device=edges.device).masked_fill_(~edges, torch.finfo(dtype).min)


def _flat(index: Tensor, batch: Batch) -> Tensor:
    """(B, ...) indices within a row to indices among all B * N tokens."""
    rows = torch.arange(batch.shape[0], device=index.device) * batch.shape[1]
    return index + rows.view(-1, *[1] * (index.dim() - 1))
