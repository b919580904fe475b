"""Configuration: RoBERTa's fields and the attention graph's, checked once when built."""

import difflib
from collections.abc import Iterable
from typing import Any, Literal

from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from .pattern import AttentionPattern

# What transformers itself may pass to any config beside the declared fields.
_LIBRARY_KEYS = {
    "attn_implementation",
    "auto_map",
    "custom_pipelines",
    "dtype",
    "experts_implementation",
    "label2id",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "tie_last_hidden_states",
    "torch_dtype",
}
_CODE = "modeling_hybrid_longformer.HybridLongformer"
# Where each Auto class finds its class in the code files that travel with a checkpoint.
AUTO_MAP = {
    "AutoConfig": "configuration_hybrid_longformer.HybridLongformerConfig",
    "AutoModel": f"{_CODE}Model",
    "AutoModelForMaskedLM": f"{_CODE}ForMaskedLM",
    "AutoModelForMultipleChoice": f"{_CODE}ForMultipleChoice",
    "AutoModelForQuestionAnswering": f"{_CODE}ForQuestionAnswering",
    "AutoModelForSeq2SeqLM": f"{_CODE}ForConditionalGeneration",
    "AutoModelForSequenceClassification": f"{_CODE}ForSequenceClassification",
    "AutoModelForTokenClassification": f"{_CODE}ForTokenClassification",
}
# Distinct graphs for the layers of one model, and for the models of neighbouring seeds.
_SEEDS_PER_MODEL = 4096


