"""Curves over steps: the mean over seeds with the range of the seeds, and every seed's raw values behind it.

Smoothing is a trailing mean of ten steps, on each seed before the mean over seeds; the faint raw lines show what it
hides. The band is the smallest and largest smoothed seed, not an error bar.
"""

import numpy as np
from matplotlib.axes import Axes

from trace_rl.report.figures.canvas import colour, panels, svg, thin
from trace_rl.report.labels import label

Rows = list[dict[str, float]]
Runs = dict[tuple[str, int], Rows]
"""Step metrics by (method, seed)."""
Series = dict[int, tuple[np.ndarray, np.ndarray]]
"""(steps, values) of one metric by seed."""
RAW_LINES = 24
"""Raw lines of one figure; beyond, only means and bands are drawn."""


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Trailing mean over at most ``window`` values."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    index = np.arange(1, len(values) + 1)
    start = np.maximum(0, index - window)
    return (sums[index] - sums[start]) / (index - start)


def series(runs: Runs, name: str, key: str) -> Series:
    """(steps, values) of a metric by seed, for the seeds that logged it."""
    found = {}
    for (method, seed), rows in runs.items():
        points = [(row["step"], row[key]) for row in rows if key in row] if method == name else []
        if points:
            steps, values = (np.array(column, dtype=float) for column in zip(*points, strict=True))
            found[seed] = (steps, values)
    return found


def draw_method(axes: Axes, seeds: Series, *, line: str, text: str, raw: bool) -> None:
    """One method: raw seeds, band of the smoothed seeds, mean of the smoothed seeds."""
    length = min(len(values) for _, values in seeds.values())
    smooth = np.array([moving_average(values[:length], 10) for _, values in seeds.values()])
    steps = next(iter(seeds.values()))[0][:length]
    if raw:
        for seed_steps, values in seeds.values():
            axes.plot(*thin(seed_steps, values), color=line, alpha=0.15, linewidth=0.7)
    at, mean = thin(steps, smooth.mean(axis=0))
    if len(seeds) > 1:
        low, high = (thin(steps, edge)[1] for edge in (smooth.min(axis=0), smooth.max(axis=0)))
        axes.fill_between(at, low, high, color=line, alpha=0.15, linewidth=0)
    axes.plot(at, mean, color=line, linewidth=1.6, label=text)


def curve(runs: Runs, key: str, *, names: list[str] | None = None, ylabel: str = "", log: bool = False) -> str | None:
    """A step metric of some methods on one pair of axes; None when no run logged it."""
    names = names if names is not None else list(dict.fromkeys(name for name, _ in runs))
    found = {name: seeds for name in names if (seeds := series(runs, name, key))}
    if not found:
        return None
    raw = sum(len(seeds) for seeds in found.values()) <= RAW_LINES

    def draw(axes: Axes) -> None:
        for name, seeds in found.items():
            draw_method(axes, seeds, line=colour(name, names), text=label(name), raw=raw)
        if log:
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        axes.legend(frameon=False, ncols=3, fontsize=8)

    return svg(draw)


def curve_panels(
    runs: Runs, key: str, *, groups: dict[str, dict[str, str]], ylabel: str, columns: int = 3
) -> str | None:
    """One panel per group of {method: text of its line}; lines of the same text share a colour."""
    texts = list(dict.fromkeys(text for group in groups.values() for text in group.values()))

    def drawing(title: str, group: dict[str, str]):
        def draw(axes: Axes) -> None:
            for name, text in group.items():
                seeds = series(runs, name, key)
                if seeds:
                    draw_method(axes, seeds, line=colour(text, texts), text=text, raw=False)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("step")
            axes.set_ylabel(ylabel)

        return draw

    if not any(series(runs, name, key) for group in groups.values() for name in group):
        return None
    return panels([drawing(*item) for item in groups.items()], columns=columns, legend=True)
