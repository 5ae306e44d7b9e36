"""What every plot is drawn on: one look, and the same bytes from the same figures.

Matplotlib is imported when a plot is drawn and not before, so that no other command waits for it. Figures are made
without pyplot: no window, no global state. Text stays text, which keeps the files small and their diffs readable.
Colours are those of Okabe and Ito, which people with any colour vision can tell apart, and lines differ in style too.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_STYLES = ("-", "--", "-.", ":")

_SETTINGS: Mapping[str, Any] = {
    "svg.hashsalt": "atoll",  # ids of clip paths and markers: random without it
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],  # comes with Matplotlib, so that the layout is the same everywhere
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
}

#: Inches of one panel.
PANEL = (5.6, 3.3)
_COLUMNS = 3


@contextmanager
def drawing(
    panels: int, size: tuple[float, float] | None = None, *, columns: int = _COLUMNS
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yields a figure with so many axes under our settings; axes of the grid beyond that are invisible."""
    from matplotlib import style
    from matplotlib.figure import Figure

    settings: Any = dict(_SETTINGS)
    with style.context(["default", settings]):  # whatever is in this user's own matplotlibrc
        columns = min(panels, columns)
        rows = math.ceil(panels / columns)
        width, height = size or (PANEL if panels == 1 else (3.4 * columns, 2.7 * rows))
        made = Figure(figsize=(width, height), layout="constrained")
        grid = list(made.subplots(rows, columns, squeeze=False).flat)
        for axes in grid[panels:]:
            axes.set_visible(False)
        yield made, grid[:panels]


def svg(drawn: Figure) -> bytes:
    """Returns the figure without date and without the version of the program that drew it."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(drawn)
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "atoll lab report"})
    # Lines of path data end in a blank, which every tool that looks at diffs complains about.
    return b"\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + b"\n"


def legend(axes: Axes, *, beside: bool = False) -> None:
    """Adds a legend if anything has a label; beside the axes where it would cover them."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(**({"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if beside else {}))


def colour(i: int) -> str:
    """Returns the colour of the i-th line."""
    return COLOURS[i % len(COLOURS)]


def style_of(i: int) -> str:
    """Returns the style of the i-th line."""
    return _STYLES[i % len(_STYLES)]
