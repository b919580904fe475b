"""The model's door: the global tokens of each task, and what is refused and in which words."""

import pytest
import torch
from torch import Tensor

from hybrid_longformer import (
    HybridLongformerForMultipleChoice,
    HybridLongformerForQuestionAnswering,
    HybridLongformerForSequenceClassification,
    HybridLongformerModel,
)
from hybrid_longformer.inputs import (
    check_inputs,
    check_positions,
    document_starts,
    first_real_token,
    first_token_mask,
    has_restart,
    question_mask,
    second_segment_mask,
    spread_positions,
)
from tests.models import (
    CLASSES,
    TOKEN_CLASSES,
    build,
    loss_of,
    main_output,
    make_inputs,
    name_of,
    run_model,
    tiny_config,
)

every_class = pytest.mark.parametrize("model_class", CLASSES, ids=name_of)
SEP = 2
# Token layouts: s a separator, q question, c context, . padding; marks: 1 where a token is global.
IDS = {"^": 0, ".": 1, "s": SEP, "q": 10, "c": 20}


def ids_of(*layouts: str) -> Tensor:
    return torch.tensor([[IDS[token] for token in layout] for layout in layouts])


def mask_of(*layouts: str) -> Tensor:
    return torch.tensor([[int(token != ".") for token in layout] for layout in layouts])


def marks_of(*rows: str) -> list[list[int]]:
    return [[int(mark) for mark in row] for row in rows]


# --- global tokens by default ---


@pytest.mark.parametrize(
    ("layout", "marks"),
    [
        ("^qqsscccs", "111000000"),  # RoBERTa: two separators, and one at the end
        ("^qqscccs.", "111000000"),  # BERT: one, and one at the end
        ("^qqsccccc", "111000000"),  # one alone, the context is cut off
        ("^qqsccccs", "111000000"),
        ("^qssccscs", "110000000"),  # separators inside the context
        ("^ssccccss", "100000000"),  # an empty question
        ("qqscccccc", "110000000"),  # no start token
        ("^cccccccc", "100000000"),  # no separator
        ("^ccccccs.", "100000000"),  # one that ends the row
        ("^cccccss.", "100000000"),  # two that end the row
        ("^qqss....", "100000000"),  # nothing but padding behind them
        ("...^qqscs", "000111000"),
        ("..^qqsscs", "001110000"),
        ("...^ccccs", "000100000"),
        (".........", "000000000"),
    ],
)
def test_question_is_global(layout: str, marks: str) -> None:
    found = question_mask(ids_of(layout), None, mask_of(layout), SEP)
    assert found.tolist() == marks_of(marks) and found.dtype == torch.long


@pytest.mark.parametrize(
    ("layout", "marks"),
    [
        ("^ccssqqqs.", "0000011110"),  # RoBERTa
        ("^ccsqqqs..", "0000111100"),  # BERT
        ("^ccsqqsqqs", "0000111111"),  # separators inside the choice
        ("...^cssqqs", "0000000111"),
        ("^ccccccs..", "1000000000"),
        ("^ccccccccc", "1000000000"),
        ("..^cccccss", "0010000000"),
    ],
)
def test_choice_is_global(layout: str, marks: str) -> None:
    assert second_segment_mask(ids_of(layout), None, mask_of(layout), SEP).tolist() == marks_of(marks)


def test_rows_are_looked_at_one_by_one() -> None:
    layouts = ("^qqsscccs", "^ccccccs.", "..^qscccs", ".........")
    found = question_mask(ids_of(*layouts), None, mask_of(*layouts), SEP)
    assert found.tolist() == marks_of("111000000", "100000000", "001100000", "000000000")


@pytest.mark.parametrize("choose", [question_mask, second_segment_mask])
def test_without_ids_or_separator_the_first_token_is_global(choose) -> None:
    layout = "..^qsscs"
    first = marks_of("00100000")
    assert choose(None, torch.randn(1, 8, 4), mask_of(layout), SEP).tolist() == first
    assert choose(ids_of(layout), None, mask_of(layout), None).tolist() == first


def test_without_mask_every_token_is_real() -> None:
    ids = ids_of("..^qsscs")
    assert first_token_mask(ids, None, None).tolist() == marks_of("10000000")
    assert question_mask(ids, None, None, SEP).tolist() == marks_of("11110000")
    assert first_token_mask(None, torch.randn(2, 3, 4), None).tolist() == marks_of("100", "100")


