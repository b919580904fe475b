"""Engine: the training loop by Accelerate, on one CPU or many GPUs; it can be stopped at any time and goes on exactly.

The loop is `Engine.train`: take the batches of a step, add up their gradients, step, then log, evaluate, save or stop.
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from torch import nn
from tqdm import tqdm
from transformers import get_scheduler

from .checkpoints import Checkpoints, RunState, check_room
from .files import write_json
from .processes import share_input_embeddings, start_processes
from .task import Task, add_lora

# Evaluations in a run, if nothing else is said.
DEFAULT_EVALUATIONS = 10


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal asked the run to end; its checkpoint is written."""

    def __init__(self, signal_number: int):
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class Engine:
    """Trains a task's model.

    Args:
        task: data, batches and evaluation.
        folder: where the run is kept.
        accelerator: made by `make_accelerator`.
    """

    def __init__(self, task: Task, *, folder: Path, accelerator: Accelerator):
        self.task, self.args, self.folder, self.accelerator = task, task.args, folder, accelerator
        self.checkpoints = Checkpoints(folder, accelerator=accelerator, keep=self.args.keep_checkpoints)
        self.total_steps = task.total_steps(accelerator.num_processes)
        self.eval_steps, self.save_steps = step_intervals(self.args, self.total_steps)
        self.state = RunState()
        self._check_rows_per_step()
        self._build()

    def _build(self) -> None:
        set_seed(self.args.seed)
        model = build_model(self.task, self.folder)
        optimizer = make_optimizer(model, self.args)
        schedule = make_schedule(optimizer, self.args, self.total_steps)
        if self.accelerator.state.deepspeed_plugin is not None:
            # Accelerate would read it off a loader.
            settings = self.accelerator.state.deepspeed_plugin.deepspeed_config
            settings["train_micro_batch_size_per_gpu"] = self.args.batch_size
        # At once: FSDP and DeepSpeed replace the parameters that the optimiser knows.
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, schedule)

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def train(self) -> RunState:
        """Trains to the end, or until the metric no longer gains; the model is then the best one that was seen."""
        if self.args.resume:
            self.state = self.checkpoints.load_newest() or self.state
            self._check_rows_per_step()
            if self._owes_evaluation():
                self._evaluate_and_save(is_last=False)
        if self.state.step == 0 and self.args.eval_first and self.task.has("validation"):
            self._evaluate()
        # Time as if the run had never been stopped.
        began = time.monotonic() - 60 * self.state.minutes
        with caught_signals() as asked, self._progress() as progress:
            for batches in self._steps():
                loss, stop_signal, out_of_time = self._step(batches, asked, began)
                self.state.minutes = (time.monotonic() - began) / 60
                self.state.step += 1
                self._log(loss, progress)
                is_last = self.state.step == self.total_steps or out_of_time
                if stop_signal:
                    self.checkpoints.save(self.state)
                    raise Stopped(stop_signal)
                if self._evaluate_and_save(is_last) or is_last:
                    break
        return self._take_best()

    def _check_rows_per_step(self) -> None:
        """Steps count progress through the data, so a run can't go on with larger or smaller ones."""
        rows = self.args.batch_size * self.args.gradient_accumulation * self.accelerator.num_processes
        if self.state.rows_per_step not in (None, rows):
            raise ValueError(
                f"the run in {self.folder} takes {self.state.rows_per_step} rows per step, now it would be {rows}: "
                "keep batch_size x gradient_accumulation x processes as it was"
            )
        self.state.rows_per_step = rows

    def _steps(self) -> Iterator[list[dict[str, Any]]]:
        """The batches of each step still to do."""
        if not self._has_time():
            return
        accumulation = self.args.gradient_accumulation
        loader = iter(
            self.task.train_loader(
                rank=self.accelerator.process_index,
                world_size=self.accelerator.num_processes,
                first=self.state.step * accumulation,
            )
        )
        for _ in range(self.state.step, self.total_steps):
            yield [next(loader) for _ in range(accumulation)]

    def _has_time(self) -> bool:
        """Whether a run that goes on has minutes left; a new one takes a step at least."""
        limit = self.args.max_minutes
        return limit is None or self.state.step == 0 or self.state.minutes < limit

    def _step(self, batches: list, asked: list[int], began: float) -> tuple[float, int, bool]:
        """One optimiser step; returns the loss over all processes, a signal that was sent, and whether time is up."""
        device, processes = self.accelerator.device, self.accelerator.num_processes
        self.model.train()
        rows = [row for batch in batches for row in batch.pop("row_ids")]
        counts = [self.task.count_items(batch).to(device) for batch in batches]
        total = self.accelerator.reduce(torch.stack(counts).sum().float(), reduction="sum").clamp(min=1)
        loss_sum = torch.zeros((), device=device)
        for batch, count in zip(batches, counts, strict=True):
            # DeepSpeed takes its step inside the last backward pass.
            self.accelerator.sync_gradients = batch is batches[-1]
            with nullcontext() if batch is batches[-1] else self.accelerator.no_sync(self.model):
                outputs = self.model(**send_to_device(batch, device))
                # The mean over no label at all is NaN; such a batch adds nothing.
                share = outputs.loss * count / total if count else outputs.logits.sum() * 0
                # Processes' gradients are averaged, so each share is scaled up to make their sum.
                self.accelerator.backward(share * processes)
                loss_sum += share.detach().float()
        timed_out = self.args.max_minutes is not None and (time.monotonic() - began) / 60 >= self.args.max_minutes
        facts = torch.tensor([float(max(asked, default=0)), float(timed_out)], device=device)
        loss, stop_signal, out_of_time = self.accelerator.reduce(
            torch.cat([loss_sum[None], facts]), reduction="sum"
        ).tolist()
        if not math.isfinite(loss):
            self._refuse_loss(loss, rows)
        if self.args.max_grad_norm:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss, int(stop_signal) and max(asked, default=signal.SIGTERM), out_of_time > 0

    def _refuse_loss(self, loss: float, rows: list[int]) -> None:
        """Ends the run before a loss that is no number spoils the weights."""
        rows = self.accelerator.gather(torch.tensor(rows, device=self.accelerator.device)).tolist()
        refuse_loss(loss, rows, step=self.state.step + 1, folder=self.folder, writes=self.is_main)

    def _log(self, loss: float, progress: tqdm) -> None:
        progress.update()
        rate = self.scheduler.get_last_lr()[0]
        progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
        if self.state.step % self.args.log_steps == 0 or self.state.step == 1:
            entry = {"step": self.state.step, "loss": loss, "learning_rate": rate}
            self.state.history.append(entry)
            self.accelerator.log({"train/loss": loss, "train/learning_rate": rate}, step=self.state.step)

    def _evaluate_and_save(self, is_last: bool) -> bool:
        """Evaluates and saves where it is time to; True when the metric has stopped gaining."""
        step = self.state.step
        evaluates = self.task.has("validation") and (is_last or step % self.eval_steps == 0)
        gained = self._evaluate() if evaluates else False
        if gained or is_last or step % self.save_steps == 0:
            self.checkpoints.save(self.state)
        return self.args.patience is not None and self.state.evaluations_without_gain >= self.args.patience

    def _owes_evaluation(self) -> bool:
        """Whether a signal came at a step that was to be evaluated."""
        step = self.state.step
        is_due = self.task.has("validation") and step > 0 and step % self.eval_steps == 0
        return is_due and not any(
            entry["step"] == step and self.task.best_metric in entry for entry in self.state.history
        )

    def _evaluate(self) -> bool:
        """Validates; True if this is the best so far."""
        metrics = evaluate(self.task, self.model, self.accelerator, "validation")
        value, best = metrics[self.task.best_metric], self.state.best_value
        self.state.history.append({"step": self.state.step, **metrics})
        numbers = {f"validation/{name}": value for name, value in metrics.items()}
        self.accelerator.log(numbers, step=self.state.step)
        if self.is_main:
            shown = ", ".join(f"{name} {number:.4g}" for name, number in metrics.items())
            tqdm.write(f"step {self.state.step}: {shown}")
        if self.state.step == 0:
            # What the model could do before is for comparison: the best model is one that was trained.
            return False
        gained = best is None or (value > best if self.task.higher_is_better else value < best)
        if gained:
            self.state.best_value, self.state.best_step = value, self.state.step
        self.state.evaluations_without_gain = 0 if gained else self.state.evaluations_without_gain + 1
        return gained

    def _take_best(self) -> RunState:
        """Loads the best checkpoint's weights; the state stays that of the whole run."""
        best = self.state.best_step
        if best is not None and best != self.state.step:
            self.checkpoints.load(self.checkpoints.path(best))
        return self.state

    @contextmanager
    def _progress(self) -> Iterator[tqdm]:
        with tqdm(
            total=self.total_steps, initial=self.state.step, desc=self.task.name, unit="step", disable=not self.is_main
        ) as progress:
            yield progress


