"""Windows: the same ids as the tokenizer's own pairs, every token covered, every answer's characters found again."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from finetune.windows import (
    PairLayout,
    TokenisedContext,
    answer_tokens,
    choose_training_windows,
    cut_windows,
    question_rng,
    question_windows,
    tokenise_context,
    tokenise_question,
    training_windows,
)

SHARED = Path(os.environ.get("HYBRID_LONGFORMER_SHARED", Path(__file__).resolve().parents[2] / "shared"))
WEIGHTS = SHARED / "models" / "granite-30m-roberta"
PROSE = [
    "The agreement between the parties ends on 31 December 2024, unless it is renewed in writing.",
    "L'été dernier, le naïve café de la Zürichstraße était fermé. Это договор аренды. 这是一份租赁合同。",
    "これは契約書です。 สัญญานี้สิ้นสุด يُنهى هذا العقد इस अनुबंध का अंत",
]
# Any script, and what breaks offsets: joined emoji, combining marks, every sort of space, marks of byte order.
TRICKY = st.sampled_from(
    [
        " ", "  ", "\t", "\r\n", "\n", "\u00a0", "\u2003", "\u3000", "\u200b", "\ufeff", "\u00ad", "a", "The", "it's",
        "e\u0301", "é", "n\u0303\u0331", "ﬁ", "İ", "ß", "👩‍👩‍👧", "🏳️‍🌈", "👍🏽", "漢字", "한국어", "e\u0301\u200d",
        "ไทย", "नमस्ते", "שלום", "العربية", "2,5", "§ 4.1", "—", "“q”", "\x00", "\x1f", "\U0001d518", "ก็",
    ]
)  # fmt: skip
TEXTS = st.lists(TRICKY | st.text(max_size=4), max_size=12).map("".join)


def byte_level(*, trim: bool = True, prefix_space: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROSE, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=trim, add_prefix_space=prefix_space
    )
    names = dict(zip(["bos_token", "pad_token", "eos_token", "unk_token", "mask_token"], special, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], model_max_length=32, **names
    )


def word_piece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(PROSE, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def sentence_piece() -> PreTrainedTokenizerFast:
    """As T5's: no special token before the question, `q </s> c </s>`."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(PROSE, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )


TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-level, untrimmed": byte_level(trim=False, prefix_space=True),
    "word pieces": word_piece(),
    "sentence pieces": sentence_piece(),
}
if WEIGHTS.is_dir():
    TOKENIZERS["real RoBERTa"] = AutoTokenizer.from_pretrained(WEIGHTS)
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def span_text(text: str, context: TokenisedContext, place: tuple[int, int]) -> str:
    return text[context.starts[place[0]] : context.ends[place[1]]]


# Layout


@each_tokenizer
@given(question=TEXTS, context=TEXTS)
def test_assembled_pairs_are_the_tokenizers_own(name, question, context):
    assume(context)  # an empty one is taken for none by the tokenizer
    tokenizer = TOKENIZERS[name]
    layout = PairLayout.of(tokenizer)
    expected = tokenizer(question, context)
    question_ids = tokenizer(question, add_special_tokens=False)["input_ids"]
    assembled = layout.assemble(question_ids, tokenise_context(tokenizer, context).input_ids)
    assert assembled["input_ids"].tolist() == expected["input_ids"]
    assert ("token_type_ids" in assembled) == ("token_type_ids" in expected)
    if "token_type_ids" in expected:
        assert assembled["token_type_ids"].tolist() == expected["token_type_ids"]
    sequence = np.array([-1 if number is None else number for number in expected.sequence_ids()])
    first, stop = assembled["question_span"]
    assert np.flatnonzero(sequence == 0).tolist() == list(range(first, stop))
    in_context = np.flatnonzero(sequence == 1)
    assert in_context.tolist() == list(
        range(assembled["context_offset"], assembled["context_offset"] + len(in_context))
    )
    assert layout.num_special == (sequence == -1).sum()
    assert layout.null_position(stop - first, len(in_context)) == np.flatnonzero(sequence == -1)[0]


def test_layouts_of_the_families():
    assert PairLayout.of(TOKENIZERS["byte-level"]).between.tolist() == [2, 2]
    bert = PairLayout.of(TOKENIZERS["word pieces"])
    assert (bert.before.tolist(), bert.between.tolist(), bert.behind.tolist()) == ([2], [3], [3])
    assert bert.assemble([7, 8], [9])["token_type_ids"].tolist() == [0, 0, 0, 0, 1, 1]
    t5 = PairLayout.of(TOKENIZERS["sentence pieces"])
    assert (t5.before.tolist(), t5.num_special, t5.null_position(3, 9)) == ([], 2, 3)


def test_slow_tokenizers_are_refused():
    with pytest.raises(ValueError, match=r"no fast tokenizer.*tokenizer\.json"):
        tokenise_context(object(), "text")


# Cutting


