"""The same training by transformers' Trainer: same rows, batches, optimiser, schedule and evaluation."""

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from .checkpoints import RunState
from .engine import (
    Stopped,
    build_model,
    caught_signals,
    evaluate,
    make_optimizer,
    make_schedule,
    refuse_loss,
    step_intervals,
)
from .files import read_json
from .task import Task

TRAINER_STATE = "trainer_state.json"


class TaskTrainer(Trainer):
    """Trainer that takes batches and metrics from a task.

    Args:
        task: data, batches and evaluation.
        first_batch: number of the batch to begin with.
    """

    def __init__(self, task: Task, *, folder: Path, first_batch: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.task, self.folder, self.first_batch = task, folder, first_batch
        self.rows_at_work: list[int] = []

    def get_train_dataloader(self) -> DataLoader:
        return self.task.train_loader(
            rank=self.accelerator.process_index, world_size=self.accelerator.num_processes, first=self.first_batch
        )

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self.rows_at_work = inputs.pop("row_ids", [])
        return super()._prepare_inputs(inputs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        total = self.accelerator.reduce(loss.detach().clone(), reduction="sum").item()
        if not math.isfinite(total):
            rows, step = gather_object(self.rows_at_work), self.state.global_step + 1
            refuse_loss(total, rows, step=step, folder=self.folder, writes=self.args.should_save)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.compute_loss_context_manager():
            metrics = evaluate(self.task, self.model, self.accelerator, "validation")
        named = {f"eval_{name}": value for name, value in metrics.items()}
        self.log(named)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)  # type: ignore[has-type]
        return named


class StopInTime(TrainerCallback, ExportableState):
    """Stops with a checkpoint when a signal came, and with evaluation and checkpoint when time is up.

    Args:
        asked: signals that came.
        accelerator: all processes stop together, whichever of them is told to.
        max_minutes: time for the whole run.
        minutes_before: what the run had taken when it was stopped.
    """

    def __init__(self, asked: list[int], *, accelerator: Accelerator, max_minutes: float | None, minutes_before: float):
        self.asked, self.accelerator, self.max_minutes = asked, accelerator, max_minutes
        self.began = time.monotonic() - 60 * minutes_before
        self.stop_signal = 0

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def state(self) -> dict[str, Any]:
        """What Trainer is to write into its checkpoints."""
        return {"args": {}, "attributes": {"minutes": self.minutes}}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_late = self.max_minutes is not None and self.minutes >= self.max_minutes
        facts = torch.tensor([float(max(self.asked, default=0)), float(is_late)], device=self.accelerator.device)
        told, late = self.accelerator.gather(facts[None]).amax(0).tolist()
        self.stop_signal = int(told)
        if told or late:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = not told and args.eval_strategy != "no"


class SaveInBetween(TrainerCallback):
    """Writes checkpoints between evaluations, too: Trainer itself can only be told to write them with those.

    Args:
        save_steps: steps between checkpoints.
    """

    def __init__(self, save_steps: int):
        self.save_steps = save_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.save_steps == 0:
            control.should_save = True


def train_by_trainer(task: Task, *, folder: Path, accelerator: Accelerator) -> tuple[nn.Module, RunState]:
    """Trains by Trainer; its checkpoints are in the same place, but under Trainer's names."""
    model = build_model(task, folder)
    total_steps = task.total_steps(accelerator.num_processes)
    settings = training_arguments(task, folder, total_steps, accelerator.mixed_precision)
    newest = newest_checkpoint(folder / "checkpoints") if task.args.resume else None
    done, minutes_before = (0, 0.0) if newest is None else progress_of(newest)
    optimizer = make_optimizer(model, task.args)
    with caught_signals() as asked:
        clock = StopInTime(
            asked, accelerator=accelerator, max_minutes=task.args.max_minutes, minutes_before=minutes_before
        )
        _, save_steps = step_intervals(task.args, total_steps)
        trainer = TaskTrainer(
            task,
            folder=folder,
            first_batch=done * task.args.gradient_accumulation,
            model=model,
            args=settings,
            eval_dataset=task.rows("validation") if task.has("validation") else None,
            optimizers=(optimizer, make_schedule(optimizer, task.args, total_steps)),
            callbacks=[clock, SaveInBetween(save_steps), *early_stopping(task, newest)],
        )
        if task.args.eval_first and done == 0 and task.has("validation"):
            trainer.evaluate()
        # Trainer forgets what it logged before it began.
        before = list(trainer.state.log_history)
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    if clock.stop_signal:
        raise Stopped(clock.stop_signal)
    return trainer.model_wrapped, run_state(trainer, before, minutes=clock.minutes)


def progress_of(checkpoint: Path) -> tuple[int, float]:
    """Steps and minutes behind a checkpoint."""
    steps = read_json(checkpoint / TRAINER_STATE)["global_step"]
    return steps, stateful_callbacks(checkpoint)[StopInTime.__name__]["attributes"]["minutes"]


def stateful_callbacks(checkpoint: Path) -> dict[str, Any]:
    return read_json(checkpoint / TRAINER_STATE)["stateful_callbacks"]


def early_stopping(task: Task, checkpoint: Path | None) -> list[TrainerCallback]:
    """The callback, if it is wanted, with what it had counted when the run was stopped."""
    if task.args.patience is None:
        return []
    callback = EarlyStoppingCallback(task.args.patience)
    known = {} if checkpoint is None else stateful_callbacks(checkpoint).get(type(callback).__name__, {})
    for name, value in known.get("attributes", {}).items():
        setattr(callback, name, value)
    return [callback]


def training_arguments(task: Task, folder: Path, total_steps: int, precision: str) -> TrainingArguments:
    args = task.args
    eval_steps, save_steps = step_intervals(args, total_steps)
    validates = task.has("validation")
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder / "logs"))
    return TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=total_steps,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.gradient_accumulation,
        max_grad_norm=args.max_grad_norm,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        use_cpu=not torch.accelerator.is_available(),
        seed=args.seed,
        eval_strategy="steps" if validates else "no",
        eval_steps=eval_steps,
        save_strategy="steps",
        # The best model can only be loaded again where every evaluation has its checkpoint.
        save_steps=eval_steps if validates else save_steps,
        save_total_limit=args.keep_checkpoints + 1,
        load_best_model_at_end=validates,
        metric_for_best_model=f"eval_{task.best_metric}" if validates else None,
        greater_is_better=task.higher_is_better if validates else None,
        logging_steps=args.log_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        report_to=args.trackers or "none",
        remove_unused_columns=False,
        # The loader begins where the run stopped, so there is nothing to skip.
        ignore_data_skip=True,
        ddp_find_unused_parameters=True,
    )


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole: Trainer writes its state last. A torn one is removed."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for path in reversed(found):
        try:
            read_json(path / TRAINER_STATE)
            return path
        except (OSError, json.JSONDecodeError):
            shutil.rmtree(path, ignore_errors=True)
    return None


def run_state(trainer: Trainer, before: list[dict[str, Any]], *, minutes: float) -> RunState:
    """What Trainer logged, in the words of the other engine."""
    history = [
        {name.removeprefix("eval_"): value for name, value in entry.items() if name != "epoch"}
        for entry in before + trainer.state.log_history
    ]
    return RunState(
        step=trainer.state.global_step,
        best_value=trainer.state.best_metric,
        best_step=trainer.state.best_global_step,
        minutes=minutes,
        history=history,
    )
