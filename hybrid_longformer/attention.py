"""Attention: the projections around a backend, and `HybridSparseAttention`, the same core for one's own models.

Letters: B batch, H heads, N tokens, D head size, E hidden size, G global tokens.
"""

import sys
from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .absorbed import FewRows
from .attend import OtherRows
from .backend import BACKENDS, check_implementation, dense_context, dense_probabilities, plan_edges
from .batch import Batch, check_mask, check_shape, describe_batch
from .configuration_hybrid_longformer import HybridLongformerConfig
from .pieces import as_bias
from .plain import is_plain
from .plan import LayerPlan, build_plans
from .projections import project

GlobalContext = Literal["mean"] | None


class HybridSelfAttention(nn.Module):
    """Multi-head attention over a plan: (B, N, E) in, (B, N, E) out, before the output projection.

    Args:
        hidden_size: E.
        num_heads: H.
        separate_global_projections: give global queries their own projections of queries, keys and values (Longformer).
        dropout: of attention probabilities, in training.
        global_context: "mean" adds `global_context_mix` to the output.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        separate_global_projections: bool = True,
        dropout: float = 0.0,
        global_context: GlobalContext = None,
    ):
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size={hidden_size} must be a multiple of num_heads={num_heads}")
        self.num_heads = num_heads
        self.head_size = hidden_size // num_heads
        self.dropout = dropout
        self.global_context = global_context
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.separate_global_projections = separate_global_projections
        if separate_global_projections:
            self.query_global = nn.Linear(hidden_size, hidden_size)
            self.key_global = nn.Linear(hidden_size, hidden_size)
            self.value_global = nn.Linear(hidden_size, hidden_size)

    def forward(
        self, x: Tensor, plan: LayerPlan, *, attn_implementation: str = "sdpa", output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the (B, N, E) output and, if asked for, the (B, H, N, N) map of probabilities before dropout."""
        dropout = self.dropout if self.training else 0.0
        is_eager = attn_implementation == "eager"
        few = None if is_eager else self._few_rows(plan, dropout, bias_dtype(x))
        # The key's bias adds the same to every score of a row: the softmax loses it, the global context does not.
        layers, unbiased = (self.query, self.key, self.value), None if self.global_context else self.key
        q, k, v, *rows = project(x, layers, few, unbiased=unbiased)
        q, k, v = (self._split_heads(y) for y in (q, k, v))
        attention_map = self.attention_map(x, q, k, plan) if is_eager or output_attentions else None
        if is_eager:
            context = self._mix_by_map(x, v, attention_map, plan, dropout)
        else:
            other_rows = self._global_rows(x, q, k, v, *rows, plan=plan, dropout=dropout)
            context = BACKENDS[attn_implementation](q, k, v, plan, other_rows, dropout)
        if self.global_context == "mean":
            context = context + global_context_mix(self._split_heads(x), q, k, plan.batch)
        return context.flatten(2), attention_map if output_attentions else None

    def attention_map(self, x: Tensor, q: Tensor, k: Tensor, plan: LayerPlan) -> Tensor:
        """The dense (B, H, N, N) map, for looking at; the rows of real tokens sum to 1, those of padding are zero."""
        edges = plan_edges(plan)
        probabilities = dense_probabilities(q, k, edges)
        is_global = plan.batch.is_global
        if is_global is None or not self.separate_global_projections:
            return probabilities
        rows = dense_probabilities(
            self._split_heads(self.query_global(x)), self._split_heads(self.key_global(x)), edges
        )
        return torch.where(is_global[:, None, :, None], rows, probabilities)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, self.head_size)

    def _mix_by_map(self, x, v, attention_map, plan: LayerPlan, dropout: float) -> Tensor:
        """The oracle's way: the dense map itself mixes the values, so that gradients pass through it."""
        context = dense_context(attention_map, v, dropout)
        is_global = plan.batch.is_global
        if is_global is None or not self.separate_global_projections:
            return context
        rows = dense_context(attention_map, self._split_heads(self.value_global(x)), dropout)
        return torch.where(is_global[..., None, None], rows, context)

    def _few_rows(self, plan: LayerPlan, dropout: float, dtype: torch.dtype) -> FewRows | None:
        """The rows of global tokens whose own projections are absorbed; None where there are none."""
        places = plan.batch.flat_global_index
        if places is None or not self.separate_global_projections or not self._can_absorb(plan.batch.num_global_slots):
            return None
        return FewRows(
            layers=(self.query_global, self.key_global, self.value_global),
            places=places,
            num_heads=self.num_heads,
            bias=global_row_bias(plan, dtype),
            dropout=dropout,
        )

    def _global_rows(self, x, q, k, v, rows=None, *, plan: LayerPlan, dropout: float) -> OtherRows | None:
        """The rows of the global tokens, which see everything, made unless they are there already."""
        batch = plan.batch
        places = batch.flat_global_index
        if places is None:
            return None
        if rows is None:
            if self.separate_global_projections:
                global_x = x.flatten(0, 1).index_select(0, places)
                global_q = self._split_heads(self.query_global(global_x))
                k, v = (self._split_heads(y) for y in project(x, (self.key_global, self.value_global)))
            else:
                global_q = q.flatten(0, 1).index_select(0, places)
            global_q = global_q.unflatten(0, (batch.shape[0], -1))
            rows = _attend_rows(global_q, k, v, global_row_bias(plan, k.dtype), dropout)
        is_used = None if batch.is_global_slot is None else batch.is_global_slot.flatten()
        return OtherRows(rows, places, is_used)

    def _can_absorb(self, num_global_slots: int) -> bool:
        """Absorbing pays while G * H < E, and is right for plain linear layers only."""
        is_cheaper = num_global_slots * self.num_heads < self.num_heads * self.head_size
        return is_cheaper and is_plain(self.key_global) and is_plain(self.value_global)


