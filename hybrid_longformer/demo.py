"""Demo: what hybrid attention looks like, that its fast way is exact, and what it saves. Run it in a minute.

python -m hybrid_longformer.demo
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from .attention import HybridSparseAttention
from .configuration_hybrid_longformer import HybridLongformerConfig
from .pictures import draw_pattern

# The rounding of two ways of adding up float32; a wrong edge shows at 1e-3 and above.
TOLERANCE = 1e-5


def draw_default_pattern(folder: Path, *, length: int = 2048) -> None:
    """Draws the default configuration's first layer, where matplotlib is at hand."""
    path = folder / "pattern.png"
    try:
        draw_pattern(HybridLongformerConfig(), length=length, path=path)
    except ImportError as error:
        print(f"   skipped: {error}")
    else:
        print(f"   {path}: who sees whom in a document of {length:,} tokens")


def build_attention() -> HybridSparseAttention:
    torch.manual_seed(0)
    return HybridSparseAttention(
        hidden_size=256, num_heads=4, attention_window=128, num_random_blocks=3, block_size=32
    ).eval()


def check_against_dense(attention: HybridSparseAttention, *, length: int = 1500) -> None:
    """Compares the fast backend with the dense oracle on a padded batch with two global tokens."""
    x = torch.randn(2, length, 256)
    padding_mask = torch.ones(2, length, dtype=torch.long)
    padding_mask[1, -length // 5 :] = 0
    global_mask = torch.zeros_like(padding_mask)
    global_mask[:, [0, length // 2]] = 1
    fast = attention(x, global_mask, padding_mask)
    attention.attn_implementation = "eager"
    dense, attention_map = attention(x, global_mask, padding_mask, return_attention_map=True)
    attention.attn_implementation = "sdpa"
    row_sums = attention_map.sum(-1)  # (B, H, N)
    _report("fast output - dense output", fast - dense)
    _report("row sums of the attention map - 1 (0 for padding)", row_sums - padding_mask[:, None])


def _report(what: str, difference: Tensor) -> None:
    largest = difference.abs().max().item()
    print(f"   largest |{what}|: {largest:.1e}")
    if not largest <= TOLERANCE:
        raise SystemExit(f"   {largest:.1e} is more than the {TOLERANCE:.0e} of rounding: please report this")


def dense_attention(attention: HybridSparseAttention, x: Tensor) -> Tensor:
    """Every token sees every token, by torch's fused attention and the same projections."""
    own = attention.attention
    q, k, v = (
        project(x).unflatten(-1, (own.num_heads, own.head_size)).transpose(1, 2)
        for project in (own.query, own.key, own.value)
    )
    context = functional.scaled_dot_product_attention(q, k, v)
    return attention.output(context.transpose(1, 2).flatten(2))


def race(attention: HybridSparseAttention, lengths: Sequence[int]) -> None:
    """Prints a table of forward times, hybrid against dense."""
    print(f"   {'tokens':>8} {'dense':>10} {'hybrid':>10} {'ratio':>8}")
    for length in lengths:
        x = torch.randn(1, length, 256)
        global_mask = torch.zeros(1, length, dtype=torch.long)
        global_mask[:, 0] = 1
        dense, hybrid = best_times(partial(dense_attention, attention, x), partial(attention, x, global_mask))
        print(f"   {length:>8,} {dense * 1e3:>7.1f} ms {hybrid * 1e3:>7.1f} ms {dense / hybrid:>7.1f}x", flush=True)


def best_times(*runs: Callable[[], Tensor], repeats: int = 3) -> list[float]:
    """The best of several times of each run, taken in turns so that a busy moment hits all of them alike."""
    for run in runs:
        run()
    rounds = [[_seconds(run) for run in runs] for _ in range(repeats)]
    return [min(times) for times in zip(*rounds, strict=True)]


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Runs torch on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(run: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hybrid_longformer.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="where pictures go (%(default)s)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="tokens to race at (%(default)s)"
    )
    # Threads that wait for each other on a busy machine would measure the other programs.
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the race (%(default)s)")
    args = parser.parse_args(argv)
    if min(args.lengths) < 1:
        parser.error(f"--lengths {min(args.lengths)}: a race needs at least 1 token")

    print("1. The pattern: window 512, 3 random blocks of 64, one global token", flush=True)
    draw_default_pattern(args.folder)

    print("\n2. The fast way is exact: 2 x 1,500 tokens, some of them padding, 2 global tokens", flush=True)
    attention = build_attention()
    check_against_dense(attention)

    print(f"\n3. What it saves: one layer forward, window 128, best of 3, CPU threads: {args.threads}", flush=True)
    with cpu_threads(args.threads):
        race(attention, args.lengths)

    print("\nNext: `make test` checks all of it, `make bench` measures it side by side with other models.")


if __name__ == "__main__":
    main()
