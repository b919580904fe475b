"""Plans: one batch's edges laid out in tiles, so that a backend can compute them block by block in O(N).

A layer's plan is a list of pieces (pieces.py) with no edge in common: windows, random blocks and global tokens; or, for
short inputs, one piece that reads everything. A bias is 0 where there is an edge and the dtype's lowest number where
there is none.

Letters: B batch, N tokens, H heads, D head size, W window, G global tokens, R random blocks, S block size,
T tiles, Q queries per tile, K keys per tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .batch import Batch, flat_index
from .pattern import AttentionPattern, ceil_div, dense_mask
from .pieces import GatheredPiece, Piece, WholePiece, WindowPiece, some_heads


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
        window_keys = pattern.window + queries_per_tile(pattern.window)
        if not is_exporting and length <= window_keys + random_keys + num_global:
            # Where the seed does not matter, one piece serves all layers.
            seed = pattern.seed if pattern.seed_matters(ceil_div(length, pattern.block_size)) else None
            edges = (pattern.window, pattern.dilation_per_head, random_keys, pattern.block_size, pattern.is_causal)
            return self._once((*edges, seed), lambda: [whole_piece(pattern, self.batch, self.dtype)])
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


def whole_piece(pattern: AttentionPattern, batch: Batch, dtype: torch.dtype) -> WholePiece:
    """Every query reads its whole row."""
    batch_size, length = batch.shape
    is_full = length <= pattern.window // 2 + 1 and max(pattern.dilation_per_head) == 1
    if batch.real is None and batch.document is None:
        is_whole = is_full and not pattern.is_causal
        return WholePiece(shape=batch.shape, bias=None if is_whole else plain_bias(pattern, batch, dtype))
    edges = dense_mask(
        batch.edges(pattern),
        batch_size=batch_size,
        num_heads=pattern.num_heads,
        length=length,
        device=batch.device,
    )
    return WholePiece(shape=batch.shape, bias=as_bias(edges, dtype))


def plain_bias(pattern: AttentionPattern, batch: Batch, dtype: torch.dtype) -> Tensor:
    """(B or 1, H or 1, N, N) of rows that are one document each, without padding.

    Made block by block, which is faster than testing every pair of tokens: the blocks that are hidden as a whole, then
    those that hold the edge of a window, which are alike along each diagonal.
    """
    length, device, lowest = batch.shape[1], batch.device, torch.finfo(dtype).min
    num_heads = 1 if len(set(pattern.dilation_per_head)) == 1 else pattern.num_heads
    blocks = _block_bias(pattern, ceil_div(length, pattern.block_size), dtype, device, num_heads=num_heads)
    for dilation, heads in heads_by_dilation(pattern.dilation_per_head):
        own_blocks = some_heads(blocks, heads, dim=0)
        for distance in _cut_distances(pattern):
            hidden = _hidden_by_window(pattern, dilation, distance, device)
            own_blocks.diagonal(distance, 1, 3).masked_fill_(hidden[..., None], lowest)
            own_blocks.diagonal(-distance, 1, 3).masked_fill_(hidden.T[..., None], lowest)
    bias = blocks.flatten(3).flatten(1, 2)[None, :, :length, :length]
    if batch.is_global is not None:
        bias = _unhide_globals(bias, batch)
    if pattern.is_causal:
        bias = torch.minimum(bias, bias.new_full((length, length), lowest).triu(1))
    return bias


def _block_bias(
    pattern: AttentionPattern, num_blocks: int, dtype: torch.dtype, device: torch.device, *, num_heads: int
) -> Tensor:
    """(H or 1, blocks, S, blocks, S) with the blocks hidden that are neither near nor drawn."""
    size = pattern.block_size
    if pattern.reaches_all_blocks(num_blocks):
        return torch.zeros(num_heads, num_blocks, size, num_blocks, size, dtype=dtype, device=device)
    block = torch.arange(num_blocks, device=device)
    is_seen = (block[:, None] - block).abs() <= pattern.near_blocks
    if pattern.num_random_blocks:
        drawn = pattern.draw(block, block.new_full((1,), num_blocks))  # (blocks, R)
        is_seen = is_seen | (drawn[..., None] == block).any(1)
    return as_bias(is_seen, dtype)[:, None, :, None].expand(num_heads, -1, size, -1, size).contiguous()


def _cut_distances(pattern: AttentionPattern) -> range:
    """The numbers of blocks between query and key at which windows may see some of a block's keys and not others.

    Not cut short for short rows, where such diagonals are empty: a compiled graph would hold for one length only.
    """
    is_dilated = max(pattern.dilation_per_head) > 1
    first = 0 if is_dilated else (pattern.window // 2 + 1) // pattern.block_size
    return range(first, pattern.near_blocks + 1)


def _hidden_by_window(pattern: AttentionPattern, dilation: int, distance: int, device: torch.device) -> Tensor:
    """(S, S) which keys so many blocks after their queries lie beyond the window, or between its tokens if dilated."""
    token = torch.arange(pattern.block_size, device=device)
    offset = token - token[:, None]
    # Not by triu, which wakes up all threads for so small a tile.
    is_beyond = offset > dilation * (pattern.window // 2) - distance * pattern.block_size
    return is_beyond if dilation == 1 else is_beyond | ((offset + distance * pattern.block_size) % dilation != 0)


def _unhide_globals(bias: Tensor, batch: Batch) -> Tensor:
    """Every token sees the global ones of its row. The bias of a single row is changed in place: memory is mapped anew
    for another one, which takes longer than the change."""
    if batch.shape[0] == 1 and batch.is_global_slot is None:
        assert batch.global_index is not None
        return bias.index_fill_(-1, batch.global_index[0], 0.0)
    # Times 0 there is an edge, times 1 it stays as it is: several times faster than choosing by bools.
    assert batch.is_global is not None
    is_ordinary = (~batch.is_global).to(bias.dtype)[:, None, None]
    return bias.mul_(is_ordinary) if batch.shape[0] == 1 else bias * is_ordinary


def window_pieces(pattern: AttentionPattern, batch: Batch, dtype: torch.dtype) -> list[Piece]:
    """One window piece per dilation and run of heads that have it. No window reads global tokens: others do."""
    device = batch.device
    size, before = queries_per_tile(pattern.window), pattern.window // 2
    after = 0 if pattern.is_causal else before
    query, key = torch.arange(size, device=device)[:, None], torch.arange(before + size + after, device=device)
    is_plain = batch.real is None and batch.is_global is None
    pieces: list[Piece] = []
    for dilation, heads in heads_by_dilation(pattern.dilation_per_head):
        piece = WindowPiece(
            shape=batch.shape,
            dilation=dilation,
            heads=heads,
            queries_per_tile=size,
            before=before,
            after=after,
            band=as_bias((key >= query) & (key - query <= before + after), dtype),
            key_bias=None if is_plain else as_bias(batch.ordinary_keys, dtype),
            document=batch.document,
        )
        pieces.append(gathered_window(piece, dtype) if torch.compiler.is_exporting() else piece)
    return pieces


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


def queries_per_tile(window: int) -> int:
    """About W / 4, measured for training; forward passes halve it (see `WindowPiece.halved`)."""
    size = 16
    while size * 4 < window and size < 128:
        size *= 2
    return size


def gathered_window(piece: WindowPiece, dtype: torch.dtype) -> GatheredPiece:
    """The same edges with keys read by index, for exported graphs: they serve all lengths, so can't cut rows up."""
    piece = piece.halved()
    (batch_size, length), device = piece.shape, piece.band.device
    num_tiles, size, num_keys = piece.tiles_per_class, piece.queries_per_tile, piece.band.shape[1]
    residue = torch.arange(piece.dilation, device=device)[:, None, None]
    start = torch.arange(num_tiles, device=device)[:, None] * size
    query = residue + piece.dilation * (start + torch.arange(size, device=device))  # (d, tiles, Q)
    key = residue + piece.dilation * (start - piece.before + torch.arange(num_keys, device=device))  # (d, tiles, K)
    rows = torch.arange(batch_size, device=device)[:, None, None, None] * length
    query_index = torch.where(query < length, query + rows, batch_size * length)
    key_index = key.clamp(min=0, max=length - 1) + rows
    bias = torch.minimum(piece.band, as_bias((key >= 0) & (key < length), dtype)[:, :, None])  # (d, tiles, Q, K)
    bias = bias.expand(batch_size, -1, -1, -1, -1)
    if piece.key_bias is not None:
        bias = torch.minimum(bias, piece.key_bias.flatten()[key_index][..., None, :])
    if piece.document is not None:
        document = piece.document.flatten()
        own = document[query_index.clamp(max=batch_size * length - 1)]
        bias = torch.minimum(bias, as_bias(own[..., None] == document[key_index][..., None, :], dtype))
    return GatheredPiece(
        shape=piece.shape,
        queries_per_tile=size,
        bias=bias.flatten(0, 2)[:, None],
        key_index=key_index.flatten(0, 2),
        query_index=query_index.flatten(),
        heads=piece.heads,
    )


