"""Rows that are read whole: their bias says what the edges say, and layers share what they can of it."""

import pytest
import torch
from hypothesis import given, settings

from hybrid_longformer import AttentionPattern, HybridSparseAttention
from hybrid_longformer.backend import plan_edges
from hybrid_longformer.batch import describe_batch
from hybrid_longformer.pieces import RowChunk, WholePiece
from hybrid_longformer.plan import LayerPlan, _PieceBuilder, build_plans

from .cases import CPU, Case, cases


@settings(max_examples=200)
@given(cases(max_length=150))
def test_bias_is_that_of_the_edges(case: Case) -> None:
    """Whatever the length: pieces are chosen by it, but right for any."""
    pattern, batch = case.module().pattern, case.batch()
    draws_blocks = pattern.num_random_blocks > 0 and case.length >= pattern.shortest_random_document
    piece = _PieceBuilder([pattern], batch, torch.float32)._whole_piece(pattern, draws_blocks=draws_blocks)
    edges = plan_edges(LayerPlan(pattern=pattern, batch=batch, pieces=[piece]))
    bias = whole_bias(piece)
    bias = torch.zeros(1, 1, 1, 1) if bias is None else bias
    assert set(bias.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}
    # The rows of padding and of global tokens are written over.
    is_kept = torch.ones(batch.shape, dtype=torch.bool) if batch.real is None else batch.real
    is_kept = (is_kept if batch.is_global is None else is_kept & ~batch.is_global)[:, None, :, None]
    assert torch.equal(*torch.broadcast_tensors((bias == 0) & is_kept, edges & is_kept))


@pytest.mark.as_shipped
@pytest.mark.parametrize(("length", "is_whole"), [(512, True), (1025, True), (1026, False)])
def test_rows_are_read_whole_up_to_some_length(length: int, is_whole: bool) -> None:
    """A window of 512 with its tile's 128 queries, 3 blocks of 64, a global token, and what tiles take beyond them."""
    module = HybridSparseAttention(hidden_size=32, num_heads=2)
    oracle = HybridSparseAttention(hidden_size=32, num_heads=2, attn_implementation="eager")
    oracle.load_state_dict(module.state_dict())
    x, global_mask = torch.randn(1, length, 32), torch.zeros(1, length, dtype=torch.long)
    global_mask[0, 0] = 1
    batch = describe_batch(batch_size=1, length=length, device=CPU, global_mask=global_mask)
    pieces = build_plans([module.pattern], batch, dtype=x.dtype)[0].pieces
    assert [isinstance(piece, WholePiece) for piece in pieces] == ([True] if is_whole else [False, False])
    assert (module(x, global_mask) - oracle(x, global_mask)).abs().max() <= 1e-5


def whole_bias(piece: WholePiece) -> torch.Tensor | None:
    return piece.chunk_bias(RowChunk(0, piece.shape[0]))


def two_layers(length: int, **facts) -> list[WholePiece]:
    """Windows reach two blocks of 16: the first of 7 blocks has 4 beyond its window, and gets all of them."""
    patterns = [
        AttentionPattern(window=64, dilation_per_head=(1,), num_random_blocks=4, block_size=16, seed=seed)
        for seed in range(2)
    ]
    batch = describe_batch(batch_size=2, length=length, device=CPU, **facts)
    plans = build_plans(patterns, batch, dtype=torch.float32)
    assert all(len(plan.pieces) == 1 and isinstance(plan.pieces[0], WholePiece) for plan in plans)
    return [plan.pieces[0] for plan in plans]


def facts_of(kind: str, length: int) -> dict[str, torch.Tensor]:
    marks = torch.ones(2, length, dtype=torch.long)
    marks[:, 0] = 0
    return {"plain": {}, "global": {"global_mask": 1 - marks}, "padded": {"padding_mask": marks}}.get(
        kind, {"document_ids": marks}
    )


@pytest.mark.parametrize("kind", ["plain", "global", "padded", "packed"])
def test_layers_share_rows_where_the_seed_does_not_matter(kind: str) -> None:
    first, second = two_layers(7 * 16, **facts_of(kind, 7 * 16))
    assert first is second


@pytest.mark.parametrize("kind", ["plain", "global", "padded", "packed"])
def test_layers_that_draw_other_blocks_share_the_rest(kind: str) -> None:
    first, second = two_layers(8 * 16, **facts_of(kind, 8 * 16))
    assert not torch.equal(whole_bias(first), whole_bias(second))
    # Of N x N elements there is one tensor for all layers.
    large = {id(x) for piece in (first, second) for x in vars(piece).values() if getattr(x, "ndim", 0) == 4}
    assert len(large) == 1
