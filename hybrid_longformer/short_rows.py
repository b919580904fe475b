"""Short rows: the bias of rows that are read whole.

Made block by block where that can be, which is faster than testing every pair of tokens.

Letters: B batch, N tokens, H heads, R random blocks, S block size, M blocks of a row, L layers that differ in their
seeds alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .batch import Batch
from .pattern import AttentionPattern, ceil_div
from .pieces import RowChunk, WholePiece, as_bias, heads_by_dilation, some_heads
from .random_blocks import RandomSlots, drawn_blocks


def whole_piece(
    pattern: AttentionPattern, batch: Batch, dtype: torch.dtype, *, sees_far_blocks: bool = False
) -> WholePiece:
    """Every query reads its whole row.

    Args:
        sees_far_blocks: whether all blocks beyond the window are seen, or none of them.
    """
    length = batch.shape[1]
    bias = None
    if length > pattern.window // 2 + 1 or max(pattern.dilation_per_head) > 1:
        bias = _window_bias(pattern, batch, dtype, sees_far_blocks=sees_far_blocks)
        bias = bias if batch.is_global is None else _unhide_globals(bias, batch)
    if batch.real is not None:
        bias = _hide(bias, as_bias(batch.real, dtype)[:, None, None].expand(-1, -1, length, -1))
    if batch.document is not None:
        own, other = batch.document[:, None, :, None], batch.document[:, None, None]
        bias = _hide(bias, as_bias(own == other, dtype))
    if pattern.is_causal:
        lowest = torch.full((1, 1, length, length), torch.finfo(dtype).min, dtype=dtype, device=batch.device)
        bias = _hide(bias, lowest.triu(1))
    return WholePiece(shape=batch.shape, bias=bias)


def _hide(bias: Tensor | None, other: Tensor) -> Tensor:
    """What both let be seen, in the memory of the first if it has room."""
    if bias is None:
        return other
    is_expanded = bias.stride(2) == 0
    return torch.minimum(bias, other, out=None if is_expanded or bias.shape[0] < other.shape[0] else bias)


def _window_bias(pattern: AttentionPattern, batch: Batch, dtype: torch.dtype, *, sees_far_blocks: bool) -> Tensor:
    """(1, H or 1, N, N): the blocks that are hidden as a whole, then those that hold the edge of a window, which are
    alike along each diagonal."""
    length, device = batch.shape[1], batch.device
    size, num_blocks = pattern.block_size, ceil_div(batch.shape[1], pattern.block_size)
    num_heads = 1 if len(set(pattern.dilation_per_head)) == 1 else pattern.num_heads
    if sees_far_blocks:
        blocks = torch.zeros(num_heads, num_blocks, size, num_blocks, size, dtype=dtype, device=device)
    else:
        block = torch.arange(num_blocks, device=device)
        is_near = as_bias((block[:, None] - block).abs() <= pattern.near_blocks, dtype)
        blocks = is_near[:, None, :, None].expand(num_heads, -1, size, -1, size).contiguous()
    for dilation, heads in heads_by_dilation(pattern.dilation_per_head):
        own_blocks = some_heads(blocks, heads, dim=0)
        for distance in _cut_distances(pattern):
            # All of these blocks are seen so far, so their bias is that of the window: copying is faster than filling.
            tile = as_bias(_seen_by_window(pattern, dilation, distance, device), dtype)
            own_blocks.diagonal(distance, 1, 3).movedim(-1, 1).copy_(tile)
            own_blocks.diagonal(-distance, 1, 3).movedim(-1, 1).copy_(tile.T.contiguous())
    return blocks.flatten(3).flatten(1, 2)[None, :, :length, :length]


def _cut_distances(pattern: AttentionPattern) -> range:
    """The numbers of blocks between query and key at which windows may see some of a block's keys and not others.

    Not cut short for short rows, where such diagonals are empty: a compiled graph would hold for one length only.
    """
    is_dilated = max(pattern.dilation_per_head) > 1
    first = 0 if is_dilated else (pattern.window // 2 + 1) // pattern.block_size
    return range(first, pattern.near_blocks + 1)


def _seen_by_window(pattern: AttentionPattern, dilation: int, distance: int, device: torch.device) -> Tensor:
    """(S, S) which keys so many blocks after their queries lie within the window, and on its tokens if dilated."""
    token = torch.arange(pattern.block_size, device=device)
    offset = token - token[:, None]
    if distance == 0:
        offset = offset.abs()  # the one block that reaches to both sides of its queries
    # Not by tril, which wakes up all threads for so small a tile.
    is_within = offset <= dilation * (pattern.window // 2) - distance * pattern.block_size
    return is_within if dilation == 1 else is_within & ((offset + distance * pattern.block_size) % dilation == 0)


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


def blocks_of_keys(batch: Batch, slots: RandomSlots, dtype: torch.dtype) -> Tensor:
    """(B or 1, M, N) 1 for the keys of each block. None is global: those are seen already."""
    every_block = torch.arange(slots.block.shape[1], device=batch.device)[:, None]
    keys = (slots.block_of_token[:, None] == every_block) & batch.ordinary_keys[:, None]
    are_rows_alike = batch.rows_are_documents and batch.is_global is None
    return (keys[:1] if are_rows_alike else keys).to(dtype)


def with_random_blocks(
    piece: WholePiece, pattern: AttentionPattern, seeds: Sequence[int], slots: RandomSlots, key_blocks: Tensor
) -> list[WholePiece]:
    """The pieces of L layers, each of which sees the blocks drawn for it besides, which the bias hides."""
    rows, num_blocks, _ = key_blocks.shape
    drawn = drawn_blocks(pattern, seeds, slots)[:rows, ..., None]
    is_drawn = (drawn == torch.arange(num_blocks, device=drawn.device)).any(3).to(key_blocks.dtype)  # (B or 1, L, M, M)
    is_drawn = F.pad(is_drawn, (0, 0, 0, 1))  # for the tokens that are in no block
    own_block = slots.block_of_token[:rows, None, :, None].expand(-1, len(seeds), -1, num_blocks)
    return [replace(piece, drawn=own, key_blocks=key_blocks) for own in is_drawn.gather(2, own_block).unbind(1)]


def with_bias_made(piece: WholePiece) -> WholePiece:
    """The same piece with a bias that is made already."""
    return WholePiece(shape=piece.shape, bias=piece.chunk_bias(RowChunk(0, piece.shape[0])))
