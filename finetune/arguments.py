"""Arguments: what every run can be told, by command line, by a YAML file, or by both (the command line wins).

python -m finetune.qa run.yaml --learning-rate 1e-4
"""

import dataclasses
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import HfArgumentParser

SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "polynomial")
GLOBAL_PLACEMENTS = "default, none, first, question, or every:K (each K-th token and the first)"


def option(default: Any, text: str, **metadata: Any) -> Any:
    """A field with a help text; lists get a fresh copy each."""
    # argparse fills in what stands behind a single percent sign.
    metadata |= {"help": text.replace("%", "%%")}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class RunArguments:
    """What all tasks share."""

    model: str = field(metadata={"help": "folder or Hub id of the checkpoint to start from"})
    output: str = field(metadata={"help": "folder of the run: checkpoints, logs, and at the end the finished model"})
    # Data
    dataset: str | None = option(None, "name of a data set on the Hub; or give files")
    dataset_config: str | None = option(None, "configuration of that data set")
    train_file: str | None = option(None, "local json, jsonl, csv or parquet, .gz too")
    validation_file: str | None = option(None, "the same, for choosing the best model")
    test_file: str | None = option(None, "the same, for the last evaluation; without one the validation set serves")
    train_split: str = option("train", "split of the data set to train on")
    validation_split: str | None = option("validation", "split of the data set to choose the best model by; or none")
    test_split: str | None = option(None, "split of the data set for the last evaluation")
    max_train_samples: int | None = option(None, "use the first so many examples only")
    max_eval_samples: int | None = option(None, "evaluate on so many examples only, spread evenly over the set")
    streaming: bool = option(False, "read training data as it is needed, for corpora larger than the disk")
    preprocessing_workers: int = option(1, "processes that tokenise")
    loader_workers: int = option(0, "processes that make batches, per training process")
    # Model
    max_length: int | None = option(None, "tokens per input; what the model can read if not given")
    global_attention: str = option("default", f"which tokens are global: {GLOBAL_PLACEMENTS}")
    attention_window: int | None = option(None, "window of a hybrid model, if another than its own is wanted")
    num_random_blocks: int | None = option(None, "random blocks of a hybrid model, if another number is wanted")
    dropout: float | None = option(None, "hidden and attention dropout, if others than the model's are wanted")
    lora_rank: int = option(0, "train LoRA adapters of this rank instead of all weights; merged at the end")
    lora_alpha: int = option(16, "scale of the adapters")
    gradient_checkpointing: bool = option(False, "compute activations again in the backward pass, to save memory")
    # Training
    trainer: bool = option(False, "train with transformers' Trainer instead of the Accelerate loop")
    epochs: float = option(3.0, "passes over the training data")
    max_steps: int | None = option(None, "optimiser steps, instead of epochs; needed with streaming")
    max_minutes: float | None = option(None, "stop training after so long in all, with evaluation and saving as usual")
    batch_size: int = option(4, "rows per process and forward pass")
    eval_batch_size: int = option(8, "rows per process when evaluating")
    gradient_accumulation: int = option(1, "forward passes per optimiser step")
    learning_rate: float = option(3e-5, "at the top of the schedule")
    weight_decay: float = option(0.01, "of all weights but biases and norms")
    schedule: str = option("linear", "shape of the learning rate", choices=list(SCHEDULES))
    warmup: float = option(0.06, "steps of warm-up; below 1, their share of all steps")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm; 0 for no clipping")
    mixed_precision: str | None = option(
        None, "no, bf16 or fp16; if not given, what accelerate's own config says", choices=["no", "bf16", "fp16"]
    )
    seed: int = option(0, "of data order, dropout and new weights")
    # Evaluation, checkpoints, reports
    eval_steps: int | None = option(None, "steps between evaluations; ten in a run if not given")
    eval_first: bool = option(False, "evaluate before training, too")
    save_steps: int | None = option(
        None, "steps between checkpoints, beside those of evaluations; as eval_steps if not given"
    )
    keep_checkpoints: int = option(2, "how many checkpoints to keep, beside the best one")
    patience: int | None = option(None, "stop after so many evaluations without a gain")
    log_steps: int = option(10, "steps between log entries")
    report_to: list[str] = option(["tensorboard"], "trackers that Accelerate knows, by name; none for none")  # noqa: RUF009
    resume: bool = option(False, "go on from the newest whole checkpoint in output, if there is one")
    overwrite: bool = option(False, "remove an earlier run in output first")
    push_to_hub: str | None = option(None, "repository to upload the finished model to")

    def __post_init__(self) -> None:
        if self.validation_split == "none":
            self.validation_split = None
        for name in ("batch_size", "eval_batch_size", "gradient_accumulation", "log_steps", "keep_checkpoints"):
            self._at_least(name, 1)
        limits = ("max_length", "max_steps", "eval_steps", "save_steps", "max_train_samples", "max_eval_samples")
        for name in (*limits, "patience"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other: go on with the old run, or remove it")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} must be one of {', '.join(SCHEDULES)}")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup} must be a share below 1 or a number of steps")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if self.streaming and self.max_steps is None:
            raise ValueError("streaming=True needs max_steps: how long a stream is can't be known beforehand")
        self._check_global_attention()

    def _at_least(self, name: str, lowest: float) -> None:
        if getattr(self, name) < lowest:
            raise ValueError(f"{name}={getattr(self, name)} must be at least {lowest}")

    def _check_global_attention(self) -> None:
        name, _, step = self.global_attention.partition(":")
        is_step = name == "every" and step.isdigit() and int(step) > 0
        if not is_step and self.global_attention not in ("default", "none", "first", "question"):
            raise ValueError(f"global_attention={self.global_attention!r} must be {GLOBAL_PLACEMENTS}")

    @property
    def trackers(self) -> list[str]:
        return [name for name in self.report_to if name != "none"]


Arguments = TypeVar("Arguments", bound=RunArguments)


def parse_arguments(arguments_class: type[Arguments], argv: Sequence[str] | None = None, **about: Any) -> Arguments:
    """Reads `[FILE.yaml] [--name value …]`; a wrong name or value ends the program with a line that says which."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(
        arguments_class,
        usage="%(prog)s [FILE.yaml] [--name value ...]",
        allow_abbrev=False,
        **about,
    )
    try:
        if given and not given[0].startswith("-"):
            given = [*yaml_arguments(Path(given[0]), arguments_class), *given[1:]]
        arguments, unknown = parser.parse_args_into_dataclasses(
            given, look_for_args_file=False, return_remaining_strings=True
        )
        if unknown:
            known = [f"--{entry.name.replace('_', '-')}" for entry in dataclasses.fields(arguments_class)]
            raise ValueError(unknown_name(unknown[0].partition("=")[0], known))
    except ValueError as error:
        parser.error(str(error))
    return arguments


def unknown_name(name: str, known: Sequence[str]) -> str:
    """What to say of a name that is not one of those that are known."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "see --help for the names there are"
    return f"{name} is not an argument of this script: {hint}"


def yaml_arguments(path: Path, arguments_class: type[RunArguments]) -> list[str]:
    """A YAML file's keys as the command line would say them."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file: the first argument is a YAML file, or starts with --")
    values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold `name: value` lines")
    known = [entry.name for entry in dataclasses.fields(arguments_class)]
    argv: list[str] = []
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{path}: {unknown_name(str(name), known)}")
        if value is None and name == "validation_split":
            value = "none"
        if value is not None:
            argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return argv
