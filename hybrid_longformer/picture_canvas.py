"""Pictures' canvas: square panels whose cells are whole pixels, so that no thin line of an attention graph is lost.

Letters: N tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 144
INK = "#222222"


@dataclass(kw_only=True)
class Canvas:
    """A figure of equal square panels, measured in pixels so that every cell is the same number of them.

    Args:
        cells: across each panel.
        side: of a panel, at least; made a multiple of `cells`.
        gap: between panels; `left`, `right`, `top` and `bottom` are the margins around them.
    """

    cells: int
    side: int
    rows: int = 1
    columns: int = 1
    left: int
    right: int
    top: int
    bottom: int
    gap: int = 0

    def __post_init__(self) -> None:
        self.side = -(-self.side // self.cells) * self.cells
        self.width = self.left + self.columns * (self.side + self.gap) - self.gap + self.right
        self.height = self.top + self.rows * (self.side + self.gap) - self.gap + self.bottom
        self.figure = _new_figure(self.width / DPI, self.height / DPI)

    def panel(self, row: int, column: int) -> "Axes":
        """The panel in a row and column, counted from the upper left."""
        x = self.left + column * (self.side + self.gap)
        y = self.height - self.top - self.side - row * (self.side + self.gap)
        panel = self.area(x, y, self.side, self.side)
        panel.tick_params(labelsize=8, length=3, width=0.6, color=INK)
        # A frame would hide the first row and column, which are often global.
        panel.spines[:].set_visible(False)
        return panel

    def area(self, x: int, y: int, width: int, height: int) -> "Axes":
        """Axes of so many pixels; x and y are those of the lower left corner."""
        return self.figure.add_axes((x / self.width, y / self.height, width / self.width, height / self.height))

    def write_before(self, panel: "Axes", text: str) -> None:
        """Writes into the gap to the left of a panel."""
        box = panel.get_position()
        x = box.x0 - self.gap / 2 / self.width - 0.004
        self.figure.text(x, (box.y0 + box.y1) / 2, text, ha="center", va="center", fontsize=26, color=INK)


def _new_figure(width: float, height: float) -> "Figure":
    """A figure of its own, outside pyplot: no window, no display, nothing to close."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'pictures need matplotlib, which is missing: pip install "hybrid-longformer[view]"'
        ) from error
    return Figure(figsize=(width, height), dpi=DPI, facecolor="white")


def save_figure(figure: "Figure", path: str | Path | None) -> "Figure":
    """Writes the figure if there is a path, whose ending chooses the format, and hands it on."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def _cell_size(length: int, at_most: int) -> int:
    """Tokens per side of a drawn cell, so that there are at most so many cells across; blocks keep whole cells."""
    size = 1
    while size * at_most < length:
        size *= 2
    return size


def count_cells(length: int, *, at_most: int) -> int:
    """Cells across a picture of so many tokens."""
    return -(-length // _cell_size(length, at_most))


def cell_note(length: int, *, at_most: int) -> str:
    """What a title has to say where a cell stands for several tokens."""
    size = _cell_size(length, at_most)
    return f" (each dot: {size} x {size} tokens)" if size > 1 else ""


def shrink(values: Tensor, at_most: int) -> Tensor:
    """(N, N) to at most so many cells across, each as its largest value: no thin line is lost between pixels."""
    size = _cell_size(values.shape[0], at_most)
    if size == 1:
        return values
    return torch.nn.functional.max_pool2d(values[None].float(), size, ceil_mode=True)[0].to(values.dtype)


def show_cells(panel: "Axes", values: Tensor, *, at_most: int, **style: Any) -> Any:
    """Draws (N, N) values into a panel whose axes count tokens."""
    shown = shrink(values, at_most)
    end = shown.shape[0] * _cell_size(values.shape[0], at_most) - 0.5
    extent = (-0.5, end, end, -0.5)
    image = panel.imshow(shown.numpy(), extent=extent, interpolation="nearest", aspect="auto", **style)
    panel.locator_params(integer=True, nbins=6)
    return image


def label_axes(panel: "Axes", *, keys: bool = True, queries: bool = True) -> None:
    """Names the axes: keys across, queries down."""
    if keys:
        panel.set_xlabel("key token j", fontsize=9)
    if queries:
        panel.set_ylabel("query token i", fontsize=9)