def global_piece(pattern: AttentionPattern, batch: Batch, dtype: torch.dtype) -> GatheredPiece:
    """Every query reads the global tokens of its row (of its document, when packed; of its past, when causal)."""
    assert batch.global_index is not None
    edges = batch.used_global_slots[:, None]  # (B, 1, G)
    if batch.document is not None:
        edges = edges & (batch.document[:, :, None] == batch.document.gather(1, batch.global_index)[:, None])
    if pattern.is_causal:
        query = torch.arange(batch.shape[1], device=edges.device)[:, None]
        edges = edges & (batch.global_index[:, None] <= query)
    return GatheredPiece(
        shape=batch.shape,
        queries_per_tile=batch.shape[1],
        bias=as_bias(edges, dtype).expand(-1, batch.shape[1], -1)[:, None],
        key_index=flat_index(batch.global_index, batch.shape[1]),
    )


@dataclass(kw_only=True)
class RandomSlots:
    """Documents laid out block by block, each from a block boundary, so that random blocks are whole blocks.

    Args:
        token: (B, M) the token in each slot (any token in unused slots).
        is_used: (B, M).
        block: (B, M / S) the index of each block in its document.
        num_blocks: (B, M / S) the number of blocks of that document; 0 for unused blocks.
    """

    token: Tensor
    is_used: Tensor
    block: Tensor
    num_blocks: Tensor


