"""Kernels: softmax attention over tiles, forward and backward, fused where torch has a fused kernel.

Each kernel yields an output and the log-sum-exp of its scores, and backward takes any log-sum-exp, so that several
pieces of one softmax can be computed apart (see attend.py).

Letters: H heads, D head size, T tiles, Q queries per tile, K keys per tile.
"""

import math
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
    return _HAS_FUSED_CPU_KERNEL and _is_on_cpu(query) and not torch.compiler.is_exporting()


def _is_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def fused_forward(tiles: Tiles) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in tiles[:3])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=_bias_for(tiles)
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


def fused_backward(tiles: Tiles, out: Tensor, lse: Tensor, grad_out: Tensor) -> TileGradients:
    q, k, v, out, lse, grad_out = (x.transpose(1, 2) for x in (*tiles[:3], out, lse, grad_out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, False, attn_mask=_bias_for(tiles)
    )
    return TileGradients(*(grad.transpose(1, 2) for grad in grads))


def _bias_for(tiles: Tiles) -> Tensor | None:
    """The bias in the queries' dtype, which under autocast is known only once their layer has made them."""
    return None if tiles.bias is None else tiles.bias.to(tiles.query.dtype)


def draw_keep_mask(keep: Tensor, dropout: float) -> None:
    """Fills a contiguous uint8 tensor with 1, or 0 with probability `dropout`."""
    if torch.compiler.is_compiling() or not _is_on_cpu(keep):
        keep.copy_(torch.rand(keep.shape, device=keep.device) >= dropout)
        return
    # Four 16-bit decisions from each 64-bit draw over the whole range: a fifth of the time of bernoulli_. Bytes, as
    # comparing to bools and multiplying by them take several times as long.
    words = torch.empty(-(-keep.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    torch.ge(words.view(torch.int16)[: keep.numel()], round(dropout * 2**16) - 2**15, out=keep.view(-1))


# Scores in units of log 2: exp2 takes half the time of exp.
LOG2_E = math.log2(math.e)


def explicit_forward(tiles: Tiles, keep: Tensor | None = None, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """The fused kernel's twin in plain operations: any device, and dropout on the probabilities."""
    outs, lses = [], []
    for heads, q, k, v, bias in _head_groups(tiles):
        weights = _scores(q, k, bias)
        largest = weights.amax(-1, keepdim=True)
        weights.sub_(largest).exp2_()
        total = weights.sum(-1, keepdim=True)
        if keep is not None:
            weights.mul_(keep[:, heads].flatten(0, 1))
        outs.append(torch.bmm(weights.to(v.dtype), v) / (total * (1.0 - dropout)))
        lses.append((largest + total.log2()) * (1.0 / LOG2_E))
    out, lse = (_join_heads(torch.stack(parts), tiles) for parts in (outs, lses))
    return out.to(tiles.query.dtype), lse.squeeze(-1)


def explicit_backward(
    tiles: Tiles,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    keep: Tensor | None = None,
    dropout: float = 0.0,
) -> TileGradients:
    groups = _head_groups(tiles)
    grads = [_room_for(x, groups) for x in tiles[:3]]
    # What every score's gradient has in common: sum_j p_ij dp_ij, which equals out_i . grad_out_i.
    common = (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1, keepdim=True)
    lse, grad_out = (lse * LOG2_E).unsqueeze(-1), grad_out if keep is None else grad_out * (1.0 / (1.0 - dropout))
    for grad_q, grad_k, grad_v, (heads, q, k, v, bias) in zip(*grads, groups, strict=True):
        g, own_common = _some_heads(grad_out, heads).to(v.dtype), _some_heads(common, heads)
        probabilities = kept = _scores(q, k, bias, lse[:, :, heads].transpose(1, 2)).exp2_()
        grad_scores = torch.bmm(g, v.transpose(1, 2)).to(probabilities.dtype)
        if keep is None:
            grad_scores.sub_(own_common).mul_(probabilities)
        else:
            kept = probabilities * keep[:, heads].flatten(0, 1)
            grad_scores.mul_(kept).addcmul_(probabilities, own_common, value=-1.0)
        kept, grad_scores = kept.to(v.dtype), grad_scores.to(v.dtype)
        torch.bmm(grad_scores, k, out=grad_q)
        torch.bmm(grad_scores.transpose(1, 2), q, out=grad_k)
        torch.bmm(kept.transpose(1, 2), g, out=grad_v)
    # What scores were multiplied by, and queries hold already (in units of log 2), but keys don't.
    grads[0].mul_(score_scale(tiles.query))
    grads[1].mul_(1.0 / LOG2_E)
    return TileGradients(*(_join_heads(grad, tiles) for grad in grads))


def score_scale(query: Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1])


class HeadGroup(NamedTuple):
    """Some heads h of tiles: queries (T * h, Q, D) multiplied as scores are, keys and values (T * h, K, D), and bias
    (T, 1 or h, Q, K)."""

    heads: slice
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None


def _head_groups(tiles: Tiles) -> list[HeadGroup]:
    """One head at a time on CPUs, whose caches then hold the scores; all at once elsewhere."""
    num_heads, on_cpu = tiles.query.shape[2], _is_on_cpu(tiles.query)
    step = 1 if on_cpu and not torch.compiler.is_compiling() else num_heads
    dtype = torch.promote_types(tiles.query.dtype, torch.float32) if on_cpu else tiles.query.dtype
    query, key, value = (x.to(dtype) for x in tiles[:3])
    query = query * (score_scale(query) * LOG2_E)
    all_bias = None if tiles.bias is None else tiles.bias.expand(query.shape[0], -1, -1, -1)
    groups = []
    for head in range(0, num_heads, step):
        heads = slice(head, head + step)
        bias = all_bias if all_bias is None or all_bias.shape[1] == 1 else all_bias[:, heads]
        q, k, v = (_some_heads(x, heads) for x in (query, key, value))
        groups.append(HeadGroup(heads, q, k, v, bias))
    return groups


def _some_heads(x: Tensor, heads: slice) -> Tensor:
    """(T, Q, H, D) to (T * h, Q, D)."""
    return x[:, :, heads].transpose(1, 2).flatten(0, 1)


def _room_for(x: Tensor, groups: list[HeadGroup]) -> Tensor:
    """(groups, T * h, Q, D) for results in the shape of (T, Q, H, D)."""
    num_tiles, size, num_heads, head_size = x.shape
    return groups[0].value.new_empty(len(groups), num_tiles * num_heads // len(groups), size, head_size)


def _join_heads(results: Tensor, tiles: Tiles) -> Tensor:
    """(groups, T * h, Q, D) to (T, Q, H, D), without a copy if there is one group or one head in each."""
    return results.unflatten(1, (tiles.query.shape[0], -1)).permute(1, 3, 0, 2, 4).flatten(2, 3)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, shift: Tensor | None = None) -> Tensor:
    """(T * h, Q, K) scores in at least float32, plus `bias` (T, 1 or h, Q, K), minus `shift` (T, h, Q, 1)."""
    dtype, keys = torch.promote_types(query.dtype, torch.float32), key.transpose(1, 2)
    if bias is None or query.dtype != dtype or torch.compiler.is_exporting():
        scores = torch.bmm(query, keys).to(dtype)
        scores = scores if bias is None else (scores.unflatten(0, (bias.shape[0], -1)) + bias).flatten(0, 1)
        return scores if shift is None else scores.sub_(shift.flatten(0, 1))
    # The product is added to what else there is: cheaper than adding that to the product.
    scores = query.new_empty(query.shape[0], query.shape[1], key.shape[1])
    by_tile = scores.unflatten(0, (bias.shape[0], -1))
    by_tile.copy_(bias) if shift is None else torch.sub(bias, shift, out=by_tile)
    return scores.baddbmm_(query, keys)
