"""Attention dropout: RoBERTa's meaning, exact gradients, honest randomness."""

import pytest
import torch
from hypothesis import given, settings

from hybrid_longformer import HybridSparseAttention
from hybrid_longformer import attend as attend_module
from hybrid_longformer.attend import attend
from hybrid_longformer.kernels import draw_keep_mask
from hybrid_longformer.plan import build_plans
from tests.cases import Case, cases


def test_keep_mask_keeps_the_right_share_everywhere() -> None:
    keep = torch.full((8, 4, 128, 640), 7, dtype=torch.uint8)
    draw_keep_mask(keep, 0.1)
    assert set(keep.unique().tolist()) == {0, 1}
    # Each of the four decisions in a 64-bit word by itself: a stuck sign bit would show in one of them.
    lanes = keep.flatten().view(-1, 4).float().mean(0)
    assert (lanes - 0.9).abs().max() < 0.002
    pairs = keep.flatten().view(-1, 2)
    assert ((pairs == 0).all(1).float().mean() - 0.01).abs() < 0.001


def draw_the_same_mask(keep: torch.Tensor, dropout: float) -> None:
    """The same at every call, so that dropout becomes a function to differentiate."""
    keep.copy_(torch.rand(keep.shape, generator=torch.Generator().manual_seed(1)) >= dropout)


@settings(max_examples=8)
@given(cases(max_length=60))
def test_dropout_gradients_are_exact(case: Case) -> None:
    case.head_size = 4
    pattern = case.module(hidden_size=case.num_heads * 4).pattern
    batch = case.batch()
    plan = build_plans([pattern], batch, dtype=torch.float64)[0]
    q, k, v = torch.randn(3, case.batch_size, case.length, case.num_heads, 4, dtype=torch.float64).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend_module, "draw_keep_mask", draw_the_same_mask)

        def function(q, k, v):
            return attend(q, k, v, plan.pieces, real=batch.real, dropout=0.3)

        assert torch.autograd.gradcheck(function, (q, k, v), fast_mode=True)


def test_dropout_drops_probabilities_after_the_softmax() -> None:
    """Its mean is the output without dropout, its variance that of independent drops: p / (1 - p) sum (a v)^2."""
    torch.manual_seed(0)
    module = HybridSparseAttention(
        hidden_size=16, num_heads=1, attention_window=16, num_random_blocks=2, block_size=8, dropout=0.2
    )
    x = torch.randn(1, 150, 16)
    global_mask = torch.zeros(1, 150, dtype=torch.long)
    global_mask[0, 3] = 1
    core = module.attention
    module.output = torch.nn.Identity()
    with torch.no_grad():
        exact, attention_map = module.eval()(x, global_mask, return_attention_map=True)
        rows = x.expand(100, -1, -1), global_mask.expand(100, -1)
        draws = torch.cat([module.train()(*rows) for _ in range(30)])[:, None]
        expected = 0.25 * torch.einsum("bhij,bjd->bid", attention_map**2, core.value(x) ** 2)
        expected_global = 0.25 * torch.einsum("bhij,bjd->bid", attention_map**2, core.value_global(x) ** 2)
        expected = torch.where(global_mask[..., None] == 1, expected_global, expected)
    error = (draws.mean(0) - exact) / (expected / 3000).sqrt()
    assert error.abs().max() < 5.5
    assert ((draws.var(0) / expected) - 1).abs().max() < 0.25


def test_no_dropout_in_evaluation() -> None:
    module = HybridSparseAttention(hidden_size=16, num_heads=1, attention_window=16, dropout=0.5).eval()
    x = torch.randn(1, 50, 16)
    assert torch.equal(module(x), module(x))
    assert not torch.equal(module.train()(x), module(x))