def refuse_loss(loss: float, rows: list[int], *, step: int, folder: Path, writes: bool) -> None:
    path = folder / "not_finite.json"
    if writes:
        write_json(path, {"step": step, "loss": str(loss), "rows": rows})
    raise SystemExit(
        f"the loss of step {step} is {loss}; nothing was updated with it. The rows of its batch are in {path}. "
        "Look at them, lower --learning-rate, or leave mixed precision, and go on with --resume."
    )


def make_accelerator(args: Any, folder: Path) -> Accelerator:
    """Accelerate's engine as the arguments and `accelerate launch` say."""
    return start_processes(
        mixed_precision=args.mixed_precision,
        log_with=args.trackers or None,
        project_dir=str(folder / "logs"),
        # The schedule counts optimiser steps, whatever the number of processes.
        step_scheduler_with_optimizer=False,
    )


def build_model(task: Task, folder: Path) -> nn.Module:
    """The task's model as it is to be trained, if its checkpoints fit on the disk."""
    args = task.args
    model: Any = task.load_model()
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    share_input_embeddings(model)
    if args.lora_rank:
        model = add_lora(model, args, task.lora_saved)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    every = sum(weight.numel() for weight in model.parameters())
    check_room(folder, parameters=every, trained_parameters=trained, keep=args.keep_checkpoints)
    return model


