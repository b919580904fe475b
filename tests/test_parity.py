"""The same weights give the same outputs as Longformer, RoBERTa, BERT, BART and LED of transformers."""

import re
from collections.abc import Callable

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hybrid_longformer import (
    HybridLongformerConfig,
    HybridLongformerForConditionalGeneration,
    HybridLongformerForMaskedLM,
    HybridLongformerForMultipleChoice,
    HybridLongformerForQuestionAnswering,
    HybridLongformerForSequenceClassification,
    HybridLongformerForTokenClassification,
    HybridLongformerModel,
)
from tests.models import (
    collate,
    largest,
    largest_difference,
    main_output,
    make_documents,
    name_of,
    results_per_document,
    scramble,
    targets,
    tiny_config,
)

LONGFORMERS = {
    HybridLongformerModel: transformers.LongformerModel,
    HybridLongformerForMaskedLM: transformers.LongformerForMaskedLM,
    HybridLongformerForQuestionAnswering: transformers.LongformerForQuestionAnswering,
    HybridLongformerForSequenceClassification: transformers.LongformerForSequenceClassification,
    HybridLongformerForTokenClassification: transformers.LongformerForTokenClassification,
    HybridLongformerForMultipleChoice: transformers.LongformerForMultipleChoice,
}
SHARED_FIELDS = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
]


def shared(config: HybridLongformerConfig) -> dict:
    return {name: getattr(config, name) for name in SHARED_FIELDS}


def load_renamed(model: nn.Module, source: nn.Module, rename: Callable[[str], str]) -> nn.Module:
    """Loads the source's weights under their names here; none may be left over on either side."""
    model.load_state_dict({rename(name): weight for name, weight in source.state_dict().items()}, strict=True)
    return model.eval()


# --- Longformer ---


def longformer_name(name: str) -> str:
    name = re.sub(r"^longformer\.", "hybrid_longformer.", name)
    return "lm_head.decoder.bias" if name == "lm_head.bias" else name


def both_longformers(model_class: type, windows: list[int], seed: int) -> tuple[nn.Module, nn.Module]:
    # A Longformer that answers questions needs exactly 2 labels.
    num_labels = 2 if model_class is HybridLongformerForQuestionAnswering else 3
    config = tiny_config(num_random_blocks=0, attention_window=windows, num_labels=num_labels)
    theirs = LONGFORMERS[model_class](
        transformers.LongformerConfig(
            **shared(config), sep_token_id=config.sep_token_id, num_labels=num_labels, attention_window=windows
        )
    )
    scramble(theirs, seed=seed).eval()
    return load_renamed(model_class(config), theirs, longformer_name), theirs


