"""Fine-tuning runs: every task by both engines, stopped and resumed exactly, and safe from what can go wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState

from finetune import engine
from finetune.files import read_json
from finetune.mlm import MaskedLM
from finetune.qa import QA
from finetune.run import run
from finetune.summarise import Summarise

from .finetuning import arguments

pytestmark = pytest.mark.usefixtures("own_accelerator")

TASKS = {"qa": QA, "summarise": Summarise, "mlm": MaskedLM}
ENGINES = {"loop": [], "trainer": ["--trainer"]}
ALL_STEPS = ["--max-steps", "6", "--eval-steps", "2"]


def losses(folder: Path) -> dict[int, float]:
    history = json.loads((folder / "history.json").read_text())
    return {entry["step"]: entry["loss"] for entry in history if "learning_rate" in entry}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize("task", TASKS)
def test_a_run_from_end_to_end(work, tmp_path, task, engine_name):
    output = tmp_path / "run"
    argv = [*arguments(work, task), *ALL_STEPS, *ENGINES[engine_name], "--output", str(output)]
    assert run(TASKS[task], argv) == 0
    history = losses(output)
    assert sorted(history) == [1, 2, 3, 4, 5, 6]
    assert history[6] < history[1]
    metrics = json.loads((output / "metrics.json").read_text())["validation"]
    best = {"qa": "f1", "summarise": "rougeLsum", "mlm": "perplexity"}[task]
    assert metrics[best] >= 0
    assert (output / "training_curve.png").stat().st_size > 10_000
    auto_class = getattr(transformers, TASKS[task].auto_class)
    model = auto_class.from_pretrained(output / "model")
    assert type(model).__name__.startswith("HybridLongformerFor")
    assert transformers.AutoTokenizer.from_pretrained(output / "model").pad_token_id == 1
    assert (output / "model" / "modeling_hybrid_longformer.py").exists()
    card = (output / "model" / "README.md").read_text()
    assert best in card
    assert f"python -m finetune.{task} --model" in card
    assert "--learning-rate 1e-3" in card
    assert "| licence | MIT License |" in card
    assert str(work) not in card and str(tmp_path) not in card
    assert "![Training curve](training_curve.png)" in card
    assert (output / "model" / "training_curve.png").read_bytes() == (output / "training_curve.png").read_bytes()
    assert not list(output.rglob("*.part"))


@pytest.mark.parametrize("task", TASKS)
def test_both_engines_take_the_same_steps(work, tmp_path, task):
    for name, more in ENGINES.items():
        output = tmp_path / name
        argv = [*arguments(work, task), "--max-steps", "4", "--eval-steps", "4", *more, "--output", str(output)]
        assert run(TASKS[task], [*argv, "--gradient-accumulation", "2"]) == 0
    first, second = (losses(tmp_path / name) for name in ENGINES)
    assert first.keys() == second.keys()
    for step, loss in first.items():
        # Trainer's mean over the batches of a step weighs them alike, the loop's by their items.
        assert second[step] == pytest.approx(loss, rel=2e-3), step


class StopAfter:
    """Sends this process a signal after so many optimiser steps."""

    def __init__(self, monkeypatch, steps: int, number: int = signal.SIGTERM):
        original, done = torch.optim.AdamW.step, [0]

        def step(optimizer, *args, **kwargs):
            result = original(optimizer, *args, **kwargs)
            done[0] += 1
            if done[0] == steps:
                os.kill(os.getpid(), number)
            return result

        monkeypatch.setattr(torch.optim.AdamW, "step", step)


@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize(("task", "more"), [("qa", []), ("mlm", []), ("qa", ["--streaming"])])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(work, tmp_path, monkeypatch, task, more, engine_name):
    argv = [*arguments(work, task), *ALL_STEPS, "--dropout", "0.1", *more, *ENGINES[engine_name]]
    assert run(TASKS[task], [*argv, "--output", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patched:
        StopAfter(patched, 3)
        stopped = run(TASKS[task], [*argv, "--output", str(tmp_path / "parts")])
    assert stopped == 128 + signal.SIGTERM
    assert not (tmp_path / "parts" / "model").exists()
    assert run(TASKS[task], [*argv, "--output", str(tmp_path / "parts"), "--resume"]) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
def test_sigterm_from_outside_writes_a_checkpoint(work, tmp_path):
    output = tmp_path / "run"
    argv = [*arguments(work, "qa"), "--max-steps", "100000", "--eval-steps", "100000", "--output", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune.qa", *argv], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        while not list(output.glob("logs*")) and process.poll() is None and not (output / "run.json").exists():
            time.sleep(0.1)
        # The signal counts once training has begun; before, it ends the process at once.
        seen = ""
        assert process.stderr is not None
        while "step/s" not in seen and process.poll() is None:
            seen += process.stderr.read(64)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert len(list((output / "checkpoints").glob("step-*"))) == 1


def test_old_checkpoints_go_and_the_best_stays(work, tmp_path, monkeypatch):
    scores = iter([5.0, 9.0, 7.0, 6.0, 5.5, 5.2, 5.2])
    monkeypatch.setattr(QA, "evaluate", lambda *args: {"f1": next(scores)})
    output = tmp_path / "run"
    argv = [*arguments(work, "qa"), "--max-steps", "6", "--eval-steps", "1", "--keep-checkpoints", "2"]
    assert run(QA, [*argv, "--output", str(output)]) == 0
    assert [path.name[-1] for path in sorted((output / "checkpoints").iterdir())] == ["2", "5", "6"]
    from safetensors.torch import load_file

    best = load_file(output / "checkpoints" / "step-00000002" / "model.safetensors")
    finished = weights(output)
    for name, value in finished.items():
        assert torch.equal(value, best[name]), name


def test_patience(work, tmp_path, monkeypatch):
    scores = iter([5.0, 4.0, 3.0, 9.0])
    monkeypatch.setattr(QA, "evaluate", lambda *args: {"f1": next(scores)})
    argv = [*arguments(work, "qa"), "--max-steps", "9", "--eval-steps", "1", "--patience", "2"]
    assert run(QA, [*argv, "--output", str(tmp_path / "run")]) == 0
    assert max(losses(tmp_path / "run")) == 3


@pytest.mark.parametrize("engine_name", ENGINES)
def test_checkpoints_between_evaluations(work, tmp_path, engine_name):
    argv = [*arguments(work, "qa"), "--max-steps", "4", "--eval-steps", "4", "--save-steps", "2"]
    assert run(QA, [*argv, *ENGINES[engine_name], "--output", str(tmp_path / "run")]) == 0
    written = (tmp_path / "run" / "checkpoints").iterdir()
    assert sorted(int(path.name.rpartition("-")[2]) for path in written) == [2, 4]


@pytest.mark.parametrize("engine_name", ENGINES)
def test_a_loss_that_is_no_number_stops_the_run_and_names_the_rows(work, tmp_path, monkeypatch, engine_name):
    from hybrid_longformer import HybridLongformerForQuestionAnswering as Model

    original, calls = Model._span_loss, []

    def spoilt(self, *args):
        calls.append(1)
        return original(self, *args) * (float("nan") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(Model, "_span_loss", spoilt)
    output = tmp_path / "run"
    argv = [*arguments(work, "qa"), "--max-steps", "6", "--eval-steps", "1", *ENGINES[engine_name]]
    # Evaluations don't compute a loss, so the third is that of step 3.
    with pytest.raises(SystemExit, match="the loss of step 3 is nan"):
        run(QA, [*argv, "--output", str(output)])
    found = json.loads((output / "not_finite.json").read_text())
    assert found["step"] == 3
    assert len(found["rows"]) == 4
    monkeypatch.undo()
    assert run(QA, [*argv, "--output", str(output), "--resume"]) == 0


def test_a_full_disk_is_told_before_training(work, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    assert run(QA, [*arguments(work, "qa"), *ALL_STEPS, "--output", str(tmp_path / "run")]) == 1
    assert "0.0 GB free, but 4 checkpoints" in capsys.readouterr().err


def test_a_disk_that_fills_up_leaves_the_last_checkpoint(work, tmp_path, monkeypatch):
    from accelerate import Accelerator

    original, saved = Accelerator.save_state, []

    def full(self, *args, **kwargs):
        saved.append(1)
        if len(saved) == 2:
            raise OSError(28, "No space left on device")
        return original(self, *args, **kwargs)

    argv = [*arguments(work, "qa"), "--max-steps", "6", "--save-steps", "2", "--eval-steps", "6"]
    with monkeypatch.context() as patched:
        patched.setattr(Accelerator, "save_state", full)
        with pytest.raises(SystemExit, match="step 4 could not be written"):
            run(QA, [*argv, "--output", str(tmp_path / "run")])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert run(QA, [*argv, "--output", str(tmp_path / "run"), "--resume"]) == 0
    assert run(QA, [*argv, "--output", str(tmp_path / "whole")]) == 0
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_folders_that_hold_something_else_are_refused(work, tmp_path, capsys):
    argv = [*arguments(work, "qa"), "--max-steps", "1", "--output", str(tmp_path / "run")]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    assert run(QA, argv) == 1
    assert "holds files that are no run" in capsys.readouterr().err
    assert run(QA, [*argv, "--overwrite"]) == 1
    assert (tmp_path / "run" / "thesis.tex").read_text() == "precious"
    (tmp_path / "file").write_text("")
    assert run(QA, [*argv, "--output", str(tmp_path / "file" / "run")]) == 1
    assert "can't be written to" in capsys.readouterr().err


def test_an_earlier_run_is_kept_unless_told(work, tmp_path, capsys):
    argv = [*arguments(work, "qa"), "--max-steps", "2", "--output", str(tmp_path / "run")]
    assert run(QA, argv) == 0
    assert run(QA, argv) == 1
    assert "holds an earlier run" in capsys.readouterr().err
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert run(QA, [*argv, "--overwrite"]) == 0
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_run_goes_on_the_way_it_began(work, tmp_path, capsys):
    argv = [*arguments(work, "qa"), "--max-steps", "1", "--output", str(tmp_path / "run")]
    assert run(QA, argv) == 0
    assert run(QA, [*argv, "--resume", "--trainer"]) == 1
    assert "step-00000001 was written without --trainer" in capsys.readouterr().err


def test_max_minutes_ends_training_with_a_finished_model(work, tmp_path):
    argv = [*arguments(work, "qa"), "--max-steps", "50", "--max-minutes", "0", "--output", str(tmp_path / "run")]
    assert run(QA, argv) == 0
    assert max(losses(tmp_path / "run")) == 1
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_max_minutes_count_what_the_run_had_taken_before(work, tmp_path):
    argv = [*arguments(work, "qa"), "--max-steps", "50", "--output", str(tmp_path / "run")]
    assert run(QA, [*argv, "--max-minutes", "0"]) == 0
    assert run(QA, [*argv, "--max-minutes", "0", "--resume"]) == 0
    assert max(losses(tmp_path / "run")) == 1
    assert run(QA, [*argv, "--max-minutes", "1000", "--max-steps", "3", "--resume"]) == 0
    assert max(losses(tmp_path / "run")) == 3


def test_trainer_keeps_the_minutes_of_a_run(work, tmp_path):
    argv = [*arguments(work, "qa"), "--trainer", "--max-steps", "50", "--output", str(tmp_path / "run")]
    assert run(QA, [*argv, "--max-minutes", "0"]) == 0
    first = read_json(tmp_path / "run" / "metrics.json")
    assert run(QA, [*argv, "--max-minutes", "0", "--resume"]) == 0
    second = read_json(tmp_path / "run" / "metrics.json")
    assert (first["steps"], second["steps"]) == (1, 2)
    assert second["minutes"] > first["minutes"] > 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-length", "5000"], "max_length=5000 is more than the 510 tokens"),
        (["--question-column", "frage"], "has no column 'frage'"),
        (["--model", "runs/qa/model"], "there is no folder runs/qa/model, and the Hub could not provide it"),
        (["--model", "runs/qa"], "there is no folder runs/qa, and the Hub could not provide it"),
        (["--stride", "500"], "stride=500"),
        (["--train-file", "nowhere.json"], "nowhere.json is not a file"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line(work, tmp_path, capsys, more, said):
    argv = [*arguments(work, "qa"), *ALL_STEPS, "--output", str(tmp_path / "run"), *more]
    assert run(QA, argv) == 1
    assert said in capsys.readouterr().err


def test_lora_trains_adapters_and_saves_a_plain_model(work, tmp_path):
    argv = [*arguments(work, "qa"), *ALL_STEPS, "--lora-rank", "4", "--output", str(tmp_path / "run")]
    assert run(QA, argv) == 0
    before = transformers.AutoModelForQuestionAnswering.from_pretrained(work / "qa")
    after = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "run" / "model")
    changed = {
        name
        for (name, one), (_, other) in zip(before.named_parameters(), after.named_parameters(), strict=True)
        if not torch.equal(one, other)
    }
    assert any("attention.self.query.weight" in name for name in changed)
    assert any("qa_outputs" in name for name in changed)
    assert not any("word_embeddings" in name or "intermediate" in name for name in changed)


def test_bf16_and_gradient_checkpointing(work, tmp_path, monkeypatch):
    seen = []
    original = engine.build_model

    def noted(task, folder):
        model = original(task, folder)
        layer = model.hybrid_longformer.encoder.layer[0]
        layer.intermediate.dense.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        return model

    monkeypatch.setattr(engine, "build_model", noted)
    argv = [*arguments(work, "qa"), "--max-steps", "1", "--eval-steps", "9", "--gradient-accumulation", "1"]
    more = ["--mixed-precision", "bf16", "--gradient-checkpointing", "--output", str(tmp_path / "run")]
    assert run(QA, [*argv, *more]) == 0
    assert set(seen) == {torch.bfloat16}
    training_calls = len(seen)
    seen.clear()
    AcceleratorState._reset_state(True)
    assert run(QA, [*argv, "--mixed-precision", "bf16", "--output", str(tmp_path / "plain")]) == 0
    # The layer is computed once more in the backward pass.
    assert training_calls == len(seen) + 1


def test_query_focused_summaries_make_the_query_global(work):
    argv = arguments(work, "summarise")
    from finetune.arguments import parse_arguments
    from finetune.summarise import SummariseArguments

    args = parse_arguments(SummariseArguments, [*argv, "--output", "unused", "--query-column", "query"])
    task = Summarise(args)
    row = task.rows("train")[0]
    query = task.tokenizer("fox?", add_special_tokens=False)["input_ids"]
    assert row["input_ids"][1 : 1 + len(query)] == query
    assert sum(row["global_attention_mask"]) == 1 + len(query)
    assert row["global_attention_mask"][: 1 + len(query)] == [1] * (1 + len(query))


def test_masking_is_by_seed_row_and_draw(work):
    from finetune.arguments import parse_arguments
    from finetune.mlm import MaskedLMArguments

    task = MaskedLM(parse_arguments(MaskedLMArguments, [*arguments(work, "mlm"), "--output", "unused"]))
    rows = task.rows("train")
    lengths = [len(row["input_ids"]) for row in (rows[number] for number in range(len(rows)))]
    assert max(lengths) == 128
    row = {**rows[0], "row_id": 0, "draw": 0}
    one, again, other = task.mask(row), task.mask(row), task.mask({**row, "draw": 1})
    assert (one["input_ids"] == again["input_ids"]).all()
    assert (one["labels"] != other["labels"]).any()
    many = [task.mask({**rows[0], "row_id": 0, "draw": draw}) for draw in range(200)]
    chosen = sum((each["labels"] != -100).sum() for each in many) / sum(len(each["labels"]) for each in many)
    hidden = sum((each["input_ids"] == task.tokenizer.mask_token_id).sum() for each in many)
    assert 0.13 < chosen < 0.16
    assert 0.75 < hidden / sum((each["labels"] != -100).sum() for each in many) < 0.85
    assert all(each["labels"][0] == -100 for each in many), "special tokens are never masked"


def test_windows_of_a_long_document_are_all_read_and_questions_are_global(work):
    from finetune.arguments import parse_arguments
    from finetune.qa import QAArguments

    argv = [*arguments(work, "qa"), "--output", "unused", "--max-length", "64", "--stride", "16"]
    task = QA(parse_arguments(QAArguments, argv))
    rows = task.rows("train")
    assert max(rows.lengths) == 64
    found = 0
    for number in range(len(rows)):
        row, place = rows[number], rows.places[number]
        question = rows.questions[place.question]
        first_separator = list(row["input_ids"]).index(task.tokenizer.sep_token_id)
        assert row["global_attention_mask"] == [1] * first_separator + [0] * (len(row["input_ids"]) - first_separator)
        if row["start_positions"]:
            text = task.tokenizer.decode(row["input_ids"][row["start_positions"] : row["end_positions"] + 1]).strip()
            assert text == question.answers[0]
            found += 1
    assert found >= sum(bool(question.answers) for question in rows.questions)


def test_tensorboard_is_written_and_the_model_folder_uploaded(work, tmp_path, monkeypatch):
    import huggingface_hub

    uploads = []

    class Hub:
        def __init__(self, token):
            assert token is None

        def create_repo(self, repository, private, exist_ok):
            assert exist_ok
            return huggingface_hub.RepoUrl(f"https://huggingface.co/me/{repository}")

        def upload_folder(self, *, repo_id, folder_path, ignore_patterns, commit_message):
            # The card that is there already tells of another run.
            assert ignore_patterns is None
            uploads.append((repo_id, {path.name for path in Path(folder_path).iterdir()}))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    output = tmp_path / "run"
    argv = [*arguments(work, "qa"), "--max-steps", "1", "--report-to", "tensorboard", "--push-to-hub", "contracts"]
    assert run(QA, [*argv, "--output", str(output)]) == 0
    assert list((output / "logs").rglob("events.out.tfevents.*"))
    ((repository, files),) = uploads
    assert repository == "me/contracts"
    assert {"model.safetensors", "config.json", "modeling_hybrid_longformer.py", "README.md", "tokenizer.json"} <= files
    assert "training_curve.png" in files


def test_asking_a_model_that_is_not_there(tmp_path, capsys):
    from finetune.answer import main

    (tmp_path / "contract.txt").write_text("The fox is red.")
    nowhere = str(tmp_path / "runs" / "model")
    assert main([nowhere, "--document", str(tmp_path / "contract.txt"), "--question", "What colour?"]) == 1
    assert f"error: there is no folder {nowhere}" in capsys.readouterr().err


def test_answers_of_a_saved_model_are_those_of_its_run(work, tmp_path):
    from finetune.answer import Answerer, show

    output = tmp_path / "run"
    argv = [*arguments(work, "qa"), *ALL_STEPS, "--max-length", "64", "--stride", "16", "--output", str(output)]
    assert run(QA, argv) == 0
    answerer = Answerer(str(output / "model"))
    predicted = json.loads((output / "predictions" / "validation" / "predictions.json").read_text())
    data = json.loads((work / "validation.json").read_text())["data"]
    for article in data:
        paragraph = article["paragraphs"][0]
        for asked in paragraph["qas"]:
            prediction = answerer(asked["question"], paragraph["context"])
            assert prediction.text == predicted[asked["id"]]
            shown = "".join(show(prediction, paragraph["context"], colour=False).split())
            assert "".join(f">>{prediction.text}<<".split()) in shown if prediction.text else "noanswer" in shown