def make_optimizer(model: nn.Module, args: Any) -> torch.optim.Optimizer:
    """AdamW that decays matrices only."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [weight for weight in trained if weight.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate)


def step_intervals(args: Any, total_steps: int) -> tuple[int, int]:
    """Steps between evaluations, and between checkpoints."""
    eval_steps = max(1, total_steps // DEFAULT_EVALUATIONS) if args.eval_steps is None else args.eval_steps
    return eval_steps, eval_steps if args.save_steps is None else args.save_steps


def warmup_steps(args: Any, total_steps: int) -> int:
    return int(args.warmup if args.warmup >= 1 else args.warmup * total_steps)


def make_schedule(optimizer: torch.optim.Optimizer, args: Any, total_steps: int) -> Any:
    return get_scheduler(
        args.schedule,
        optimizer,
        num_warmup_steps=warmup_steps(args, total_steps),
        num_training_steps=total_steps,
    )


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, accelerator: Accelerator, split: Any, folder: Path | None = None
) -> dict[str, float]:
    """The task's own evaluation, in evaluation mode."""
    model.eval()
    return task.evaluate(model, accelerator, split, folder)


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them; a second one is not caught any more."""
    asked: list[int] = []
    handlers: dict[int, Any] = {}

    def remember(number: int, frame: Any) -> None:
        asked.append(number)
        for caught, handler in handlers.items():
            signal.signal(caught, handler)
        tqdm.write("stopping after this step, with a checkpoint; once more to stop at once")

    for caught in (signal.SIGINT, signal.SIGTERM):
        handlers[caught] = signal.signal(caught, remember)
    try:
        yield asked
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