@given(num_tokens=st.integers(0, 300), room=st.integers(1, 60), stride=st.integers(0, 59))
def test_windows_cover_every_token_and_overlap_by_the_stride(num_tokens, room, stride):
    assume(stride < room)
    windows = cut_windows(num_tokens, room=room, stride=stride)
    assert windows[0][0] == 0 and windows[-1][1] == num_tokens
    assert all(stop - first <= room for first, stop in windows)
    for (_, stop), (first, next_stop) in pairwise(windows):
        assert stop - first == stride and next_stop > stop
    assert all(stop - first == room for first, stop in windows[:-1])


@given(num_tokens=st.integers(1, 200), room=st.integers(2, 60), data=st.data())
def test_an_answer_no_longer_than_the_stride_lies_whole_in_some_window(num_tokens, room, data):
    stride = data.draw(st.integers(1, room - 1))
    first = data.draw(st.integers(0, num_tokens - 1))
    last = data.draw(st.integers(first, min(num_tokens, first + stride) - 1))
    windows = cut_windows(num_tokens, room=room, stride=stride)
    assert any(start <= first and last < stop for start, stop in windows)


@pytest.mark.parametrize("name", ["byte-level", "word pieces"])
@given(words=st.lists(st.sampled_from(["the", "ends", "31", "été"]), min_size=1, max_size=60), data=st.data())
def test_the_same_windows_as_the_tokenizer_cuts(name, words, data):
    tokenizer, text, question = TOKENIZERS[name], " ".join(words), "ends on"
    question_ids = tokenise_question(tokenizer, question)
    layout = PairLayout.of(tokenizer)
    room = data.draw(st.integers(2, 40))
    stride = data.draw(st.integers(0, room - 1))
    max_length = room + layout.num_special + len(question_ids)
    expected = tokenizer(
        question,
        text,
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
    )["input_ids"]
    context = tokenise_context(tokenizer, text)
    windows = question_windows(question_ids, context, layout=layout, max_length=max_length, stride=stride)
    assert [window["input_ids"].tolist() for window in windows] == expected


@pytest.mark.parametrize(
    ("num_tokens", "room", "stride", "message"),
    [(10, 4, 4, "room for 4 tokens.*stride=4.*smaller stride"), (10, 0, 0, "room=0"), (10, 4, -1, "stride=-1")],
)
def test_windows_that_cannot_be_are_refused(num_tokens, room, stride, message):
    with pytest.raises(ValueError, match=message):
        cut_windows(num_tokens, room=room, stride=stride)


# Characters


@each_tokenizer
@given(text=TEXTS, data=st.data())
@example(text="  Hello  wo\u0301rld\r\n\t👩‍👩‍👧 ", data=None)
def test_located_answers_cover_their_characters_tightly(name, text, data):
    """Whole tokens are the finest that can be told: the first and last token touch the answer, none is missing."""
    context = tokenise_context(TOKENIZERS[name], text)
    spans = (
        [(2, 13), (0, len(text))] if data is None else [sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))]
    )
    for start, end in spans:
        answer = text[start:end]
        place = answer_tokens(context, start, answer)
        if place is None:
            assert not answer.strip() or not _standing_for(context, start, end)
            continue
        found_start, found_end = context.starts[place[0]], context.ends[place[1]]
        found = text[found_start:found_end]
        assert found == found.strip()
        stripped_start = start + len(answer) - len(answer.lstrip())
        stripped_end = stripped_start + len(answer.strip())
        # Characters that the tokenizer drops wherever they stand alone are the only ones that may be missing.
        assert found_start <= stripped_start or not _standing_for(context, stripped_start, found_start)
        assert found_end >= stripped_end or not _standing_for(context, found_end, stripped_end)
        assert context.ends[place[0]] > stripped_start and context.starts[place[1]] < stripped_end


def _standing_for(context: TokenisedContext, start: int, end: int) -> bool:
    return bool(((context.starts < end) & (context.ends > start) & (context.starts < context.ends)).any())


@pytest.mark.parametrize("name", ["byte-level", "byte-level, untrimmed", "real RoBERTa"])
@given(text=TEXTS)
def test_byte_level_tokens_leave_no_visible_character_out(name, text):
    if name not in TOKENIZERS:
        pytest.skip(f"no real tokenizer in {SHARED}")
    context = tokenise_context(TOKENIZERS[name], text)
    covered = {at for start, end in zip(context.starts, context.ends, strict=True) for at in range(start, end)}
    assert {at for at, character in enumerate(text) if not character.isspace()} <= covered


@each_tokenizer
@given(words=st.lists(st.sampled_from(["The", "é", "e\u0301te\u0301", "漢", "🙂", "2024", "ends", "नमस्ते"]), min_size=1))
def test_whole_words_are_found_exactly(name, words):
    text = "\r\n\t".join(words)
    context = tokenise_context(TOKENIZERS[name], text)
    at = 0
    for word in words:
        place = answer_tokens(context, at, word)
        # Metaspace takes only plain spaces for word ends, so line ends and tabs may be inside its tokens.
        if name == "sentence pieces":
            assert place is None or word in span_text(text, context, place)
        else:
            assert span_text(text, context, place) == word
        at += len(word) + 3


