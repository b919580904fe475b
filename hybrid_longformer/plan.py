"""Plans: one batch's edges laid out in tiles, so that a backend can compute them block by block in O(N).

A layer's plan is a list of pieces (pieces.py) with no edge in common: windows, random blocks and global tokens; or, for
short inputs, one piece that reads everything. A bias is 0 where there is an edge and the dtype's lowest number where
there is none.

Letters: B batch, N tokens, H heads, D head size, W window, G global tokens, R random blocks, S block size,
T tiles, Q queries per tile, K keys per tile, L layers that differ in their seeds alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .batch import Batch, flat_index
from .pattern import AttentionPattern, ceil_div
from .pieces import GatheredPiece, Piece, WholePiece, WindowPiece, as_bias, heads_by_dilation
from .random_blocks import RandomSlots, lay_out_documents, random_keys
from .short_rows import blocks_of_keys, whole_piece, with_bias_made, with_random_blocks

# What calls, copies and merging take where there are tiles, as so many more keys per query. On CPUs, with windows of 64
# to 512, reading rows whole took less time up to 140 to 350 tokens beyond the keys of tiles (eight rows: 60 to 210).
OVERHEAD_OF_TILES_IN_KEYS = 192


@dataclass(kw_only=True)
class LayerPlan:
    """One layer's attention for one batch: the pattern, the batch's facts, and (for tiled backends) the pieces."""

    pattern: AttentionPattern
    batch: Batch
    pieces: list[Piece]


def build_plans(
    patterns: Sequence[AttentionPattern], batch: Batch, *, dtype: torch.dtype, with_pieces: bool = True
) -> list[LayerPlan]:
    """The plan of every layer. Layers share whatever their patterns have in common; random blocks are each one's own,
    but drawn for all of them at once.

    Args:
        dtype: of the queries and keys, so that a bias is converted once and not in every layer.
        with_pieces: False for backends that need no tiles.
    """
    if not with_pieces:
        return [LayerPlan(pattern=pattern, batch=batch, pieces=[]) for pattern in patterns]
    builder = _PieceBuilder(patterns, batch, dtype)
    return [LayerPlan(pattern=pattern, batch=batch, pieces=builder.pieces(pattern)) for pattern in patterns]


class _PieceBuilder:
    """Builds pieces and remembers what several layers share."""

    def __init__(self, patterns: Sequence[AttentionPattern], batch: Batch, dtype: torch.dtype):
        self.patterns = patterns
        self.batch = batch
        self.dtype = dtype
        self.shared: dict[tuple, Any] = {}

    def pieces(self, pattern: AttentionPattern) -> list[Piece]:
        length, num_global = self.batch.shape[1], self.batch.num_global_slots
        # An exported graph serves all lengths, so it may not choose by this one's.
        is_exporting = torch.compiler.is_exporting()
        draws_blocks = pattern.num_random_blocks > 0 and (is_exporting or length >= pattern.shortest_random_document)
        num_random_keys = pattern.num_random_blocks * pattern.block_size if draws_blocks else 0
        # Reading every key is no more work than tiles are: still O(N), and one piece instead of three.
        num_keys_of_tiles = pattern.window + queries_per_tile(pattern.window) + num_random_keys + num_global
        if not is_exporting and length <= num_keys_of_tiles + OVERHEAD_OF_TILES_IN_KEYS:
            return [self._whole_piece(pattern, draws_blocks=draws_blocks)]
        windows = self._once(
            (pattern.window, pattern.dilation_per_head, pattern.is_causal),
            lambda: window_pieces(pattern, self.batch, self.dtype),
        )
        # Few global tokens ride along with the random blocks, which saves a pass over all queries.
        globals_ride = draws_blocks and self.batch.document is None and num_global <= pattern.block_size
        rest: list[Piece] = []
        if draws_blocks:
            with_globals = globals_ride and num_global > 0
            rest.append(
                self._of_all_seeds(
                    pattern,
                    lambda seeds: random_pieces(
                        pattern, seeds, self.batch, self._slots(pattern), self.dtype, with_globals=with_globals
                    ),
                )
            )
        if num_global and not globals_ride:
            rest += self._once(("global", pattern.is_causal), lambda: [global_piece(pattern, self.batch, self.dtype)])
        return windows + rest

    def _whole_piece(self, pattern: AttentionPattern, *, draws_blocks: bool) -> WholePiece:
        """One piece for all layers, or one that shares its bias where every layer draws other blocks."""
        batch, size = self.batch, pattern.block_size
        num_blocks = ceil_div(batch.shape[1], size)
        sees_far_blocks = draws_blocks and batch.rows_are_documents and pattern.reaches_all_blocks(num_blocks)
        edges = (pattern.window, pattern.dilation_per_head, pattern.is_causal)
        piece = self._once(
            ("whole", *edges, size if sees_far_blocks else None),
            lambda: whole_piece(pattern, batch, self.dtype, sees_far_blocks=sees_far_blocks),
        )
        if not draws_blocks or sees_far_blocks:
            return piece
        slots = self._slots(pattern)
        key_blocks = self._once(
            ("keys", size, pattern.shortest_random_document), lambda: blocks_of_keys(batch, slots, self.dtype)
        )
        if pattern.seed_matters(num_blocks):
            return self._of_all_seeds(
                pattern, lambda seeds: with_random_blocks(piece, pattern, seeds, slots, key_blocks)
            )
        return self._once(
            ("whole", *edges, size, pattern.num_random_blocks),
            lambda: with_bias_made(with_random_blocks(piece, pattern, [pattern.seed], slots, key_blocks)[0]),
        )

    def _of_all_seeds(self, pattern: AttentionPattern, build: Callable[[list[int]], Sequence[Piece]]) -> Any:
        """A layer's own piece among those of all layers that differ in their seeds alone, built together."""
        family = _seedless(pattern)

        def build_all() -> dict[int, Piece]:
            seeds = list(dict.fromkeys(other.seed for other in self.patterns if _seedless(other) == family))
            return dict(zip(seeds, build(seeds), strict=True))

        return self._once(("seeds", family), build_all)[pattern.seed]

    def _once(self, key, build) -> Any:
        if key not in self.shared:
            self.shared[key] = build()
        return self.shared[key]

    def _slots(self, pattern: AttentionPattern) -> RandomSlots:
        key = (pattern.block_size, pattern.shortest_random_document)
        return self._once(key, lambda: lay_out_documents(self.batch, *key))


