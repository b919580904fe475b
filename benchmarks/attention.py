"""Attention benchmark: the hybrid layer beside HF Longformer's and dense attention, in time, memory and scaling.

    python -m benchmarks.attention            # everything, about a quarter of an hour on two cores
    python -m benchmarks.attention --quick    # a first impression

Contenders take turns within each round, so that whatever else the machine does hits all of them alike. Ratios are
other / hybrid: above 1 the hybrid layer is faster or smaller. Letters: B batch, H heads, N tokens, D head size.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from hybrid_longformer import AttentionPattern, HybridSelfAttention
from hybrid_longformer.batch import describe_batch
from hybrid_longformer.plan import build_plans

from .measure import START_UP_COST, interleave, measure_and_report, measure_memory, print_memory, progress_bar
from .report import (
    DENSE,
    FORWARD,
    HF_LONGFORMER,
    HYBRID,
    MODES,
    TRAINING,
    TRAINING_DROPOUT,
    Case,
    Results,
)

HIDDEN_SIZE, NUM_HEADS, WINDOW, RANDOM_BLOCKS, BLOCK_SIZE = 768, 12, 512, 3, 64
LENGTHS, MEMORY_LENGTHS, SCALING_LENGTHS = [512, 4096, 16384], [4096, 16384], [4096, 16384, 65536]
QUICK_LENGTHS, QUICK_MEMORY_LENGTHS, QUICK_SCALING_LENGTHS, QUICK_ROUNDS = [512, 4096], [4096], [4096, 16384], 2
# Beyond this many tokens dense attention with dropout, which keeps several N x N maps, fits few machines.
LONGEST_DENSE_DROPOUT = 8192


class HFLongformer(nn.Module):
    """HF Longformer's self-attention, given the masks that its model makes once per batch."""

    def __init__(self, *, length: int, dropout: float):
        super().__init__()
        config = LongformerConfig(
            hidden_size=HIDDEN_SIZE,
            num_attention_heads=NUM_HEADS,
            attention_window=[WINDOW],
            num_hidden_layers=1,
            attention_probs_dropout_prob=dropout,
        )
        self.attention = LongformerSelfAttention(config, 0)
        self.mask = torch.zeros(1, length)
        self.mask[:, 0] = 10000.0
        self.is_masked, self.is_global = self.mask < 0, self.mask > 0

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(
            x,
            attention_mask=self.mask,
            is_index_masked=self.is_masked,
            is_index_global_attn=self.is_global,
            is_global_attn=True,
        )[0]


class DenseSDPA(nn.Module):
    """Every token sees every token, through PyTorch's fused attention."""

    def __init__(self, *, length: int, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.query, self.key, self.value = (nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)  # (B, H, N, D)
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2).flatten(2)


class Hybrid(nn.Module):
    """The hybrid layer, with the batch's description and plan made anew in every call, as no model has to."""

    def __init__(self, *, length: int, dropout: float):
        super().__init__()
        self.attention = HybridSelfAttention(hidden_size=HIDDEN_SIZE, num_heads=NUM_HEADS, dropout=dropout)
        self.pattern = AttentionPattern(
            window=WINDOW,
            dilation_per_head=(1,) * NUM_HEADS,
            num_random_blocks=RANDOM_BLOCKS,
            block_size=BLOCK_SIZE,
        )
        self.global_mask = torch.zeros(1, length, dtype=torch.long)
        self.global_mask[:, 0] = 1

    def forward(self, x: Tensor) -> Tensor:
        batch = describe_batch(
            batch_size=x.shape[0],
            length=x.shape[1],
            device=x.device,
            global_mask=self.global_mask,
        )
        (plan,) = build_plans([self.pattern], batch, dtype=x.dtype)
        return self.attention(x, plan)[0]


CONTENDERS: dict[str, Callable[..., nn.Module]] = {HF_LONGFORMER: HFLongformer, DENSE: DenseSDPA, HYBRID: Hybrid}


def build(case: Case) -> tuple[nn.Module, Tensor]:
    """The contender, in training mode if it is to be trained, and its input."""
    is_training = case.mode != FORWARD
    module = CONTENDERS[case.contender](length=case.length, dropout=0.1 if case.mode == TRAINING_DROPOUT else 0.0)
    return module.train(is_training), torch.randn(1, case.length, HIDDEN_SIZE, requires_grad=is_training)


def expected_cost(case: Case) -> int:
    """Roughly, in tokens of the hybrid's forward pass: it makes the progress bar's time left mean something."""
    per_token = {HF_LONGFORMER: 4.0, DENSE: 0.5 + case.length / 2048, HYBRID: 1.0}[case.contender]
    return round(case.length * per_token * {FORWARD: 1, TRAINING: 3, TRAINING_DROPOUT: 5}[case.mode])