def global_row_bias(plan: LayerPlan, dtype: torch.dtype) -> Tensor | None:
    """(B, 1, 1 or G, N) what the global tokens may see: all real tokens of their document (and past, if causal)."""
    batch = plan.batch
    assert batch.global_index is not None
    limits = []
    if batch.real is not None:
        limits.append(batch.real[:, None])
    if batch.document is not None:
        limits.append(batch.document.gather(1, batch.global_index)[..., None] == batch.document[:, None])
    if plan.pattern.is_causal:
        limits.append(batch.global_index[..., None] >= torch.arange(batch.shape[1], device=batch.device))
    return as_bias(reduce(torch.logical_and, limits), dtype)[:, None] if limits else None


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
    """(B * G, H, D) attention of (B, G, H, D) queries over all N keys."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    rows = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
    return rows.transpose(1, 2).flatten(0, 1)


def global_context_mix(hidden: Tensor, q: Tensor, k: Tensor, batch: Batch) -> Tensor:
    """y_i = a_i h_i + (1 - a_i) mean(h), with a = softmax of q_i . k_i over the tokens of the document.

    Parameter-free and O(N). `hidden`, `q` and `k` are (B, N, H, D); padding counts for nothing and gets zeros.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    score = (q.to(dtype) * k.to(dtype)).sum(-1)  # (B, N, H)
    real = torch.ones(batch.shape, device=batch.device) if batch.real is None else batch.real
    real = real.to(dtype)[..., None]  # (B, N, 1)
    document = torch.zeros_like(batch.position) if batch.document is None else batch.document
    num_documents = 1 if batch.document is None else batch.shape[1]

    def per_document(values: Tensor, how: Literal["sum", "amax"]) -> Tensor:
        """Reduces (B, N, ...) over the tokens of each document and gives every token its document's result."""
        index = document.view(*document.shape, *[1] * (values.dim() - 2)).expand_as(values)
        start = values.new_full(
            (values.shape[0], num_documents, *values.shape[2:]), 0.0 if how == "sum" else -torch.inf
        )
        return start.scatter_reduce(1, index, values, how).gather(1, index)

    lowest = torch.finfo(dtype).min
    largest = per_document(score.detach().masked_fill(real == 0, lowest), "amax")
    weight = (score - largest).clamp(max=0).exp() * real
    alpha = (weight / per_document(weight, "sum").clamp(min=torch.finfo(dtype).tiny))[..., None]
    values = hidden.to(dtype) * real[..., None]
    mean = per_document(values, "sum") / batch.document_length.clamp(min=1)[..., None, None]
    return ((alpha * values + (1 - alpha) * mean) * real[..., None]).to(hidden.dtype)