@st.composite
def longformer_cases(draw) -> dict:
    """Windows per layer (of those Longformer can mix), odd lengths, none to many globals that differ in the batch."""
    lengths = draw(st.lists(st.sampled_from([1, 2, 7, 9, 16, 17, 31, 33, 50, 75]), min_size=4, max_size=4))
    share = draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    # One document of each batch has no global token at all.
    chosen = [
        [] if row == 1 else torch.nonzero(torch.rand(length, generator=generator) < share).flatten().tolist()
        for row, length in enumerate(lengths)
    ]
    return {
        "windows": draw(st.lists(st.sampled_from([4, 8, 16, 32]), min_size=2, max_size=2)),
        "documents": make_documents(lengths, chosen, seed=draw(st.integers(0, 1000))),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.mark.parametrize("model_class", LONGFORMERS, ids=name_of)
@settings(max_examples=12)
@given(case=longformer_cases())
def test_equals_longformer(model_class: type, case: dict) -> None:
    ours, theirs = both_longformers(model_class, case["windows"], case["seed"])
    inputs = collate(model_class, case["documents"])
    with torch.no_grad():
        own, exact = (model(**inputs, output_hidden_states=True) for model in (ours, theirs))
    assert largest_difference(results_per_document(own, inputs), results_per_document(exact, inputs)) <= 1e-5
    assert len(own.hidden_states) == len(exact.hidden_states) == 3
    real = inputs["attention_mask"].flatten(0, -2).bool()
    for state, expected in zip(own.hidden_states, exact.hidden_states, strict=True):
        assert state.shape == expected.shape and largest((state - expected)[real]) <= 1e-5


@settings(max_examples=12)
@given(case=longformer_cases())
def test_equals_longformer_on_the_left(case: dict) -> None:
    """Longformer's pooler reads the first place, so only the states are compared."""
    ours, theirs = both_longformers(HybridLongformerModel, case["windows"], case["seed"])
    inputs = collate(HybridLongformerModel, case["documents"], side="left")
    with torch.no_grad():
        states, expected = (model(**inputs).last_hidden_state for model in (ours, theirs))
    assert largest((states - expected)[inputs["attention_mask"].bool()]) <= 1e-5


@pytest.mark.parametrize("model_class", list(LONGFORMERS)[2:], ids=name_of)
def test_default_global_tokens_are_longformers(model_class: type) -> None:
    ours, theirs = both_longformers(model_class, [8, 16], seed=0)
    inputs = collate(model_class, make_documents(), with_globals=False)
    with torch.no_grad():
        own, exact = ours(**inputs), theirs(**inputs)
    assert largest_difference(results_per_document(own, inputs), results_per_document(exact, inputs)) <= 1e-5


@pytest.mark.parametrize("model_class", LONGFORMERS, ids=name_of)
def test_gradients_are_longformers(model_class: type) -> None:
    ours, theirs = both_longformers(model_class, [8, 16], seed=0)
    inputs = collate(model_class, make_documents())
    direction = None
    for model in (ours, theirs):
        values = torch.stack([value.sum(0) for value in results_per_document(model(**inputs), inputs)])
        direction = torch.randn_like(values) if direction is None else direction
        (values * direction).sum().backward()
    gradients = {longformer_name(name): parameter.grad for name, parameter in theirs.named_parameters()}
    scale = max(largest(gradient) for gradient in gradients.values() if gradient is not None)
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None and gradients[name] is not None:
            assert largest(parameter.grad - gradients[name]) <= 1e-5 * scale, name


# --- RoBERTa and BERT ---


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("source_class", "config_class", "position_offset"),
    [
        (transformers.RobertaModel, transformers.RobertaConfig, 2),
        (transformers.BertModel, transformers.BertConfig, 0),
    ],
    ids=["RoBERTa", "BERT"],
)
def test_equals_full_attention_in_a_wide_window(source_class, config_class, position_offset: int, side: str) -> None:
    """Documents of up to W / 2 + 1 tokens are seen whole: random blocks and global tokens add nothing."""
    config = tiny_config(attention_window=[72, 100], separate_global_projections=False, position_offset=position_offset)
    theirs = scramble(source_class(config_class(**shared(config)))).eval()
    ours = load_renamed(HybridLongformerModel(config), theirs, str)
    inputs = collate(HybridLongformerModel, make_documents(), side=side)
    inputs["token_type_ids"] = (inputs["input_ids"] % 2) * inputs["attention_mask"]
    marks = inputs.pop("global_attention_mask")
    if position_offset == 0:  # BERT itself counts padding
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert max(inputs["attention_mask"].sum(1)) == 72 // 2 + 1
    with torch.no_grad():
        own, exact = ours(**inputs, global_attention_mask=marks), theirs(**inputs)
    real = inputs["attention_mask"].bool()
    assert largest((own.last_hidden_state - exact.last_hidden_state)[real]) <= 1e-5
    if side == "right":
        assert largest(own.pooler_output - exact.pooler_output) <= 1e-5


def test_differs_from_full_attention_in_a_narrow_window() -> None:
    config = tiny_config(attention_window=[8, 8], separate_global_projections=False)
    theirs = scramble(transformers.RobertaModel(transformers.RobertaConfig(**shared(config)))).eval()
    ours = load_renamed(HybridLongformerModel(config), theirs, str)
    ids = make_documents()[0].ids[None]
    with torch.no_grad():
        assert largest(ours(ids).last_hidden_state - theirs(ids).last_hidden_state) > 0.1


# --- BART and LED ---

# Applied in this order; what comes first is more specific.
SEQ2SEQ_NAMES = [
    (r"^(?:model|led)\.encoder\.", "hybrid_longformer.encoder."),
    (r"^(?:model|led)\.decoder\.", "decoder."),
    (r"\.layers\.", ".layer."),
    (r"\.self_attn\.longformer_self_attn\.", ".attention.self."),
    (r"\.self_attn\.output\.", ".attention.output.dense."),
    (r"\.self_attn_layer_norm\.", ".attention.output.LayerNorm."),
    (r"\.encoder_attn_layer_norm\.", ".crossattention.output.LayerNorm."),
    (r"\.self_attn\.", ".attention.self."),
    (r"\.encoder_attn\.", ".crossattention.self."),
    (r"\.self\.out_proj\.", ".output.dense."),
    (r"\.q_proj\.", ".query."),
    (r"\.k_proj\.", ".key."),
    (r"\.v_proj\.", ".value."),
    (r"\.fc1\.", ".intermediate.dense."),
    (r"\.fc2\.", ".output.dense."),
    (r"\.final_layer_norm\.", ".output.LayerNorm."),
    (r"^hybrid_longformer\.encoder\.embed_tokens\.", "hybrid_longformer.embeddings.word_embeddings."),
    (r"^hybrid_longformer\.encoder\.embed_positions\.", "hybrid_longformer.embeddings.position_embeddings."),
    (r"^hybrid_longformer\.encoder\.layernorm_embedding\.", "hybrid_longformer.embeddings.LayerNorm."),
    (r"^decoder\.embed_tokens\.", "decoder.word_embeddings."),
    (r"^decoder\.embed_positions\.", "decoder.position_embeddings."),
    (r"^decoder\.layernorm_embedding\.", "decoder.LayerNorm."),
]


