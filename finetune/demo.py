"""The main job on generated contracts, in minutes: fine-tune a small hybrid model on long-document question answering,
beside its twin with local attention only; compare, save, reload in a fresh process, and ask a question.

    make demo        or        python -m finetune.demo --output runs/demo
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .arguments import parse_arguments
from .contracts import Contract, generate_contracts, write_dataset
from .engine import Stopped, make_accelerator
from .files import read_json
from .qa import QA
from .run import fit

START = Path(__file__).parent / "demo_model"
# Few documents and steps serve to try the commands; the figures need the full ones.
FULL = {"train": 80, "validation": 10, "test": 30, "steps": 40, "eval_steps": 10}
QUICK = {"train": 4, "validation": 2, "test": 2, "steps": 2, "eval_steps": 1}
SETTINGS = ["--batch-size", "8", "--learning-rate", "2e-4", "--warmup", "0.1", "--max-answer-tokens", "24"]
SETTINGS += ["--eval-first", "--max-question-tokens", "48", "--log-steps", "1", "--report-to", "none", "--overwrite"]
MODELS = {
    "hybrid": ("local + global + random attention", []),
    "local": ("the same model, local attention only", ["--global-attention", "none", "--num-random-blocks", "0"]),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m finetune.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument("--quick", action="store_true", help="a few documents and steps, to see that everything runs")
    args = parser.parse_args(argv)
    try:
        show(args.output, QUICK if args.quick else FULL)
    except (Stopped, KeyboardInterrupt):
        print("stopped; `make demo` begins anew", file=sys.stderr)
        return 130
    return 0


def show(output: Path, sizes: dict[str, int]) -> None:
    """All steps of the demo, one after the other."""
    started = time.monotonic()
    say(1, f"generating contracts of about 2,400 tokens into {output / 'contracts'}")
    files = make_data(output / "contracts", sizes)
    metrics = {}
    for number, (name, (what, more)) in enumerate(MODELS.items(), start=2):
        say(number, f"fine-tuning {what}")
        metrics[name] = train(output / name, files, sizes, more)
    say(4, "comparing")
    compare(output, metrics)
    say(5, "reloading the saved checkpoint in a fresh process, by AutoModel and its own code, and asking it")
    ask(output)
    say(6, f"done in {(time.monotonic() - started) / 60:.1f} minutes. What next?")
    print(
        f"  your own question   python -m finetune.answer {output}/hybrid/model --trust-remote-code \\\n"
        f"                        --document {output}/contract.txt --question '...'\n"
        "  your own model      hybrid-longformer convert my-roberta my-hybrid --max-length 4096\n"
        "  your own documents  hybrid-longformer finetune qa --model my-hybrid --train-file train.json --output run\n"
        f"  pictures            {output}/comparison.png, {output}/hybrid/training_curve.png"
    )


def say(number: int, what: str) -> None:
    print(f"\n[{number}/6] {what}", flush=True)


def make_data(folder: Path, sizes: dict[str, int]) -> dict[str, Path]:
    shutil.rmtree(folder, ignore_errors=True)
    counts = {split: sizes[split] for split in ("train", "validation", "test")}
    for split, questions in write_dataset(folder, size="medium", **counts).items():
        print(f"  {split}: {counts[split]} contracts, {questions} questions, a third of them without an answer")
    return {split: folder / f"{split}.json" for split in counts}


def train(output: Path, files: dict[str, Path], sizes: dict[str, int], more: list[str]) -> dict[str, Any]:
    """A run as `python -m finetune.qa` would make it."""
    steps = ["--max-steps", str(sizes["steps"]), "--eval-steps", str(sizes["eval_steps"])]
    data = [word for split, path in files.items() for word in (f"--{split}-file", str(path))]
    argv = ["--model", str(START), "--output", str(output), *data, *steps, *SETTINGS, *more]
    args = parse_arguments(QA.arguments_class, argv)
    return fit(QA, args, make_accelerator(args, output), ["python", "-m", "finetune.qa", *argv])


def compare(output: Path, metrics: dict[str, dict[str, Any]]) -> None:
    """The two models' scores as a table and as a picture."""
    rows = [("all questions", "f1"), ("with an answer", "HasAns_f1"), ("without an answer", "NoAns_f1")]
    print(f"  {'F1 on test contracts':24}{'hybrid':>10}{'local only':>12}")
    for label, key in rows:
        hybrid, local = (metrics[name]["test"].get(key, float("nan")) for name in MODELS)
        print(f"  {label:24}{hybrid:10.1f}{local:12.1f}")
    draw_comparison(output, metrics, rows)
    print(f"  drawn in {output / 'comparison.png'}")


def draw_comparison(output: Path, metrics: dict[str, dict[str, Any]], rows: list[tuple[str, str]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    bars, curves = figure.subplots(1, 2)
    for place, (name, (what, _)) in enumerate(MODELS.items()):
        colour = f"C{place}"
        scores = [metrics[name]["test"].get(key, 0.0) for _, key in rows]
        drawn = bars.bar([number + 0.4 * place for number in range(len(rows))], scores, 0.4, color=colour, label=what)
        bars.bar_label(drawn, fmt="%.0f")
        history = [entry for entry in read_json(output / name / "history.json") if "f1" in entry]
        curves.plot([entry["step"] for entry in history], [entry["f1"] for entry in history], "o-", color=colour)
    bars.set_xticks([number + 0.2 for number in range(len(rows))], [label for label, _ in rows])
    bars.set(ylabel="F1, test contracts", ylim=(0, 105))
    figure.legend(*bars.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    curves.set(xlabel="step", ylabel="F1, validation contracts", ylim=(0, 105))
    figure.savefig(output / "comparison.png", dpi=120)


def ask(output: Path) -> None:
    """Asks in another process, which has nothing but the checkpoint folder and transformers."""
    contract = next(generate_contracts(size="medium", split="test", count=1))
    document = output / "contract.txt"
    document.write_text(contract.text, encoding="utf-8")
    question = farthest_question(contract)
    command = [sys.executable, "-m", "finetune.answer", str(output / "hybrid" / "model"), "--trust-remote-code"]
    command += ["--document", str(document), "--question", question.question]
    subprocess.run(command, check=True)
    print(f"  (the contract says: {json.dumps(question.answers[0])})")


def farthest_question(contract: Contract) -> Any:
    """The question whose answer stands last in the contract."""
    return max((each for each in contract.questions if each.answers), key=lambda each: each.answer_starts[0])


if __name__ == "__main__":
    sys.exit(main())
