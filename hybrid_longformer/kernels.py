"""Kernels: softmax attention over tiles, forward and backward, fused where torch has a fused kernel.

Each kernel yields an output and the log-sum-exp of its scores, and backward takes any log-sum-exp, so that several
pieces of one softmax can be computed apart (see attend.py).

Letters: H heads, D head size, T tiles, Q queries per tile, K keys per tile.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_HAS_FUSED_CPU_KERNEL = all(
    hasattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}") for suffix in ("", "_backward")
)


class Tiles(NamedTuple):
    """Some tiles of one piece: queries (T, Q, H, D), keys and values (T, K, H, D), bias (T, 1 or H, Q, K) or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None


class TileGradients(NamedTuple):
    """Gradients in the shapes of `Tiles`."""

    query: Tensor
    key: Tensor
    value: Tensor


def forward_kernel(tiles: Tiles, keep: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """(T, Q, H, D) outputs and (T, Q, H) log-sum-exps by the fastest kernel that can."""
    if keep is None and can_fuse(tiles.query):
        return fused_forward(tiles)
    return explicit_forward(tiles, keep, dropout)


def backward_kernel(tiles: Tiles, out, lse, grad_out, keep, dropout: float) -> TileGradients:
    if keep is None and can_fuse(tiles.query):
        return fused_backward(tiles, out, lse, grad_out)
    return explicit_backward(tiles, out, lse, grad_out, keep, dropout)


def can_fuse(query: Tensor) -> bool:
    return _HAS_FUSED_CPU_KERNEL and query.device.type == "cpu" and not torch.compiler.is_exporting()


def fused_forward(tiles: Tiles) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in tiles[:3])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=tiles.bias)
    return out.transpose(1, 2), lse.transpose(1, 2)


def fused_backward(tiles: Tiles, out: Tensor, lse: Tensor, grad_out: Tensor) -> TileGradients:
    q, k, v, out, lse, grad_out = (x.transpose(1, 2) for x in (*tiles[:3], out, lse, grad_out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, False, attn_mask=tiles.bias
    )
    return TileGradients(*(grad.transpose(1, 2) for grad in grads))


def draw_keep_mask(shape: tuple[int, ...], dropout: float, device: torch.device) -> Tensor:
    """A bool tensor of that shape, True with probability 1 - dropout."""
    if torch.compiler.is_compiling() or device.type != "cpu":
        return torch.rand(shape, device=device) >= dropout
    # Four 16-bit decisions from each 64-bit draw over the whole range: a fifth of the time of bernoulli_.
    numel = math.prod(shape)
    words = torch.empty(-(-numel // 4), dtype=torch.int64).random_(-(2**63), None)
    return (words.view(torch.int16)[:numel] >= round(dropout * 2**16) - 2**15).view(shape)


def explicit_forward(tiles: Tiles, keep: Tensor | None = None, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """The fused kernel's twin in plain operations: any device, and dropout on the probabilities."""
    outs, lses = [], []
    for heads in _head_groups(tiles):
        _, _, v, scores = _scores(tiles, heads)
        largest = scores.amax(-1)
        probabilities = torch.softmax(scores, -1)
        # The largest probability is exp(largest - lse).
        lses.append(largest - probabilities.amax(-1).log())
        if keep is not None:
            probabilities = probabilities * keep[:, heads]
        outs.append(torch.matmul(probabilities.to(v.dtype), v))
    out = _join_heads(outs) / (1.0 - dropout)
    return out.to(tiles.query.dtype), _join_heads(lses)


def explicit_backward(
    tiles: Tiles,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    keep: Tensor | None = None,
    dropout: float = 0.0,
) -> TileGradients:
    grads: list[list[Tensor]] = [[], [], []]
    # What every score's gradient has in common: sum_j p_ij dp_ij, which equals out_i . grad_out_i.
    common = (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1)
    for heads in _head_groups(tiles):
        q, k, v, scores = _scores(tiles, heads)
        g = grad_out[:, :, heads].transpose(1, 2).to(v.dtype)
        probabilities = (scores - lse[:, :, heads].transpose(1, 2)[..., None]).exp_()
        grad_scores = torch.matmul(g, v.transpose(-1, -2)).to(scores.dtype)
        dropped = probabilities
        if keep is not None:
            factor = keep[:, heads] * (1.0 / (1.0 - dropout))
            dropped = probabilities * factor
            grad_scores = grad_scores * factor
        grad_scores = (grad_scores - common[:, :, heads].transpose(1, 2)[..., None]) * (probabilities * score_scale(q))
        grad_scores, dropped = grad_scores.to(v.dtype), dropped.to(v.dtype)
        grads[0].append(torch.matmul(grad_scores, k))
        grads[1].append(torch.matmul(grad_scores.transpose(-1, -2), q))
        grads[2].append(torch.matmul(dropped.transpose(-1, -2), g))
    return TileGradients(*map(_join_heads, grads))


def _join_heads(parts: list[Tensor]) -> Tensor:
    """(T, h, Q, ...) of consecutive heads to (T, Q, H, ...)."""
    return torch.cat([part.transpose(1, 2) for part in parts], 2)


def score_scale(query: Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1])


def _head_groups(tiles: Tiles) -> Iterator[slice]:
    """One head at a time on CPUs, whose caches then hold the scores; all at once elsewhere."""
    num_heads = tiles.query.shape[2]
    step = 1 if tiles.query.device.type == "cpu" and not torch.compiler.is_compiling() else num_heads
    return (slice(head, head + step) for head in range(0, num_heads, step))


def _scores(tiles: Tiles, heads: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (T, h, Q, D), k and v (T, h, K, D) of some heads, and their biased scores (T, h, Q, K) in at least float32."""
    q, k, v = (x[:, :, heads].transpose(1, 2) for x in tiles[:3])
    score_dtype = torch.promote_types(q.dtype, torch.float32)
    if q.device.type == "cpu":
        q, k, v = (x.to(score_dtype) for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)).to(score_dtype) * score_scale(q)
    if tiles.bias is not None:
        scores = scores + (tiles.bias[:, heads] if tiles.bias.shape[1] > 1 else tiles.bias)
    return q, k, v, scores
