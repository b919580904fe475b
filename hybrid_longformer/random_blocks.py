"""Random blocks: documents laid out block by block, and the keys that each block reads.

Letters: B batch, N tokens, R random blocks, S block size, M slots of a row, L layers that differ in their seeds alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Batch
from .pattern import AttentionPattern, ceil_div


@dataclass(kw_only=True)
class RandomSlots:
    """Documents laid out block by block, each from a block boundary, so that random blocks are whole blocks.

    Args:
        block_of_token: (B, N) the block of each token among all of its row, M / S for tokens that have no slot.
        token: (B, M) the token in each slot (any token in unused slots).
        is_used: (B, M).
        block: (B, M / S) the index of each block in its document.
        num_blocks: (B, M / S) the number of blocks of that document; 0 for unused blocks.
    """

    block_of_token: Tensor
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
            block_of_token=batch.position // block_size,
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
        block_of_token=slot_of_token // block_size,
        token=token,
        is_used=is_used,
        block=batch.position.gather(1, first_token) // block_size,
        num_blocks=torch.where(block_is_used, num_blocks.gather(1, first_token), 0),
    )


def drawn_blocks(pattern: AttentionPattern, seeds: Sequence[int], slots: RandomSlots) -> Tensor:
    """(B, L, M / S, R) the blocks that each block reads, counted as `block_of_token` does; -1 for none."""
    drawn = pattern.draw_for(seeds, slots.block, slots.num_blocks).movedim(-2, 1)
    # Blocks are drawn by their place in the document, whose first block stands `block` places before this one.
    here = torch.arange(slots.block.shape[1], device=drawn.device)
    return torch.where(drawn < 0, -1, drawn + (here - slots.block)[:, None, :, None])


def random_keys(
    pattern: AttentionPattern, seeds: Sequence[int], batch: Batch, slots: RandomSlots
) -> tuple[Tensor, Tensor]:
    """The R * S keys that each block of a document reads, and which of them are edges; each (B, L, M / S, R * S)."""
    size = pattern.block_size
    drawn = drawn_blocks(pattern, seeds, slots)
    shape = (*drawn.shape[1:3], -1)
    key_slot = (drawn.clamp(min=0)[..., None] * size + torch.arange(size, device=drawn.device)).flatten(1)
    key = slots.token.gather(1, key_slot)  # (B, L * M * R)
    is_drawn = (drawn >= 0)[..., None].expand(-1, -1, -1, -1, size).flatten(1)
    edges = is_drawn & slots.is_used.gather(1, key_slot) & batch.ordinary_keys.gather(1, key)
    return key.unflatten(1, shape), edges.unflatten(1, shape)
