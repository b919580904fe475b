"""Backends: three ways to compute softmax attention over one plan, chosen by `attn_implementation` at every call.

- `eager`: the dense N x N oracle, the one place where attention maps come from;
- `sdpa`: the plan's pieces through fused kernels, O(N), the default on every device;
- `flex_attention`: the same edges as a FlexAttention BlockMask, for GPUs (on CPUs it has a forward pass only).

None of them keeps any state, so no call changes what the next one does.

Letters: B batch, H heads, N tokens, D head size, G global tokens, R random blocks, S block size.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .attend import OtherRows, attend, put_rows
from .batch import Batch
from .kernels import score_scale
from .pattern import AttentionPattern, ceil_div, dense_mask
from .plain import no_autocast
from .plan import LayerPlan
from .random_blocks import lay_out_documents, random_keys

IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")


def check_implementation(name: str) -> str:
    """Refuses names that no backend has."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"attn_implementation={name!r} is not known: choose one of {', '.join(IMPLEMENTATIONS)}")
    return name


def plan_edges(plan: LayerPlan) -> Tensor:
    """The dense (B, H or 1, N, N) graph of a plan."""
    batch_size, length = plan.batch.shape
    return dense_mask(
        plan.batch.edges(plan.pattern),
        batch_size=batch_size,
        num_heads=plan.pattern.num_heads,
        length=length,
        device=plan.batch.device,
    )


def dense_probabilities(query: Tensor, key: Tensor, edges: Tensor) -> Tensor:
    """(B, H, N, N) attention of (B, N, H, D) queries; rows without an edge are zero, the others sum to 1."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    with no_autocast(query):
        scores = torch.einsum("bihd,bjhd->bhij", query.to(dtype), key.to(dtype)) * score_scale(query)
        scores = scores.masked_fill(~edges, torch.finfo(dtype).min)
        return torch.softmax(scores, dim=-1) * edges


def dense_context(probabilities: Tensor, value: Tensor, dropout: float) -> Tensor:
    """(B, N, H, D) values mixed by (B, H, N, N) probabilities, some of which are dropped."""
    dropped = F.dropout(probabilities, dropout, training=dropout > 0)
    with no_autocast(value):
        return torch.einsum("bhij,bjhd->bihd", dropped, value.to(dropped.dtype)).to(value.dtype)


def sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: LayerPlan, other_rows: OtherRows | None, dropout: float
) -> Tensor:
    return attend(query, key, value, plan.pieces, real=plan.batch.real, other_rows=other_rows, dropout=dropout)


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: LayerPlan, other_rows: OtherRows | None, dropout: float
) -> Tensor:
    """The global tokens' keys stand behind the others, so that every query reads them in the same few blocks."""
    if dropout:
        raise ValueError(
            f"flex_attention has no attention dropout and {dropout} is asked for: "
            "set the attention dropout to 0 or use attn_implementation='sdpa'"
        )
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if query.device.type == "cpu" and needs_gradient:
        raise ValueError("flex_attention has no backward pass on CPUs: train with attn_implementation='sdpa'")
    batch = plan.batch
    if batch.global_index is not None:
        index = batch.global_index[..., None, None].expand(-1, -1, *key.shape[2:])
        key, value = (torch.cat([x, x.gather(1, index)], dim=1) for x in (key, value))
    attention = _flex_function()
    out = attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        block_mask=flex_block_mask(plan.pattern, batch),
    ).transpose(1, 2)
    out = out if batch.real is None else out.masked_fill(~batch.real[..., None, None], 0.0)
    return out if other_rows is None else put_rows(out, other_rows)


# The fast ones; `eager` is made of the dense functions above, since it needs its map.
BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, LayerPlan, OtherRows | None, float], Tensor]] = {
    "sdpa": sdpa_attention,
    "flex_attention": flex_attention,
}


def _flex_function():
    from torch.nn.attention import flex_attention as flex

    # Inside a compiled model it must be the plain function; on its own it is only fast (and only sparse) compiled.
    return flex.flex_attention if torch.compiler.is_compiling() else _compiled_flex()


@lru_cache(maxsize=1)
def _compiled_flex():
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention, dynamic=False)


FLEX_BLOCK = 128


def flex_block_mask(pattern: AttentionPattern, batch: Batch):
    """The BlockMask of one layer, laid out from the plan's own tables and never by testing N x N edges."""
    from torch.nn.attention.flex_attention import BlockMask

    length, num_global = batch.shape[1], batch.num_global_slots
    blocks = flex_block_map(pattern, batch)  # (B, query blocks, key blocks)
    count = blocks.sum(-1, dtype=torch.int32)[:, None]
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()[:, None]
    return BlockMask.from_kv_blocks(
        count,
        order,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=flex_mask(pattern, batch),
        seq_lengths=(length, length + num_global),
    )


def flex_mask(pattern: AttentionPattern, batch: Batch):
    """The predicate over queries 0..N-1 and keys 0..N-1 followed by the G global slots."""
    length = batch.shape[1]
    ordinary = batch.ordinary_keys
    edges = batch.edges(pattern)
    global_index = batch.global_index
    is_global_slot = None if global_index is None else batch.used_global_slots

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        in_row = j < length
        row_key = torch.where(in_row, j, 0)
        if global_index is None or is_global_slot is None:
            return edges(b, h, i, row_key) & ordinary[b, row_key]
        slot = torch.where(in_row, 0, j - length)
        key = torch.where(in_row, row_key, global_index[b, slot])
        is_read_here = torch.where(in_row, ordinary[b, row_key], is_global_slot[b, slot])
        return edges(b, h, i, key) & is_read_here

    return allows


def flex_block_map(pattern: AttentionPattern, batch: Batch) -> Tensor:
    """(B, query blocks, key blocks) bool: the blocks that hold any edge of a non-global query."""
    batch_size, length = batch.shape
    device = batch.device
    query_blocks = row_blocks = ceil_div(length, FLEX_BLOCK)
    key_blocks = ceil_div(length + batch.num_global_slots, FLEX_BLOCK)
    query, key = torch.arange(query_blocks, device=device)[:, None], torch.arange(key_blocks, device=device)
    reach = ceil_div(pattern.window // 2 * max(pattern.dilation_per_head), FLEX_BLOCK)
    first_global_block = length // FLEX_BLOCK if batch.num_global_slots else row_blocks
    near = ((query - key).abs() <= reach) & (key < row_blocks)
    blocks = (near | (key >= first_global_block)).expand(batch_size, -1, -1)
    if pattern.num_random_blocks and length >= pattern.shortest_random_document:
        slots = lay_out_documents(batch, pattern.block_size, pattern.shortest_random_document)
        keys = random_keys(pattern, [pattern.seed], batch, slots)
        key_tokens, is_edge = (x.squeeze(1) for x in keys)  # (B, random blocks, R * S)
        tokens = slots.token.unflatten(1, (-1, pattern.block_size))
        reads = _touches(tokens, slots.is_used.view_as(tokens), query_blocks)
        read = _touches(key_tokens, is_edge, key_blocks)
        blocks = blocks | (torch.matmul(reads.transpose(1, 2), read) > 0)
    return blocks


def _touches(tokens: Tensor, counts: Tensor, num_blocks: int) -> Tensor:
    """(B, rows, num_blocks) 1.0 where a row's tokens (B, rows, any) that count lie in that flex block."""
    block = torch.where(counts, tokens // FLEX_BLOCK, num_blocks)
    marks = torch.zeros(*tokens.shape[:2], num_blocks + 1, device=tokens.device)
    return marks.scatter(2, block, 1.0)[..., :num_blocks]
