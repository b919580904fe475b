"""Arguments of a run: command line, YAML, both, and what they refuse."""

import re
from pathlib import Path

import pytest

from finetune.arguments import RunArguments, parse_arguments
from finetune.mlm import MaskedLMArguments
from finetune.qa import QAArguments
from finetune.summarise import SummariseArguments

CONFIGS = Path(__file__).parent.parent / "finetune" / "configs"

NEEDED = ["--model", "m", "--output", "o"]


def refusal(capsys, arguments_class: type[RunArguments], argv: list[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(arguments_class, argv)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_command_line_wins_over_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\noutput: o\nlearning_rate: 1.0e-3\nstreaming: true\nmax_steps: 7\nreport_to: [none]\n")
    args = parse_arguments(QAArguments, [str(path), "--learning-rate", "2e-5", "--stride", "9"])
    assert (args.model, args.learning_rate, args.max_steps, args.stride) == ("m", 2e-5, 7, 9)
    assert args.streaming is True
    assert args.trackers == []


def test_defaults_are_not_shared():
    first, second = (parse_arguments(QAArguments, NEEDED) for _ in range(2))
    first.report_to.append("wandb")
    assert second.report_to == ["tensorboard"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "model: m\noutput: o\nlearning_rat: 1",
            "learning_rat is not an argument of this script: did you mean learning_rate?",
        ),
        ("- a\n- b", "must hold `name: value` lines"),
    ],
)
def test_yaml_that_says_something_else_is_refused(tmp_path, capsys, text, said):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert said in refusal(capsys, QAArguments, [str(path)])


def test_yaml_that_is_not_there_is_refused(capsys):
    assert "nowhere.yaml is not a file" in refusal(capsys, QAArguments, ["nowhere.yaml"])


@pytest.mark.parametrize(
    ("arguments_class", "more", "said"),
    [
        (
            QAArguments,
            ["--learning-rat", "1"],
            "--learning-rat is not an argument of this script: did you mean --learning-rate?",
        ),
        (
            QAArguments,
            ["--learning_rat=1"],
            "--learning_rat is not an argument of this script: did you mean --learning-rate?",
        ),
        (QAArguments, ["--resume", "true", "false"], "false is not an argument of this script: see --help"),
        (QAArguments, ["--batch-size", "0"], "batch_size=0 must be at least 1"),
        (QAArguments, ["--max-steps", "-3"], "max_steps=-3 must be at least 1"),
        (QAArguments, ["--max-length", "0"], "max_length=0 must be at least 1"),
        (QAArguments, ["--resume", "--overwrite"], "resume and overwrite exclude each other"),
        (QAArguments, ["--schedule", "wobbly"], "wobbly"),
        (QAArguments, ["--warmup", "-1"], "warmup=-1.0"),
        (QAArguments, ["--dropout", "1"], "dropout=1.0"),
        (QAArguments, ["--streaming"], "streaming=True needs max_steps"),
        (QAArguments, ["--global-attention", "every:0"], "global_attention='every:0' must be"),
        (MaskedLMArguments, ["--mask-share", "1.5"], "mask_share=1.5"),
    ],
)
def test_wrong_values_are_refused_by_name(capsys, arguments_class, more, said):
    assert said in refusal(capsys, arguments_class, [*NEEDED, *more])


def test_every_argument_has_a_help_text():
    for arguments_class in (QAArguments, SummariseArguments, MaskedLMArguments):
        for name, entry in arguments_class.__dataclass_fields__.items():
            assert len(entry.metadata.get("help", "")) > 8, name


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_read_by_the_task_they_are_for(path):
    task = re.search(r"python -m finetune\.(\w+) finetune/configs/" + path.name, path.read_text())
    assert task, "a config shows the command that reads it"
    arguments_class = {"qa": QAArguments, "summarise": SummariseArguments, "mlm": MaskedLMArguments}[task[1]]
    assert parse_arguments(arguments_class, [str(path)]).max_length in (None, 512, 4096)
