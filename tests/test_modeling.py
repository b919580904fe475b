"""What transformers expects of every model class: saving, outputs, gradients, embeddings, padding, dtypes, devices."""

import math

import pytest
import torch
import transformers
from torch.nn import functional as F

from hybrid_longformer import (
    HybridLongformerForConditionalGeneration,
    HybridLongformerForMaskedLM,
    HybridLongformerForMultipleChoice,
    HybridLongformerForQuestionAnswering,
    HybridLongformerForSequenceClassification,
    HybridLongformerForTokenClassification,
    HybridLongformerModel,
)
from tests.models import (
    AUTO_CLASSES,
    CLASSES,
    FIRST_WORD,
    NUM_CHOICES,
    NUM_LABELS,
    PAD,
    TARGET_LENGTH,
    TIED_CLASSES,
    TOKEN_CLASSES,
    VOCABULARY,
    build,
    collate,
    encoder_of,
    largest,
    largest_difference,
    loss_of,
    main_output,
    make_documents,
    make_inputs,
    make_labels,
    name_of,
    results_per_document,
    tiny_config,
)

every_class = pytest.mark.parametrize("model_class", CLASSES, ids=name_of)
token_classes = pytest.mark.parametrize("model_class", TOKEN_CLASSES, ids=name_of)
tied_classes = pytest.mark.parametrize("model_class", TIED_CLASSES, ids=name_of)
both_backends = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


def run(model, inputs: dict, **options):
    with torch.no_grad():
        return model(**inputs, **options)


def results(model, inputs: dict, **options) -> list[torch.Tensor]:
    return results_per_document(run(model, inputs, **options), inputs)


def gradients_of(model, inputs: dict) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    loss_of(model, inputs).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# --- saving and loading ---


@every_class
def test_saved_models_load_by_class_and_by_auto_class(model_class: type, tmp_path) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    model.save_pretrained(tmp_path)
    before = main_output(run(model, inputs))
    for loader in (model_class, getattr(transformers, AUTO_CLASSES[model_class])):
        loaded, report = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is model_class and not loaded.training
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(main_output(run(loaded, inputs)), before)


@every_class
def test_heads_take_the_weights_of_a_base_checkpoint(model_class: type, tmp_path) -> None:
    base = build(HybridLongformerModel, seed=1)
    base.save_pretrained(tmp_path)
    model = model_class.from_pretrained(tmp_path)
    weights = encoder_of(model).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in base.state_dict().items() if name in weights)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@every_class
def test_base_model_takes_the_weights_of_any_head(model_class: type, tmp_path) -> None:
    model, inputs = build(model_class), make_inputs(HybridLongformerModel)
    model.save_pretrained(tmp_path)
    base = HybridLongformerModel.from_pretrained(tmp_path)
    state = run(encoder_of(model), inputs).last_hidden_state
    assert torch.equal(run(base, inputs).last_hidden_state, state)


def test_new_parameters_are_initialised_when_a_checkpoint_lacks_them(tmp_path) -> None:
    build(HybridLongformerModel, separate_global_projections=False).save_pretrained(tmp_path)
    model = HybridLongformerForTokenClassification.from_pretrained(
        tmp_path, num_extra_global_tokens=50, separate_global_projections=True, initializer_range=0.3
    )
    query_global = model.hybrid_longformer.encoder.layer[0].attention.self.query_global
    for weight in (model.hybrid_longformer.extra_global_tokens, query_global.weight, model.classifier.weight):
        assert weight.std().item() == pytest.approx(0.3, rel=0.2)
    assert largest(query_global.bias) == 0


def test_fresh_weights_have_the_configured_spread() -> None:
    model = HybridLongformerForMaskedLM(tiny_config(initializer_range=0.05, num_extra_global_tokens=20))
    for name, parameter in model.named_parameters():
        if "norm" in name.lower():
            assert torch.all(parameter == (1 if name.endswith("weight") else 0)), name
        elif name.endswith("bias"):
            assert largest(parameter) == 0, name
        elif parameter.numel() > 500:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.15), name


# --- outputs ---


