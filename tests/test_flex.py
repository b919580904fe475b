"""The FlexAttention backend: its block mask holds every edge and little else, and compiled it equals the oracle."""

import pytest
import torch
from hypothesis import given, settings

from hybrid_longformer import HybridSparseAttention, backend
from hybrid_longformer.pattern import dense_mask
from tests.cases import CPU, Case, cases


@settings(max_examples=60)
@given(cases(max_length=700))
def test_block_mask_holds_exactly_the_edges(case: Case) -> None:
    pattern, batch = case.module().pattern, case.batch()
    mask = backend.flex_block_mask(pattern, batch)
    slots = batch.num_global_slots
    keys = case.length + slots
    indices = [torch.arange(size) for size in (case.batch_size, case.num_heads, case.length, keys)]
    b, h, i, j = (index.view([-1 if axis == a else 1 for a in range(4)]) for axis, index in enumerate(indices))
    allowed = mask.mask_mod(b, h, i, j).expand(case.batch_size, case.num_heads, case.length, keys)
    in_blocks = mask.to_dense().bool().repeat_interleave(128, -1).repeat_interleave(128, -2)
    in_blocks = in_blocks[..., : case.length, :keys]
    ordinary_rows = torch.ones(case.batch_size, case.length, dtype=torch.bool)
    if batch.is_global is not None:
        ordinary_rows = ~batch.is_global
    assert not (allowed & ~in_blocks & ordinary_rows[:, None, :, None]).any()
    # The keys in the row and the global slots behind it together are each edge once.
    edges = dense_mask(
        batch.edges(pattern), batch_size=case.batch_size, num_heads=case.num_heads, length=case.length, device=CPU
    ).expand(-1, case.num_heads, -1, -1)
    folded = allowed[..., : case.length].int()
    if slots:
        index = batch.global_index[:, None, None].expand(-1, case.num_heads, case.length, -1)
        folded = folded.scatter_add(-1, index, allowed[..., case.length :].int())
    assert torch.equal(folded, edges.int())


def test_flex_says_what_it_cannot_do() -> None:
    module = HybridSparseAttention(hidden_size=32, num_heads=2, dropout=0.1, attn_implementation="flex_attention")
    with pytest.raises(ValueError, match=r"no attention dropout and 0\.1 is asked for"):
        module.train()(torch.randn(1, 10, 32))
    with pytest.raises(ValueError, match="no backward pass on CPUs"):
        module.eval()(torch.randn(1, 10, 32))


@pytest.mark.slow
@pytest.mark.parametrize("dilation", [1, [1, 3]])
def test_compiled_flex_equals_the_oracle(dilation) -> None:
    options = {"attention_window": 64, "attention_dilation": dilation, "num_random_blocks": 2, "block_size": 32}
    flex = HybridSparseAttention(hidden_size=64, num_heads=2, attn_implementation="flex_attention", **options)
    oracle = HybridSparseAttention(hidden_size=64, num_heads=2, attn_implementation="eager", **options)
    oracle.load_state_dict(flex.state_dict())
    x = torch.randn(2, 700, 64)
    padding_mask = torch.ones(2, 700, dtype=torch.long)
    padding_mask[1, :201] = 0
    global_mask = torch.zeros_like(padding_mask)
    global_mask[0, [0, 5, 600]] = 1
    with torch.no_grad():
        assert (flex(x, global_mask, padding_mask) - oracle(x, global_mask, padding_mask)).abs().max() <= 1e-5
