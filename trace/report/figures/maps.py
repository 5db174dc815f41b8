"""Heat maps whose cells carry their number, so that nothing is read from the colour alone."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from trace_rl.report.figures.canvas import panels

Grid = tuple[Sequence[str], Sequence[str], Sequence[Sequence[float | None]], Sequence[Sequence[str]]]
"""Row names, column names, values (None: not run) and the text of each cell."""


def heat_maps(
    grids: dict[str, Grid],
    *,
    xlabel: str,
    ylabel: str,
    columns: int = 2,
    height: float = 2.4,
    width: float = 9.0,
    log: bool = False,
) -> str | None:
    """One panel per grid on a common colour scale; None when every cell is empty."""
    present = [v for _, _, values, _ in grids.values() for row in values for v in row if v is not None]
    if not present:
        return None
    low, high = min(present), max(present)

    def shade(value: float) -> float:
        if log and low > 0:
            low_, high_, value = np.log(low), np.log(high), np.log(value)
        else:
            low_, high_ = low, high
        return 0.5 if high_ == low_ else float((value - low_) / (high_ - low_))

    def drawing(title: str, grid: Grid):
        row_names, column_names, values, texts = grid

        def draw(axes: Axes) -> None:
            shades = np.array([[np.nan if v is None else shade(v) for v in row] for row in values])
            axes.pcolormesh(np.ma.masked_invalid(shades), cmap="Blues", vmin=0.0, vmax=1.4, edgecolors="white")
            for y, row in enumerate(texts):
                for x, text in enumerate(row):
                    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7)
            axes.set_xticks(np.arange(len(column_names)) + 0.5, column_names, fontsize=8)
            axes.set_yticks(np.arange(len(row_names)) + 0.5, row_names, fontsize=8)
            axes.set_ylim(len(row_names), 0)
            axes.tick_params(length=0)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel(xlabel)
            axes.set_ylabel(ylabel)

        return draw

    return panels([drawing(*item) for item in grids.items()], columns=columns, width=width, height=height)