def lay_out_documents(batch: Batch, block_size: int, shortest_random_document: int) -> RandomSlots:
    """Gives every document its slots. Packed documents too short for random blocks get none, which bounds M."""
    batch_size, length = batch.shape
    total_blocks = ceil_div(length, block_size)
    if batch.real is None and batch.document is None:
        slot = torch.arange(total_blocks * block_size, device=batch.device).expand(batch_size, -1)
        block = torch.arange(total_blocks, device=slot.device).expand(batch_size, -1)
        return RandomSlots(
            token=slot.clamp(max=length - 1),
            is_used=slot < length,
            block=block,
            num_blocks=torch.full_like(block, total_blocks),
        )
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
        assert batch.global_index is not None
        key = torch.cat([key, batch.global_index[:, None].expand(-1, total_blocks, -1)], dim=-1)
        edges = torch.cat([edges, batch.used_global_slots[:, None].expand(-1, total_blocks, -1)], dim=-1)
    edges = edges[:, :, None]  # (B, M / S, 1, K)
    if pattern.is_causal:
        edges = edges & (key[:, :, None] <= slots.token.view(batch_size, total_blocks, size, 1))
    bias = as_bias(edges, dtype).flatten(0, 1)[:, None].expand(-1, -1, size, -1)
    query_index = None
    # Often slots are the tokens as they stand: nothing to gather. (A compiled graph serves all lengths: it can't ask.)
    has_gaps = torch.compiler.is_compiling() or batch.shape[1] != total_slots
    if batch.real is not None or batch.document is not None or has_gaps:
        query_index = torch.where(
            slots.is_used, flat_index(slots.token, batch.shape[1]), batch_size * batch.shape[1]
        ).flatten()
    return GatheredPiece(
        shape=batch.shape,
        queries_per_tile=size,
        bias=bias,
        key_index=flat_index(key, batch.shape[1]).flatten(0, 1),
        query_index=query_index,
    )


def as_bias(edges: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where there is an edge, else the lowest number: finite, so that a row without any edge makes no NaN."""
    lowest = torch.finfo(dtype).min
    if dtype == torch.get_default_dtype():
        return torch.where(edges, 0.0, lowest)
    return torch.zeros(edges.shape, dtype=dtype, device=edges.device).masked_fill_(~edges, lowest)