@every_class
def test_evaluation_is_deterministic_and_training_is_not(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    first, second = (main_output(run(model, inputs)) for _ in range(2))
    assert torch.equal(first, second) and first.isfinite().all()
    model.train()
    first, second = (main_output(run(model, inputs)) for _ in range(2))
    assert not torch.equal(first, second)


@every_class
def test_output_shapes(model_class: type) -> None:
    inputs = make_inputs(model_class)
    batch_size, length = inputs["input_ids"].shape[0], inputs["input_ids"].shape[-1]
    shapes = {
        HybridLongformerModel: (batch_size, length, 32),
        HybridLongformerForMaskedLM: (batch_size, length, VOCABULARY),
        HybridLongformerForQuestionAnswering: (batch_size, length, 2),
        HybridLongformerForSequenceClassification: (batch_size, NUM_LABELS),
        HybridLongformerForTokenClassification: (batch_size, length, NUM_LABELS),
        HybridLongformerForMultipleChoice: (batch_size, NUM_CHOICES),
        HybridLongformerForConditionalGeneration: (batch_size, TARGET_LENGTH, VOCABULARY),
    }
    assert main_output(run(build(model_class), inputs)).shape == shapes[model_class]


@every_class
def test_hidden_states(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    outputs = run(model, inputs, output_hidden_states=True)
    rows, length = inputs["input_ids"].flatten(0, -2).shape
    states = outputs.get("hidden_states") or outputs.encoder_hidden_states
    assert [state.shape for state in states] == [(rows, length, 32)] * 3
    assert torch.equal(main_output(outputs), main_output(run(model, inputs)))
    assert not any(key.endswith("hidden_states") for key in run(model, inputs))
    if model_class is HybridLongformerModel:
        assert torch.equal(states[-1], outputs.last_hidden_state)
        assert torch.equal(states[0], model.embeddings(inputs["input_ids"], None, rows_of_positions(inputs)))
    if model_class is HybridLongformerForConditionalGeneration:
        assert [state.shape for state in outputs.decoder_hidden_states] == [(rows, TARGET_LENGTH, 32)] * 3


def rows_of_positions(inputs: dict) -> torch.Tensor:
    """RoBERTa's positions: 2 for the first real token, 1 for padding."""
    real = inputs["attention_mask"]
    return torch.where(real == 1, real.cumsum(1) + 1, 1)


@pytest.mark.parametrize("is_training", [False, True])
@both_backends
@every_class
def test_attention_maps(model_class: type, implementation: str, is_training: bool) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    model.set_attn_implementation(implementation)
    model.train(is_training)
    torch.manual_seed(0)
    without = run(model, inputs)
    torch.manual_seed(0)
    outputs = run(model, inputs, output_attentions=True)
    assert torch.equal(main_output(outputs), main_output(without))
    assert not any(key.endswith("attentions") for key in without)
    maps = outputs.get("attentions") or outputs.encoder_attentions
    mask = inputs["attention_mask"].flatten(0, -2)
    rows, length = mask.shape
    assert [tuple(one.shape) for one in maps] == [(rows, 2, length, length)] * 2
    for one in maps:
        assert largest(one.sum(-1) - mask[:, None]) <= 1e-5
        assert largest(one * (1 - mask)[:, None, None]) == 0
    if model_class is HybridLongformerForConditionalGeneration:
        check_decoder_maps(outputs, mask)


def check_decoder_maps(outputs, mask: torch.Tensor) -> None:
    rows, length = mask.shape
    own = (rows, 2, TARGET_LENGTH, TARGET_LENGTH)
    assert [tuple(one.shape) for one in outputs.decoder_attentions] == [own] * 2
    assert [tuple(one.shape) for one in outputs.cross_attentions] == [(rows, 2, TARGET_LENGTH, length)] * 2
    for one in (*outputs.decoder_attentions, *outputs.cross_attentions):
        assert largest(one.sum(-1) - 1) <= 1e-5
    assert all(largest(one.triu(1)) == 0 for one in outputs.decoder_attentions)
    assert all(largest(one * (1 - mask)[:, None, None]) == 0 for one in outputs.cross_attentions)


def test_maps_and_states_can_be_asked_for_in_the_config(tmp_path) -> None:
    build(HybridLongformerForQuestionAnswering).save_pretrained(tmp_path)
    model = HybridLongformerForQuestionAnswering.from_pretrained(
        tmp_path, output_attentions=True, output_hidden_states=True
    )
    inputs = make_inputs(HybridLongformerForQuestionAnswering)
    outputs = run(model, inputs)
    assert len(outputs.attentions) == 2 and len(outputs.hidden_states) == 3
    outputs = run(model, inputs, output_attentions=False, output_hidden_states=False)
    assert outputs.attentions is None and outputs.hidden_states is None


@pytest.mark.parametrize("where", ["call", "config"])
@every_class
def test_tuples_hold_the_same_as_named_outputs(model_class: type, where: str) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    inputs |= make_labels(model_class, inputs)
    options = {"output_hidden_states": True, "output_attentions": True}
    named = run(model, inputs, **options)
    if where == "config":
        model.config.return_dict = False
    plain = run(model, inputs, **options, **({"return_dict": False} if where == "call" else {}))
    assert type(plain) is tuple
    assert_same_structure(plain, named.to_tuple())


def assert_same_structure(first, second) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, tuple | list):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_same_structure(a, b)


# --- gradients ---

# A bias that all keys of a row share adds the same to all its scores, and one that all choices share to all their
# logits: the softmax loses it.
NO_GRADIENT = ("key.bias", "key_global.bias")
NO_GRADIENT_BY_CLASS = {HybridLongformerForMultipleChoice: ("classifier.bias",)}


@both_backends
@every_class
def test_gradient_reaches_every_parameter(model_class: type, implementation: str) -> None:
    model = build(model_class, num_extra_global_tokens=2, attn_implementation=implementation).train()
    lost = NO_GRADIENT + NO_GRADIENT_BY_CLASS.get(model_class, ())
    for name, gradient in gradients_of(model, make_inputs(model_class)).items():
        if not name.endswith(lost):
            assert gradient is not None and gradient.isfinite().all() and largest(gradient) > 1e-9, name


@every_class
def test_only_global_projections_go_without_gradient_when_nothing_is_global(model_class: type) -> None:
    model, inputs = build(model_class).train(), make_inputs(model_class)
    inputs["global_attention_mask"] = torch.zeros_like(inputs["attention_mask"])
    gradients = gradients_of(model, inputs)
    missing = {name for name, gradient in gradients.items() if gradient is None}
    assert len(missing) == 2 * 6 and all("_global." in name for name in missing)
    lost = NO_GRADIENT + NO_GRADIENT_BY_CLASS.get(model_class, ())
    assert all(largest(gradients[name]) > 1e-9 for name in gradients.keys() - missing if not name.endswith(lost))


@every_class
def test_gradients_agree_between_backends(model_class: type) -> None:
    inputs = make_inputs(model_class)
    fast, oracle = (gradients_of(build(model_class, attn_implementation=name), inputs) for name in ("sdpa", "eager"))
    scale = max(1.0, max(largest(gradient) for gradient in oracle.values() if gradient is not None))
    for name, gradient in oracle.items():
        ours = torch.zeros(()) if fast[name] is None else fast[name]
        exact = torch.zeros(()) if gradient is None else gradient
        assert largest(ours - exact) <= 1e-5 * scale, name


@every_class
def test_gradients_can_be_kept_at_states_and_maps(model_class: type) -> None:
    """As in transformers, maps carry gradients on the eager backend; there they are what the output is made of."""
    model, inputs = build(model_class, attn_implementation="eager"), make_inputs(model_class)
    outputs = model(**inputs, output_hidden_states=True, output_attentions=True)
    kept = [
        tensor
        for key, tensors in outputs.items()
        if key.endswith(("hidden_states", "attentions"))
        for tensor in tensors[: -1 if key.endswith("hidden_states") else None]
    ]
    assert len(kept) == (4 + 6 if model_class is HybridLongformerForConditionalGeneration else 4)
    for tensor in kept:
        tensor.retain_grad()
    main_output(outputs).square().sum().backward()
    assert all(tensor.grad is not None and largest(tensor.grad) > 0 for tensor in kept)


@pytest.mark.parametrize("use_reentrant", [False, True])
@both_backends
@every_class
def test_gradient_checkpointing_changes_nothing(model_class: type, implementation: str, use_reentrant: bool) -> None:
    model = build(model_class, num_extra_global_tokens=1, attn_implementation=implementation).train()
    inputs = make_inputs(model_class)
    torch.manual_seed(0)
    plain = gradients_of(model, inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    calls = count_calls(encoder_of(model).encoder.layer[0].attention)
    torch.manual_seed(0)
    checkpointed = gradients_of(model, inputs)
    assert len(calls) == 2  # once forward and once more on the way back
    for name, gradient in plain.items():
        if gradient is not None:
            assert largest(checkpointed[name] - gradient) <= 1e-6, name


def count_calls(module: torch.nn.Module) -> list[int]:
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


# --- embeddings ---


@every_class
def test_input_embeddings_can_be_read_and_replaced(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    words = encoder_of(model).embeddings.word_embeddings
    assert model.get_input_embeddings() is words
    before = main_output(run(model, inputs))
    changed = torch.nn.Embedding(VOCABULARY, 32)
    model.set_input_embeddings(changed)
    assert model.get_input_embeddings() is changed and encoder_of(model).embeddings.word_embeddings is changed
    assert not torch.allclose(main_output(run(model, inputs)), before)
    model.set_input_embeddings(words)
    assert torch.equal(main_output(run(model, inputs)), before)


@pytest.mark.parametrize("scale_embedding", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@every_class
def test_embedded_inputs_equal_token_ids(model_class: type, side: str, scale_embedding: bool) -> None:
    model, inputs = build(model_class, scale_embedding=scale_embedding), make_inputs(model_class, side=side)
    embedded = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
    embedded["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"])
    if model_class is HybridLongformerForConditionalGeneration:
        target = embedded.pop("decoder_input_ids")
        embedded["decoder_inputs_embeds"] = model.decoder.get_input_embeddings()(target)
    assert largest_difference(results(model, embedded), results(model, inputs)) <= 1e-6


def test_scaled_embeddings_are_scaled() -> None:
    plain, scaled = build(HybridLongformerModel), build(HybridLongformerModel, scale_embedding=True)
    with torch.no_grad():
        scaled.embeddings.word_embeddings.weight.div_(math.sqrt(32))
    inputs = make_inputs(HybridLongformerModel)
    assert largest_difference(results(plain, inputs), results(scaled, inputs)) <= 1e-5


@pytest.mark.parametrize("new_size", [VOCABULARY + 7, VOCABULARY - 20])
@every_class
def test_vocabulary_can_be_resized(model_class: type, new_size: int, tmp_path) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    inputs |= make_labels(model_class, inputs)
    inputs = {name: tensor.clamp(max=new_size - 1) for name, tensor in inputs.items()}
    before = results(model, inputs)
    model.resize_token_embeddings(new_size)
    assert model.config.vocab_size == new_size
    assert model.get_input_embeddings().weight.shape == (new_size, 32)
    after = results(model, inputs)
    if model_class in TIED_CLASSES:
        kept = min(new_size, VOCABULARY)
        before, after = ([one[..., :kept] for one in each] for each in (before, after))
        assert main_output(run(model, inputs)).shape[-1] == new_size
    assert largest_difference(before, after) <= 1e-6
    assert main_output(run(model, inputs | {"input_ids": inputs["input_ids"].clamp(min=new_size - 1)})).isfinite().all()
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    assert torch.equal(main_output(run(loaded, inputs)), main_output(run(model, inputs)))


def tied_weights(model) -> list[torch.Tensor]:
    others = [model.decoder.word_embeddings.weight] if hasattr(model, "decoder") else []
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight, *others]


@tied_classes
def test_tied_weights_stay_tied(model_class: type, tmp_path) -> None:
    model = build(model_class)
    model.resize_token_embeddings(VOCABULARY + 3)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    loaded.resize_token_embeddings(VOCABULARY + 5)
    for each in (model, loaded):
        assert len({weight.data_ptr() for weight in tied_weights(each)}) == 1
    with torch.no_grad():
        loaded.get_input_embeddings().weight.add_(1.0)
    assert torch.equal(*tied_weights(loaded)[:2])


@tied_classes
def test_untied_weights_stay_apart(model_class: type, tmp_path) -> None:
    model, inputs = build(model_class, tie_word_embeddings=False), make_inputs(model_class)
    before = [weight.detach().clone() for weight in tied_weights(model)]
    logits = main_output(run(model, inputs))
    model.resize_token_embeddings(VOCABULARY + 3)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    for each in (model, loaded):
        weights = tied_weights(each)
        assert len({weight.data_ptr() for weight in weights}) == len(weights)
        assert all(torch.equal(weight[:VOCABULARY], old) for weight, old in zip(weights, before, strict=True))
        assert largest(main_output(run(each, inputs))[..., :VOCABULARY] - logits) <= 1e-6


# --- padding and company ---


@both_backends
@every_class
def test_company_and_padding_change_nothing(model_class: type, implementation: str) -> None:
    """Every document says the same alone, among others, and padded on either side; so does the pooler."""
    model, documents = build(model_class, attn_implementation=implementation), make_documents()
    group = NUM_CHOICES if model_class is HybridLongformerForMultipleChoice else 1
    groups = [documents[start : start + group] for start in range(0, len(documents), group)]
    alone = [results(model, collate(model_class, one))[0] for one in groups]
    for side in ("right", "left"):
        together = results(model, collate(model_class, documents, side=side))
        assert largest_difference(together, alone) <= 1e-5


@every_class
def test_default_global_tokens_ignore_padding(model_class: type) -> None:
    model = build(model_class)
    right, left = (
        results(model, make_inputs(model_class, side=side, with_globals=False)) for side in ("right", "left")
    )
    assert largest_difference(right, left) <= 1e-5


@every_class
def test_what_stands_under_padding_changes_nothing(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    noise = 100 * torch.randn(embeddings.shape) * (inputs["attention_mask"] == 0)[..., None]
    clean = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
    first, second = (results(model, clean | {"inputs_embeds": each}) for each in (embeddings, embeddings + noise))
    assert noise.any() and largest_difference(first, second) <= 1e-6


def test_pooler_reads_the_first_real_token() -> None:
    model = build(HybridLongformerModel)
    right, left = (run(model, make_inputs(HybridLongformerModel, side=side)) for side in ("right", "left"))
    assert largest(right.pooler_output - left.pooler_output) <= 1e-5
    assert torch.equal(right.pooler_output, model.pooler(right.last_hidden_state[:, 0]))
    starts = make_inputs(HybridLongformerModel, side="left")["attention_mask"].argmax(1)
    assert torch.equal(left.pooler_output, model.pooler(left.last_hidden_state[torch.arange(len(starts)), starts]))


@pytest.mark.parametrize("told_by", ["document_ids", "position_ids"])
@token_classes
def test_packed_documents_say_the_same_as_apart(model_class: type, told_by: str) -> None:
    model, documents = build(model_class), make_documents()
    apart = [main_output(run(model, collate(model_class, [document])))[0] for document in documents]
    lengths = [len(document) for document in documents]
    packing = {
        "document_ids": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None],
        "position_ids": torch.cat([torch.arange(length) + 2 for length in lengths])[None],
    }
    packed = {
        "input_ids": torch.cat([document.ids for document in documents])[None],
        "global_attention_mask": torch.cat([document.global_marks for document in documents])[None],
        told_by: packing[told_by],
    }
    outputs = main_output(run(model, packed))[0].split(lengths)
    assert largest_difference(outputs, apart) <= 1e-5


@pytest.mark.parametrize("model_class", [each for each in CLASSES if each not in TOKEN_CLASSES], ids=name_of)
def test_heads_with_one_answer_per_row_refuse_packed_rows(model_class: type) -> None:
    inputs = make_inputs(model_class)
    with pytest.raises(ValueError, match="document_ids pack several documents into one: give each document its own"):
        build(model_class)(**inputs, document_ids=torch.zeros_like(inputs["input_ids"]))


@token_classes
def test_given_positions_of_one_document_equal_the_default(model_class: type) -> None:
    """One row of positions serves the whole batch, as elsewhere in transformers."""
    model = build(model_class)
    inputs = make_inputs(model_class)
    default = results(model, inputs)
    positions = torch.arange(2, 2 + inputs["input_ids"].shape[1])[None]
    given = results(model, inputs | {"position_ids": positions.expand(len(inputs["input_ids"]), -1)})
    assert largest_difference(given, default) <= 1e-5
    assert largest_difference(results(model, inputs | {"position_ids": positions}), default) <= 1e-5
    roberta = rows_of_positions(inputs)
    assert largest_difference(results(model, inputs | {"position_ids": roberta}), default) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
@every_class
def test_masks_of_any_dtype(model_class: type, dtype: torch.dtype) -> None:
    model, inputs = build(model_class, num_extra_global_tokens=1), make_inputs(model_class)
    masks = {name: inputs[name].to(dtype) for name in ("attention_mask", "global_attention_mask")}
    assert torch.equal(main_output(run(model, inputs | masks)), main_output(run(model, inputs)))


# --- losses ---


@pytest.mark.parametrize(
    "model_class",
    [
        HybridLongformerForMaskedLM,
        HybridLongformerForTokenClassification,
        HybridLongformerForConditionalGeneration,
    ],
    ids=name_of,
)
def test_unlabelled_tokens_do_not_count(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    labels = make_labels(model_class, inputs)["labels"]
    chosen = (torch.rand(labels.shape) < 0.3) & (labels != -100)
    labels = labels.masked_fill(~chosen, -100)
    outputs = run(model, inputs, labels=labels)
    logs = outputs.logits.log_softmax(-1)[chosen]
    own = -logs[torch.arange(len(logs)), labels[chosen]]
    assert len(own) > 0 and outputs.loss.item() == pytest.approx(own.mean().item(), abs=1e-5)
    accumulated = run(model, inputs, labels=labels, num_items_in_batch=1000).loss
    assert accumulated.item() == pytest.approx(own.sum().item() / 1000, abs=1e-6)


@pytest.mark.parametrize("model_class", [HybridLongformerForMaskedLM, HybridLongformerForTokenClassification])
def test_logits_at_labels_are_those_of_all_tokens(model_class) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    labels = make_labels(model_class, inputs)["labels"].clone()
    labels[:, ::3] = -100
    everywhere = run(model, inputs, labels=labels)
    only_there = run(model, inputs, labels=labels, logits_at_labels=True)
    expected = everywhere.logits[labels != -100]
    assert only_there.logits.shape == expected.shape
    torch.testing.assert_close(only_there.logits, expected, atol=1e-5, rtol=0)
    assert only_there.loss.item() == pytest.approx(everywhere.loss.item(), abs=1e-6)
    with pytest.raises(ValueError, match="logits_at_labels=True needs labels"):
        run(model, inputs, logits_at_labels=True)


def test_padding_does_not_change_the_loss_of_an_answer() -> None:
    model = build(HybridLongformerForQuestionAnswering)
    inputs = make_inputs(HybridLongformerForQuestionAnswering)
    answer = {"start_positions": torch.tensor([3, 4, 2, 1]), "end_positions": torch.tensor([5, 4, 3, 2])}
    longer = {name: F.pad(value, (0, 9), value=PAD if name == "input_ids" else 0) for name, value in inputs.items()}
    losses = [run(model, some, **answer).loss.item() for some in (inputs, longer)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_answers_beyond_the_input_do_not_count() -> None:
    model = build(HybridLongformerForQuestionAnswering)
    inputs = make_inputs(HybridLongformerForQuestionAnswering)
    length = inputs["input_ids"].shape[1]
    start, end = torch.tensor([3, length, 4, length + 50]), torch.tensor([5, length, length + 9, 7])
    outputs = run(model, inputs, start_positions=start, end_positions=end)
    # Nor does padding: it is no place where an answer could be.
    padding = inputs["attention_mask"] == 0
    assert padding.any()
    start_logits, end_logits = (
        logits.masked_fill(padding, -torch.inf) for logits in (outputs.start_logits, outputs.end_logits)
    )
    start_loss = F.cross_entropy(start_logits[[0, 2]], start[[0, 2]])
    end_loss = F.cross_entropy(end_logits[[0, 3]], end[[0, 3]])
    assert outputs.loss.item() == pytest.approx((start_loss + end_loss).item() / 2, abs=1e-6)
    columns = run(model, inputs, start_positions=start[:, None], end_positions=end[:, None])
    assert torch.equal(columns.loss, outputs.loss)


@pytest.mark.parametrize(
    ("num_labels", "labels", "expected"),
    [
        (1, torch.tensor([0.5, -1.0, 2.0, 0.0]), lambda logits, labels: F.mse_loss(logits[:, 0], labels)),
        (3, torch.tensor([0, 2, 1, 1]), F.cross_entropy),
        (3, torch.eye(4)[:, :3], F.binary_cross_entropy_with_logits),
    ],
    ids=["regression", "single label", "several labels"],
)
def test_classification_losses(num_labels: int, labels: torch.Tensor, expected) -> None:
    model = build(HybridLongformerForSequenceClassification, num_labels=num_labels)
    outputs = run(model, make_inputs(HybridLongformerForSequenceClassification), labels=labels)
    assert outputs.logits.shape == (4, num_labels)
    assert outputs.loss.item() == pytest.approx(expected(outputs.logits, labels).item(), abs=1e-6)


def test_multiple_choice_loss() -> None:
    model, inputs = build(HybridLongformerForMultipleChoice), make_inputs(HybridLongformerForMultipleChoice)
    labels = torch.tensor([1, 0])
    outputs = run(model, inputs, labels=labels)
    assert outputs.loss.item() == pytest.approx(F.cross_entropy(outputs.logits, labels).item(), abs=1e-6)


@pytest.mark.parametrize("model_class", CLASSES[1:], ids=name_of)
def test_trainer_accumulates_the_gradient_of_the_whole_batch(model_class: type, tmp_path) -> None:
    """Two batches of one and a batch of two move the weights alike (every row has as many labels)."""
    inputs = make_inputs(model_class)
    batch = {name: tensor[:2] for name, tensor in (inputs | make_labels(model_class, inputs)).items()}
    if "labels" in batch and batch["labels"].shape == inputs["attention_mask"].shape:
        batch["labels"] = batch["labels"].masked_fill(torch.arange(batch["labels"].shape[1]) > 9, -100)
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(2)]
    weights = []
    for batch_size in (1, 2):
        model = build(model_class, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=2 // batch_size,
            max_steps=1,
            learning_rate=0.1,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=1e9,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
        weights.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    start = torch.cat([parameter.flatten() for parameter in build(model_class).parameters()])
    step = largest(weights[1] - start)
    assert step > 0 and largest(weights[0] - weights[1]) <= 1e-3 * step


# --- backends, dtypes, devices ---


@every_class
def test_backend_can_be_switched_on_the_fly(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    assert model.config._attn_implementation == "sdpa"
    fast = results(model, inputs)
    outputs = {}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        for module in model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                assert module.config._attn_implementation == implementation
        outputs[implementation] = results(model, inputs)
    assert 0 < largest_difference(outputs["eager"], fast) <= 1e-5
    assert largest_difference(outputs["sdpa"], fast) == 0


@both_backends
@every_class
def test_backend_can_be_chosen_when_loading(model_class: type, implementation: str, tmp_path) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path, attn_implementation=implementation)
    assert encoder_of(loaded).config._attn_implementation == implementation
    assert largest_difference(results(loaded, inputs), results(model, inputs)) <= 1e-5


def test_unknown_backends_are_refused(tmp_path) -> None:
    model = build(HybridLongformerModel)
    model.save_pretrained(tmp_path)
    for name, message in (("flash_attention_2", "does not support Flash Attention 2"), ("fast", '"fast"')):
        with pytest.raises(ValueError, match=message):
            HybridLongformerModel.from_pretrained(tmp_path, attn_implementation=name)
        with pytest.raises(ValueError, match=message):
            model.set_attn_implementation(name)
    model.config._attn_implementation_internal = "fast"
    with pytest.raises(ValueError, match="'fast' is not known: choose one of eager, sdpa, flex_attention"):
        model(torch.full((1, 5), FIRST_WORD))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@both_backends
@every_class
def test_half_precision(model_class: type, implementation: str, dtype: torch.dtype, tmp_path) -> None:
    exact, inputs = build(model_class), make_inputs(model_class)
    exact.save_pretrained(tmp_path)
    model = model_class.from_pretrained(tmp_path, dtype=dtype, attn_implementation=implementation)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    output, truth = main_output(run(model, inputs)), main_output(run(exact, inputs))
    assert output.dtype == dtype and output.isfinite().all()
    assert largest(output.float() - truth) <= 30 * torch.finfo(dtype).eps * largest(truth)
    gradients = gradients_of(model.train(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients.values() if gradient is not None)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto"], ids=str)
@every_class
def test_device_maps(model_class: type, device_map, tmp_path) -> None:
    model, inputs = build(model_class, num_extra_global_tokens=1), make_inputs(model_class)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path, device_map=device_map)
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}
    assert torch.equal(main_output(run(loaded, inputs)), main_output(run(model, inputs)))


@every_class
def test_weights_can_wait_on_disk(model_class: type, tmp_path) -> None:
    """Offloaded weights exist only while their layer's own forward runs."""
    from accelerate import disk_offload

    model, inputs = build(model_class), make_inputs(model_class)
    expected = results(model, inputs)
    disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert any(parameter.is_meta for parameter in model.parameters())
    assert largest_difference(results(model, inputs), expected) <= 1e-5


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@every_class
def test_feed_forward_in_chunks(model_class: type, chunk_size: int) -> None:
    inputs = make_inputs(model_class)
    whole, chunked = (build(model_class, chunk_size_feed_forward=size) for size in (0, chunk_size))
    sizes = []
    encoder_of(chunked).encoder.layer[0].intermediate.register_forward_hook(
        lambda module, args, output: sizes.append(output.shape[1])
    )
    assert largest_difference(results(whole, inputs), results(chunked, inputs)) <= 1e-5
    assert max(sizes) == min(chunk_size, inputs["input_ids"].shape[-1])


# --- extra global tokens (ETC) ---


@pytest.mark.parametrize("layers", [True, [1]], ids=["every layer", "one layer"])
@every_class
def test_extra_tokens_do_not_show_outside(model_class: type, layers: bool | list[int]) -> None:
    inputs = make_inputs(model_class)
    plain = run(build(model_class), inputs, output_hidden_states=layers)
    extended = run(build(model_class, num_extra_global_tokens=3), inputs, output_hidden_states=layers)
    assert main_output(extended).shape == main_output(plain).shape
    shapes = [
        [
            None if state is None else state.shape
            for state in outputs.get("hidden_states") or outputs.encoder_hidden_states
        ]
        for outputs in (plain, extended)
    ]
    assert shapes[0] == shapes[1]


@every_class
def test_extra_tokens_are_seen_by_all_and_ignore_padding(model_class: type) -> None:
    model, documents = build(model_class, num_extra_global_tokens=3), make_documents()
    right, left = (results(model, collate(model_class, documents, side=side)) for side in ("right", "left"))
    assert largest_difference(right, left) <= 1e-5
    with torch.no_grad():
        encoder_of(model).extra_global_tokens[1].neg_()
    changed = results(model, collate(model_class, documents))
    assert all(largest(a - b) > 1e-3 for a, b in zip(changed, right, strict=True))


@both_backends
@every_class
def test_extra_tokens_learn(model_class: type, implementation: str) -> None:
    model = build(model_class, num_extra_global_tokens=3, attn_implementation=implementation).train()
    gradient = gradients_of(model, make_inputs(model_class))
    (name,) = (each for each in gradient if each.endswith("extra_global_tokens"))
    assert gradient[name].abs().amax(1).min() > 1e-9


@token_classes
def test_extra_tokens_refuse_packed_rows(model_class: type) -> None:
    model, inputs = build(model_class, num_extra_global_tokens=3), make_inputs(model_class)
    halves = (torch.arange(inputs["input_ids"].shape[1]) > 12).long().expand_as(inputs["input_ids"])
    positions = torch.arange(inputs["input_ids"].shape[1]) - 13 * halves + 2
    for packing in ({"document_ids": halves}, {"position_ids": positions}):
        with pytest.raises(ValueError, match="num_extra_global_tokens=3 belong to one document"):
            model(**inputs, **packing)


@token_classes
def test_extra_tokens_take_positions_of_one_document(model_class: type) -> None:
    model, inputs = build(model_class, num_extra_global_tokens=3), make_inputs(model_class)
    given = results(model, inputs | {"position_ids": rows_of_positions(inputs)})
    assert largest_difference(given, results(model, inputs)) <= 1e-5


def test_extra_tokens_work_without_any_mask() -> None:
    model, document = build(HybridLongformerModel, num_extra_global_tokens=3), make_documents()[1]
    bare = run(model, {"input_ids": document.ids[None]}).last_hidden_state
    assert largest(bare - run(model, collate(HybridLongformerModel, [document])).last_hidden_state) <= 1e-5
    padded = {"input_ids": F.pad(document.ids[None], (0, 4), value=PAD)}
    padded["attention_mask"] = (padded["input_ids"] != PAD).long()
    assert largest(run(model, padded).last_hidden_state[:, :-4] - bare) <= 1e-5


@pytest.mark.parametrize("model_class", CLASSES, ids=name_of)
def test_modules_that_stay_whole_are_there(model_class) -> None:
    # FSDP refuses a model that lacks one of them.
    found = {type(module).__name__ for module in build(model_class).modules()}
    assert set(model_class._no_split_modules) <= found
