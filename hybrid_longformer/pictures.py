"""Pictures: draws attention patterns and attention maps, from the same predicates that the model computes with.

A tool beside the model: nothing in the model imports it, and drawing needs matplotlib.

    python -m hybrid_longformer.pictures pattern --length 256 --window 32 --block-size 16 --output pattern.png
    python -m hybrid_longformer.pictures layers --length 256 --window 32 --block-size 16 --output layers.png
    python -m hybrid_longformer.pictures overview --output overview.png

Letters: H heads, N tokens.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .configuration_hybrid_longformer import HybridLongformerConfig
from .pattern import AttentionPattern
from .picture_canvas import INK, Canvas, cell_note, count_cells, label_axes, save_figure, show_cells, shrink
from .picture_rules import Rule, describe_pattern, describe_random, describe_window, edge_rules, one_row_batch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST_LABELLED_MAP = 60

BACKGROUND, PADDING_COLOUR = "#EFEEEA", "#CFCDC6"

# Paul Tol's "high contrast": distinct for every kind of colour vision, and in grey.
RULE_COLOURS = {Rule.NONE: BACKGROUND, Rule.RANDOM: "#DDAA33", Rule.WINDOW: "#004488", Rule.GLOBAL: "#BB5566"}


def draw_pattern(
    config_or_pattern: HybridLongformerConfig | AttentionPattern,
    *,
    length: int,
    layer: int = 0,
    head: int = 0,
    global_positions: Sequence[int] = (0,),
    padding: int = 0,
    document_ids: Sequence[int] | Tensor | None = None,
    path: str | Path | None = None,
) -> "Figure":
    """Draws who sees whom in one head, each edge in the colour of its rule.

    Args:
        config_or_pattern: a model's configuration, or the pattern of one layer. A configuration's extra global tokens
            are not drawn: they stand before the sequence, inside the encoder.
        length: N, padding included.
        global_positions: the global tokens.
        padding: how many of the last tokens are padding.
        document_ids: N numbers, for a row that packs several documents: each run of equal ids is one.
        path: where to save the picture; its ending chooses the format.
    """
    pattern = _choose_pattern(config_or_pattern, layer=layer, head=head)
    batch = one_row_batch(length=length, global_positions=global_positions, padding=padding, document_ids=document_ids)
    rules = edge_rules(pattern, batch, head=head)
    edges = int((rules != Rule.NONE).sum())
    canvas = Canvas(cells=count_cells(length, at_most=512), side=720, left=100, right=40, top=112, bottom=140)
    panel = canvas.panel(0, 0)
    _draw_rules(panel, rules, at_most=canvas.cells, padding=padding)
    label_axes(panel)
    panel.set_title(
        f"{'' if pattern is config_or_pattern else f'layer {layer}, '}head {head}: "
        f"{edges:,} edges, {edges / length**2:.1%} of {length:,}²{cell_note(length, at_most=canvas.cells)}\n"
        f"{describe_pattern(pattern, head=head)}",
        fontsize=10,
        pad=10,
        linespacing=1.5,
    )
    _add_legend(canvas.figure, [rules], dilation=pattern.dilation_per_head[head], has_padding=padding > 0)
    return save_figure(canvas.figure, path)


def draw_layers(
    config: HybridLongformerConfig,
    *,
    length: int,
    head: int = 0,
    global_positions: Sequence[int] = (0,),
    path: str | Path | None = None,
) -> "Figure":
    """Draws the pattern of every layer side by side: each layer draws its own random blocks."""
    patterns = config.attention_patterns()
    _check_index("head", head, patterns[0].num_heads)
    batch = one_row_batch(length=length, global_positions=global_positions)
    columns = min(len(patterns), 4 if len(patterns) > 4 else 3)
    rows = -(-len(patterns) // columns)
    canvas = Canvas(
        cells=count_cells(length, at_most=160),
        # Few layers get larger panels, so that title and legend have room.
        side=max(320, 720 // columns),
        rows=rows,
        columns=columns,
        left=100,
        right=40,
        top=112,
        bottom=140,
        gap=60,
    )
    all_rules = [edge_rules(pattern, batch, head=head) for pattern in patterns]
    for layer, (pattern, rules) in enumerate(zip(patterns, all_rules, strict=True)):
        row, column = divmod(layer, columns)
        panel = canvas.panel(row, column)
        _draw_rules(panel, rules, at_most=canvas.cells)
        is_lowest = layer + columns >= len(patterns)
        label_axes(panel, keys=is_lowest, queries=column == 0)
        panel.tick_params(labelbottom=is_lowest, labelleft=column == 0)
        panel.set_title(f"layer {layer}: {describe_window(pattern, head=head)}", fontsize=8, pad=6)
    canvas.figure.suptitle(
        f"{len(patterns)} layers, head {head}, {length:,} tokens: {describe_random(patterns[0])}"
        f"{cell_note(length, at_most=canvas.cells)}",
        fontsize=10,
        y=1 - 34 / canvas.height,
    )
    _add_legend(canvas.figure, all_rules, dilation=max(pattern.dilation_per_head[head] for pattern in patterns))
    return save_figure(canvas.figure, path)


def draw_attention_map(
    attention_map: Tensor,
    *,
    tokens: Sequence[str] | None = None,
    head: int | None = None,
    path: str | Path | None = None,
) -> "Figure":
    """Draws attention weights on a logarithmic scale; pairs of weight zero (no edge, or padding) stay blank.

    Args:
        attention_map: (H, N, N), one panel per head, or (N, N): one row of what `return_attention_map` returns.
        tokens: N labels, written at the axes of maps of up to 60 tokens.
        head: draw this head only.
    """
    maps = _check_map(attention_map)
    if head is not None:
        _check_index("head", head, len(maps))
        maps = maps[head : head + 1]
    length = maps.shape[-1]
    if tokens is not None and len(tokens) != length:
        raise ValueError(f"tokens has {len(tokens)} labels but the map has {length} tokens: give one label per token")
    labels = [_shorten(token) for token in tokens] if tokens is not None and length <= LONGEST_LABELLED_MAP else []
    heads = range(len(maps)) if head is None else [head]
    canvas = _map_canvas(len(maps), length, labels)
    scale = _weight_scale(maps)
    image = None
    for index, weights in enumerate(maps):
        panel = canvas.panel(*divmod(index, canvas.columns))
        image = _draw_weights(panel, weights, scale, at_most=canvas.cells)
        _label_tokens(panel, labels)
        label_axes(panel)
        name = f"head {heads[index]}" if attention_map.dim() == 3 else "attention map"
        panel.set_title(f"{name}{cell_note(length, at_most=canvas.cells)}", fontsize=10)
    _add_weight_bar(canvas, image)
    return save_figure(canvas.figure, path)


def draw_overview(path: str | Path | None = None) -> "Figure":
    """Draws the picture of the README: local window + global tokens + random blocks = hybrid attention."""
    length, window = 96, 16
    pattern = AttentionPattern(window=window, dilation_per_head=(1,), num_random_blocks=2, block_size=8, seed=35)
    with_globals = one_row_batch(length=length, global_positions=(0, 60))
    without_globals = one_row_batch(length=length, global_positions=())
    together = edge_rules(pattern, with_globals)
    apart = edge_rules(pattern, without_globals)
    panels = [
        ("Local window", f"each token sees {window // 2} on either side", _only(apart, Rule.WINDOW)),
        ("Global tokens", "see all and are seen by all", _only(together, Rule.GLOBAL)),
        ("Random blocks", "each block sees 2 far ones", _only(apart, Rule.RANDOM)),
        ("Hybrid attention", "one softmax over all three", together),
    ]
    canvas = Canvas(cells=length, side=4 * length, columns=4, left=96, right=28, top=120, bottom=92, gap=84)
    for column, (title, subtitle, rules) in enumerate(panels):
        panel = canvas.panel(0, column)
        _draw_rules(panel, rules, at_most=length)
        panel.set_xticks([0, 32, 64, 95])
        panel.set_yticks([0, 32, 64, 95])
        panel.tick_params(labelsize=10)
        panel.set_xlabel("key token j", fontsize=12)
        panel.text(0.5, 1.17, title, transform=panel.transAxes, ha="center", fontsize=15, weight="bold")
        panel.text(0.5, 1.06, subtitle, transform=panel.transAxes, ha="center", fontsize=12)
        if column == 0:
            panel.set_ylabel("query token i", fontsize=12)
        else:
            canvas.write_before(panel, "=" if column == 3 else "+")
    return save_figure(canvas.figure, path)


def _only(rules: Tensor, rule: Rule) -> Tensor:
    return torch.where(rules == rule, rules, int(Rule.NONE))


def _choose_pattern(
    config_or_pattern: HybridLongformerConfig | AttentionPattern, *, layer: int, head: int
) -> AttentionPattern:
    if isinstance(config_or_pattern, AttentionPattern):
        patterns = [config_or_pattern]
    else:
        patterns = config_or_pattern.attention_patterns()
    _check_index("layer", layer, len(patterns))
    _check_index("head", head, patterns[layer].num_heads)
    return patterns[layer]


def _check_index(name: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise ValueError(f"{name}={value} does not exist: there are {count}, choose from 0 to {count - 1}")


def _check_map(attention_map: Tensor) -> Tensor:
    """The map as (H, N, N) floats."""
    shape = tuple(attention_map.shape)
    if len(shape) not in (2, 3) or shape[-1] != shape[-2] or 0 in shape:
        raise ValueError(
            f"attention_map has shape {shape} but must be (heads, tokens, tokens) or (tokens, tokens): "
            "of a batch's map, choose one row, as in attention_map[0]"
        )
    maps = attention_map.detach().float().cpu().reshape(-1, *shape[-2:])
    wrong = ~((maps >= 0) & maps.isfinite())
    if bool(wrong.any()):
        raise ValueError(
            f"attention_map contains {maps[wrong][0].item()}, but weights are finite and at least 0: "
            "give probabilities, not scores"
        )
    return maps


def _draw_rules(panel: "Axes", rules: Tensor, *, at_most: int, padding: int = 0) -> None:
    from matplotlib.colors import ListedColormap

    colours = ListedColormap([RULE_COLOURS[rule] for rule in sorted(Rule)])
    show_cells(panel, rules, at_most=at_most, cmap=colours, vmin=min(Rule), vmax=max(Rule))
    if padding:
        first = rules.shape[0] - padding - 0.5
        panel.axvspan(first, first + padding, color=PADDING_COLOUR, linewidth=0)
        panel.axhspan(first, first + padding, color=PADDING_COLOUR, linewidth=0)


def _draw_weights(panel: "Axes", weights: Tensor, scale: Any, *, at_most: int) -> Any:
    panel.set_facecolor(BACKGROUND)
    shown = shrink(weights, at_most)
    return show_cells(panel, weights, at_most=at_most, cmap="viridis_r", norm=scale, alpha=(shown > 0).double().numpy())


def _add_legend(figure: "Figure", rules: Iterable[Tensor], *, dilation: int = 1, has_padding: bool = False) -> None:
    from matplotlib.patches import Patch

    names = {
        Rule.GLOBAL: "global token",
        Rule.WINDOW: "window" if dilation == 1 else "dilated window",
        Rule.RANDOM: "random block",
        Rule.NONE: "not seen",
    }
    drawn = {value for matrix in rules for value in matrix.unique().tolist()}
    entries = [(name, RULE_COLOURS[rule]) for rule, name in names.items() if rule in drawn]
    if has_padding:
        entries.append(("padding", PADDING_COLOUR))
    patches = [Patch(facecolor=colour, edgecolor=INK, linewidth=0.4, label=name) for name, colour in entries]
    figure.legend(
        handles=patches,
        loc="lower center",
        ncols=len(patches),
        frameon=False,
        fontsize=9,
        handlelength=1.5,
        columnspacing=1.5,
    )


def _shorten(token: str, at_most: int = 14) -> str:
    return token if len(token) <= at_most else token[: at_most - 1] + "…"


def _map_canvas(num_maps: int, length: int, labels: list[str]) -> Canvas:
    columns = math.ceil(math.sqrt(num_maps))
    # Labels are drawn at 7 points, about 10 pixels a capital letter, and stand beside every panel.
    room = 10 * max((len(label) for label in labels), default=4)
    side = max(480 if num_maps > 1 else 720, 17 * len(labels))
    return Canvas(
        cells=count_cells(length, at_most=side),
        side=side,
        rows=-(-num_maps // columns),
        columns=columns,
        left=room + 64,
        right=190,
        top=60,
        bottom=room + 64,
        gap=room + 100,
    )


def _weight_scale(maps: Tensor) -> Any:
    """Logarithmic over the four decades below the largest weight; smaller weights are drawn as the smallest."""
    from matplotlib.colors import LogNorm

    largest = maps.max().item() or 1.0
    smallest = min((maps[maps > 0].min().item() if bool((maps > 0).any()) else largest), largest / 10)
    return LogNorm(vmin=max(smallest, largest / 1e4), vmax=largest, clip=True)


def _label_tokens(panel: "Axes", labels: list[str]) -> None:
    if labels:
        # A token may hold dollar signs, which matplotlib would take for formulas.
        panel.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7, parse_math=False)
        panel.set_yticks(range(len(labels)), labels, fontsize=7, parse_math=False)


def _add_weight_bar(canvas: Canvas, image: Any) -> None:
    y = canvas.height - canvas.top - canvas.side
    bar = canvas.area(canvas.width - canvas.right + 40, y, 24, canvas.side)
    canvas.figure.colorbar(image, cax=bar)
    bar.set_ylabel("attention weight (blank: none)", fontsize=9)
    bar.tick_params(labelsize=8)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hybrid_longformer.pictures", description="Draws who sees whom in hybrid attention."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    pattern = commands.add_parser("pattern", help="the pattern of one layer and head")
    pattern.add_argument("--layer", type=int, default=0)
    pattern.add_argument("--padding", type=int, default=0, help="how many of the last tokens are padding")
    pattern.add_argument(
        "--documents", type=int, nargs="+", metavar="TOKENS", help="lengths of the documents packed in the row"
    )
    layers = commands.add_parser("layers", help="the patterns of all layers, side by side")
    layers.add_argument("--layers", type=int, default=12, help="number of layers")
    for command in (pattern, layers):
        _add_pattern_options(command)
    overview = commands.add_parser("overview", help="the picture of the README")
    for command in (pattern, layers, overview):
        command.add_argument("--output", type=Path, required=True, help="the picture to write: .png, .svg or .pdf")
    return parser


def _add_pattern_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--length", type=int, default=1024, help="tokens, padding included (%(default)s)")
    command.add_argument("--window", type=int, default=512, help="W: token i sees |i - j| <= W / 2 (%(default)s)")
    command.add_argument("--dilation", type=int, default=1, help="see every d-th token, d times as far (%(default)s)")
    command.add_argument("--random-blocks", type=int, default=3, help="random blocks per block (%(default)s)")
    command.add_argument("--block-size", type=int, default=64, help="tokens per random block (%(default)s)")
    command.add_argument("--seed", type=int, default=0, help="of the random graph (%(default)s)")
    command.add_argument("--head", type=int, default=0)
    command.add_argument("--causal", action="store_true", help="no token sees a later one")
    command.add_argument(
        "--global-positions", type=int, nargs="*", default=[0], metavar="TOKEN", help="the global tokens (0)"
    )


def _config_from(args: argparse.Namespace) -> HybridLongformerConfig:
    return HybridLongformerConfig(
        num_hidden_layers=args.layers if args.command == "layers" else max(1, args.layer + 1),
        attention_window=args.window,
        attention_dilation=args.dilation,
        num_random_blocks=args.random_blocks,
        block_size=args.block_size,
        random_seed=args.seed,
        causal_attention=args.causal,
    )


def _draw_from(args: argparse.Namespace) -> None:
    if args.command == "overview":
        draw_overview(args.output)
        return
    config = _config_from(args)
    options = {
        "length": args.length,
        "head": args.head,
        "global_positions": args.global_positions,
        "path": args.output,
    }
    if args.command == "layers":
        draw_layers(config, **options)
        return
    documents = None
    if args.documents:
        documents = [number for number, size in enumerate(args.documents) for _ in range(size)]
    draw_pattern(config, layer=args.layer, padding=args.padding, document_ids=documents, **options)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: draws one picture and says where it is."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _draw_from(args)
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