def test_separator_on_padding_does_not_count() -> None:
    """Some tokenizers pad with the separator."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]])
    assert question_mask(ids_of("ss^qsccs"), None, mask, SEP).tolist() == marks_of("00110000")
    assert second_segment_mask(ids_of("ss^qsccs"), None, mask, SEP).tolist() == marks_of("00000110")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_default_marks_take_masks_of_any_dtype(dtype: torch.dtype) -> None:
    layout = "..^qsscs"
    expected = question_mask(ids_of(layout), None, mask_of(layout), SEP)
    assert torch.equal(question_mask(ids_of(layout), None, mask_of(layout).to(dtype), SEP), expected)


@pytest.mark.parametrize(
    ("model_class", "choose"),
    [
        (HybridLongformerForQuestionAnswering, lambda ids, mask: question_mask(ids, None, mask, SEP)),
        (HybridLongformerForMultipleChoice, lambda ids, mask: second_segment_mask(ids, None, mask, SEP)),
        (HybridLongformerForSequenceClassification, lambda ids, mask: first_token_mask(ids, None, mask)),
    ],
    ids=["question", "choice", "first token"],
)
def test_heads_use_their_default(model_class: type, choose) -> None:
    model, inputs = build(model_class), make_inputs(model_class, with_globals=False)
    ids, mask = (inputs[name].flatten(0, -2) for name in ("input_ids", "attention_mask"))
    default, given, none = (
        main_output(model(**inputs, global_attention_mask=marks))
        for marks in (None, choose(ids, mask).view_as(inputs["input_ids"]), torch.zeros_like(inputs["input_ids"]))
    )
    assert torch.equal(default, given) and not torch.allclose(default, none, atol=1e-3)


@pytest.mark.parametrize("model_class", TOKEN_CLASSES, ids=name_of)
def test_token_heads_have_no_global_token_by_default(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class, with_globals=False)
    none = torch.zeros_like(inputs["input_ids"])
    assert torch.equal(main_output(model(**inputs)), main_output(model(**inputs, global_attention_mask=none)))


# --- what is refused ---


def refuse(message: str, **changes) -> None:
    inputs = {"input_ids": torch.full((2, 5), 7), "inputs_embeds": None} | changes
    with pytest.raises(ValueError, match=message):
        check_inputs(tiny_config(), **inputs)


@pytest.mark.parametrize("name", ["attention_mask", "global_attention_mask"])
def test_masks_hold_zeros_and_ones(name: str) -> None:
    refuse(
        f"^{name} contains 2, but is 1 or 0 for each token: global tokens have a mask", **{name: torch.full((2, 5), 2)}
    )
    refuse(f"^{name} contains -10000.0, .*additive", **{name: torch.full((2, 5), -1e4)})
    refuse(f"^{name} contains nan", **{name: torch.full((2, 5), float("nan"))})


@pytest.mark.parametrize("name", ["attention_mask", "global_attention_mask", "token_type_ids", "document_ids"])
@pytest.mark.parametrize("shape", [(2, 4), (1, 5), (5,), (2, 1, 1, 5)], ids=str)
def test_tensors_have_one_value_per_token(name: str, shape: tuple[int, ...]) -> None:
    wrong = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    refuse(rf"^{name} has shape \({wrong}\) but the input has \(2, 5\)", **{name: torch.zeros(shape).long()})


def test_ids_are_in_the_vocabulary() -> None:
    config = tiny_config()
    refuse(r"^input_ids contains 100, but vocab_size=100 allows 0 to 99", input_ids=torch.tensor([[3, 100]]))
    refuse(r"^input_ids contains -100, but vocab_size=100", input_ids=torch.tensor([[3, -100, 200]]))
    refuse(r"^token_type_ids contains 2, but type_vocab_size=2 allows 0 to 1", token_type_ids=torch.full((2, 5), 2))
    refuse(r"^token_type_ids contains -1", token_type_ids=torch.full((2, 5), -1))
    check_inputs(config, torch.tensor([[0, 99]]), None, token_type_ids=torch.tensor([[0, 1]]))


def test_inputs_have_the_right_dimensions() -> None:
    refuse(r"^input_ids has shape \(5,\) but must be \(batch, tokens\)", input_ids=torch.full((5,), 7))
    refuse(r"^input_ids has shape \(2, 1, 5\)", input_ids=torch.full((2, 1, 5), 7))
    refuse(
        r"^inputs_embeds has shape \(2, 32\) but must be \(batch, tokens, hidden\)",
        input_ids=None,
        inputs_embeds=torch.randn(2, 32),
    )
    refuse(
        r"^inputs_embeds has shape \(2, 5, 31\) but must be \(batch, tokens, 32\)",
        input_ids=None,
        inputs_embeds=torch.randn(2, 5, 31),
    )
    for shape in ((0, 5), (2, 0)):
        refuse("give at least one token", input_ids=torch.zeros(shape).long())


@every_class
def test_every_class_wants_exactly_one_input(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class, with_globals=False)
    ids = inputs.pop("input_ids")
    with pytest.raises(ValueError, match="give exactly one of input_ids and inputs_embeds"):
        model(**inputs)
    with pytest.raises(ValueError, match="give exactly one of input_ids and inputs_embeds"):
        model(input_ids=ids, inputs_embeds=model.get_input_embeddings()(ids), **inputs)


@every_class
def test_every_class_refuses_wrong_shapes_by_name(model_class: type) -> None:
    """Even where the class looks at its inputs before the encoder does."""
    model, inputs = build(model_class), make_inputs(model_class, with_globals=False)
    wanted = r"\(batch, choices, tokens\)" if model_class is HybridLongformerForMultipleChoice else r"\(batch, tokens\)"
    with pytest.raises(ValueError, match=rf"input_ids has shape \(37,\) but must be {wanted}"):
        model(**inputs | {"input_ids": inputs["input_ids"].flatten()[:37], "attention_mask": None})
    with pytest.raises(ValueError, match=r"attention_mask has shape \(4, 36\) but the input has \(4, 37\)"):
        model(**inputs | {"attention_mask": inputs["attention_mask"][..., 1:]})


@every_class
def test_every_class_refuses_wrong_values_by_name(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    for name, value, message in (
        ("attention_mask", 3, "attention_mask contains 3"),
        ("global_attention_mask", 2, "global_attention_mask contains 2"),
        ("input_ids", 100, "input_ids contains 100, but vocab_size=100"),
        ("token_type_ids", 5, "token_type_ids contains 5, but type_vocab_size=2.*leave them out"),
        ("attention_mask", 2, "attention_mask contains 2.*global tokens have a mask of their own"),
        ("attention_mask", -10000, "attention_mask contains -10000.*an additive mask"),
        ("input_ids", 3.0, "input_ids is of torch.float32, but has to hold whole numbers"),
        ("position_ids", 3.0, "position_ids is of torch.float32"),
        ("token_type_ids", True, "token_type_ids is of torch.bool"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**inputs | {name: torch.full(inputs["input_ids"].shape, value)})


def test_documents_are_whole_numbers() -> None:
    ids = torch.full((1, 5), 7)
    with pytest.raises(ValueError, match=r"document_ids is of torch\.float32"):
        build(HybridLongformerModel)(ids, document_ids=ids.float())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("global_mask", "global_attention_mask"),
        ("padding_mask", "attention_mask"),
        ("atention_mask", "attention_mask"),
        ("global_attention_masks", "global_attention_mask"),
        ("lables", "labels"),
    ],
)
@every_class
def test_misspelled_arguments_are_refused(model_class: type, name: str, meant: str) -> None:
    inputs = make_inputs(model_class)
    with pytest.raises(TypeError, match=f"{name} is no argument of this model: did you mean '{meant}'"):
        build(model_class)(**inputs, **{name: inputs["attention_mask"]})


@every_class
def test_columns_that_mean_nothing_here_are_ignored(model_class: type) -> None:
    model, inputs = build(model_class), make_inputs(model_class)
    more = {"special_tokens_mask": inputs["attention_mask"], "length": 5, "num_items_in_batch": 3}
    assert torch.equal(main_output(run_model(model, inputs | more)), main_output(run_model(model, inputs)))


def test_choices_need_masks_of_choices() -> None:
    model, inputs = build(HybridLongformerForMultipleChoice), make_inputs(HybridLongformerForMultipleChoice)
    for name in ("attention_mask", "global_attention_mask"):
        with pytest.raises(ValueError, match=rf"{name} has shape \(2, 37\) but must be \(batch, choices, tokens\)"):
            model(**inputs | {name: inputs[name][:, 0]})


# --- positions ---


def test_too_long_documents_are_refused() -> None:
    model = build(HybridLongformerModel, max_position_embeddings=22)
    ids = torch.full((1, 21), 7)
    assert model(ids[:, :20]).last_hidden_state.isfinite().all()
    message = (
        r"the input has 21 tokens in a document, but the position table holds 20 \(max_position_embeddings=22\): "
        "truncate it, cut it into overlapping windows, or convert"
    )
    with pytest.raises(ValueError, match=message):
        model(ids)
    with pytest.raises(ValueError, match=message):
        model(inputs_embeds=torch.randn(1, 21, 32))
    # Padding and other documents need no row of their own.
    padded = torch.cat([ids[:, :20], torch.full((1, 9), 1)], dim=1)
    assert model(padded, attention_mask=(padded != 1).long()).last_hidden_state.isfinite().all()
    documents = (torch.arange(40)[None] >= 20).long()
    assert model(torch.full((1, 40), 7), document_ids=documents).last_hidden_state.isfinite().all()


def test_positions_outside_the_table_are_refused() -> None:
    config = tiny_config(max_position_embeddings=22)
    check_positions(config, torch.tensor([[0, 21]]))
    with pytest.raises(ValueError, match=r"position table holds 20"):
        check_positions(config, torch.tensor([[0, 22]]))
    with pytest.raises(ValueError, match=r"position_ids contains -1"):
        check_positions(config, torch.tensor([[-1, 5]]))
    with pytest.raises(ValueError, match=r"position_ids has shape \(3, 5\) but the input has \(2, 5\)"):
        build(HybridLongformerModel)(torch.full((2, 5), 7), position_ids=torch.arange(5).expand(3, -1))


def test_one_row_of_positions_serves_the_batch() -> None:
    assert spread_positions(torch.arange(3)[None], (2, 3)).tolist() == [[0, 1, 2], [0, 1, 2]]
    own = torch.tensor([[0, 1], [5, 6]])
    assert torch.equal(spread_positions(own, (2, 2)), own)
    for wrong in (torch.arange(3), torch.arange(4)[None]):
        with pytest.raises(ValueError, match="position_ids has shape"):
            spread_positions(wrong, (2, 3))


@pytest.mark.parametrize(
    ("positions", "documents"),
    [
        ([2, 3, 4, 5], [0, 0, 0, 0]),
        ([2, 3, 2, 3, 4, 2], [0, 0, 1, 1, 1, 2]),
        ([7, 7, 8, 3, 1], [0, 0, 0, 1, 2]),
        ([4], [0]),
    ],
)
def test_documents_start_where_positions_decrease(positions: list[int], documents: list[int]) -> None:
    assert document_starts(torch.tensor([positions, positions])).tolist() == [documents] * 2


@pytest.mark.parametrize(
    ("positions", "mask", "expected"),
    [
        ([[2, 3, 4, 5]], None, False),
        ([[2, 3, 2, 3]], None, True),
        ([[2, 3, 1, 1]], [[1, 1, 0, 0]], False),  # RoBERTa's positions of padding
        ([[1, 1, 2, 3]], [[0, 0, 1, 1]], False),
        ([[2, 3, 4, 5], [2, 3, 2, 3]], [[1, 1, 1, 1], [1, 1, 1, 0]], True),
    ],
)
def test_packed_rows_are_recognised(positions: list, mask: list | None, expected: bool) -> None:
    assert has_restart(torch.tensor(positions), None if mask is None else torch.tensor(mask)) is expected


# --- padding ---


def test_first_real_token() -> None:
    states = torch.arange(12.0).view(2, 3, 2)
    assert torch.equal(first_real_token(states, None), states[:, 0])
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    for dtype in (torch.long, torch.bool, torch.float32):
        assert first_real_token(states, mask.to(dtype)).tolist() == [[2.0, 3.0], [6.0, 7.0]]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("extra", [0, 2])
@every_class
def test_rows_of_padding_give_finite_results(model_class: type, implementation: str, extra: int) -> None:
    model = build(model_class, attn_implementation=implementation, num_extra_global_tokens=extra)
    inputs = make_inputs(model_class, with_globals=False)
    expected = main_output(model(**inputs))
    inputs["input_ids"][-1], inputs["attention_mask"][-1] = 1, 0
    output = main_output(model(**inputs))
    assert output.isfinite().all()
    assert torch.allclose(output[:-1], expected[:-1], atol=1e-5)  # the other rows don't mind
    loss_of(model, inputs).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
