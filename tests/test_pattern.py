"""Patterns against their definitions, written out token by token, and the random graph's promises."""

import pytest
import torch
from hypothesis import given, settings

from hybrid_longformer import AttentionPattern, HybridLongformerConfig
from hybrid_longformer.pattern import dense_mask, draw_random_blocks
from tests.cases import CPU, Case, cases


def edges_by_definition(case: Case, pattern: AttentionPattern) -> torch.Tensor:
    """DESIGN's rules in plain Python, one edge at a time, except that the drawn blocks are taken as given."""
    masks = case.masks()
    edges = torch.zeros(case.batch_size, case.num_heads, case.length, case.length, dtype=torch.bool)
    for b in range(case.batch_size):
        real = [True] * case.length if masks["padding_mask"] is None else masks["padding_mask"][b].bool().tolist()
        is_global = [False] * case.length if masks["global_mask"] is None else masks["global_mask"][b].bool().tolist()
        ids = [0] * case.length if masks["document_ids"] is None else masks["document_ids"][b].tolist()
        place, size = {}, {}
        for i in range(case.length):
            if real[i]:
                place[i] = size.get(ids[i], 0)
                size[ids[i]] = place[i] + 1
        drawn = {
            i: pattern.draw(
                torch.tensor(place[i] // case.block_size), torch.tensor(-(-size[ids[i]] // case.block_size))
            ).tolist()
            for i in place
            if pattern.num_random_blocks
        }
        for h in range(case.num_heads):
            d = pattern.dilation_per_head[h]
            for i in place:
                for j in place:
                    in_window = abs(i - j) <= d * case.window // 2 and (i - j) % d == 0
                    in_random = place[j] // case.block_size in drawn.get(i, [])
                    allowed = in_window or in_random or is_global[i] or is_global[j]
                    edges[b, h, i, j] = allowed and ids[i] == ids[j] and (j <= i or not case.is_causal)
    return edges


@settings(max_examples=25)
@given(cases(max_length=70))
def test_edges_follow_the_definition(case: Case) -> None:
    pattern = case.module().pattern
    drawn = dense_mask(
        case.batch().edges(pattern),
        batch_size=case.batch_size,
        num_heads=case.num_heads,
        length=case.length,
        device=CPU,
    ).expand(-1, case.num_heads, -1, -1)
    assert torch.equal(drawn, edges_by_definition(case, pattern))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 2, 5, 6, 7, 9, 40])
def test_random_blocks_are_distinct_real_and_beyond_the_window(num_blocks: int, is_causal: bool) -> None:
    near = 2
    query = torch.arange(num_blocks)
    drawn = draw_random_blocks(
        query,
        torch.tensor(num_blocks),
        num_random_blocks=3,
        near_blocks=near,
        seeds=[5],
        is_causal=is_causal,
    ).squeeze(1)
    for block, row in enumerate(drawn.tolist()):
        chosen = [key for key in row if key >= 0]
        far = [key for key in range(num_blocks) if abs(key - block) > near and (key < block or not is_causal)]
        assert len(set(chosen)) == len(chosen) == min(3, len(far))
        assert set(chosen) <= set(far)


def test_random_blocks_reach_the_whole_document_evenly() -> None:
    query = torch.tensor([50])
    drawn = draw_random_blocks(query, torch.tensor(100), num_random_blocks=3, near_blocks=4, seeds=range(4000))
    counts = drawn.flatten().bincount(minlength=100).float()
    far = torch.cat([counts[:46], counts[55:]])
    assert counts[46:55].sum() == 0
    # 12,000 draws over 91 blocks: 132 each, with a standard deviation of 11.
    assert far.min() > 132 - 5 * 11.5 and far.max() < 132 + 5 * 11.5


def test_random_graph_differs_per_layer_and_seed_but_not_per_call() -> None:
    blocks, count = torch.arange(64), torch.tensor(64)
    layers = HybridLongformerConfig(num_hidden_layers=4).attention_patterns()
    graphs = [pattern.draw(blocks, count) for pattern in layers]
    other_seed = HybridLongformerConfig(num_hidden_layers=4, random_seed=1).attention_patterns()[0].draw(blocks, count)
    assert torch.equal(graphs[0], layers[0].draw(blocks, count))
    for other in [*graphs[1:], other_seed]:
        assert (graphs[0] != other).float().mean() > 0.8


def test_random_graph_is_pinned() -> None:
    """A checkpoint's graph must be the same in every release: these numbers may never change."""
    pattern = AttentionPattern(window=8, dilation_per_head=(1,), num_random_blocks=3, block_size=4, seed=7)
    drawn = pattern.draw(torch.tensor([0, 9, 31]), torch.tensor(32))
    assert drawn.tolist() == [[12, 15, 31], [18, 6, 26], [7, 26, 29]]
