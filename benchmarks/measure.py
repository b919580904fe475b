"""Measure: runs of contenders in turn, and the memory that each takes in a process of its own.

Contenders take turns within each round, so that whatever else the machine does hits all of them alike.
"""

import gc
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .plots import draw
from .report import Case, Results, format_report

MIB = 2**20
# What starting a process costs, in the units of the expected costs.
START_UP_COST = 80_000

Builder = Callable[[Case], tuple[nn.Module, Tensor]]


def run_once(module: nn.Module, x: Tensor) -> None:
    """One pass; of a module in training mode, forward and backward."""
    with torch.set_grad_enabled(module.training):
        out = module(x)
    if module.training:
        out.backward(torch.ones_like(out))


def time_once(module: nn.Module, x: Tensor) -> float:
    gc.collect()
    start = time.perf_counter()
    run_once(module, x)
    seconds = time.perf_counter() - start
    module.zero_grad(set_to_none=True)
    x.grad = None
    return seconds


def interleave(
    cases: Sequence[Case],
    build: Builder,
    *,
    rounds: int,
    samples: dict[Case, list[float]],
    bar: tqdm,
    expected_cost: Callable[[Case], float],
) -> None:
    """Runs every case once in each round, in turn, and adds the seconds to `samples` as they come."""
    built = {case: build(case) for case in cases}
    # Else every collection between runs walks all that was imported, which takes longer than a short run.
    gc.freeze()
    for _ in range(rounds):
        for case, (module, x) in built.items():
            bar.set_description_str(str(case), refresh=False)
            seconds = time_once(module, x)
            samples.setdefault(case, []).append(seconds)
            bar.update(expected_cost(case))


def resident_bytes() -> int:
    """What this process holds now; without /proc, the most it ever held."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_bytes()


def peak_bytes() -> int:
    """The most this process ever held."""
    # On Linux ru_maxrss survives exec: a child would report its parent's peak. VmHWM starts anew with each program.
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_here(case: Case, build: Builder, *, shortest: int) -> dict[str, float]:
    """This process's peak memory in MiB, and its growth over what the libraries took; right in a new process only."""
    # A short input makes the libraries start their threads and allocate their buffers.
    run_once(*build(replace(case, length=shortest)))
    gc.collect()
    before = resident_bytes()
    run_once(*build(case))
    peak = peak_bytes()
    return {"peak_mib": peak / MIB, "growth_mib": (peak - before) / MIB}


def measure_memory(case: Case, results: Results, *, program: str) -> None:
    """Runs `memory_here` in a process of its own: that of `python -m PROGRAM --measure-memory ...`."""
    child = subprocess.run(
        [sys.executable, "-m", program, "--measure-memory", case.contender, case.mode, str(case.length)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode == 0:
        results.memory[case] = json.loads(child.stdout)
    else:
        # A process killed for taking too much memory says nothing.
        last_words = child.stderr.strip().rpartition("\n")[2] or "nothing said"
        results.skipped.append(f"memory of {case}: its process ended with {child.returncode}, {last_words}")


def progress_bar(total: int) -> tqdm:
    # No smoothing: steps differ so much that only the average speed foretells anything.
    layout = "{percentage:3.0f}%|{bar:20}| {elapsed} gone, {remaining} left: {desc}"
    return tqdm(total=total, smoothing=0, bar_format=layout, mininterval=1.0, dynamic_ncols=True)


def print_memory(words: Sequence[str], build: Builder, *, shortest: int) -> int:
    """What the process that `measure_memory` starts is for; `words` are the contender, the mode and the length."""
    contender, mode, length = words
    case = Case(contender=contender, mode=mode, length=int(length))
    print(json.dumps(memory_here(case, build, shortest=shortest)))
    return 0


def measure_and_report(measure: Callable[[], None], results: Results, output: Path, *, subject: str) -> int:
    """Measures, then saves, draws and prints what there is, also when it was stopped; returns the exit code."""
    exit_code = 0
    try:
        measure()
    except KeyboardInterrupt:
        print("\nStopped; this is what was measured until then.", file=sys.stderr)
        exit_code = 130
    results.save(output)
    report = results.report()
    draw(report, output / f"{results.name}.png", subject=subject)
    print(format_report(report), end="")
    return exit_code
