"""Runs: the phases of every fine-tuning, prepare -> train -> evaluate -> save, whichever the task and the engine."""

import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch import nn

from hybrid_longformer.conversion_report import find_licence
from hybrid_longformer.saving import push_folder

from .answer import SETTINGS_FILE
from .arguments import RunArguments, parse_arguments
from .cards import CardFacts, write_card
from .checkpoints import RunState, prepare_folder
from .engine import Engine, Stopped, evaluate, make_accelerator
from .files import read_json, replace_folder, write_json
from .history import draw_history
from .processes import end_processes, is_sharded
from .task import Task

CURVE_FILE = "training_curve.png"


def run(task_class: type[Task], argv: Sequence[str] | None = None) -> int:
    """Parses the command line, runs all phases, and returns the process's exit code."""
    args = parse_arguments(task_class.arguments_class, argv, prog=f"python -m finetune.{task_class.name}")
    command = ["python", "-m", f"finetune.{task_class.name}", *(sys.argv[1:] if argv is None else argv)]
    return guarded_fit(task_class, args, command)


def guarded_fit(task_class: type[Task], args: RunArguments, command: list[str]) -> int:
    """`fit`, with errors of the user's told in a line and every process group closed."""
    accelerator = None
    try:
        accelerator = make_accelerator(args, Path(args.output))
        fit(task_class, args, accelerator, command)
    except Stopped as stopped:
        print(f"stopped by {stopped}; a checkpoint is written: go on with --resume", file=sys.stderr)
        return stopped.exit_code
    except KeyboardInterrupt:
        begun = any((Path(args.output) / "checkpoints").glob("*-*"))
        print("stopped; " + ("go on with --resume" if begun else "nothing to resume"), file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if accelerator is not None:
            end_processes(accelerator)
    return 0


def fit(
    task_class: type[Task], args: RunArguments, accelerator: Accelerator, command: list[str] | None = None
) -> dict[str, Any]:
    """Prepares, trains, evaluates and saves; returns the metrics of the last evaluation."""
    transformers.logging.set_verbosity_error()
    folder = Path(args.output)
    if accelerator.is_main_process:
        prepare_folder(folder, resume=args.resume, overwrite=args.overwrite)
        note_arguments(folder, args)
    accelerator.wait_for_everyone()
    if accelerator.trackers == [] and args.trackers:
        accelerator.init_trackers(task_class.name, config=plain_values(args))
    with accelerator.main_process_first():
        task = task_class(args)
        task.prepare()
    model, state = train(task, folder, accelerator)
    metrics, seconds = last_evaluation(task, model, accelerator, folder)
    if accelerator.is_main_process:
        write_results(task, state, metrics, seconds, folder)
    save_model(task, model, accelerator, folder, metrics, command or [])
    if accelerator.is_main_process:
        print_results(metrics, folder)
        if args.push_to_hub:
            # The card tells of this run, so it takes the place of one that tells of another.
            message = "Upload fine-tuned model"
            push_folder(folder / "model", args.push_to_hub, keep_card=False, commit_message=message)
    accelerator.wait_for_everyone()
    return metrics


def train(task: Task, folder: Path, accelerator: Accelerator) -> tuple[nn.Module, RunState]:
    others = sorted((folder / "checkpoints").glob("step-*" if task.args.trainer else "checkpoint-*"))
    if task.args.resume and others:
        raise ValueError(
            f"{others[-1]} was written {'without' if task.args.trainer else 'with'} --trainer: go on the way it began"
        )
    if task.args.trainer:
        from .trainer import train_by_trainer

        return train_by_trainer(task, folder=folder, accelerator=accelerator)
    engine = Engine(task, folder=folder, accelerator=accelerator)
    return engine.model, engine.train()


def last_evaluation(
    task: Task, model: nn.Module, accelerator: Accelerator, folder: Path
) -> tuple[dict[str, Any], dict[str, float]]:
    """The best model's metrics, and seconds; validation first, where thresholds are tuned, then the test set."""
    metrics: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for split in ("validation", "test"):
        if task.has(split):
            began = time.monotonic()
            metrics[split] = evaluate(task, model, accelerator, split, folder / "predictions" / split)
            seconds[split] = round(time.monotonic() - began, 2)
    return metrics, seconds


def save_model(
    task: Task, model: nn.Module, accelerator: Accelerator, folder: Path, metrics: dict[str, Any], command: list[str]
) -> None:
    """The finished model with tokenizer, settings, card and training curve, whole or not at all."""
    state_dict = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return
    part = folder / ".model.part"
    shutil.rmtree(part, ignore_errors=True)
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    if is_sharded(accelerator):
        # Put together again, tied weights are several tensors, of which transformers would write every one.
        tied = set(getattr(plain, "all_tied_weights_keys", ()))
        state_dict = {name: weight for name, weight in state_dict.items() if name not in tied}
    if task.args.lora_rank:
        plain, state_dict = plain.merge_and_unload(), None
    task.finish_model(plain)
    plain.save_pretrained(part, state_dict=state_dict)
    task.tokenizer.save_pretrained(part)
    write_json(part / SETTINGS_FILE, {"task": task.name, **task.settings()})
    shutil.copy(folder / CURVE_FILE, part)
    write_card(part, facts=card_facts(task, metrics, command))
    replace_folder(part, folder / "model")


def card_facts(task: Task, metrics: dict[str, Any], command: list[str]) -> CardFacts:
    args = task.args
    shown = metrics.get("test") or metrics.get("validation") or {}
    names = ("learning_rate", "batch_size", "gradient_accumulation", "epochs", "max_steps", "schedule", "seed")
    length_not_used = "max_steps" if args.max_steps is None else "epochs"
    return CardFacts(
        title=Path(args.output).resolve().name,
        base_model=str(args.model),
        task=task.name,  # type: ignore[arg-type]
        dataset_name=args.dataset or Path(args.train_file or "").name,
        licence=find_licence(Path(args.model)),
        metrics={name: value for name, value in shown.items() if not name.endswith("total")},
        settings={name: getattr(args, name) for name in names if name != length_not_used},
        command=command,
        model_type=task.config.model_type,
        auto_class=task.auto_class,
        max_length=task.max_length,
        global_attention=task.global_placement if task.takes("global_attention_mask") else None,
        curve_picture=CURVE_FILE,
    )


def write_results(
    task: Task, state: RunState, metrics: dict[str, Any], seconds: dict[str, float], folder: Path
) -> None:
    """Metrics and history as json, the training curve as a picture."""
    effort = {"steps": state.step, "minutes": round(state.minutes, 4), "evaluation_seconds": seconds}
    write_json(folder / "metrics.json", {**metrics, **effort})
    write_json(folder / "history.json", state.history)
    draw_history(state.history, folder / CURVE_FILE, title=folder.name, metric=task.best_metric)


def print_results(metrics: dict[str, Any], folder: Path) -> None:
    """The metrics, and where everything is."""
    for split, values in metrics.items():
        print(f"{split}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    print(f"model: {folder / 'model'}   metrics: {folder / 'metrics.json'}   curve: {folder / CURVE_FILE}")


def note_arguments(folder: Path, args: RunArguments) -> None:
    """Writes what the run was told, and says what is told otherwise when it goes on."""
    path, now = folder / "run.json", asdict(args)
    if args.resume and path.exists():
        before = read_json(path)["arguments"]
        free = ("resume", "overwrite")
        for name in sorted(key for key in now if key not in free and before.get(key) != now[key]):
            print(f"note: {name} was {before.get(name)!r} before, is {now[name]!r} now", file=sys.stderr)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    write_json(path, {"arguments": now, "versions": versions, "command": shlex.join(sys.argv)})


def plain_values(args: RunArguments) -> dict[str, Any]:
    """The arguments as trackers take them."""
    return {
        name: value if isinstance(value, int | float | str | bool) else str(value)
        for name, value in asdict(args).items()
    }
