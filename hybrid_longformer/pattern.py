"""Patterns: who may see whom.

A predicate says, for index tensors (b, h, i, j) that broadcast against each other, whether query token i of row b may
see key token j in head h. Predicates compose with `both` and `either`; the dense oracle, the FlexAttention mask and the
pictures are all drawn from them.

Letters used everywhere: B batch, H heads, N tokens, D head size, E hidden size, W window, G global tokens,
R random blocks, S block size, L layers that differ in their seeds alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def ceil_div(value: int, divisor: int) -> int:
    """Whole divisors that cover a value. Not by the -(-a // b) trick: in an ONNX graph division rounds towards zero."""
    return (value + divisor - 1) // divisor


def both(*predicates: Predicate) -> Predicate:
    """An edge exists where every predicate allows it."""
    return lambda b, h, i, j: reduce(torch.logical_and, (allows(b, h, i, j) for allows in predicates))


def either(*predicates: Predicate) -> Predicate:
    """An edge exists where at least one predicate allows it; it still counts once."""
    return lambda b, h, i, j: reduce(torch.logical_or, (allows(b, h, i, j) for allows in predicates))


def local(window: int) -> Predicate:
    """Token i sees j when |i - j| <= window / 2 (two-sided, as in Longformer)."""
    return lambda b, h, i, j: (i - j).abs() <= window // 2


def dilated(window: int, dilation_per_head: Tensor) -> Predicate:
    """As `local`, reaching d times as far and keeping every d-th token, with d = dilation_per_head[h]."""

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        dilation = dilation_per_head[h]
        return ((i - j).abs() <= dilation * (window // 2)) & ((i - j) % dilation == 0)

    return allows


def global_tokens(is_global: Tensor) -> Predicate:
    """A global token sees every token and is seen by every token. `is_global` is (B, N)."""
    return lambda b, h, i, j: is_global[b, i] | is_global[b, j]


def random_blocks(block_of_token: Tensor, drawn_blocks: Tensor) -> Predicate:
    """Token i sees the blocks drawn for it: `block_of_token` is (B, N), `drawn_blocks` (B, N, R) with -1 for none."""

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        key_block = block_of_token[b, j]
        return reduce(torch.logical_or, (drawn_blocks[b, i, r] == key_block for r in range(drawn_blocks.shape[-1])))

    return allows


def causal() -> Predicate:
    """No token sees a later one."""
    return lambda b, h, i, j: j <= i


def same_document(document: Tensor) -> Predicate:
    """Tokens of packed rows see their own document only. `document` is (B, N)."""
    return lambda b, h, i, j: document[b, i] == document[b, j]


def real_tokens(real: Tensor) -> Predicate:
    """Padding neither sees nor is seen. `real` is (B, N)."""
    return lambda b, h, i, j: real[b, i] & real[b, j]


@dataclass(frozen=True, kw_only=True)
class AttentionPattern:
    """What one layer's attention graph looks like, before any batch is seen.

    Args:
        window: W, two-sided and even: token i sees |i - j| <= W / 2.
        dilation_per_head: one dilation for every head.
        num_random_blocks: R key blocks drawn for each query block; 0 for none.
        block_size: S, tokens per random block.
        seed: of the random graph; give every layer its own.
        is_causal: cut the whole pattern at j <= i.
    """

    window: int
    dilation_per_head: tuple[int, ...]
    num_random_blocks: int = 0
    block_size: int = 64
    seed: int = 0
    is_causal: bool = False

    @property
    def num_heads(self) -> int:
        return len(self.dilation_per_head)

    @property
    def near_blocks(self) -> int:
        """Blocks on either side that the widest window may touch; random blocks are drawn beyond them only."""
        return ceil_div(self.window // 2 * max(self.dilation_per_head), self.block_size)

    @property
    def shortest_random_document(self) -> int:
        """The fewest tokens for which any random block can be drawn."""
        return (self.near_blocks + 1) * self.block_size + 1

    def reaches_all_blocks(self, num_blocks: int) -> bool:
        """Whether every block of a document of so many is near or drawn, seen from any other."""
        return num_blocks <= self.near_blocks + 1 + self.num_random_blocks

    def seed_matters(self, num_blocks: int) -> bool:
        """Whether there are blocks to choose from in a document of so many."""
        return self.num_random_blocks > 0 and not self.reaches_all_blocks(num_blocks)

    def window_predicate(self, device: torch.device) -> Predicate:
        if max(self.dilation_per_head) == 1:
            return local(self.window)
        return dilated(self.window, torch.tensor(self.dilation_per_head, device=device))

    def draw(self, query_block: Tensor, num_blocks: Tensor) -> Tensor:
        """The key blocks of each query block of a document of `num_blocks` blocks, (..., R); -1 where there is none."""
        return self.draw_for([self.seed], query_block, num_blocks).squeeze(-2)

    def draw_for(self, seeds: Sequence[int], query_block: Tensor, num_blocks: Tensor) -> Tensor:
        """What layers draw that differ in their seeds alone, (..., L, R)."""
        return draw_random_blocks(
            query_block,
            num_blocks,
            num_random_blocks=self.num_random_blocks,
            near_blocks=self.near_blocks,
            seeds=seeds,
            is_causal=self.is_causal,
        )


def draw_random_blocks(
    query_block: Tensor,
    num_blocks: Tensor,
    *,
    num_random_blocks: int,
    near_blocks: int,
    seeds: Sequence[int],
    is_causal: bool = False,
) -> Tensor:
    """Draws distinct key blocks beyond the window, uniformly, by Floyd's sampling on a hash.

    A hash rather than a generator: the graph is then the same in training and evaluation, on every device and in every
    library version, and depends on nothing but the seed, the block and the document's own number of blocks.

    Args:
        query_block: (...) index of each query block in its document.
        num_blocks: (...) number of blocks of that document.
        seeds: one for each of L graphs.

    Returns:
        (..., L, R) distinct block indices in random order, -1 where fewer than R blocks lie beyond the window.
    """
    first_near = (query_block - near_blocks).clamp(min=0)
    first_far = torch.minimum(query_block + (near_blocks + 1), num_blocks)
    candidates = first_near if is_causal else first_near + num_blocks - first_far
    # The r-th pick is one of the first candidates, up to the r-th of the last R; if that is taken already, the last.
    from_end = torch.arange(num_random_blocks, 0, -1, device=query_block.device)
    last = (candidates.unsqueeze(-1) - from_end).clamp(min=-1).unsqueeze(-2)  # (..., 1, R)
    # As every checkpoint has it: the factor of 2 has no further reason and may never change.
    salts = [2 * seed * num_random_blocks + r for seed in seeds for r in range(num_random_blocks)]
    hashes = _hash(query_block.unsqueeze(-1), salts).unflatten(-1, (len(seeds), -1))  # (..., L, R)
    picks = hashes % (last + 1).clamp(min=1)
    picks = torch.where(last < 0, -1, picks)
    drawn = picks[..., :1]
    for r in range(1, num_random_blocks):
        pick = picks[..., r : r + 1]
        is_taken = (drawn == pick).any(-1, keepdim=True)
        drawn = torch.cat([drawn, torch.where(is_taken, last[..., r : r + 1], pick)], dim=-1)
    # The candidates are the blocks before the window and, past a gap, those after it.
    first_near, first_far = first_near[..., None, None], first_far[..., None, None]
    return torch.where(drawn >= first_near, drawn + (first_far - first_near), drawn)


def _hash(values: Tensor, salts: Sequence[int]) -> Tensor:
    """A 32-bit integer hash of (..., 1) values for every salt, in int64 arithmetic that cannot overflow; divisions
    instead of shifts, for ONNX's sake."""
    offset = torch.tensor([(salt * 0x85EBCA77 + 0x165667B1) % 2**32 for salt in salts], device=values.device)
    mixed = (values * 0x9E3779B1 + offset) % 2**32
    for _ in range(2):
        mixed = ((mixed ^ (mixed // 2**16)) * 0x45D9F3B) % 2**32
    return mixed ^ (mixed // 2**16)


def dense_mask(allows: Predicate, *, batch_size: int, num_heads: int, length: int, device: torch.device) -> Tensor:
    """The whole (B, H, N, N) graph of a predicate, with H = 1 if all heads see the same; for maps and short inputs."""
    indices = [torch.arange(size, device=device) for size in (batch_size, num_heads, length, length)]
    b, h, i, j = (index.view([-1 if axis == a else 1 for a in range(4)]) for axis, index in enumerate(indices))
    return allows(b, h, i, j).expand(batch_size, -1, length, length)
