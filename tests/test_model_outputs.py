"""Outputs of every model class: shapes, states, maps, tuples, and losses."""

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
    CLASSES,
    NUM_CHOICES,
    NUM_LABELS,
    PAD,
    TARGET_LENGTH,
    VOCABULARY,
    both_backends,
    build,
    every_class,
    largest,
    main_output,
    make_inputs,
    make_labels,
    name_of,
    rows_of_positions,
    run_model,
)


@every_class
def test_evaluation_is_deterministic_and_training_is_not(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    first, second = (main_output(run_model(model, inputs)) for _ in range(2))
    assert torch.equal(first, second) and first.isfinite().all()
    model.train()
    first, second = (main_output(run_model(model, inputs)) for _ in range(2))
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
    assert main_output(run_model(build(model_class), inputs)).shape == shapes[model_class]


@every_class
def test_hidden_states(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    outputs = run_model(model, inputs, output_hidden_states=True)
    rows, length = inputs["input_ids"].flatten(0, -2).shape
    states = outputs.get("hidden_states") or outputs.encoder_hidden_states
    assert [state.shape for state in states] == [(rows, length, 32)] * 3
    assert torch.equal(main_output(outputs), main_output(run_model(model, inputs)))
    assert not any(key.endswith("hidden_states") for key in run_model(model, inputs))
    if model_class is HybridLongformerModel:
        assert torch.equal(states[-1], outputs.last_hidden_state)
        assert torch.equal(states[0], model.embeddings(inputs["input_ids"], None, rows_of_positions(inputs)))
    if model_class is HybridLongformerForConditionalGeneration:
        assert [state.shape for state in outputs.decoder_hidden_states] == [(rows, TARGET_LENGTH, 32)] * 3


@pytest.mark.parametrize("is_training", [False, True])
@both_backends
@every_class
def test_attention_maps(model_class: type, implementation: str, is_training: bool) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    model.set_attn_implementation(implementation)
    model.train(is_training)
    torch.manual_seed(0)
    without = run_model(model, inputs)
    torch.manual_seed(0)
    outputs = run_model(model, inputs, output_attentions=True)
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
    outputs = run_model(model, inputs)
    assert len(outputs.attentions) == 2 and len(outputs.hidden_states) == 3
    outputs = run_model(model, inputs, output_attentions=False, output_hidden_states=False)
    assert outputs.attentions is None and outputs.hidden_states is None


@pytest.mark.parametrize("where", ["call", "config"])
@every_class
def test_tuples_hold_the_same_as_named_outputs(model_class: type, where: str) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    inputs |= make_labels(model_class, inputs)
    options = {"output_hidden_states": True, "output_attentions": True}
    named = run_model(model, inputs, **options)
    if where == "config":
        model.config.return_dict = False
    plain = run_model(model, inputs, **options, **({"return_dict": False} if where == "call" else {}))
    assert type(plain) is tuple
    assert_same_structure(plain, named.to_tuple())


def assert_same_structure(first, second) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, tuple | list):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_same_structure(a, b)


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
    outputs = run_model(model, inputs, labels=labels)
    logs = outputs.logits.log_softmax(-1)[chosen]
    own = -logs[torch.arange(len(logs)), labels[chosen]]
    assert len(own) > 0 and outputs.loss.item() == pytest.approx(own.mean().item(), abs=1e-5)
    accumulated = run_model(model, inputs, labels=labels, num_items_in_batch=1000).loss
    assert accumulated.item() == pytest.approx(own.sum().item() / 1000, abs=1e-6)


@pytest.mark.parametrize("model_class", [HybridLongformerForMaskedLM, HybridLongformerForTokenClassification])
def test_logits_at_labels_are_those_of_all_tokens(model_class) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    labels = make_labels(model_class, inputs)["labels"].clone()
    labels[:, ::3] = -100
    everywhere = run_model(model, inputs, labels=labels)
    only_there = run_model(model, inputs, labels=labels, logits_at_labels=True)
    expected = everywhere.logits[labels != -100]
    assert only_there.logits.shape == expected.shape
    torch.testing.assert_close(only_there.logits, expected, atol=1e-5, rtol=0)
    assert only_there.loss.item() == pytest.approx(everywhere.loss.item(), abs=1e-6)
    with pytest.raises(ValueError, match="logits_at_labels=True needs labels"):
        run_model(model, inputs, logits_at_labels=True)


def test_padding_does_not_change_the_loss_of_an_answer() -> None:
    model = build(HybridLongformerForQuestionAnswering)
    inputs = make_inputs(HybridLongformerForQuestionAnswering)
    answer = {"start_positions": torch.tensor([3, 4, 2, 1]), "end_positions": torch.tensor([5, 4, 3, 2])}
    longer = {name: F.pad(value, (0, 9), value=PAD if name == "input_ids" else 0) for name, value in inputs.items()}
    losses = [run_model(model, some, **answer).loss.item() for some in (inputs, longer)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_answers_beyond_the_input_do_not_count() -> None:
    model = build(HybridLongformerForQuestionAnswering)
    inputs = make_inputs(HybridLongformerForQuestionAnswering)
    length = inputs["input_ids"].shape[1]
    start, end = torch.tensor([3, length, 4, length + 50]), torch.tensor([5, length, length + 9, 7])
    outputs = run_model(model, inputs, start_positions=start, end_positions=end)
    # Nor does padding: it is no place where an answer could be.
    padding = inputs["attention_mask"] == 0
    assert padding.any()
    start_logits, end_logits = (
        logits.masked_fill(padding, -torch.inf) for logits in (outputs.start_logits, outputs.end_logits)
    )
    start_loss = F.cross_entropy(start_logits[[0, 2]], start[[0, 2]])
    end_loss = F.cross_entropy(end_logits[[0, 3]], end[[0, 3]])
    assert outputs.loss.item() == pytest.approx((start_loss + end_loss).item() / 2, abs=1e-6)
    columns = run_model(model, inputs, start_positions=start[:, None], end_positions=end[:, None])
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
    outputs = run_model(model, make_inputs(HybridLongformerForSequenceClassification), labels=labels)
    assert outputs.logits.shape == (4, num_labels)
    assert outputs.loss.item() == pytest.approx(expected(outputs.logits, labels).item(), abs=1e-6)


def test_multiple_choice_loss() -> None:
    model, inputs = build(HybridLongformerForMultipleChoice), make_inputs(HybridLongformerForMultipleChoice)
    labels = torch.tensor([1, 0])
    outputs = run_model(model, inputs, labels=labels)
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
