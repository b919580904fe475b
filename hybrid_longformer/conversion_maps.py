"""Name maps: for each family of source models, what its tensors and config fields are called here.

Names are without the base model's prefix ("roberta.encoder..." is "encoder..."). A rule maps a module and everything in
it; `*` stands for the number of a layer. Of several sources for one tensor the first rule wins and the others are
reported as dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Names = tuple[tuple[str, str], ...]
Reasons = Mapping[str, str]

SELF_ATTENTION = "encoder.layer.*.attention.self"
POSITIONS, DECODER_POSITIONS = "embeddings.position_embeddings.weight", "decoder.position_embeddings.weight"
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """Where every tensor of a model goes.

    Args:
        names: (source, target) rules.
        drops: source tensors without a counterpart, and why losing them changes no output.
        zeros: target tensors that the source does without, so that zeros are exact.
        new: target tensors that no source has, which start from random values.
        copies: (target, other target, action): what a missing target is a second copy of.
    """

    names: Names = ()
    drops: Reasons = field(default_factory=dict)
    zeros: Reasons = field(default_factory=dict)
    new: Reasons = field(default_factory=dict)
    copies: tuple[tuple[str, str, str], ...] = ()

    def __or__(self, other: "NameMap") -> "NameMap":
        return NameMap(
            names=tuple(dict(self.names + other.names).items()),
            drops={**self.drops, **other.drops},
            zeros={**self.zeros, **other.zeros},
            new={**self.new, **other.new},
            copies=self.copies + other.copies,
        )


@dataclass(frozen=True, kw_only=True)
class Head:
    """A source class: the class it becomes here, and the names of its head.

    Args:
        target: our class's name without "HybridLongformer".
        activation_field: our config field that takes the source's hidden_act, where the head uses it.
        refusal: why this head can't be carried over exactly, or None.
    """

    target: str
    map: NameMap = field(default_factory=NameMap)
    activation_field: str | None = None
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """Source models with the same names.

    Args:
        prefix: what classes with a head call their base model.
        heads: the source's classes by name.
        map: the base model's names.
        fields: (source field, our field) of the config, beside those of the same name.
        settings: our config fields that this family fixes.
        counts_after_padding: positions start behind pad_token_id (RoBERTa) rather than at a fixed row.
        position_offset: that fixed row.
        position_field: the config field with the encoder's number of positions.
        reserved_rows_counted: that number includes the reserved rows (RoBERTa) or not (BART).
        has_own_window: the source limits attention itself, so it runs without an added mask.
        mask_module: the attention of layer `*`, which takes an added mask otherwise.
        pads_to_window: it fills its input up to whole windows, for which it needs positions.
        check_options: how to load it for a comparison.
        separates_by_end: texts are separated by the token that ends them.
        can_start_decoder: its encoder can be copied into a decoder.
    """

    prefix: str
    heads: Mapping[str, Head]
    map: NameMap
    fields: tuple[tuple[str, str], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    counts_after_padding: bool = False
    position_offset: int = 0
    position_field: str = "max_position_embeddings"
    reserved_rows_counted: bool = True
    has_own_window: bool = False
    mask_module: str = SELF_ATTENTION
    pads_to_window: bool = False
    check_options: Mapping[str, Any] = field(default_factory=dict)
    separates_by_end: bool = True
    can_start_decoder: bool = False


SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "type_vocab_size",
    "initializer_range",
    "layer_norm_eps",
    "classifier_dropout",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "sep_token_id",
    "scale_embedding",
    "decoder_layers",
    "decoder_attention_heads",
    "decoder_start_token_id",
    "use_cache",
    "problem_type",
)

GLOBAL_COPIES = tuple(
    (f"{SELF_ATTENTION}.{name}_global", f"{SELF_ATTENTION}.{name}", "copied into *_global")
    for name in ("query", "key", "value")
)
BUFFERS = {
    "embeddings.position_ids": "a buffer that is computed",
    "embeddings.token_type_ids": "a buffer that is computed",
}

ENCODER = NameMap(
    names=(("embeddings", "embeddings"), ("encoder.layer.*", "encoder.layer.*"), ("pooler.dense", "pooler.dense")),
    drops=BUFFERS,
    new={"pooler": "the source has no pooler"},
    copies=GLOBAL_COPIES,
)
QA = NameMap(names=(("qa_outputs", "qa_outputs"),))
CLASSIFIER = NameMap(names=(("classifier", "classifier"),))
# Where the weights are not tied, `decoder.bias` is the one that is read.
ROBERTA_LM = NameMap(names=(("lm_head", "lm_head"), ("lm_head.bias", "lm_head.decoder.bias")))
BERT_LM = NameMap(
    names=(
        ("cls.predictions.transform.dense", "lm_head.dense"),
        ("cls.predictions.transform.LayerNorm", "lm_head.layer_norm"),
        ("cls.predictions.decoder", "lm_head.decoder"),
        ("cls.predictions.bias", "lm_head.decoder.bias"),
    ),
    drops={"cls.seq_relationship": "there is no next-sentence head here"},
)


def _roberta_heads(name: str) -> dict[str, Head]:
    return {
        f"{name}Model": Head(target="Model"),
        f"{name}ForMaskedLM": Head(target="ForMaskedLM", map=ROBERTA_LM),
        f"{name}ForQuestionAnswering": Head(target="ForQuestionAnswering", map=QA),
        f"{name}ForSequenceClassification": Head(target="ForSequenceClassification", map=CLASSIFIER),
        f"{name}ForTokenClassification": Head(target="ForTokenClassification", map=CLASSIFIER),
        f"{name}ForMultipleChoice": Head(target="ForMultipleChoice", map=CLASSIFIER),
    }


def _roberta(name: str) -> Family:
    return Family(
        prefix="roberta",
        heads=_roberta_heads(name),
        map=ENCODER,
        counts_after_padding=True,
        can_start_decoder=True,
    )


# BERT's pooler and classifier are, layer for layer, RoBERTa's classification head.
BERT_CLASSIFIER = NameMap(
    names=(("pooler.dense", "classifier.dense"), ("classifier", "classifier.out_proj")),
)
BERT = Family(
    prefix="bert",
    heads={
        "BertModel": Head(target="Model"),
        "BertForMaskedLM": Head(target="ForMaskedLM", map=BERT_LM, activation_field="lm_head_act"),
        "BertForPreTraining": Head(target="ForMaskedLM", map=BERT_LM, activation_field="lm_head_act"),
        "BertForQuestionAnswering": Head(target="ForQuestionAnswering", map=QA),
        "BertForSequenceClassification": Head(target="ForSequenceClassification", map=BERT_CLASSIFIER),
        "BertForTokenClassification": Head(target="ForTokenClassification", map=CLASSIFIER),
        "BertForMultipleChoice": Head(target="ForMultipleChoice", map=CLASSIFIER),
    },
    map=ENCODER,
    separates_by_end=False,
    can_start_decoder=True,
)
BIG_BIRD = Family(
    prefix="bert",
    heads={
        "BigBirdModel": Head(target="Model"),
        "BigBirdForMaskedLM": Head(target="ForMaskedLM", map=BERT_LM, activation_field="lm_head_act"),
        "BigBirdForPreTraining": Head(target="ForMaskedLM", map=BERT_LM, activation_field="lm_head_act"),
        "BigBirdForQuestionAnswering": Head(
            target="ForQuestionAnswering",
            refusal="its head has a feed-forward block before the last layer, and the head here is that layer alone",
        ),
        "BigBirdForSequenceClassification": Head(
            target="ForSequenceClassification", map=CLASSIFIER, activation_field="classifier_act"
        ),
        "BigBirdForTokenClassification": Head(target="ForTokenClassification", map=CLASSIFIER),
        "BigBirdForMultipleChoice": Head(target="ForMultipleChoice", map=CLASSIFIER),
    },
    map=ENCODER
    | NameMap(
        names=(("pooler", "pooler.dense"),),
        zeros={f"{SELF_ATTENTION}.{name}.bias": "the source has use_bias=False" for name in ("query", "key", "value")},
    ),
    fields=(("rescale_embeddings", "scale_embedding"),),
    settings={"separate_global_projections": False},
    check_options={"attention_type": "original_full"},
    separates_by_end=False,
)
LONGFORMER = Family(
    prefix="longformer",
    heads=_roberta_heads("Longformer"),
    map=ENCODER,
    counts_after_padding=True,
    has_own_window=True,
    can_start_decoder=True,
)


def _bart_attention(source: str, target: str) -> Names:
    parts = (("q_proj", "self.query"), ("k_proj", "self.key"), ("v_proj", "self.value"), ("out_proj", "output.dense"))
    rules = tuple((f"{source}.{theirs}", f"{target}.{ours}") for theirs, ours in parts)
    return (*rules, (f"{source}_layer_norm", f"{target}.output.LayerNorm"))


def _bart_feed_forward(stack: str) -> Names:
    source, target = f"{stack}.layers.*", f"{stack}.layer.*"
    return (
        (f"{source}.fc1", f"{target}.intermediate.dense"),
        (f"{source}.fc2", f"{target}.output.dense"),
        (f"{source}.final_layer_norm", f"{target}.output.LayerNorm"),
    )


BART_SHARED = NameMap(
    names=(
        ("encoder.embed_tokens", "embeddings.word_embeddings"),
        ("decoder.embed_tokens", "decoder.word_embeddings"),
        ("shared", "embeddings.word_embeddings"),
        ("encoder.embed_positions", "embeddings.position_embeddings"),
        ("encoder.layernorm_embedding", "embeddings.LayerNorm"),
        ("decoder.embed_positions", "decoder.position_embeddings"),
        ("decoder.layernorm_embedding", "decoder.LayerNorm"),
        ("lm_head", "lm_head"),
        ("final_logits_bias", "lm_head.bias"),
        *_bart_feed_forward("encoder"),
        *_bart_feed_forward("decoder"),
        *_bart_attention("decoder.layers.*.self_attn", "decoder.layer.*.attention"),
        *_bart_attention("decoder.layers.*.encoder_attn", "decoder.layer.*.crossattention"),
    ),
    zeros={TOKEN_TYPES: "the source has no token types", "lm_head.bias": "the source adds no bias to its logits"},
    copies=GLOBAL_COPIES,
)
BART_FIELDS = (
    ("activation_function", "hidden_act"),
    ("dropout", "hidden_dropout_prob"),
    ("attention_dropout", "attention_probs_dropout_prob"),
    ("init_std", "initializer_range"),
    ("encoder_ffn_dim", "intermediate_size"),
    ("decoder_ffn_dim", "decoder_intermediate_size"),
)
# The layer norms of BART and LED are built with PyTorch's epsilon, whatever the config says.
BART_SETTINGS = {"is_encoder_decoder": True, "type_vocab_size": 1, "layer_norm_eps": 1e-5}


def _bart_heads(name: str, *others: str) -> dict[str, Head]:
    refusal = "its head reads the decoder's last state, and the seq2seq model here has the generation head alone"
    heads = {f"{name}{kind}": Head(target="ForConditionalGeneration") for kind in ("Model", "ForConditionalGeneration")}
    return heads | {f"{name}{kind}": Head(target="ForConditionalGeneration", refusal=refusal) for kind in others}


BART = Family(
    prefix="model",
    heads=_bart_heads("Bart", "ForSequenceClassification", "ForQuestionAnswering"),
    map=BART_SHARED | NameMap(names=_bart_attention("encoder.layers.*.self_attn", "encoder.layer.*.attention")),
    fields=BART_FIELDS,
    settings=BART_SETTINGS,
    position_offset=2,
    reserved_rows_counted=False,
    mask_module="encoder.layers.*.self_attn",
)
LED = Family(
    prefix="led",
    heads=_bart_heads("LED", "ForQuestionAnswering", "ForSequenceClassification"),
    map=BART_SHARED
    | NameMap(
        names=(
            ("encoder.layers.*.self_attn.longformer_self_attn", SELF_ATTENTION),
            ("encoder.layers.*.self_attn.output", "encoder.layer.*.attention.output.dense"),
            ("encoder.layers.*.self_attn_layer_norm", "encoder.layer.*.attention.output.LayerNorm"),
        ),
    ),
    fields=BART_FIELDS,
    settings=BART_SETTINGS,
    position_field="max_encoder_position_embeddings",
    has_own_window=True,
    pads_to_window=True,
)

FAMILIES: dict[str, Family] = {
    "roberta": _roberta("Roberta"),
    "xlm-roberta": _roberta("XLMRoberta"),
    "camembert": _roberta("Camembert"),
    "bert": BERT,
    "longformer": LONGFORMER,
    "big_bird": BIG_BIRD,
    "bart": BART,
    "led": LED,
}

_PRE_LN = "it normalises before each block instead of after it (pre-LN), which the layers here do not"
REFUSED_TYPES = {
    "hybrid_longformer": "it is a Hybrid Longformer already, which from_pretrained loads",
    "mbart": _PRE_LN,
    "pegasus": f"{_PRE_LN}, and its positions are sinusoids",
    "bigbird_pegasus": _PRE_LN,
    "roberta-prelayernorm": _PRE_LN,
    "xlm-roberta-xl": _PRE_LN,
}

# A decoder made of the encoder's own weights (Rothe et al. 2020).
_NOT_READ = "the seq2seq model's logits come from the word embeddings directly"
_NO_SUCH_HEAD = "the seq2seq model has no such head"
WARM_START = NameMap(
    names=(
        ("lm_head.decoder", "lm_head"),
        ("lm_head.bias", "lm_head.bias"),
        ("cls.predictions.decoder", "lm_head"),
        ("cls.predictions.bias", "lm_head.bias"),
    ),
    drops={
        "pooler": "the seq2seq model has no pooler",
        "lm_head.dense": _NOT_READ,
        "lm_head.layer_norm": _NOT_READ,
        "cls.predictions.transform": _NOT_READ,
        "cls.seq_relationship": _NO_SUCH_HEAD,
        "classifier": _NO_SUCH_HEAD,
        "qa_outputs": _NO_SUCH_HEAD,
    },
    zeros={"lm_head.bias": "the source has no masked-language-model head to take it from"},
    new={"decoder.layer.*.crossattention": "no encoder has cross-attention"},
    copies=(
        ("decoder.word_embeddings", "embeddings.word_embeddings", "copied"),
        ("decoder.position_embeddings", "embeddings.position_embeddings", "copied"),
        ("decoder.LayerNorm", "embeddings.LayerNorm", "copied"),
        ("decoder.layer.*", "encoder.layer.*", "copied"),
        ("lm_head.weight", "embeddings.word_embeddings.weight", "copied"),
    ),
)

EXPORT_HEADS = {
    "HybridLongformerModel": "LongformerModel",
    "HybridLongformerForMaskedLM": "LongformerForMaskedLM",
    "HybridLongformerForQuestionAnswering": "LongformerForQuestionAnswering",
    "HybridLongformerForSequenceClassification": "LongformerForSequenceClassification",
    "HybridLongformerForTokenClassification": "LongformerForTokenClassification",
    "HybridLongformerForMultipleChoice": "LongformerForMultipleChoice",
}
EXPORT = NameMap(
    names=(
        *ENCODER.names,
        ("lm_head.decoder.bias", "lm_head.bias"),
        ("lm_head", "lm_head"),
        ("classifier", "classifier"),
        ("qa_outputs", "qa_outputs"),
    ),
    # Untied Longformers have the bias twice and read the second.
    copies=(*GLOBAL_COPIES, ("lm_head.decoder.bias", "lm_head.bias", "copied")),
)