def seq2seq_name(name: str) -> str:
    for pattern, replacement in SEQ2SEQ_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def seq2seq_weights(source: nn.Module) -> dict[str, Tensor]:
    weights = {seq2seq_name(name): weight for name, weight in source.state_dict().items() if ".shared." not in name}
    weights["lm_head.bias"] = weights.pop("final_logits_bias").flatten()
    words = weights["hybrid_longformer.embeddings.word_embeddings.weight"]
    weights["hybrid_longformer.embeddings.token_type_embeddings.weight"] = torch.zeros(1, words.shape[1])
    return weights


def both_seq2seq(source: str, **options) -> tuple[nn.Module, nn.Module]:
    """BART or LED and the same model here. BART's position table has two reserved rows, LED's none."""
    is_bart = source == "Bart"
    rows, decoder_rows, offset = 202, 42, 2 if is_bart else 0
    config = tiny_config(
        max_position_embeddings=rows,
        decoder_max_position_embeddings=decoder_rows,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_intermediate_size=40,
        position_offset=offset,
        type_vocab_size=1,
        num_random_blocks=0,
        attention_window=2 * 74 if is_bart else [8, 16],
        separate_global_projections=not is_bart,
        is_encoder_decoder=True,
        **options,
    )
    positions = (
        {"max_position_embeddings": rows - offset}
        if is_bart
        else {"max_encoder_position_embeddings": rows, "max_decoder_position_embeddings": decoder_rows}
    )
    their_config = getattr(transformers, f"{source}Config")(
        vocab_size=config.vocab_size,
        d_model=config.hidden_size,
        encoder_layers=config.num_hidden_layers,
        encoder_attention_heads=config.num_attention_heads,
        encoder_ffn_dim=config.intermediate_size,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=40,
        **positions,
        **({} if is_bart else {"attention_window": [8, 16]}),
        **options,
    )
    theirs = scramble(getattr(transformers, f"{source}ForConditionalGeneration")(their_config)).eval()
    theirs.final_logits_bias.normal_()
    weights = seq2seq_weights(theirs)
    if is_bart:  # both of BART's tables are as long as the longer text
        weights["decoder.position_embeddings.weight"] = weights["decoder.position_embeddings.weight"][:decoder_rows]
    ours = HybridLongformerForConditionalGeneration(config)
    ours.load_state_dict(weights, strict=True)
    return ours.eval(), theirs


def seq2seq_inputs(source: str) -> dict[str, Tensor]:
    documents = make_documents((75, 33, 50, 9), ((0, 7, 40), (), (0,), range(9)))
    inputs = collate(HybridLongformerForConditionalGeneration, documents)
    if source == "Bart":
        del inputs["global_attention_mask"]
    return inputs


@pytest.mark.parametrize(
    ("source", "options"),
    [("Bart", {}), ("Bart", {"scale_embedding": True}), ("LED", {})],
    ids=["BART", "BART with scaled embeddings", "LED"],
)
def test_equals_seq2seq(source: str, options: dict) -> None:
    ours, theirs = both_seq2seq(source, **options)
    inputs = seq2seq_inputs(source)
    labels = targets(4).flip(1)
    labels[1, 3:] = -100
    with torch.no_grad():
        own, exact = (model(**inputs, labels=labels, output_hidden_states=True) for model in (ours, theirs))
    assert largest(main_output(own) - main_output(exact)) <= 1e-5
    assert own.loss.item() == pytest.approx(exact.loss.item(), abs=1e-5)
    real = inputs["attention_mask"].bool()
    for state, expected in zip(own.encoder_hidden_states, exact.encoder_hidden_states, strict=True):
        assert largest((state - expected)[real]) <= 1e-5
    for state, expected in zip(own.decoder_hidden_states, exact.decoder_hidden_states, strict=True):
        assert largest(state - expected) <= 1e-5


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("source", ["Bart", "LED"])
def test_generates_as_seq2seq(source: str, num_beams: int) -> None:
    ours, theirs = both_seq2seq(source)
    inputs = seq2seq_inputs(source)
    del inputs["decoder_input_ids"]
    options = {"max_new_tokens": 12, "num_beams": num_beams, "no_repeat_ngram_size": 2, "forced_eos_token_id": 2}
    own, exact = (model.generate(**inputs, **options) for model in (ours, theirs))
    assert torch.equal(own, exact)
    assert len(own.unique(dim=0)) > 1 and own.shape[1] > 3
