"""The global-context branch against its formula, document by document."""

import torch
from hypothesis import given, settings

from hybrid_longformer.attention import global_context_mix
from tests.cases import Case, cases


@settings(max_examples=30)
@given(cases(max_length=80))
def test_global_context_follows_its_formula(case: Case) -> None:
    batch, masks = case.batch(), case.masks()
    shape = (case.batch_size, case.length, case.num_heads, case.head_size)
    h, q, k = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    expected = torch.zeros(shape, dtype=torch.float64)
    for b in range(case.batch_size):
        ids = [0] * case.length if masks["document_ids"] is None else masks["document_ids"][b].tolist()
        for document in set(ids):
            tokens = [i for i in range(case.length) if ids[i] == document and (batch.real is None or batch.real[b, i])]
            if tokens:
                alpha = torch.softmax((q[b, tokens] * k[b, tokens]).sum(-1), dim=0)[..., None]
                expected[b, tokens] = alpha * h[b, tokens] + (1 - alpha) * h[b, tokens].mean(0)
    assert torch.allclose(global_context_mix(h, q, k, batch), expected, atol=1e-10)