def reason_to_skip(case: Case) -> str | None:
    if case.contender != DENSE or case.mode != TRAINING_DROPOUT or case.length <= LONGEST_DENSE_DROPOUT:
        return None
    return f"with dropout it keeps several N x N maps of {NUM_HEADS * case.length**2 * 4 / 2**30:.0f} GiB each"


def feasible_cases(
    results: Results, *, contenders: Iterable[str], modes: Iterable[str], lengths: Iterable[int], what: str
) -> list[Case]:
    """All combinations; those that no ordinary machine can run are noted as skipped instead."""
    cases = [
        Case(contender=contender, mode=mode, length=length)
        for length, mode, contender in product(lengths, modes, contenders)
    ]
    results.skipped += [f"{what} of {case}: {reason}" for case in cases if (reason := reason_to_skip(case))]
    return [case for case in cases if not reason_to_skip(case)]


def measure(args: argparse.Namespace, results: Results) -> None:
    """Times, then memory, then scaling; `results` and the file fill up on the way, so that stopping loses nothing."""
    timed = [
        feasible_cases(results, contenders=CONTENDERS, modes=MODES, lengths=[length], what="time")
        for length in args.lengths
    ]
    memory = feasible_cases(results, contenders=CONTENDERS, modes=MODES[1:], lengths=args.memory_lengths, what="memory")
    scaling = feasible_cases(
        results, contenders=[HYBRID], modes=MODES[:2], lengths=args.scaling_lengths, what="scaling"
    )
    scaling_rounds = args.rounds[-1]
    total = sum(rounds * sum(map(expected_cost, cases)) for cases, rounds in zip(timed, args.rounds, strict=True))
    total += sum(START_UP_COST + expected_cost(case) for case in memory)
    total += scaling_rounds * sum(map(expected_cost, scaling))
    with progress_bar(total) as bar:
        for cases, rounds in zip(timed, args.rounds, strict=True):
            interleave(cases, build, rounds=rounds, samples=results.times, bar=bar, expected_cost=expected_cost)
            results.save(args.output)
        for case in memory:
            bar.set_description_str(f"memory of {case}", refresh=False)
            measure_memory(case, results, program="benchmarks.attention")
            bar.update(START_UP_COST + expected_cost(case))
            results.save(args.output)
        interleave(scaling, build, rounds=scaling_rounds, samples=results.scaling, bar=bar, expected_cost=expected_cost)
        results.save(args.output)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", help=f"tokens to time at, multiples of {WINDOW}")
    parser.add_argument("--rounds", type=int, nargs="+", help="one number, or one per length; the last serves scaling")
    parser.add_argument("--memory-lengths", type=int, nargs="*", help="tokens to measure memory at; give none to skip")
    parser.add_argument("--scaling-lengths", type=int, nargs="*", help="tokens to fit the hybrid's exponent on")
    parser.add_argument("--quick", action="store_true", help="fewer lengths and rounds, where they are not given")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder of the results (%(default)s)")
    parser.add_argument("--measure-memory", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    fill_in(args)
    wrong = [length for length in (*args.lengths, *args.memory_lengths) if length % WINDOW or length < WINDOW]
    if wrong:
        parser.error(f"HF Longformer needs multiples of its window: {wrong[0]} is none of {WINDOW}")
    if len(args.rounds) != len(args.lengths) or min(args.rounds) < 1:
        parser.error(f"--rounds takes one number of 1 or more, or one for each of {len(args.lengths)} lengths")
    return args


def fill_in(args: argparse.Namespace) -> None:
    """Whatever was not asked for: long inputs get fewer rounds, as they take longer and vary less."""
    if args.lengths is None:
        args.lengths = QUICK_LENGTHS if args.quick else LENGTHS
    if args.memory_lengths is None:
        args.memory_lengths = QUICK_MEMORY_LENGTHS if args.quick else MEMORY_LENGTHS
    if args.scaling_lengths is None:
        args.scaling_lengths = QUICK_SCALING_LENGTHS if args.quick else SCALING_LENGTHS
    if args.rounds is None:
        args.rounds = [QUICK_ROUNDS if args.quick else min(max(40_000 // length, 3), 60) for length in args.lengths]
    if len(args.rounds) == 1:
        args.rounds *= len(args.lengths)


def command(args: argparse.Namespace) -> str:
    """What to type for the same measurements, whatever the defaults become; no paths."""
    options = {name: getattr(args, name) for name in ("lengths", "rounds", "memory_lengths", "scaling_lengths")}
    words = [f"--{name.replace('_', '-')} {' '.join(map(str, values))}" for name, values in options.items()]
    return " ".join(["python -m benchmarks.attention", *words]).strip()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.measure_memory:
        # The shortest length that HF Longformer takes.
        return print_memory(args.measure_memory, build, shortest=WINDOW)
    results = Results(command=command(args))
    return measure_and_report(lambda: measure(args, results), results, args.output, subject="one attention layer")


if __name__ == "__main__":
    sys.exit(main())
