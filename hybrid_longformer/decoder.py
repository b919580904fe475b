"""The decoder of the seq2seq model: full attention over what it has written, and over what the encoder has read.

Letters: B batch, T tokens written.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hybrid_longformer import HybridLongformerConfig
from .inputs import check_token_ids
from .layers import DecoderCrossAttention, DecoderSelfAttention, HybridLongformerDecoderLayer
from .pretrained import HybridLongformerPreTrainedModel


class HybridLongformerDecoder(HybridLongformerPreTrainedModel):
    """A full-attention decoder with cross-attention and cache."""

    _no_split_modules = ["HybridLongformerDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": HybridLongformerDecoderLayer,
        "attentions": DecoderSelfAttention,
        "cross_attentions": DecoderCrossAttention,
    }

    def __init__(self, config: HybridLongformerConfig):
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.word_scale = config.hidden_size**0.5 if config.scale_embedding else 1.0
        self.position_embeddings = nn.Embedding(config.decoder_max_position_embeddings, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layer = nn.ModuleList(HybridLongformerDecoderLayer(config, i) for i in range(config.decoder_layers or 0))
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.word_embeddings = value

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decodes (B, T) tokens; positions follow on what the cache holds."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "give exactly one of decoder_input_ids and decoder_inputs_embeds, or labels to make them of"
            )
        if past_key_values is None:
            # What follows is what generation itself has chosen.
            check_token_ids(self.config, "decoder_input_ids", input_ids)
        words = (self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds) * self.word_scale
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        hidden_states = self.dropout(self.LayerNorm(words + self._positions(past, words)))
        own_cache = past_key_values.self_attention_cache if past_key_values is not None else None
        causal_mask = create_causal_mask(
            config=self.config, inputs_embeds=words, attention_mask=attention_mask, past_key_values=own_cache
        )
        cross_mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=words,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        for layer in self.layer:
            hidden_states = layer(
                hidden_states,
                causal_mask,
                encoder_hidden_states,
                encoder_attention_mask=cross_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values if use_cache else None
        )

    def _positions(self, past: Any, words: Tensor) -> Tensor:
        length, rows = words.shape[1], self.config.decoder_max_position_embeddings
        offset = self.config.position_offset
        if isinstance(past, int) and past + length + offset > rows:
            raise ValueError(
                f"the decoder is at token {past + length}, but its position table holds {rows - offset} "
                f"(decoder_max_position_embeddings={rows}): lower max_new_tokens or truncate the labels"
            )
        return self.position_embeddings(torch.arange(length, device=words.device) + (past + offset))


def tied_layers(num_layers: int) -> dict[str, str]:
    """For every weight of the decoder layers that the encoder layers have too, the encoder's."""
    modules = [f"attention.self.{name}" for name in ("query", "key", "value")]
    modules += ["attention.output.dense", "attention.output.LayerNorm"]
    modules += ["intermediate.dense", "output.dense", "output.LayerNorm"]
    names = [
        f"layer.{layer}.{name}.{kind}" for layer in range(num_layers) for name in modules for kind in ("weight", "bias")
    ]
    return {f"decoder.{name}": f"hybrid_longformer.encoder.{name}" for name in names}