def _seedless(pattern: AttentionPattern) -> AttentionPattern:
    return replace(pattern, seed=0)


def window_pieces(pattern: AttentionPattern, batch: Batch, dtype: torch.dtype) -> list[Piece]:
    """One window piece per dilation and run of heads that have it. No window reads global tokens: others do."""
    device = batch.device
    size, before = queries_per_tile(pattern.window), pattern.window // 2
    after = 0 if pattern.is_causal else before
    query, key = torch.arange(size, device=device)[:, None], torch.arange(before + size + after, device=device)
    sees_all_keys = batch.real is None and batch.is_global is None
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
            key_bias=None if sees_all_keys else as_bias(batch.ordinary_keys, dtype),
            document=batch.document,
        )
        pieces.append(gathered_window(piece, dtype) if torch.compiler.is_exporting() else piece)
    return pieces


def queries_per_tile(window: int) -> int:
    """About W / 4, measured for training; forward passes halve it (see `WindowPiece.halved`)."""
    size = 32
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


def random_pieces(
    pattern: AttentionPattern,
    seeds: Sequence[int],
    batch: Batch,
    slots: RandomSlots,
    dtype: torch.dtype,
    *,
    with_globals: bool,
) -> list[GatheredPiece]:
    """A piece for each of L layers: every block of a document reads the blocks drawn for it, and the global tokens if
    they ride along."""
    size = pattern.block_size
    batch_size, total_slots = slots.token.shape
    key, edges = random_keys(pattern, seeds, batch, slots)  # (B, L, M / S, K)
    if with_globals:
        assert batch.global_index is not None
        shape = *key.shape[:3], batch.num_global_slots
        key = torch.cat([key, batch.global_index[:, None, None].expand(shape)], dim=-1)
        edges = torch.cat([edges, batch.used_global_slots[:, None, None].expand(shape)], dim=-1)
    edges = edges.unsqueeze(-2)  # (B, L, M / S, 1, K)
    if pattern.is_causal:
        edges = edges & (key.unsqueeze(-2) <= slots.token.view(batch_size, 1, -1, size, 1))
    query_index = None
    # Often slots are the tokens as they stand: nothing to gather. (A compiled graph serves all lengths: it can't ask.)
    has_gaps = torch.compiler.is_compiling() or batch.shape[1] != total_slots
    if batch.real is not None or batch.document is not None or has_gaps:
        query_index = torch.where(
            slots.is_used, flat_index(slots.token, batch.shape[1]), batch_size * batch.shape[1]
        ).flatten()
    biases, key_indices = as_bias(edges, dtype).unbind(1), flat_index(key, batch.shape[1]).unbind(1)
    return [
        GatheredPiece(
            shape=batch.shape,
            queries_per_tile=size,
            bias=bias.flatten(0, 1)[:, None].expand(-1, -1, size, -1),
            key_index=key_index.flatten(0, 1),
            query_index=query_index,
        )
        for bias, key_index in zip(biases, key_indices, strict=True)
    ]
