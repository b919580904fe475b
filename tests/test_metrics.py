"""Metrics: worked by hand, against transformers' own SQuAD scores where it has them, and loaded without network."""

import importlib
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.metrics import METRICS, load_metric
from finetune.metrics.long_qa.squad_scores import (
    answer_words,
    best_threshold,
    exact_match,
    normalise_answer,
    token_f1,
)

ROOT = Path(__file__).resolve().parents[1]
WORDS = [
    "the",
    "A",
    "an",
    "red",
    "Fox,",
    "fox",
    "it's",
    "don't",
    "$5.00",
    "naïve",
    "—",
    "“Fox”",
    "3-4",
    "Über",
    "договор",
]


@pytest.fixture(autouse=True, scope="module")
def _own_module_cache(tmp_path_factory):
    """Modules are copied into a folder of this run, never into the user's."""
    import datasets.config
    import evaluate.config

    folder = tmp_path_factory.mktemp("modules")
    forget_modules()
    with pytest.MonkeyPatch.context() as patch:
        for config in (evaluate.config, datasets.config):
            patch.setattr(config, "HF_MODULES_CACHE", folder)
        patch.syspath_prepend(str(folder))
        yield
    forget_modules()


def forget_modules() -> None:
    """Metrics that were loaded from another folder would be looked for there, whatever the folder is now."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "evaluate_modules"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def reference(name, *texts):
    return {"id": name, "answers": {"text": list(texts), "answer_start": [0] * len(texts)}}


def predicted(**texts):
    return [{"id": name, "prediction_text": text} for name, text in texts.items()]


# Scores of one answer


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat's\tpyjamas!", "cats pyjamas"),
        ("an apple, a day", "apple day"),
        ("theatre", "theatre"),
        ("U.S.", "us"),
        ("", ""),
        ("The", ""),
        ("Cafe\u0301", "caf\u00e9"),
        ("1990\u20131995", "1990\u20131995"),
        ("北京\u3002", "北京"),
        ("ÜBER die", "über die"),
    ],
)
def test_normalised_as_in_squad(text, normal):
    assert normalise_answer(text) == normal


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The red fox", ["red", "fox"]),
        ("北京大学 in 1898\u5e74", ["北", "京", "大", "学", "in", "1898", "年"]),
        ("PM2.5\u6c61\u67d3", ["pm25", "污", "染"]),
        ("ก็ดี", ["ก็", "ดี"]),
        ("서울 대학교", ["서울", "대학교"]),
        ("これは。", ["こ", "れ", "は"]),
        ("", []),
    ],
)
def test_words_of_any_script(text, words):
    assert answer_words(text) == words


def test_f1_by_hand():
    assert token_f1("the big red fox", ["red fox jumps"]) == pytest.approx(2 * (2 / 3) * (2 / 3) / (4 / 3))
    assert token_f1("fox fox", ["fox"]) == pytest.approx(2 / 3)
    assert token_f1("hen", ["fox", "red hen"]) == pytest.approx(2 / 3)
    assert token_f1("", []) == token_f1("The", []) == 1.0
    assert token_f1("fox", []) == token_f1("", ["fox"]) == 0.0
    assert token_f1("北京", ["北京大学"]) == pytest.approx(2 / 3)
    assert exact_match("The Fox!", ["hen", "fox"]) == 1.0
    assert exact_match("foxes", ["fox"]) == 0.0


def squad_metrics():
    return pytest.importorskip(
        "transformers.data.metrics.squad_metrics", reason="this transformers has no SQuAD scores"
    )


def test_the_same_as_transformers_on_random_answers():
    theirs = squad_metrics()
    rng = random.Random(0)
    for _ in range(2000):
        text, right = (" ".join(rng.choices(WORDS, k=rng.randrange(5))) for _ in range(2))
        assert normalise_answer(text) == theirs.normalize_answer(text)
        golds = [right] if theirs.normalize_answer(right) else []
        assert exact_match(text, golds) == theirs.compute_exact(golds[0] if golds else "", text)
        assert token_f1(text, golds) == pytest.approx(theirs.compute_f1(golds[0] if golds else "", text))


def test_the_same_tables_as_transformers():
    theirs = squad_metrics()
    rng = random.Random(1)
    for size in (1, 2, 7, 40):
        texts = {str(n): " ".join(rng.choices(WORDS, k=rng.randrange(4))) for n in range(size)}
        golds = {name: [" ".join(rng.choices(WORDS[3:], k=2)) for _ in range(rng.randrange(3))] for name in texts}
        # Distinct, because theirs takes equal ones apart; positive, because theirs takes 0 for "answer nothing".
        doubts = {name: value / 100 for name, value in zip(texts, rng.sample(range(1, 100), size), strict=True)}
        examples = [
            SimpleNamespace(qas_id=name, answers=[{"text": text} for text in answers])
            for name, answers in golds.items()
        ]
        expected = dict(theirs.squad_evaluate(examples, texts, dict(doubts), 0.5))
        ours = load_metric("long_qa").compute(
            predictions=predicted(**texts),
            references=[reference(name, *answers) for name, answers in golds.items()],
            no_answer_scores=doubts,
            no_answer_threshold=0.5,
        )
        for kind in ("exact", "f1"):
            if expected[f"best_{kind}_thresh"] == 0.0:
                assert ours.pop(f"best_{kind}_thresh") < min(doubts.values())
                expected.pop(f"best_{kind}_thresh")
        assert ours == pytest.approx(expected)


# Thresholds


@given(
    rows=st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([0, 0.25, 1]), st.sampled_from([0, 1])), min_size=1),
    hopeless=st.booleans(),
)
def test_the_best_threshold_is_the_best_of_all(rows, hopeless):
    differences, answered, not_answered = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    if hopeless:
        differences[0], answered[0] = np.inf, not_answered[0]

    def mean_with(threshold):
        return np.where(differences > threshold, not_answered, answered).mean()

    threshold, mean = best_threshold(differences, answered, not_answered)
    assert mean == pytest.approx(mean_with(threshold))
    assert mean == pytest.approx(max(mean_with(other) for other in np.arange(-4.5, 4)))


def test_thresholds_need_numbers():
    with pytest.raises(ValueError, match="no question"):
        best_threshold([], [], [])
    with pytest.raises(ValueError, match="not a number"):
        best_threshold([np.nan], [1.0], [0.0])


# Modules


def test_long_qa_by_hand():
    result = load_metric("long_qa").compute(
        predictions=predicted(a="the red fox", b="", c="hen", d=""),
        references=[reference("d", "x"), reference("c"), reference("b"), reference("a", "red", "big red fox")],
    )
    f1 = 100 * 2 * 2 / 5
    assert result == pytest.approx(
        {
            "exact": 25.0,
            "f1": (f1 + 100) / 4,
            "total": 4,
            "HasAns_exact": 0.0,
            "HasAns_f1": f1 / 2,
            "HasAns_total": 2,
            "NoAns_exact": 50.0,
            "NoAns_f1": 50.0,
            "NoAns_total": 2,
        }
    )


def test_long_qa_without_unanswerable_questions_is_v1():
    result = load_metric("long_qa").compute(predictions=predicted(a="fox"), references=[reference("a", "Fox.")])
    assert result == {"exact": 100.0, "f1": 100.0, "total": 1} | {
        "HasAns_exact": 100.0,
        "HasAns_f1": 100.0,
        "HasAns_total": 1,
    }


def test_long_qa_thresholds_by_hand():
    arguments = {
        "predictions": predicted(a="fox", b="hen"),
        "references": [reference("a", "fox"), reference("b")],
        "no_answer_scores": {"a": -1.0, "b": 2.0},
    }
    result = load_metric("long_qa").compute(**arguments)
    assert (result["f1"], result["best_f1"], result["best_f1_thresh"]) == (50.0, 100.0, -1.0)
    assert load_metric("long_qa").compute(**arguments, no_answer_threshold=-1.0)["f1"] == 100.0


@pytest.mark.parametrize(
    ("predictions", "options", "message"),
    [
        (predicted(b="x"), {}, "'a' among them: predict every question"),
        (predicted(a="x"), {"no_answer_scores": {"b": 1.0}}, "score every question"),
        (predicted(a="x"), {"no_answer_threshold": 1.0}, "needs no_answer_scores"),
        (predicted(a="x") * 2, {}, "2 predictions but 1 different ids"),
    ],
)
def test_long_qa_refuses_what_does_not_match(predictions, options, message):
    with pytest.raises(ValueError, match=message):
        load_metric("long_qa").compute(
            predictions=predictions, references=[reference(name, "x") for name in "ac"[: len(predictions)]], **options
        )


def test_rouge_by_hand():
    # Six words each, of which "the cat … on the mat" are shared in order: 5 of 6 words, 3 of 5 pairs.
    result = load_metric("rouge").compute(predictions=["the cat sat on the mat"], references=["the cat lay on the mat"])
    assert result == pytest.approx({"rouge1": 500 / 6, "rouge2": 60.0, "rougeL": 500 / 6, "rougeLsum": 500 / 6})


def test_rouge_lsum_compares_sentences_and_rouge_l_the_whole():
    # Two sentences in another order: each has its match, but in the whole only one of them is in order.
    texts = {"predictions": ["Red fox runs. Blue whale sings."], "references": ["Blue whale sings. Red fox runs."]}
    result = load_metric("rouge").compute(**texts)
    assert (result["rougeL"], result["rougeLsum"]) == pytest.approx((50.0, 100.0))
    assert load_metric("rouge").compute(**texts, split_sentences=False)["rougeLsum"] == pytest.approx(50.0)
    lines = {name: [text.replace(". ", ".\n") for text in texts[name]] for name in texts}
    assert load_metric("rouge").compute(**lines, split_sentences=False)["rougeLsum"] == pytest.approx(100.0)


def test_rouge_takes_the_best_of_several_references_and_means_over_summaries():
    result = load_metric("rouge").compute(
        predictions=["red fox", "hen"], references=[["blue whale", "red foxes"], ["cow", "dog"]]
    )
    assert result["rouge1"] == pytest.approx(50.0)
    unstemmed = load_metric("rouge").compute(predictions=["red fox"], references=["red foxes"], use_stemmer=False)
    assert unstemmed["rouge1"] == pytest.approx(50.0)


def test_rouge_of_other_scripts():
    texts = ["Суд отменил решение.", "北京大学", "हिन्दी भाषा"]
    for text in texts:
        assert load_metric("rouge").compute(predictions=[text], references=[text])["rouge1"] == 100.0
    half = load_metric("rouge").compute(predictions=["суд решил"], references=["Суд отменил"])
    assert (half["rouge1"], half["rouge2"]) == (50.0, 0.0)
    # Mostly Latin texts are scored as everywhere else.
    texts = {"predictions": ["Zürich and 北京"], "references": ["Zürich and Bern"]}
    assert load_metric("rouge").compute(**texts)["rouge1"] == pytest.approx(600 / 7)


def test_rouge_with_a_tokenizer_of_ones_own():
    texts = {"predictions": ["北京大学"], "references": ["北京"]}
    assert load_metric("rouge").compute(**texts, tokenizer=answer_words)["rouge1"] == pytest.approx(200 / 3)


def test_perplexity_by_hand():
    metric = load_metric("perplexity_from_loss")
    assert metric.compute(predictions=[2.0, 1.0], references=[30, 10]) == pytest.approx(
        {"perplexity": np.exp(1.75), "loss": 1.75}
    )
    # A batch in which nothing was masked has no loss.
    assert metric.compute(predictions=[2.0, float("nan")], references=[3, 0])["loss"] == 2.0
    assert metric.compute(predictions=[1e6], references=[1])["perplexity"] == np.inf
    with pytest.raises(ValueError, match="0 tokens in 1 batches"):
        metric.compute(predictions=[1.0], references=[0])


def test_masked_accuracy_by_hand():
    metric = load_metric("masked_accuracy")
    expected = {"masked_accuracy": 200 / 3, "total": 3}
    assert metric.compute(predictions=[5, 6, 7, 8], references=[5, -100, 7, 9]) == pytest.approx(expected)
    rows = metric.compute(predictions=[[5, 6], [7, 8, 1]], references=[[5, -100], [7, 9, -100]])
    assert rows == pytest.approx(expected)
    for batch in ([5, 6], [7, 8]):
        metric.add_batch(predictions=np.array(batch), references=np.array(batch))
    assert metric.compute() == {"masked_accuracy": 100.0, "total": 4}
    with pytest.raises(ValueError, match="all 2 labels are -100"):
        metric.compute(predictions=[1, 2], references=[-100, -100])


def test_unknown_metrics_are_refused():
    with pytest.raises(ValueError, match=r"no metric 'bleu'.*long_qa"):
        load_metric("bleu")


@pytest.mark.slow
def test_every_metric_loads_offline_from_a_read_only_folder_in_several_processes(tmp_path):
    package = tmp_path / "package" / "finetune"
    shutil.copytree(ROOT / "finetune" / "metrics", package / "metrics", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").touch()
    places = sorted([*package.rglob("*"), package])
    for place in places:
        place.chmod(place.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    code = (
        "import json, pathlib, finetune.metrics as m;"
        "print(json.dumps([str(pathlib.Path(m.__file__)), *(m.load_metric(name).name for name in m.METRICS)]))"
    )
    environment = os.environ | {
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(package.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("HF_MODULES_CACHE", None)
    command = [sys.executable, "-c", code]
    runs = [
        subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        outputs = [run.communicate() for run in runs]
    finally:
        for place in places:
            place.chmod(place.stat().st_mode | stat.S_IWUSR)
    for run, (output, errors) in zip(runs, outputs, strict=True):
        assert run.returncode == 0, errors.decode()
        assert json.loads(output) == [str(package / "metrics" / "__init__.py"), *METRICS]
    # Whoever may write everywhere finds the folder as it was too.
    assert sorted([*package.rglob("*"), package]) == places
    copied = {path.stem for path in (tmp_path / "home" / "modules").rglob("*.py")}
    assert set(METRICS) | {"squad_scores"} <= copied


def test_the_lead_baseline_is_scored_on_the_first_words(tmp_path, capsys):
    from benchmarks.lead_summaries import main

    path = tmp_path / "rows.jsonl"
    path.write_text('{"document": "one two three four", "summary": "one two"}\n')
    assert main([str(path), "--words", "2"]) == 0
    assert "rouge1 100.00" in capsys.readouterr().out
    assert main([str(path), "--words", "4"]) == 0
    assert "rouge1 66.67" in capsys.readouterr().out
