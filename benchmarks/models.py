"""Model benchmark: whole encoders of base size side by side: the hybrid and its peers in transformers.

    python -m benchmarks.models            # about twenty minutes on two cores
    python -m benchmarks.models --quick    # a first impression

All have random weights, hidden size 768, 12 heads and three layers (ModernBERT attends fully in one of three), and read
one document. Each has its own architecture: ModernBERT's feed-forward layers are smaller than the others', and BigBird
turns to full attention by itself at 704 tokens and less. Dropout is the same for all: none, or 0.1 everywhere.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BigBirdConfig,
    BigBirdModel,
    LongformerConfig,
    LongformerModel,
    ModernBertConfig,
    ModernBertModel,
    RobertaConfig,
    RobertaModel,
    logging,
)

from hybrid_longformer import HybridLongformerConfig, HybridLongformerModel

from .measure import START_UP_COST, interleave, measure_and_report, measure_memory, print_memory, progress_bar
from .report import (
    FORWARD,
    HF_BIGBIRD,
    HF_LONGFORMER,
    HF_MODERNBERT,
    HF_ROBERTA,
    HYBRID,
    MODES,
    TRAINING,
    TRAINING_DROPOUT,
    Case,
    Results,
)

SIZES = {"num_hidden_layers": 3, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 1000}
WINDOW, BLOCK_SIZE = 512, 64
SHORTEST = 512
# RoBERTa's positions start behind two reserved ones.
RESERVED_POSITIONS = 2


def hybrid(length: int, dropout: dict[str, float]) -> nn.Module:
    edges = {"attention_window": WINDOW, "block_size": BLOCK_SIZE}
    config = HybridLongformerConfig(**SIZES, **dropout, **positions(length), **edges)
    return HybridLongformerModel(config, add_pooling_layer=False)


def longformer(length: int, dropout: dict[str, float]) -> nn.Module:
    config = LongformerConfig(**SIZES, **dropout, **positions(length), attention_window=WINDOW)
    return LongformerModel(config, add_pooling_layer=False)


def roberta(length: int, dropout: dict[str, float]) -> nn.Module:
    config = RobertaConfig(**SIZES, **dropout, **positions(length), attn_implementation="sdpa")
    return RobertaModel(config, add_pooling_layer=False)


def bigbird(length: int, dropout: dict[str, float]) -> nn.Module:
    return BigBirdModel(BigBirdConfig(**SIZES, **dropout, **positions(length)), add_pooling_layer=False)


def modernbert(length: int, dropout: dict[str, float]) -> nn.Module:
    names = {"attention_probs_dropout_prob": ["attention_dropout"]}
    names["hidden_dropout_prob"] = ["embedding_dropout", "mlp_dropout"]
    own = {name: rate for key, rate in dropout.items() for name in names[key]}
    special = {f"{name}_token_id": index for index, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    return ModernBertModel(ModernBertConfig(**SIZES, **own, **special, **positions(length), attn_implementation="sdpa"))


CONTENDERS: dict[str, Callable[[int, dict[str, float]], nn.Module]] = {
    HF_LONGFORMER: longformer,
    HF_BIGBIRD: bigbird,
    HF_MODERNBERT: modernbert,
    HF_ROBERTA: roberta,
    HYBRID: hybrid,
}


def positions(length: int) -> dict[str, int]:
    return {"max_position_embeddings": length + RESERVED_POSITIONS}


class Encoder(nn.Module):
    """A model with the masks that its users give it: no padding and, where it knows global tokens, the first."""

    def __init__(self, model: nn.Module, *, length: int, has_global_tokens: bool):
        super().__init__()
        self.model = model
        self.masks = {"attention_mask": torch.ones(1, length, dtype=torch.long)}
        if has_global_tokens:
            self.masks["global_attention_mask"] = torch.zeros(1, length, dtype=torch.long)
            self.masks["global_attention_mask"][:, 0] = 1

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, **self.masks).last_hidden_state


def build(case: Case) -> tuple[nn.Module, Tensor]:
    """The contender, in training mode if it is to be trained, and its input."""
    rate = 0.1 if case.mode == TRAINING_DROPOUT else 0.0
    dropout = {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}
    model = CONTENDERS[case.contender](case.length, dropout)
    has_global_tokens = case.contender in (HYBRID, HF_LONGFORMER)
    encoder = Encoder(model, length=case.length, has_global_tokens=has_global_tokens).train(case.mode != FORWARD)
    return encoder, torch.randint(10, SIZES["vocab_size"], (1, case.length))


def expected_cost(case: Case) -> int:
    """Roughly, in tokens of the hybrid's forward pass: it makes the progress bar's time left mean something."""
    per_token: dict[str, Any] = {HF_LONGFORMER: 2.4, HF_BIGBIRD: 3.5, HF_MODERNBERT: 1.5, HYBRID: 1.0}
    is_dense_dropout = case.contender == HF_ROBERTA and case.mode == TRAINING_DROPOUT
    dense = 0.8 + case.length / (1024 if is_dense_dropout else 8192)
    return round(case.length * per_token.get(case.contender, dense) * (1 if case.mode == FORWARD else 4))


def measure(args: argparse.Namespace, results: Results) -> None:
    """Times, then memory; `results` and the file fill up on the way, so that stopping loses nothing."""
    timed = [
        [Case(contender=name, mode=mode, length=length) for mode in args.modes for name in CONTENDERS]
        for length in args.lengths
    ]
    memory = [
        Case(contender=name, mode=TRAINING, length=length) for length in args.memory_lengths for name in CONTENDERS
    ]
    total = sum(rounds * sum(map(expected_cost, cases)) for cases, rounds in zip(timed, args.rounds, strict=True))
    total += sum(START_UP_COST + expected_cost(case) for case in memory)
    with progress_bar(total) as bar:
        for cases, rounds in zip(timed, args.rounds, strict=True):
            interleave(cases, build, rounds=rounds, samples=results.times, bar=bar, expected_cost=expected_cost)
            results.save(args.output)
        for case in memory:
            bar.set_description_str(f"memory of {case}", refresh=False)
            measure_memory(case, results, program="benchmarks.models")
            bar.update(START_UP_COST + expected_cost(case))
            results.save(args.output)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096], help="tokens to time at")
    parser.add_argument("--rounds", type=int, nargs="+", help="one number, or one per length")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="what to time")
    parser.add_argument("--memory-lengths", type=int, nargs="*", default=[4096], help="tokens to measure memory at")
    parser.add_argument("--quick", action="store_true", help="one round, where rounds are not given")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder of the results (%(default)s)")
    parser.add_argument("--measure-memory", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rounds is None:
        args.rounds = [1 if args.quick else max(8192 // length, 2) for length in args.lengths]
    if len(args.rounds) == 1:
        args.rounds *= len(args.lengths)
    if len(args.rounds) != len(args.lengths) or min(args.rounds) < 1:
        parser.error(f"--rounds takes one number of 1 or more, or one for each of {len(args.lengths)} lengths")
    return args


def command(args: argparse.Namespace) -> str:
    """What to type for the same measurements, whatever the defaults become; no paths."""
    modes = [] if args.modes == list(MODES) else ["--modes", *(f'"{mode}"' for mode in args.modes)]
    options = {"lengths": args.lengths, "rounds": args.rounds, "memory-lengths": args.memory_lengths}
    words = [word for name, values in options.items() for word in (f"--{name}", *map(str, values))]
    return " ".join(["python -m benchmarks.models", *words, *modes])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    logging.set_verbosity_error()  # BigBird says at every length what it does there
    if args.measure_memory:
        return print_memory(args.measure_memory, build, shortest=SHORTEST)
    results = Results(command=command(args), name="models")
    return measure_and_report(
        lambda: measure(args, results), results, args.output, subject="encoders with three layers"
    )


if __name__ == "__main__":
    sys.exit(main())
