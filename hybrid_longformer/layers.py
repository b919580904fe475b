"""Layers: embeddings, the encoder's hybrid-attention layer and the decoder's full-attention layer, all post-LN.

The encoder layer is RoBERTa's, which is also BERT's, Longformer's and BART's under other names; so is the decoder's,
with cross-attention. Parameter names follow RoBERTa and Longformer.

Letters: B batch, H heads, N tokens, D head size, E hidden size.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import HybridSelfAttention
from .configuration_hybrid_longformer import HybridLongformerConfig
from .feed_forward import can_divide, feed_forward
from .plain import has_hooks
from .plan import LayerPlan


class HybridLongformerEmbeddings(nn.Module):
    """Words + positions + token types, normalised."""

    def __init__(self, config: HybridLongformerConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        # No padding_idx here: sources that count positions from 0 use every row.
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.word_scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        position_ids: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        words = (self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds) * self.word_scale
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(position_ids)
        embeddings = words + self.token_type_embeddings(token_type_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class ResidualOutput(nn.Module):
    """Projects a block's output, adds what went into the block and normalises: the post-LN residual."""

    def __init__(self, in_size: int, config: HybridLongformerConfig):
        super().__init__()
        self.dense = nn.Linear(in_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, output: Tensor, residual: Tensor) -> Tensor:
        return self.finish(self.dense(output), residual)

    def finish(self, projected: Tensor, residual: Tensor) -> Tensor:
        """All but the projection."""
        return self.LayerNorm(self.dropout(projected) + residual)


class Intermediate(nn.Module):
    """The wide half of the feed-forward block."""

    def __init__(self, size: int, config: HybridLongformerConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.dense(hidden_states))


def feed_forward_block(intermediate: Intermediate, output: ResidualOutput, hidden_states: Tensor) -> Tensor:
    """`intermediate`, then `output`, without keeping what is wide where nobody looks at it."""
    up, activation, down = intermediate.dense, intermediate.activation, output.dense
    is_watched = has_hooks(intermediate) or has_hooks(output) or has_hooks(activation)
    if is_watched or not can_divide(hidden_states, up, activation, down):
        return output(intermediate(hidden_states), hidden_states)
    return output.finish(feed_forward(hidden_states, up, activation, down), hidden_states)


class EncoderAttention(nn.Module):
    def __init__(self, config: HybridLongformerConfig):
        super().__init__()
        self.self = HybridSelfAttention(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            separate_global_projections=config.separate_global_projections,
            dropout=config.attention_probs_dropout_prob,
            global_context=config.global_context,
        )
        self.output = ResidualOutput(config.hidden_size, config)

    def forward(self, hidden_states: Tensor, plan: LayerPlan, **options: Any) -> Tensor:
        context, _ = self.self(hidden_states, plan, **options)
        return self.output(context, hidden_states)


class HybridLongformerLayer(GradientCheckpointingLayer):
    """Hybrid attention, then feed-forward."""

    def __init__(self, config: HybridLongformerConfig):
        super().__init__()
        self.chunk_size = config.chunk_size_feed_forward
        self.attention = EncoderAttention(config)
        self.intermediate = Intermediate(config.intermediate_size, config)
        self.output = ResidualOutput(config.intermediate_size, config)

    def forward(self, hidden_states: Tensor, plan: LayerPlan, **options: Any) -> Tensor:
        attended = self.attention(hidden_states, plan, **options)
        if not self.chunk_size:
            return self._feed_forward(attended)
        # Not transformers' own chunking: that takes lengths only that the chunks divide.
        return torch.cat([self._feed_forward(chunk) for chunk in attended.split(self.chunk_size, dim=1)], dim=1)

    def _feed_forward(self, hidden_states: Tensor) -> Tensor:
        return feed_forward_block(self.intermediate, self.output, hidden_states)


class HybridLongformerEncoder(nn.Module):
    """The stack of encoder layers, each with its own plan."""

    def __init__(self, config: HybridLongformerConfig):
        super().__init__()
        self.layer = nn.ModuleList(HybridLongformerLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, hidden_states: Tensor, plans: list[LayerPlan], **options: Any) -> Tensor:
        for layer, plan in zip(self.layer, plans, strict=True):
            hidden_states = layer(hidden_states, plan, **options)
        return hidden_states


