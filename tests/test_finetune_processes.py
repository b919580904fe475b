"""Two processes on the CPU train as one process with the same global batch does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from .finetuning import save_model, write_questions, write_summaries

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "finetune" / "accelerate" / "cpu_2_processes.yaml"
COMMON = ["--learning-rate", "1e-3", "--log-steps", "1", "--max-steps", "5", "--eval-steps", "5"]
LAUNCH_TWO = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIG)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("processes")
    save_model(root / "qa", "QuestionAnswering")
    save_model(root / "summarise", "ConditionalGeneration")
    for name, numbers in (("train", range(9)), ("validation", range(9, 12))):
        write_questions(root / f"{name}.json", numbers)
        write_summaries(root / f"{name}.jsonl", numbers)
    return root


def start(work: Path, output: Path, task: str, launch: list[str], *more: str) -> subprocess.Popen:
    script = [] if "tests.sharded_run" in launch else ["-m", f"finetune.{task}"]
    suffix = "json" if task == "qa" else "jsonl"
    own = (
        ["--max-length", "160", "--stride", "32"] if task == "qa" else ["--max-summary-tokens", "8", "--num-beams", "1"]
    )
    files = [f"--{name}-file={work / name}.{suffix}" for name in ("train", "validation")]
    argv = ["--model", str(work / task), "--output", str(output), *files, *own, *COMMON, *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        [sys.executable, *launch, *script, *argv],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A group of its own, as in a terminal, whose Ctrl-C goes to the whole group.
        start_new_session=True,
    )


def finished_run(work: Path, output: Path, task: str, launch: list[str], batch_size: int) -> dict:
    process = start(work, output, task, launch, "--batch-size", str(batch_size))
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr[-3000:]
    metrics = json.loads((output / "metrics.json").read_text())["validation"]
    history = json.loads((output / "history.json").read_text())
    losses = {entry["step"]: entry["loss"] for entry in history if "learning_rate" in entry}
    return {"losses": losses, "metrics": metrics, "stdout": stdout}


@pytest.mark.parametrize("task", ["qa", "summarise"])
def test_two_processes_are_as_one(work, tmp_path, task):
    alone = finished_run(work, tmp_path / "alone", task, [], 4)
    two = finished_run(work, tmp_path / "two", task, LAUNCH_TWO, 2)
    assert sorted(two["losses"]) == [1, 2, 3, 4, 5]
    for step, loss in alone["losses"].items():
        assert two["losses"][step] == pytest.approx(loss, abs=1e-4), step
    for name, value in alone["metrics"].items():
        assert two["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
    # Only the main process tells and writes.
    assert two["stdout"].count("model: ") == 1
    assert len(list((tmp_path / "two" / "checkpoints").glob("step-*"))) == 1


def test_ctrl_c_leaves_a_checkpoint_of_both_processes(work, tmp_path):
    process = start(work, tmp_path / "run", "qa", LAUNCH_TWO, "--max-steps", "5000", "--eval-steps", "5000")
    with process:
        line = ""
        while "loss=" not in line:
            # A progress bar ends its lines with a carriage return, which text mode takes for a line's end.
            line = process.stderr.readline()
            assert line, "the run ended before its first step"
        os.killpg(process.pid, signal.SIGINT)
        process.communicate()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert {path.name for path in checkpoint.glob("random_states_*")} == {"random_states_0.pkl", "random_states_1.pkl"}
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(("task", "config"), [("qa", "gpus_fsdp_encoder"), ("summarise", "gpus_fsdp_seq2seq")])
def test_a_divided_model_trains_as_a_whole_one(work, tmp_path, task, config):
    sharded = ["-m", "tests.sharded_run", task, str(CONFIG.with_name(f"{config}.yaml"))]
    alone = finished_run(work, tmp_path / "alone", task, [], 4)
    divided = finished_run(work, tmp_path / "divided", task, [*LAUNCH_TWO, *sharded], 2)
    assert divided["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert divided["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-4)
    first, second = ({path.name for path in (tmp_path / name / "model").iterdir()} for name in ("alone", "divided"))
    assert first == second
    saved = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("alone", "divided")]
    assert saved[0].keys() == saved[1].keys()
    # The loss does not depend on what is added to all logits: this bias follows rounding errors, which Adam enlarges.
    weights = saved[0].keys() - {"qa_outputs.bias"}
    assert max((saved[0][name] - saved[1][name]).abs().max().item() for name in weights) < 1e-4
