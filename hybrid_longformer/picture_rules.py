"""Pictures' rules: why each query may see each key, for a row of tokens that is to be drawn.

Letters: N tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

import torch
from torch import Tensor

from .batch import Batch, describe_batch
from .pattern import AttentionPattern, Predicate, global_tokens

# Predicates are asked about every pair of tokens, so a longer picture would take gigabytes.
LONGEST_PICTURE = 4096


class Rule(IntEnum):
    """Why query i may see key j. Where several rules allow an edge, the one with the highest number names it."""

    NONE = 0
    RANDOM = 1
    WINDOW = 2
    GLOBAL = 3


def edge_rules(pattern: AttentionPattern, batch: Batch, *, head: int = 0, row: int = 0) -> Tensor:
    """The (N, N) `Rule` by which query i (down) of one head sees key j (across), for one row of a batch."""
    edges = _graph(batch.edges(pattern), batch, head=head, row=row)
    without_globals = replace(batch, is_global=None, global_index=None, flat_global_index=None, is_global_slot=None)
    window_edges = without_globals.edges(replace(pattern, num_random_blocks=0))
    # Edges are the union of three rules, so those that neither of the other two explains are random.
    rules = edges * int(Rule.RANDOM)
    rules[_graph(window_edges, batch, head=head, row=row)] = int(Rule.WINDOW)
    if batch.is_global is not None:
        rules[edges & _graph(global_tokens(batch.is_global), batch, head=head, row=row)] = int(Rule.GLOBAL)
    return rules


def one_row_batch(
    *,
    length: int,
    global_positions: Sequence[int] = (),
    padding: int = 0,
    document_ids: Sequence[int] | Tensor | None = None,
) -> Batch:
    """A batch of one row of `length` tokens, whose last `padding` are padding."""
    if not 1 <= length <= LONGEST_PICTURE:
        raise ValueError(
            f"length={length} must be between 1 and {LONGEST_PICTURE} to be drawn: "
            "a shorter document shows the same pattern"
        )
    if not 0 <= padding < length:
        raise ValueError(f"padding={padding} must be between 0 and {length - 1}: length={length} counts it too")
    global_mask = torch.zeros(1, length, dtype=torch.bool)
    for position in global_positions:
        if not 0 <= position < length - padding:
            raise ValueError(
                f"global position {position} is no real token: choose from 0 to {length - padding - 1}, "
                f"as length={length} and padding={padding}"
            )
        global_mask[0, position] = True
    documents = None if document_ids is None else torch.as_tensor(document_ids).reshape(1, -1)
    if documents is not None and documents.shape[1] != length:
        raise ValueError(f"document_ids has {documents.shape[1]} values but length={length}: give one id per token")
    return describe_batch(
        batch_size=1,
        length=length,
        device=torch.device("cpu"),
        padding_mask=(torch.arange(length) < length - padding)[None] if padding else None,
        global_mask=global_mask,
        document_ids=documents,
    )


def describe_pattern(pattern: AttentionPattern, *, head: int = 0) -> str:
    """One head's pattern in a few words."""
    causal = ", causal" if pattern.is_causal else ""
    seed = f", seed {pattern.seed}" if pattern.num_random_blocks else ""
    return f"{describe_window(pattern, head=head)}, {describe_random(pattern)}{seed}{causal}"


def describe_window(pattern: AttentionPattern, *, head: int) -> str:
    """One head's window in a few words."""
    return f"window {pattern.window}, dilation {pattern.dilation_per_head[head]}"


def describe_random(pattern: AttentionPattern) -> str:
    """The random blocks in a few words."""
    count = pattern.num_random_blocks
    return f"{count} random block{'s' * (count != 1)} of {pattern.block_size}" if count else "no random blocks"


def _graph(allows: Predicate, batch: Batch, *, head: int, row: int) -> Tensor:
    """The (N, N) edges of one head in one row: `dense_mask` would work out all of them."""
    length = batch.shape[1]
    token = torch.arange(length, device=batch.device)
    b, h = (torch.full((1, 1), index, device=token.device) for index in (row, head))
    return allows(b, h, token[:, None], token[None, :]).expand(length, length)
