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


def draw_keep_mask(keep: Tensor, dropout: float) -> None:
    """Fills a contiguous uint8 tensor with 1, or 0 with probability `dropout`."""
    if torch.compiler.is_compiling() or keep.device.type != "cpu":
        keep.copy_(torch.rand(keep.shape, device=keep.device) >= dropout)
        return
    # Four 16-bit decisions from each 64-bit draw over the whole range: a fifth of the time of bernoulli_. Bytes, because
    # comparing to bools and multiplying by them take several times as long.
    words = torch.empty(-(-keep.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    torch.ge(words.view(torch.int16)[: keep.numel()], round(dropout * 2**16) - 2**15, out=keep.view(-1))


# Scores in units of log 2: exp2 takes half the time of exp.
LOG2_E = math.log2(math.e)


def explicit_forward(tiles: Tiles, keep: Tensor | None = None, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """The fused kernel's twin in plain operations: any device, and dropout on the probabilities."""
    num_tiles = tiles.query.shape[0]
    outs, lses = [], []
    for heads, q, k, v, bias in _by_heads(tiles):
        weights = _scores(q, k, bias, num_tiles)
        largest = weights.amax(-1, keepdim=True)
        weights.sub_(largest).exp2_()
        total = weights.sum(-1, keepdim=True)
        if keep is not None:
            weights.mul_(keep[:, heads].flatten(0, 1))
        outs.append(torch.bmm(weights.to(v.dtype), v) / (total * (1.0 - dropout)))
        lses.append((largest + total.log2()) / LOG2_E)
    return _join_heads(outs, num_tiles).to(tiles.query.dtype), _join_heads(lses, num_tiles).squeeze(-1)


def explicit_backward(
    tiles: Tiles,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    keep: Tensor | None = None,
    dropout: float = 0.0,
) -> TileGradients:
    num_tiles = tiles.query.shape[0]
    grads: list[list[Tensor]] = [[], [], []]
    # What every score's gradient has in common: sum_j p_ij dp_ij, which equals out_i . grad_out_i.
    common = (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1, keepdim=True)
    lse, grad_out = (lse * LOG2_E).unsqueeze(-1), grad_out * (1.0 / (1.0 - dropout))
    for heads, q, k, v, bias in _by_heads(tiles):
        g = _some_heads(grad_out, heads).to(v.dtype)
        probabilities = _scores(q, k, bias, num_tiles).sub_(_some_heads(lse, heads)).exp2_()
        kept = probabilities if keep is None else probabilities * keep[:, heads].flatten(0, 1)
        grad_scores = torch.bmm(g, v.transpose(1, 2)).to(probabilities.dtype)
        grad_scores.mul_(kept).addcmul_(probabilities, _some_heads(common, heads), value=-1.0)
        kept, grad_scores = kept.to(v.dtype), grad_scores.to(v.dtype)
        # `q` holds the factor of the scores, which the gradient of k has too.
        grads[0].append(torch.bmm(grad_scores, k))
        grads[1].append(torch.bmm(grad_scores.transpose(1, 2), q))
        grads[2].append(torch.bmm(kept.transpose(1, 2), g))
    grad_query, grad_key, grad_value = (_join_heads(parts, num_tiles) for parts in grads)
    return TileGradients(grad_query.mul_(score_scale(tiles.query)), grad_key.mul_(1.0 / LOG2_E), grad_value)


def score_scale(query: Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1])


def _by_heads(tiles: Tiles) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor | None]]:
    """Some heads h at a time: queries (T * h, Q, D) with the scores' factor, keys and values (T * h, K, D), and bias."""
    # One head at a time on CPUs, whose caches then hold the scores; all at once elsewhere.
    num_heads, on_cpu = tiles.query.shape[2], tiles.query.device.type == "cpu"
    step = 1 if on_cpu and not torch.compiler.is_compiling() else num_heads
    dtype = torch.promote_types(tiles.query.dtype, torch.float32) if on_cpu else tiles.query.dtype
    query, key, value = (x.to(dtype) for x in tiles[:3])
    query = query * (score_scale(query) * LOG2_E)
    for head in range(0, num_heads, step):
        heads = slice(head, head + step)
        bias = tiles.bias if tiles.bias is None or tiles.bias.shape[1] == 1 else tiles.bias[:, heads]
        yield heads, *(_some_heads(x, heads) for x in (query, key, value)), bias


def _some_heads(x: Tensor, heads: slice) -> Tensor:
    """(T, Q, H, D) to (T * h, Q, D)."""
    return x[:, :, heads].transpose(1, 2).flatten(0, 1)


def _join_heads(parts: list[Tensor], num_tiles: int) -> Tensor:
    """(T * h, Q, D) of consecutive heads to (T, Q, H, D)."""
    return torch.cat([part.unflatten(0, (num_tiles, -1)).transpose(1, 2) for part in parts], 2)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, num_tiles: int) -> Tensor:
    """(T * h, Q, K) biased scores in at least float32."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    if bias is not None and query.shape[0] == num_tiles and query.dtype == dtype:
        return torch.baddbmm(bias[:, 0].to(dtype), query, key.transpose(1, 2))
    scores = torch.bmm(query, key.transpose(1, 2)).to(dtype)
    if bias is not None:
        scores.unflatten(0, (num_tiles, -1)).add_(bias)
    return scores
