"""The model family: embeddings, layers of hybrid attention, and a head for each task.

The whole forward pass is `HybridLongformerModel.forward`: check the inputs, embed them, build every layer's plan from
the masks, run the layers. Which token sees which is in pattern.py, how that is laid out in plan.py, how it is computed
in backend.py. Every head takes `global_attention_mask` and, when it is None, chooses the global tokens of its task.

Letters: B batch, H heads, N tokens, E hidden size, X extra global tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .attention import bias_dtype
from .backend import check_implementation
from .batch import Batch, describe_batch, number_runs, place_in_document
from .configuration_hybrid_longformer import HybridLongformerConfig
from .decoder import HybridLongformerDecoder, tied_layers
from .inputs import (
    check_inputs,
    check_positions,
    document_starts,
    first_real_token,
    first_token_mask,
    input_shape,
    question_mask,
    refuse_misspelled,
    refuse_packed_rows,
    second_segment_mask,
    spread_positions,
)
from .layers import (
    HybridLongformerEmbeddings,
    HybridLongformerEncoder,
)
from .plan import build_plans
from .pretrained import HybridLongformerPreTrainedModel


class HybridLongformerModel(HybridLongformerPreTrainedModel):
    """The encoder: hidden states for every token and, with a pooler, one vector for the document."""

    _auto_class = "AutoModel"

    def __init__(
        self, config: HybridLongformerConfig, add_pooling_layer: bool = True, first_token_is_global: bool = False
    ):
        super().__init__(config)
        self.first_token_is_global = first_token_is_global
        self.patterns = config.attention_patterns()
        self.embeddings = HybridLongformerEmbeddings(config)
        self.extra_global_tokens = None
        if config.num_extra_global_tokens:
            size = (config.num_extra_global_tokens, config.hidden_size)
            self.extra_global_tokens = nn.Parameter(torch.empty(size).normal_(std=config.initializer_range))
        self.encoder = HybridLongformerEncoder(config)
        self.pooler = Pooler(config) if add_pooling_layer else None
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        document_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling | tuple:
        """Encodes (B, N) tokens.

        Args:
            attention_mask: (B, N), 1 for real tokens, 0 for padding, on either side.
            global_attention_mask: (B, N), 1 for tokens that see and are seen by all; None for no such token, or for
                the first one in an encoder that feeds a decoder.
            position_ids: (B, N) rows of the position table. Where they decrease, a new packed document starts.
            document_ids: (B, N), for rows that hold several documents: each run of equal ids is one.
        """
        refuse_misspelled(kwargs)
        return_dict = kwargs.pop("return_dict", None)
        if global_attention_mask is None and self.first_token_is_global:
            global_attention_mask = first_token_mask(input_ids, inputs_embeds, attention_mask)
        outputs = self._encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            global_attention_mask=global_attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            document_ids=document_ids,
            return_dict=True,
            **kwargs,
        )
        extra = self.config.num_extra_global_tokens
        if extra and outputs.hidden_states is not None:
            states = outputs.hidden_states
            # Layers that were not asked for are None; the last one has lost its extra tokens already.
            shown = (state if state is None else state[:, extra:] for state in states[:-1])
            outputs.hidden_states = (*shown, states[-1])
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return outputs if return_dict else outputs.to_tuple()

    @capture_outputs
    def _encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        global_attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        document_ids: Tensor | None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        check_inputs(
            self.config, input_ids, inputs_embeds, attention_mask, global_attention_mask, token_type_ids, document_ids
        )
        if document_ids is not None:
            document_ids = number_runs(document_ids)
        if position_ids is not None:
            position_ids = spread_positions(position_ids, input_shape(input_ids, inputs_embeds))
        if self.extra_global_tokens is not None:
            reason = f"num_extra_global_tokens={self.config.num_extra_global_tokens} belong to one document"
            shape = input_shape(input_ids, inputs_embeds)
            refuse_packed_rows(reason, shape, document_ids, position_ids, attention_mask)
        elif document_ids is None and position_ids is not None:
            document_ids = document_starts(position_ids)
        if position_ids is None:
            position_ids = self._position_ids(input_ids, inputs_embeds, attention_mask, document_ids)
        check_positions(self.config, position_ids)
        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, token_type_ids)
        hidden_states, batch = self._describe(hidden_states, attention_mask, global_attention_mask, document_ids)
        implementation = check_implementation(self.config._attn_implementation)
        plans = build_plans(self.patterns, batch, dtype=bias_dtype(hidden_states), with_pieces=implementation == "sdpa")
        wants_maps = self.config.output_attentions if output_attentions is None else output_attentions
        hidden_states = self.encoder(
            hidden_states, plans, attn_implementation=implementation, output_attentions=bool(wants_maps)
        )
        hidden_states = hidden_states[:, self.config.num_extra_global_tokens :]
        pooled = None if self.pooler is None else self.pooler(first_real_token(hidden_states, attention_mask))
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def _position_ids(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
    ) -> Tensor:
        """Each document's real tokens count from the first unreserved row; padding gets the row before it (RoBERTa)."""
        if input_ids is not None and self.config.pad_token_id is not None:
            counted = (input_ids != self.config.pad_token_id).long()
        elif attention_mask is not None:
            counted = attention_mask.long()
        else:
            source = input_ids if input_ids is not None else inputs_embeds
            assert source is not None
            counted = torch.ones(source.shape[:2], dtype=torch.long, device=source.device)
        position, _ = place_in_document(counted, document_ids)
        offset = self.config.position_offset
        return torch.where(counted == 1, position + offset, max(offset - 1, 0))

    def _describe(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        global_attention_mask: Tensor | None,
        document_ids: Tensor | None,
    ) -> tuple[Tensor, Batch]:
        """The batch's facts; the extra global tokens, if any, are put before every row."""
        if self.extra_global_tokens is not None:
            batch_size, extra = hidden_states.shape[0], self.config.num_extra_global_tokens
            tokens = self.extra_global_tokens.to(hidden_states.dtype).expand(batch_size, -1, -1)
            hidden_states = torch.cat([tokens, hidden_states], dim=1)
            if global_attention_mask is None:
                global_attention_mask = hidden_states.new_zeros(batch_size, hidden_states.shape[1] - extra).long()
            global_attention_mask = F.pad(global_attention_mask, (extra, 0), value=1)
            attention_mask = None if attention_mask is None else F.pad(attention_mask, (extra, 0), value=1)
        batch = describe_batch(
            batch_size=hidden_states.shape[0],
            length=hidden_states.shape[1],
            device=hidden_states.device,
            padding_mask=attention_mask,
            global_mask=global_attention_mask,
            document_ids=document_ids,
            max_global_tokens=self.config.max_global_tokens,
            num_extra_global_tokens=self.config.num_extra_global_tokens,
        )
        return hidden_states, batch