def eager_decoder_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Plain attention of (B, H, N, D) queries that also returns its map; the mask is bool or additive."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is None and module.is_causal and query.shape[2] > 1:
        attention_mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    probabilities = nn.functional.softmax(scores, dim=-1)
    dropped = nn.functional.dropout(probabilities, p=dropout, training=module.training)
    return torch.matmul(dropped, value).transpose(1, 2), probabilities


class DecoderAttention(nn.Module):
    """Full attention over the decoder's own past, or over the encoder's output."""

    def __init__(self, config: HybridLongformerConfig, *, layer_idx: int, is_causal: bool):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.head_size = config.hidden_size // int(config.decoder_attention_heads or config.num_attention_heads)
        self.scaling = 1.0 / math.sqrt(self.head_size)
        self.dropout = config.attention_probs_dropout_prob
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query = self._split_heads(self.query(hidden_states))
        key, value = self._keys_and_values(hidden_states, encoder_hidden_states, past_key_values)
        wants_map = kwargs.pop("output_attentions", None) or self.config.output_attentions
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_decoder_attention)
        dropout = self.dropout if self.training else 0.0
        inputs = (self, query, key, value, attention_mask)
        context, attention_map = attend(*inputs, scaling=self.scaling, dropout=dropout, **kwargs)
        if wants_map and attention_map is None:
            # The fast functions keep no map; it is computed beside them, so that asking for it changes no result.
            _, attention_map = eager_decoder_attention(*inputs, scaling=self.scaling)
        return context.flatten(2), attention_map

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (B, H, N, D)

    def _keys_and_values(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None, past_key_values: Any):
        """New keys and values joined with cached ones; the encoder's are computed once per document."""
        is_cross = encoder_hidden_states is not None
        cache = past_key_values
        if isinstance(past_key_values, EncoderDecoderCache):
            cache = past_key_values.cross_attention_cache if is_cross else past_key_values.self_attention_cache
            if is_cross and past_key_values.is_updated.get(self.layer_idx):
                return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
        source = encoder_hidden_states if is_cross else hidden_states
        key, value = self._split_heads(self.key(source)), self._split_heads(self.value(source))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if is_cross and isinstance(past_key_values, EncoderDecoderCache):
                past_key_values.is_updated[self.layer_idx] = True
        return key, value


class DecoderSelfAttention(DecoderAttention):
    """Attention over the decoder's own past; a class of its own so that its maps can be recorded."""


class DecoderCrossAttention(DecoderAttention):
    """Attention over the encoder's output; a class of its own so that its maps can be recorded."""


class DecoderAttentionBlock(nn.Module):
    def __init__(self, attention: DecoderAttention, config: HybridLongformerConfig):
        super().__init__()
        self.self = attention
        self.output = ResidualOutput(config.hidden_size, config)

    def forward(self, hidden_states: Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Tensor:
        context, _ = self.self(hidden_states, attention_mask, *args, **kwargs)
        return self.output(context, hidden_states)


class HybridLongformerDecoderLayer(GradientCheckpointingLayer):
    """Causal self-attention, cross-attention, feed-forward."""

    def __init__(self, config: HybridLongformerConfig, layer_idx: int):
        super().__init__()
        self.attention = DecoderAttentionBlock(
            DecoderSelfAttention(config, layer_idx=layer_idx, is_causal=True), config
        )
        self.crossattention = DecoderAttentionBlock(
            DecoderCrossAttention(config, layer_idx=layer_idx, is_causal=False), config
        )
        size = config.decoder_intermediate_size or config.intermediate_size
        self.intermediate = Intermediate(size, config)
        self.output = ResidualOutput(size, config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        hidden_states = self.attention(hidden_states, attention_mask, past_key_values=past_key_values, **kwargs)
        hidden_states = self.crossattention(
            hidden_states, encoder_attention_mask, encoder_hidden_states, past_key_values=past_key_values, **kwargs
        )
        return feed_forward_block(self.intermediate, self.output, hidden_states)