class HybridLongformerConfig(PreTrainedConfig):
    r"""Configuration of a Hybrid Longformer: RoBERTa with local + global + random attention.

    Every impossible combination is refused when the config is built, and again when a model is built from it, by an
    error that names the field, its value and the remedy; so is any key that no field has.

    Args:
        vocab_size (`int`): number of token ids.
        hidden_size (`int`): E, size of the hidden states.
        num_hidden_layers (`int`): number of layers.
        num_attention_heads (`int`): H, heads per layer; divides hidden_size.
        intermediate_size (`int`): size of the feed-forward layers.
        hidden_act (`str`): activation of the feed-forward layers.
        hidden_dropout_prob (`float`): dropout of embeddings and layer outputs.
        attention_probs_dropout_prob (`float`): dropout of attention probabilities.
        max_position_embeddings (`int`): rows of the position table, reserved rows included.
        type_vocab_size (`int`): number of token types.
        initializer_range (`float`): standard deviation of new weights.
        layer_norm_eps (`float`): epsilon of the layer norms.
        classifier_dropout (`float`, *optional*): dropout before a classification head; hidden_dropout_prob if None.
        classifier_act (`str`): activation inside the sequence-classification head: "tanh" as in RoBERTa and BERT.
        lm_head_act (`str`): activation inside the masked-language-model head: "gelu" as in RoBERTa.
        attention_window (`int` or `list[int]`): W, for all layers or one per layer; even. Token i sees |i-j| <= W/2.
        attention_dilation (`int`, `list[int]` or `list[list[int]]`): d, for all layers, per layer, or per layer and
            head. Token i sees |i-j| <= d*W/2 where (i-j) is a multiple of d.
        separate_global_projections (`bool`): global queries have projections of their own, as in Longformer.
        num_random_blocks (`int`): R, random key blocks for each query block; 0 for none.
        block_size (`int`): S, tokens per random block.
        random_seed (`int`): of the random graph, which is the same in training and evaluation.
        num_extra_global_tokens (`int`): learned global tokens before the sequence (BigBird-ETC); 0 for none.
        max_global_tokens (`int`, *optional*): a promise of at most so many global tokens per row. None counts them in
            every forward pass and keeps 64 slots in compiled and exported graphs.
        global_context (`str`, *optional*): "mean" adds the parameter-free global-context branch to every attention.
        causal_attention (`bool`): no token sees a later one.
        position_offset (`int`): reserved first rows of the position table: 2 for RoBERTa and BART, 0 for BERT.
        scale_embedding (`bool`): multiply word embeddings by the square root of hidden_size, as some BARTs do.
        is_encoder_decoder (`bool`): a full-attention decoder follows the encoder; the decoder fields below then count.
        decoder_layers (`int`, *optional*): number of decoder layers; num_hidden_layers if None.
        decoder_attention_heads (`int`, *optional*): heads of the decoder; num_attention_heads if None.
        decoder_intermediate_size (`int`, *optional*): of the decoder's feed-forward; intermediate_size if None.
        decoder_max_position_embeddings (`int`): rows of the decoder's position table, reserved rows included.
        tie_encoder_decoder (`bool`): decoder layers share the weights of the encoder's, all but the cross-attention.
        decoder_start_token_id (`int`, *optional*): the token that generation starts from.
        use_cache (`bool`): keep the decoder's keys and values while generating.
    """

    model_type = "hybrid_longformer"
    _auto_class = "AutoConfig"

    vocab_size: int = 50265
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 4098
    type_vocab_size: int = 1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    sep_token_id: int | None = 2
    classifier_dropout: float | int | None = None
    classifier_act: str = "tanh"
    lm_head_act: str = "gelu"
    tie_word_embeddings: bool = True

    attention_window: int | list[int] = 512
    attention_dilation: int | list[int] | list[list[int]] = 1
    separate_global_projections: bool = True
    num_random_blocks: int = 3
    block_size: int = 64
    random_seed: int = 0
    num_extra_global_tokens: int = 0
    max_global_tokens: int | None = None
    global_context: Literal["mean"] | None = None
    causal_attention: bool = False
    position_offset: int = 2
    scale_embedding: bool = False

    decoder_layers: int | None = None
    decoder_attention_heads: int | None = None
    decoder_intermediate_size: int | None = None
    decoder_max_position_embeddings: int = 1026
    tie_encoder_decoder: bool = False
    decoder_start_token_id: int | None = 2
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown_keys(kwargs)
        super().__post_init__(**kwargs)
        self.auto_map = dict(AUTO_MAP)
        self.check()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        # transformers would set overrides on the finished config, behind its checks.
        own = set(cls.__dataclass_fields__) - set(PreTrainedConfig.__dataclass_fields__)
        changes = {name: kwargs.pop(name) for name in list(kwargs) if name in own}
        return super().from_dict(config_dict | changes, **kwargs)

    def check(self) -> None:
        """Refuses fields that can't be, alone or together."""
        self._check_sizes()
        self._check_choices()
        self._check_tokens()
        self._check_attention()
        if self.is_encoder_decoder:
            self.add_decoder()

    def add_decoder(self) -> None:
        """Makes this the configuration of an encoder and decoder: what is not set is as in the encoder."""
        self.is_encoder_decoder = True
        self.decoder_layers = self.decoder_layers or self.num_hidden_layers
        self.decoder_attention_heads = self.decoder_attention_heads or self.num_attention_heads
        self.decoder_intermediate_size = self.decoder_intermediate_size or self.intermediate_size
        for name in ("decoder_layers", "decoder_attention_heads", "decoder_intermediate_size"):
            self._check_whole(name, getattr(self, name), at_least=1)
        self._check_whole(
            "decoder_max_position_embeddings", self.decoder_max_position_embeddings, at_least=self.position_offset + 1
        )
        if self.hidden_size % self.decoder_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of "
                f"decoder_attention_heads={self.decoder_attention_heads}"
            )
        if self.tie_encoder_decoder:
            self._check_tied_decoder()

    def _check_tied_decoder(self) -> None:
        for name, encoder_name in (
            ("decoder_layers", "num_hidden_layers"),
            ("decoder_attention_heads", "num_attention_heads"),
            ("decoder_intermediate_size", "intermediate_size"),
        ):
            if getattr(self, name) != getattr(self, encoder_name):
                raise ValueError(
                    f"tie_encoder_decoder=True needs equal layers, but {name}={getattr(self, name)} and "
                    f"{encoder_name}={getattr(self, encoder_name)}: make them equal or do not tie"
                )
        if not self.tie_word_embeddings:
            raise ValueError(
                "tie_encoder_decoder=True needs tie_word_embeddings=True: transformers ties all or nothing"
            )

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the position table holds."""
        return self.max_position_embeddings - self.position_offset

    @property
    def output_attentions(self) -> bool | None:
        """Whether attention maps are returned by default; every backend can."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        self._output_attentions = value

    def validate_output_attentions(self) -> None:
        """Nothing to refuse: unlike elsewhere, maps don't need the eager backend."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        # A checkpoint that came from somewhere names that place's code: what is saved here carries its own.
        self.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)

    def attention_patterns(self) -> list[AttentionPattern]:
        """The attention graph of every layer."""
        return [
            AttentionPattern(
                window=window,
                dilation_per_head=dilations,
                num_random_blocks=self.num_random_blocks,
                block_size=self.block_size,
                seed=self.random_seed * _SEEDS_PER_MODEL + layer,
                is_causal=self.causal_attention,
            )
            for layer, (window, dilations) in enumerate(
                zip(self.window_per_layer, self.dilation_per_layer_and_head, strict=True)
            )
        ]

    @property
    def window_per_layer(self) -> list[int]:
        window = self.attention_window
        return [window] * self.num_hidden_layers if isinstance(window, int) else list(window)

    @property
    def dilation_per_layer_and_head(self) -> list[tuple[int, ...]]:
        dilation = self.attention_dilation
        per_layer = [dilation] * self.num_hidden_layers if isinstance(dilation, int) else dilation
        return [(own,) * self.num_attention_heads if isinstance(own, int) else tuple(own) for own in per_layer]

    def _refuse_unknown_keys(self, kwargs: dict[str, Any]) -> None:
        fields = set(type(self).__dataclass_fields__)
        known = fields | _LIBRARY_KEYS | set(GenerationConfig().to_dict())
        unknown = [key for key in kwargs if key not in known and not key.startswith("_")]
        if not unknown:
            return
        hint = _closest(unknown[0], fields | _LIBRARY_KEYS)
        raise ValueError(f"{unknown[0]}={kwargs[unknown[0]]!r} is not a field of this configuration: {hint}")

    def _check_sizes(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "type_vocab_size",
            "block_size",
        ):
            self._check_whole(name, getattr(self, name), at_least=1)
        for name in ("num_random_blocks", "num_extra_global_tokens", "random_seed", "position_offset"):
            self._check_whole(name, getattr(self, name), at_least=0)
        if self.max_global_tokens is not None:
            self._check_whole("max_global_tokens", self.max_global_tokens, at_least=1)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
            value = getattr(self, name)
            optional = name == "classifier_dropout" and value is None
            if not optional and not (_is_number(value) and 0 <= value < 1):
                raise ValueError(f"{name}={value!r} must be a probability of at least 0 and below 1")
        if self.max_tokens < 1:
            raise ValueError(
                f"max_position_embeddings={self.max_position_embeddings} leaves no row for a token after "
                f"position_offset={self.position_offset} reserved ones: use at least {self.position_offset + 1}"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}"
            )

    def _check_choices(self) -> None:
        for name in ("hidden_act", "classifier_act", "lm_head_act"):
            value = getattr(self, name)
            if value not in ACT2FN:
                raise ValueError(f"{name}={value!r} is no activation of transformers: {_closest(value, ACT2FN)}")
        if not (_is_number(self.layer_norm_eps) and self.layer_norm_eps > 0):
            raise ValueError(f"layer_norm_eps={self.layer_norm_eps!r} must be a number above 0")

    def _check_tokens(self) -> None:
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id"):
            value = getattr(self, name)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"{name}={token} is no token: vocab_size={self.vocab_size} allows 0 to {self.vocab_size - 1}, "
                        "or None for a vocabulary without it"
                    )

    def _check_attention(self) -> None:
        self._check_windows()
        self._check_dilations()
        if self.global_context not in (None, "mean"):
            raise ValueError(f"global_context={self.global_context!r} must be None or 'mean'")
        for name in ("separate_global_projections", "causal_attention"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.num_random_blocks:
            self._check_random_blocks()

    def _check_windows(self) -> None:
        windows = self.attention_window
        if not isinstance(windows, int):
            self._check_list("attention_window", windows, self.num_hidden_layers, "num_hidden_layers")
        for window in [windows] if isinstance(windows, int) else windows:
            self._check_whole("attention_window", window, at_least=2)
            if window % 2:
                raise ValueError(
                    f"attention_window={window} is odd, but it is split evenly between both sides of a token: "
                    f"use {window - 1} or {window + 1}"
                )

    def _check_dilations(self) -> None:
        dilations = self.attention_dilation
        if not isinstance(dilations, int):
            self._check_list("attention_dilation", dilations, self.num_hidden_layers, "num_hidden_layers")
        for own in [dilations] if isinstance(dilations, int) else dilations:
            if not isinstance(own, int):
                self._check_list("attention_dilation", own, self.num_attention_heads, "num_attention_heads")
            for dilation in [own] if isinstance(own, int) else own:
                self._check_whole("attention_dilation", dilation, at_least=1)

    def _check_random_blocks(self) -> None:
        for pattern in self.attention_patterns():
            if pattern.shortest_random_document > self.max_position_embeddings:
                raise ValueError(
                    f"block_size={self.block_size} does not fit: with attention_window={pattern.window} a document "
                    f"needs {pattern.shortest_random_document} tokens before any block lies beyond the window, more "
                    f"than max_position_embeddings={self.max_position_embeddings}; use smaller blocks or a smaller "
                    "window, or num_random_blocks=0"
                )

    def _check_list(self, name: str, values: Any, length: int, field: str) -> None:
        if not isinstance(values, list | tuple) or len(values) != length:
            raise ValueError(f"{name}={values!r} must be one number or a list of {length} of them, as {field}={length}")

    def _check_whole(self, name: str, value: Any, *, at_least: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {at_least}")


def _closest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {close[0]!r}?" if close else "see HybridLongformerConfig for what there is"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


__all__ = ["HybridLongformerConfig"]
