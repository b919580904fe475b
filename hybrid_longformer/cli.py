"""Command line: `hybrid-longformer convert`, `hybrid-longformer export-longformer`, `hybrid-longformer finetune`."""

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .conversion import convert_checkpoint, export_to_longformer
from .conversion_source import ConversionError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybrid-longformer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser(
        "convert",
        help="turn RoBERTa, XLM-RoBERTa, CamemBERT, BERT, Longformer, BigBird, BART or LED into a Hybrid Longformer",
    )
    _add_common(convert)
    convert.add_argument(
        "--max-length",
        type=int,
        help="tokens the result can read (4096, or the source's own length where that is more)",
    )
    convert.add_argument(
        "--attention-window",
        type=int,
        nargs="+",
        help="one value, or one per layer (the source's own, or 512 if it has none)",
    )
    convert.add_argument(
        "--num-random-blocks",
        type=int,
        help="random blocks per query block (0 for Longformer and LED, BigBird's own, 3 otherwise)",
    )
    convert.add_argument("--block-size", type=int, help="tokens per random block (BigBird's own, 64 otherwise)")
    convert.add_argument("--drop-head", action="store_true", help="leave the source's head out")
    convert.add_argument(
        "--warm-start-decoder",
        action="store_true",
        help="make a seq2seq model of an encoder: the decoder starts from the same weights, its cross-attention anew",
    )
    convert.add_argument(
        "--tie-encoder-decoder", action="store_true", help="with --warm-start-decoder: share weights between the two"
    )
    convert.add_argument(
        "--decoder-max-length", type=int, help="tokens the decoder can write (the source's own, 1024 with a warm start)"
    )
    export = commands.add_parser("export-longformer", help="turn a Hybrid Longformer back into a Longformer")
    _add_common(export)
    finetune = commands.add_parser("finetune", help="fine-tune a checkpoint on long documents")
    finetune.add_argument("task", choices=["qa", "summarise", "mlm"], help="with --help behind it: what it can be told")
    finetune.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a folder or a Hub id")
    parser.add_argument("output", metavar="OUTPUT", help="the folder to write; it appears whole or not at all")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the result with the source; refuse to write if they differ by more than 1e-4",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an output folder that has files in it")


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised like Ctrl-C so that the same clean-up runs."""


@contextmanager
def sigterm_like_ctrl_c() -> Iterator[None]:
    """Turns SIGTERM into `Terminated` for a while; only the main thread may do so, elsewhere nothing changes."""

    def stop(number: int, frame: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the process's exit code."""
    args = build_parser().parse_args(argv)
    if args.command == "finetune":
        return _finetune(args.task, args.rest)
    try:
        with sigterm_like_ctrl_c():
            report = _export(args) if args.command == "export-longformer" else _convert(args)
    except ConversionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print("stopped; nothing was written", file=sys.stderr)
        # The shell's codes: 128 and the signal's number.
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
    print(f"{report}\n\nwritten to {args.output}")
    return 0


def _finetune(task: str, argv: Sequence[str]) -> int:
    try:
        # Not a part of the model's package, and with needs of its own.
        from finetune.tasks import TASKS, run
    except ImportError as error:
        print(f"error: {error}: install hybrid-longformer[finetune]", file=sys.stderr)
        return 1
    return run(TASKS[task], argv)


def _convert(args: argparse.Namespace):
    window = args.attention_window
    return convert_checkpoint(
        args.source,
        args.output,
        max_length=args.max_length,
        attention_window=window[0] if window is not None and len(window) == 1 else window,
        num_random_blocks=args.num_random_blocks,
        block_size=args.block_size,
        head="drop" if args.drop_head else "keep",
        decoder="warm-start" if args.warm_start_decoder else None,
        tie_encoder_decoder=args.tie_encoder_decoder,
        decoder_max_length=args.decoder_max_length,
        verify=args.verify,
        overwrite=args.overwrite,
    )


def _export(args: argparse.Namespace):
    return export_to_longformer(args.source, args.output, verify=args.verify, overwrite=args.overwrite)


if __name__ == "__main__":
    sys.exit(main())
