"""Answers: against a search of all pairs, over all windows, with thresholds tuned as if every one had been tried."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune.answers import (
    Answer,
    AnswerCollector,
    WindowScores,
    best_spans,
    choose,
    tune_threshold,
    window_spans,
    write_nbest,
)
from finetune.metrics.long_qa.squad_scores import token_f1
from finetune.windows import PairLayout, TokenisedContext, cut_windows, question_windows

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Few distinct values, so that equal scores are common.
LOGITS = st.integers(-6, 6).map(lambda value: value / 2)


def letters(num_tokens: int) -> tuple[TokenisedContext, str]:
    """One-letter tokens with a space between."""
    starts = np.arange(num_tokens) * 2
    return TokenisedContext(np.arange(num_tokens), starts, starts + 1), " ".join(LETTERS[:num_tokens])


def windows_of(start, end, ranges, *, nulls=None, question_id="q"):
    nulls = [0.0] * len(ranges) if nulls is None else nulls
    return [
        WindowScores(question_id, first, stop - 1, np.array(start[first:stop]), np.array(end[first:stop]), null)
        for (first, stop), null in zip(ranges, nulls, strict=True)
    ]


def all_pairs(windows, max_answer_tokens):
    """Every span by brute force, with its best score over the windows."""
    scores = {}
    for window in windows:
        for i, start in enumerate(window.start_logits):
            for j, end in enumerate(window.end_logits):
                if i <= j < i + max_answer_tokens:
                    span = (window.first_token + i, window.first_token + j)
                    scores[span] = max(scores.get(span, -np.inf), start + end)
    return scores


# Spans


@given(data=st.data(), num_tokens=st.integers(0, 25), n_best=st.integers(1, 8), longest=st.integers(1, 30))
def test_the_best_spans_of_a_window_are_those_of_all_pairs(data, num_tokens, n_best, longest):
    start, end = (data.draw(st.lists(LOGITS, min_size=num_tokens, max_size=num_tokens)) for _ in range(2))
    (window,) = windows_of(start, end, [(0, num_tokens)])
    found = window_spans(window, n_best=n_best, max_answer_tokens=longest)
    scores = all_pairs([window], longest)
    assert found.score.tolist() == sorted(scores.values(), reverse=True)[:n_best]
    pairs = list(zip(found.first.tolist(), found.last.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert [scores[pair] for pair in pairs] == found.score.tolist()


@pytest.mark.parametrize("longest", [1, 2, 3, 5, 6, 7, 12])
def test_a_better_end_out_of_reach_draws_no_attention(longest):
    rng = np.random.default_rng(longest)
    for _ in range(100):
        start, end = rng.normal(size=(2, 12))
        (window,) = windows_of(start, end, [(0, 12)])
        found = window_spans(window, n_best=1, max_answer_tokens=longest)
        assert found.score[0] == max(all_pairs([window], longest).values())


@given(data=st.data(), num_tokens=st.integers(1, 30), n_best=st.integers(1, 8), longest=st.integers(1, 6))
def test_answers_are_the_best_over_all_windows(data, num_tokens, n_best, longest):
    room = data.draw(st.integers(1, 12))
    ranges = cut_windows(num_tokens, room=room, stride=data.draw(st.integers(0, room - 1)))
    windows = []
    for place in ranges:
        # Each window has its own opinion of the tokens it shares with others.
        start, end = (data.draw(st.lists(LOGITS, min_size=num_tokens, max_size=num_tokens)) for _ in range(2))
        windows += windows_of(start, end, [place], nulls=[data.draw(LOGITS)])
    context, text = letters(num_tokens)
    nbest = best_spans(windows, context, text, n_best=n_best, max_answer_tokens=longest)
    (null,) = [answer for answer in nbest if answer.start is None]
    given_answers = [answer for answer in nbest if answer.start is not None]
    scores = all_pairs(windows, longest)
    assert null.score == min(window.null_score for window in windows)
    assert [answer.score for answer in given_answers] == sorted(scores.values(), reverse=True)[:n_best]
    for answer in given_answers:
        assert answer.text == text[answer.start : answer.end]
        assert scores[answer.start // 2, answer.end // 2] == answer.score
    weights = np.exp([answer.score for answer in nbest])
    np.testing.assert_allclose([answer.probability for answer in nbest], weights / weights.sum(), rtol=1e-12)
    assert [answer.score for answer in nbest] == sorted((answer.score for answer in nbest), reverse=True)


def test_an_answer_worked_by_hand():
    context, text = letters(6)
    start, end = [0, 5, 0, 0, 1, 0], [0, 0, 4, 0, 0, 3]
    windows = windows_of(start, end, [(0, 4), (2, 6)], nulls=[2.0, 7.0])
    nbest = best_spans(windows, context, text, n_best=3, max_answer_tokens=3)
    assert [(answer.text, answer.start, answer.end, answer.score) for answer in nbest] == [
        ("b c", 2, 5, 9.0),
        ("b", 2, 3, 5.0),
        ("b c d", 2, 7, 5.0),
        ("", None, None, 2.0),
    ]
    assert nbest[0].probability == pytest.approx(np.exp(9) / (np.exp(9) + 2 * np.exp(5) + np.exp(2)))
    assert choose(nbest).text == "b c"


def test_spans_with_the_same_characters_count_once_and_white_space_is_no_answer():
    # "a \n é": a letter, a line end, and one character of two tokens.
    text = "a \n é"
    context = TokenisedContext([0, 1, 2, 3], np.array([0, 4, 4, 4]), np.array([1, 1, 5, 5]))
    windows = windows_of([9, 9.5, 3, 2], [1, 9, 2, 4], [(0, 4)])
    nbest = best_spans(windows, context, text, n_best=10, max_answer_tokens=4)
    texts = [(answer.text, answer.score) for answer in nbest if answer.start is not None]
    assert texts == [("a", 18.0), ("é", 13.5), ("a \n é", 13.0)]


def test_a_document_without_tokens_has_no_answer():
    context = TokenisedContext([], np.zeros(0, dtype=int), np.zeros(0, dtype=int))
    nbest = best_spans(windows_of([], [], [(0, 0)], nulls=[-3.0]), context, "")
    assert [(answer.text, answer.probability) for answer in nbest] == [("", 1.0)]
    for threshold in (None, -1e9, 1e9):
        assert choose(nbest, threshold=threshold).text == ""
    assert choose(nbest).score_difference == np.inf


def test_ruled_out_tokens_are_never_chosen():
    context, text = letters(3)
    windows = windows_of([-np.inf, 1.0, -np.inf], [0.0, 1.0, -np.inf], [(0, 3)])
    assert [answer.text for answer in best_spans(windows, context, text)] == ["b", ""]


@pytest.mark.parametrize(
    ("start", "null", "message"),
    [
        ([0.0, np.nan], 0.0, "'q'.*not finite.*diverged"),
        ([0.0, np.inf], 0.0, "'q'.*not finite"),
        ([0.0, 1.0], np.nan, r"'q'.*no answer: nan"),
        ([0.0], 0.0, "1 start and 2 end logits for tokens 0 to 1"),
    ],
)
def test_spoilt_logits_are_refused(start, null, message):
    with pytest.raises(ValueError, match=message):
        WindowScores("q", 0, 1, np.array(start), np.array([0.0, 1.0]), null)


# Choosing


def prediction(text: str, difference: float, *, threshold=0.0):
    nbest = [Answer(text, 0, len(text), 0.0, 0.5), Answer("", None, None, difference, 0.5)]
    return choose(nbest, threshold=threshold)


def test_the_threshold_is_how_much_more_no_answer_must_score():
    assert prediction("yes", 0.0).text == "yes"
    assert prediction("yes", 0.1).text == ""
    assert prediction("yes", 0.1, threshold=0.1).text == "yes"
    assert prediction("yes", 99.0, threshold=None).text == "yes"
    none = prediction("yes", 3.0)
    assert (none.start, none.score, none.null_score, none.score_difference) == (None, 3.0, 3.0, 3.0)
    assert choose(none.nbest, threshold=5.0).text == "yes"


@given(
    questions=st.lists(
        st.tuples(
            st.sampled_from(["red fox", "red", "blue whale", "the"]),
            st.integers(-3, 3).map(float),
            st.sampled_from([[], ["red fox"], ["blue", "blue whale sings"]]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_no_other_threshold_is_better(questions):
    predictions = {str(number): prediction(text, difference) for number, (text, difference, _) in enumerate(questions)}
    references = {str(number): right for number, (_, _, right) in enumerate(questions)}

    def f1_with(threshold):
        chosen = {key: choose(value.nbest, threshold=threshold).text for key, value in predictions.items()}
        return 100 * float(np.mean([token_f1(chosen[key], references[key]) for key in chosen]))

    threshold, f1 = tune_threshold(predictions, references)
    assert f1 == pytest.approx(f1_with(threshold))
    assert f1 == pytest.approx(max(f1_with(other) for other in np.arange(-4.5, 4, 0.5)))
    assert np.isfinite(threshold)


def test_tuning_by_hand():
    predictions = {"a": prediction("x", -2.0), "b": prediction("y", 1.0), "c": prediction("z", 3.0)}
    references = {"a": ["x"], "b": ["y"], "c": []}
    # Halfway between the last question to answer and the first not to.
    assert tune_threshold(predictions, references) == (2.0, 100.0)
    assert tune_threshold(predictions, dict.fromkeys("abc", ())) == (-2.5, 100.0)
    with pytest.raises(ValueError, match=r"1 questions.*'c'"):
        tune_threshold(predictions, {"a": ["x"], "b": ["y"]})


# Collecting


def test_batches_in_any_order_and_twice_and_from_two_processes_give_the_same():
    rng = np.random.default_rng(0)
    layout = PairLayout(before=np.array([0]), between=np.array([2, 2]), behind=np.array([2]))
    context, text = letters(40)
    batches = []
    for question in ("one", "two"):
        windows = question_windows([7, 8], context, layout=layout, max_length=20, stride=5)
        padded = max(len(window["input_ids"]) for window in windows)
        logits = rng.normal(size=(2, len(windows), padded)) * 3
        batches += [({**w, "question_id": question}, *logits[:, n]) for n, w in enumerate(windows)]

    def add(collector, chosen):
        collector.add(
            [w for w, _, _ in chosen], np.stack([s for _, s, _ in chosen]), np.stack([e for _, _, e in chosen])
        )

    whole, halves = AnswerCollector(n_best=5), [AnswerCollector(n_best=5) for _ in range(2)]
    add(whole, batches)
    add(halves[0], batches[::-2])
    add(halves[1], batches[::2])
    add(halves[1], [batches[3]])
    for part in [half.collected for half in halves]:
        halves[0].update(part)
    for question in ("one", "two"):
        expected = whole.finish(question, context=context, text=text)
        assert halves[0].finish(question, context=context, text=text) == expected
        own = [batch for batch in batches if batch[0]["question_id"] == question]
        scored = [
            WindowScores(question, w["first_token"], w["last_token"], s[5 : 5 + n], e[5 : 5 + n], s[0] + e[0])
            for w, s, e in own
            for n in [w["last_token"] - w["first_token"] + 1]
        ]
        assert best_spans(scored, context, text, n_best=5) == expected.nbest
        assert expected.null_score == min(s[0] + e[0] for _, s, e in own)
    assert not whole.collected
    with pytest.raises(KeyError, match="'one'"):
        whole.finish("one", context=context, text=text)


def test_a_collector_keeps_little_of_a_long_document():
    rng = np.random.default_rng(0)
    collector = AnswerCollector(n_best=10, max_answer_tokens=30)
    for first in range(0, 40_000, 4000):
        logits = rng.normal(size=(2, 4000))
        collector.add_window(WindowScores("q", first, first + 3999, *logits, 0.0))
    assert len(collector.collected["q"].score) == 20


def test_tensors_of_half_precision_are_taken():
    window = {"question_id": "q", "first_token": 0, "last_token": 2, "context_offset": 1, "null_position": 0}
    logits = torch.tensor([[1.0, 0.0, 4.0, 2.0, 99.0]], dtype=torch.bfloat16, requires_grad=True)
    collector = AnswerCollector()
    collector.add([window], logits, logits)
    context, text = letters(3)
    assert collector.finish("q", context=context, text=text).text == "b"
    with pytest.raises(ValueError, match=r"1 windows.*\(2, 5\)"):
        collector.add([window], logits.repeat(2, 1), logits.repeat(2, 1))


def test_limits_are_checked():
    with pytest.raises(ValueError, match="n_best=0"):
        AnswerCollector(n_best=0)
    with pytest.raises(ValueError, match="windows of 0 questions"):
        best_spans([], *letters(3))


# Writing


def test_the_nbest_file_has_probabilities_and_the_texts_as_they_are(tmp_path):
    path = tmp_path / "new" / "nbest.json"
    write_nbest(path, {"fräge": prediction("é漢🙂", 1.0)})
    assert "é漢🙂" in path.read_text(encoding="utf-8")
    (written,) = json.loads(path.read_text(encoding="utf-8")).values()
    assert written[0] == {"text": "é漢🙂", "start": 0, "end": 3, "score": 0.0, "probability": 0.5}
    assert written[1]["start"] is None


def test_the_nbest_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "nbest.json"
    write_nbest(path, {"q": prediction("old", 1.0)})
    before = path.read_bytes()

    def disk_full(file, text, **_):
        file.write_bytes(text[:2].encode())
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", disk_full)
    with pytest.raises(OSError, match="No space"):
        write_nbest(path, {"q": prediction("new", 1.0)})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["nbest.json"]
