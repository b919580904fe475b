"""Memory benchmark of conversion: the most each step holds, in a process of its own, for a RoBERTa of base size.

    python -m benchmarks.conversion_memory

Imports nothing large itself: on Linux a child's peak starts at what its parent held.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MAKE_SOURCE = """
import sys, torch
from transformers import RobertaConfig, RobertaForMaskedLM
torch.manual_seed(0)
config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, num_hidden_layers=LAYERS)
RobertaForMaskedLM(config).save_pretrained(sys.argv[1])
"""
CONVERT = ["-m", "hybrid_longformer.cli", "convert"]


def peak_megabytes(arguments: Sequence[str]) -> float:
    """The most that one Python process held, in millions of bytes."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"python {' '.join(arguments)} ended with {process.returncode}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="of the source (%(default)s)")
    layers = parser.parse_args(argv).layers
    with tempfile.TemporaryDirectory() as folder:
        source, outputs = f"{folder}/source", [f"{folder}/unverified", f"{folder}/verified"]
        peak_megabytes(["-c", MAKE_SOURCE.replace("LAYERS", str(layers)), source])
        rows = {
            "the imports alone": peak_megabytes(["-c", "import hybrid_longformer.cli"]),
            "convert --no-verify": peak_megabytes([*CONVERT, source, outputs[0], "--no-verify"]),
            "convert": peak_megabytes([*CONVERT, source, outputs[1]]),
        }
        sizes = [Path(name, "model.safetensors").stat().st_size / 1e6 for name in (source, outputs[1])]
    print(f"weights: source {sizes[0]:.0f} MB, result {sizes[1]:.0f} MB\n\n| peak of | MB |\n|---|---|")
    for name, peak in rows.items():
        print(f"| {name} | {peak:.0f} |")


if __name__ == "__main__":
    main()