class Pooler(nn.Module):
    """The first real token's state through a dense layer and tanh."""

    def __init__(self, config: HybridLongformerConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first_token: Tensor) -> Tensor:
        return torch.tanh(self.dense(first_token))


class LMHead(nn.Module):
    """RoBERTa's language-model head."""

    def __init__(self, config: HybridLongformerConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.activation = ACT2FN[config.lm_head_act]
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.layer_norm(self.activation(self.dense(hidden_states))))


class ClassificationHead(nn.Module):
    """RoBERTa's classification head over the first real token."""

    def __init__(self, config: HybridLongformerConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.classifier_act]
        self.dropout = nn.Dropout(classifier_dropout(config))
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, first_token: Tensor) -> Tensor:
        return self.out_proj(self.dropout(self.activation(self.dense(self.dropout(first_token)))))


def classifier_dropout(config: HybridLongformerConfig) -> float:
    return config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout


def token_loss(logits: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Cross-entropy over labelled tokens: their mean, or their sum over the number in the whole accumulated batch."""
    flat_logits, flat_labels = logits.flatten(0, -2).float(), labels.flatten().to(logits.device)
    if num_items_in_batch is None:
        return F.cross_entropy(flat_logits, flat_labels)
    return F.cross_entropy(flat_logits, flat_labels, reduction="sum") / num_items_in_batch


def at_labels(hidden_states: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """The (M, E) states and (M) labels of the tokens that have a label."""
    if labels is None:
        raise ValueError("logits_at_labels=True needs labels: they say which tokens to compute logits of")
    labelled = labels.to(hidden_states.device) != -100
    return hidden_states[labelled], labels.to(hidden_states.device)[labelled]


class TokenPredictionModel(HybridLongformerPreTrainedModel):
    """What heads that say something of every token share. No token is global unless `global_attention_mask` says so."""

    output_class: type

    def token_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_at_labels: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Packed documents are welcome.

        Args:
            labels: (B, N), the class of each token, or -100 where there is none.
            logits_at_labels: compute logits where there is a label only, (labelled tokens, classes). A masked LM then
                spares its vocabulary's logits at the 85% of tokens that count for nothing.
        """
        outputs = self.hybrid_longformer(
            input_ids,
            attention_mask=attention_mask,
            global_attention_mask=global_attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            document_ids=document_ids,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if logits_at_labels:
            hidden_states, labels = at_labels(hidden_states, labels)
        logits = self.token_logits(hidden_states)
        loss = None if labels is None else token_loss(logits, labels, kwargs.get("num_items_in_batch"))
        return self.output_class(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class HybridLongformerForMaskedLM(TokenPredictionModel):
    """Predicts masked tokens."""

    _auto_class = "AutoModelForMaskedLM"
    _tied_weights_keys = {"lm_head.decoder.weight": "hybrid_longformer.embeddings.word_embeddings.weight"}
    output_class = MaskedLMOutput

    def __init__(self, config: HybridLongformerConfig):
        super().__init__(config)
        self.hybrid_longformer = HybridLongformerModel(config, add_pooling_layer=False)
        self.lm_head = LMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head.decoder = new_embeddings

    def token_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)


class HybridLongformerForTokenClassification(TokenPredictionModel):
    """Labels every token."""

    _auto_class = "AutoModelForTokenClassification"
    output_class = TokenClassifierOutput

    def __init__(self, config: HybridLongformerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.hybrid_longformer = HybridLongformerModel(config, add_pooling_layer=False)
        self.dropout = nn.Dropout(classifier_dropout(config))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def token_logits(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))


class DocumentPredictionModel(HybridLongformerPreTrainedModel):
    """What heads that say something of the whole document share: one document per row."""

    # Their losses are means over rows, so that Trainer has to divide them by the steps it accumulates.
    accepts_loss_kwargs = False

    def encode_document(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        global_attention_mask: Tensor,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        reason, shape = f"{type(self).__name__} gives one answer per row", input_shape(input_ids, inputs_embeds)
        refuse_packed_rows(reason, shape, kwargs.get("document_ids"), position_ids, attention_mask)
        return self.hybrid_longformer(
            input_ids,
            attention_mask=attention_mask,
            global_attention_mask=global_attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )


class HybridLongformerForSequenceClassification(DocumentPredictionModel):
    """Classifies documents. The first token is global unless `global_attention_mask` is given."""

    _auto_class = "AutoModelForSequenceClassification"

    def __init__(self, config: HybridLongformerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.hybrid_longformer = HybridLongformerModel(config, add_pooling_layer=False)
        self.classifier = ClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """`labels` (B), or (B, num_labels) for several labels or regression targets at once."""
        if global_attention_mask is None:
            global_attention_mask = first_token_mask(input_ids, inputs_embeds, attention_mask)
        kwargs |= {"token_type_ids": token_type_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        outputs = self.encode_document(input_ids, attention_mask, global_attention_mask, **kwargs)
        logits = self.classifier(first_real_token(outputs.last_hidden_state, attention_mask))
        loss = None if labels is None else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class HybridLongformerForMultipleChoice(DocumentPredictionModel):
    """Chooses among (B, choices, N) inputs. The tokens behind the first segment, the choice, are global by default."""

    _auto_class = "AutoModelForMultipleChoice"

    def __init__(self, config: HybridLongformerConfig):
        super().__init__(config)
        self.hybrid_longformer = HybridLongformerModel(config)
        self.dropout = nn.Dropout(classifier_dropout(config))
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """All inputs are (B, choices, N); `labels` (B) is the index of the right choice."""
        batch_size, num_choices = input_shape(input_ids, inputs_embeds, rows="batch, choices")
        for name, mask in (("attention_mask", attention_mask), ("global_attention_mask", global_attention_mask)):
            if mask is not None and mask.dim() != 3:
                raise ValueError(f"{name} has shape {tuple(mask.shape)} but must be (batch, choices, tokens)")
        inputs = (input_ids, attention_mask, global_attention_mask, token_type_ids, position_ids, inputs_embeds)
        flat = [None if x is None else x.flatten(0, 1) for x in inputs]
        input_ids, attention_mask, global_attention_mask, token_type_ids, position_ids, inputs_embeds = flat
        if global_attention_mask is None:
            global_attention_mask = second_segment_mask(
                input_ids, inputs_embeds, attention_mask, self.config.sep_token_id
            )
        kwargs |= {"token_type_ids": token_type_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        outputs = self.encode_document(input_ids, attention_mask, global_attention_mask, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output)).view(batch_size, num_choices)
        loss = None if labels is None else F.cross_entropy(logits.float(), labels.to(logits.device))
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class HybridLongformerForQuestionAnswering(DocumentPredictionModel):
    """Finds the answer's first and last token. The question is global unless `global_attention_mask` is given."""

    _auto_class = "AutoModelForQuestionAnswering"

    def __init__(self, config: HybridLongformerConfig):
        super().__init__(config)
        self.hybrid_longformer = HybridLongformerModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """`start_positions` and `end_positions` (B): positions beyond the input don't count in the loss."""
        if global_attention_mask is None:
            global_attention_mask = question_mask(input_ids, inputs_embeds, attention_mask, self.config.sep_token_id)
        kwargs |= {"token_type_ids": token_type_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        outputs = self.encode_document(input_ids, attention_mask, global_attention_mask, **kwargs)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self._span_loss(start_logits, end_logits, start_positions, end_positions, attention_mask)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _span_loss(self, start_logits, end_logits, start_positions, end_positions, attention_mask) -> Tensor:
        """Cross-entropy over the real tokens: what a document is padded to must not change its loss."""
        if attention_mask is not None:
            padding = attention_mask == 0
            lowest = torch.finfo(start_logits.dtype).min
            start_logits, end_logits = (x.masked_fill(padding, lowest) for x in (start_logits, end_logits))
        return self.loss_function(start_logits, end_logits, start_positions, end_positions)


class HybridLongformerForConditionalGeneration(HybridLongformerPreTrainedModel, GenerationMixin):
    """Writes text about long documents. The first token is global unless `global_attention_mask` is given."""

    _auto_class = "AutoModelForSeq2SeqLM"
    _no_split_modules = ["HybridLongformerEmbeddings", "HybridLongformerLayer", "HybridLongformerDecoderLayer"]
    _tied_weights_keys = {
        "decoder.word_embeddings.weight": "hybrid_longformer.embeddings.word_embeddings.weight",
        "lm_head.weight": "hybrid_longformer.embeddings.word_embeddings.weight",
    }

    def __init__(self, config: HybridLongformerConfig):
        config.add_decoder()
        super().__init__(config)
        if config.tie_encoder_decoder:
            self._tied_weights_keys = self._tied_weights_keys | tied_layers(config.num_hidden_layers)
        # `generate` calls the encoder by itself, so it is the encoder that knows the default global token.
        self.hybrid_longformer = HybridLongformerModel(config, add_pooling_layer=False, first_token_is_global=True)
        self.decoder = HybridLongformerDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_encoder(self, *args: Any, **kwargs: Any) -> nn.Module:
        return self.hybrid_longformer

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.hybrid_longformer.set_input_embeddings(value)
        if self.config.tie_word_embeddings:
            self.decoder.set_input_embeddings(value)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        if not self.config.tie_word_embeddings:
            self.decoder.resize_token_embeddings(*args, **kwargs)
        return embeddings

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Labels shifted right behind the start token, as the data collator for seq2seq wants them."""
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or padding is None:
            raise ValueError(
                f"decoder_start_token_id={start} and pad_token_id={padding} must both be set to train on labels"
            )
        shifted = torch.cat([labels.new_full((labels.shape[0], 1), start), labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, padding)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """`labels` (B, T): the summary's tokens, -100 for padding; decoder inputs are made of them if not given."""
        if encoder_outputs is None:
            reason, shape = f"{type(self).__name__} writes one text per row", input_shape(input_ids, inputs_embeds)
            refuse_packed_rows(reason, shape, kwargs.get("document_ids"), kwargs.get("position_ids"), attention_mask)
            encoder_outputs = self.hybrid_longformer(
                input_ids,
                attention_mask=attention_mask,
                global_attention_mask=global_attention_mask,
                inputs_embeds=inputs_embeds,
                token_type_ids=token_type_ids,
                return_dict=True,
                **kwargs,
            )
        elif not isinstance(encoder_outputs, BaseModelOutput | BaseModelOutputWithPooling):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        decoded = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(decoded.last_hidden_state)
        loss = None if labels is None else token_loss(logits, labels, kwargs.get("num_items_in_batch"))
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=decoded.past_key_values,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )
