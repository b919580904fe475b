"""The explicit kernels by themselves against autograd, as CPUs run them and as other devices do."""

import math

import pytest
import torch
from torch import Tensor

from hybrid_longformer import HybridSparseAttention, kernels
from hybrid_longformer.kernels import Tiles, draw_keep_mask, explicit_backward, explicit_forward

TILES, QUERIES, KEYS, HEADS, HEAD_SIZE = 3, 5, 11, 4, 8
BIAS_SHAPES = {"none": None, "shared": (1, 1), "per tile": (TILES, 1), "per head": (1, HEADS), "full": (TILES, HEADS)}


@pytest.fixture(params=["cpu", "elsewhere"])
def device_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Elsewhere all heads are computed at once, in the dtype of the inputs."""
    if request.param == "elsewhere":
        monkeypatch.setattr(kernels, "_is_on_cpu", lambda x: False)
    return request.param


def make_tiles(bias_shape: tuple[int, int] | None, dtype: torch.dtype) -> Tiles:
    torch.manual_seed(0)
    query, key, value = (torch.randn(TILES, n, HEADS, HEAD_SIZE).to(dtype) for n in (QUERIES, KEYS, KEYS))
    bias = None
    if bias_shape is not None:
        hidden = torch.rand(*bias_shape, QUERIES, KEYS) < 0.3
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    return Tiles(query, key, value, bias)


def plain_attention(tiles: Tiles, keep: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """What the kernels compute, written out."""
    scores = torch.einsum("tqhd,tkhd->thqk", tiles.query, tiles.key) / math.sqrt(HEAD_SIZE)
    scores = scores if tiles.bias is None else scores + tiles.bias
    weights = torch.softmax(scores, -1)
    weights = weights if keep is None else weights * keep / (1.0 - dropout)
    return torch.einsum("thqk,tkhd->tqhd", weights, tiles.value), scores.logsumexp(-1).transpose(1, 2)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("bias_shape", BIAS_SHAPES.values(), ids=BIAS_SHAPES)
def test_explicit_kernels_equal_autograd(bias_shape, dropout: float, device_kind: str) -> None:
    tiles = make_tiles(bias_shape, torch.float64)
    keep = torch.empty(TILES, HEADS, QUERIES, KEYS, dtype=torch.uint8) if dropout else None
    if keep is not None:
        draw_keep_mask(keep, dropout)
        assert 0 < keep.double().mean() < 1
    leaves = [x.clone().requires_grad_() for x in tiles[:3]]
    exact_out, exact_lse = plain_attention(Tiles(*leaves, tiles.bias), keep, dropout)
    grad_out = torch.randn_like(exact_out)
    exact_grads = torch.autograd.grad(exact_out, leaves, grad_out)
    out, lse = explicit_forward(tiles, keep, dropout)
    grads = explicit_backward(tiles, out, lse, grad_out, keep, dropout)
    for ours, exact in zip((out, lse, *grads), (exact_out, exact_lse, *exact_grads), strict=True):
        torch.testing.assert_close(ours, exact.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_explicit_kernels_in_half_precision(dtype: torch.dtype, device_kind: str) -> None:
    tiles = make_tiles((TILES, 1), dtype)
    exact = Tiles(*(x.double().requires_grad_() for x in tiles[:3]), tiles.bias.double())
    exact_out, exact_lse = plain_attention(exact, None, 0.0)
    grad_out = torch.randn(exact_out.shape).to(dtype)
    exact_grads = torch.autograd.grad(exact_out, exact[:3], grad_out.double())
    out, lse = explicit_forward(tiles)
    grads = explicit_backward(tiles, out, lse, grad_out)
    assert out.dtype == dtype and lse.dtype == torch.float32
    for ours, truth in zip((out, lse, *grads), (exact_out, exact_lse, *exact_grads), strict=True):
        assert (ours.double() - truth).abs().max() <= 8 * torch.finfo(dtype).eps * max(1.0, truth.abs().max().item())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_second_derivatives_are_refused_and_not_wrong(dropout: float) -> None:
    module = HybridSparseAttention(hidden_size=16, num_heads=2, attention_window=8, dropout=dropout)
    x = torch.randn(1, 40, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