def test_white_space_around_tokens_and_answers():
    text = "  one \r\n two  "
    for name in ("byte-level", "byte-level, untrimmed"):
        context = tokenise_context(TOKENIZERS[name], text)
        assert span_text(text, context, (0, len(context) - 1)) == "one \r\n two"
        assert span_text(text, context, answer_tokens(context, 0, "  one ")) == "one"
        assert answer_tokens(context, 5, " \r\n ") is None
        assert answer_tokens(context, -1, "one") is None
        assert answer_tokens(context, 2, "") is None
        assert answer_tokens(context, len(text) + 5, "one") is None


def test_dropped_accents_belong_to_the_letter_before_them():
    text = "un e\u0301te\u0301 \ufeffchaud"
    context = tokenise_context(TOKENIZERS["word pieces"], text)
    assert span_text(text, context, answer_tokens(context, 3, "e\u0301te\u0301")) == "e\u0301te\u0301"
    assert span_text(text, context, answer_tokens(context, 9, "\ufeffchaud")) == "\ufeffchaud"


def test_an_empty_window_has_no_tokens():
    layout = PairLayout.of(TOKENIZERS["byte-level"])
    empty = TokenisedContext([], np.array([], dtype=int), np.array([], dtype=int))
    (window,) = question_windows([5, 6], empty, layout=layout, max_length=16, stride=2)
    assert window["last_token"] == window["first_token"] - 1 == -1
    assert window["input_ids"].tolist() == [0, 5, 6, 2, 2, 2]


# Training


def numbered(num_tokens: int) -> TokenisedContext:
    """Tokens 100, 101, … of two characters each, with a space between."""
    starts = np.arange(num_tokens) * 3
    return TokenisedContext(np.arange(num_tokens) + 100, starts, starts + 2)


def cut(answers, *, num_tokens=20, question=(5, 6), **options):
    layout = PairLayout.of(TOKENIZERS["byte-level"])
    options = {"max_length": 14, "stride": 3, **options}
    return training_windows(list(question), numbered(num_tokens), answers, layout=layout, **options)


def test_positions_point_at_the_answers_tokens_in_every_window_that_holds_it():
    windows = cut({"text": ["xx xx"], "answer_start": [6 * 3]})
    assert [(w["first_token"], w["last_token"]) for w in windows] == [(0, 7), (5, 12), (10, 17), (15, 19)]
    assert [w["has_answer"] for w in windows] == [True, True, False, False]
    for window in windows[:2]:
        ids = window["input_ids"]
        assert ids[window["start_positions"]] == 106 and ids[window["end_positions"]] == 107
    for window in windows[2:]:
        assert window["start_positions"] == window["end_positions"] == window["null_position"] == 0


def test_half_an_answer_is_no_answer():
    windows = cut({"text": ["xx xx xx xx"], "answer_start": [6 * 3]})
    assert [w["has_answer"] for w in windows] == [False, True, False, False]


def test_each_window_takes_the_first_listed_answer_that_it_holds():
    windows = cut({"text": ["xx", "xx"], "answer_start": [17 * 3, 1 * 3]})
    assert [int(w["input_ids"][w["start_positions"]]) for w in windows] == [101, 0, 117, 117]


def test_long_questions_are_truncated_and_say_so():
    windows = cut({"text": [], "answer_start": []}, question=range(5, 15), max_question_tokens=2)
    assert all(w["question_truncated"] for w in windows)
    assert windows[0]["input_ids"][:4].tolist() == [0, 5, 6, 2]
    assert not cut({"text": [], "answer_start": []}, max_question_tokens=2)[0]["question_truncated"]
    with pytest.raises(ValueError, match=r"question of 10 tokens.*max_length=14.*max_question_tokens"):
        cut({"text": [], "answer_start": []}, question=range(10))


def test_negatives_are_sampled_by_seed_and_question():
    windows = cut({"text": ["xx"], "answer_start": [40 * 3]}, num_tokens=200)
    positive = [w for w in windows if w["has_answer"]]

    def chosen(seed, question, negatives):
        kept = choose_training_windows(windows, negatives_per_question=negatives, rng=question_rng(seed, question))
        assert [w for w in kept if w["has_answer"]] == positive
        firsts = [w["first_token"] for w in kept]
        assert firsts == sorted(firsts)
        return firsts

    assert chosen(1, "a", 3) == chosen(1, "a", 3)
    assert len(chosen(1, "a", 3)) == len(positive) + 3
    assert len({tuple(chosen(seed, name, 3)) for seed in range(3) for name in "abc"}) > 5
    assert len(chosen(1, "a", None)) == len(windows) == len(chosen(1, "a", 1000))
    halves = [len(chosen(1, f"question {number}", 0.5)) - len(positive) for number in range(400)]
    assert set(halves) == {0, 1} and 150 < sum(halves) < 250
    with pytest.raises(ValueError, match=r"negatives_per_question=-1"):
        chosen(1, "a", -1)