class HybridSparseAttention(nn.Module):
    """Local + global + random attention as a plain module, for people who write their own models.

    Args:
        hidden_size: E.
        num_heads: H.
        attention_window: W, even; token i sees |i - j| <= W / 2.
        attention_dilation: one dilation, or one per head.
        num_random_blocks: R random key blocks per query block; 0 for none.
        block_size: S, tokens per random block.
        random_seed: of the random graph. Stacked modules see different blocks when each has its own seed.
        separate_global_projections: Longformer's extra projections for global queries.
        causal_attention: no token sees a later one.
        dropout: of attention probabilities, in training.
        global_context: "mean" for the parameter-free global-context branch.
        max_global_tokens: a promise of at most so many global tokens per row, which spares reading their number back.
        attn_implementation: "sdpa", "eager" or "flex_attention".

    Example:
        >>> attention = HybridSparseAttention(hidden_size=768, num_heads=12)
        >>> output = attention(x, global_mask, padding_mask)
        >>> output, attention_map = attention(x, global_mask, padding_mask, return_attention_map=True)
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        attention_window: int = 512,
        attention_dilation: int | Sequence[int] = 1,
        num_random_blocks: int = 3,
        block_size: int = 64,
        random_seed: int = 0,
        separate_global_projections: bool = True,
        causal_attention: bool = False,
        dropout: float = 0.0,
        global_context: GlobalContext = None,
        max_global_tokens: int | None = None,
        attn_implementation: str = "sdpa",
    ):
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(f"hidden_size={hidden_size} must be a multiple of num_heads={num_heads}")
        # The config's own checks, so that both doors refuse the same things in the same words.
        self.pattern = HybridLongformerConfig(
            hidden_size=hidden_size,
            num_attention_heads=num_heads,
            num_hidden_layers=1,
            max_position_embeddings=sys.maxsize,  # a module alone has no position table to fit into
            attention_window=attention_window,
            attention_dilation=attention_dilation
            if isinstance(attention_dilation, int)
            else [list(attention_dilation)],
            num_random_blocks=num_random_blocks,
            block_size=block_size,
            random_seed=random_seed,
            separate_global_projections=separate_global_projections,
            causal_attention=causal_attention,
            attention_probs_dropout_prob=dropout,
            global_context=global_context,
            max_global_tokens=max_global_tokens,
        ).attention_patterns()[0]
        self.hidden_size = hidden_size
        self.max_global_tokens = max_global_tokens
        self.attn_implementation = check_implementation(attn_implementation)
        self.attention = HybridSelfAttention(
            hidden_size=hidden_size,
            num_heads=num_heads,
            separate_global_projections=separate_global_projections,
            dropout=dropout,
            global_context=global_context,
        )
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        x: Tensor,
        global_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        return_attention_map: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends over (B, N, E) inputs.

        Args:
            global_mask: (B, N), 1 for global tokens, 0 for others.
            padding_mask: (B, N), 1 for real tokens, 0 for padding (as Hugging Face's attention_mask).
            document_ids: (B, N), for rows that hold several documents: each run of equal ids is one.
            return_attention_map: also return the dense (B, H, N, N) map; it takes O(N^2) memory.
        """
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x has shape {tuple(x.shape)} but must be (batch, tokens, hidden_size={self.hidden_size})"
            )
        shape = (x.shape[0], x.shape[1])
        for name, mask in (("global_mask", global_mask), ("padding_mask", padding_mask)):
            check_mask(name, mask, shape)
        check_shape("document_ids", document_ids, shape)
        batch = describe_batch(
            batch_size=shape[0],
            length=shape[1],
            device=x.device,
            padding_mask=padding_mask,
            global_mask=global_mask,
            document_ids=document_ids,
            max_global_tokens=self.max_global_tokens,
        )
        with_pieces = self.attn_implementation == "sdpa"
        (plan,) = build_plans([self.pattern], batch, dtype=bias_dtype(x), with_pieces=with_pieces)
        context, attention_map = self.attention(
            x, plan, attn_implementation=self.attn_implementation, output_attentions=return_attention_map
        )
        output = self.output(context)
        return output if attention_map is None else (output, attention_map)


def bias_dtype(x: Tensor) -> torch.dtype:
    """The dtype that queries and keys will have: autocast's, where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
