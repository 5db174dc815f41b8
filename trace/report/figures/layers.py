"""Codeword statistics by layer and tensor: one panel a tensor, one line a method, seeds as error bars."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from trace_rl.report.figures.canvas import colour, panels
from trace_rl.report.labels import changes, label

TENSORS = {"fc1": "FC1 input", "k": "K", "v": "V"}


def by_layer(summary: dict[str, Any], name: str, *, mode: str, metric: str, tensor: str) -> dict[int, list[float]]:
    """Values of ``diag/<mode>/<metric>/<tensor>/<layer>`` by layer, one per seed."""
    pattern = re.compile(rf"diag/{mode}/{metric}/{tensor}/(\d+)")
    layers: dict[int, list[float]] = {}
    for record in summary["methods"].get(name, {}).values():
        for key, value in (record.get("diagnostics") or {}).items():
            match = pattern.fullmatch(key)
            if match and value is not None:
                layers.setdefault(int(match[1]), []).append(value)
    return dict(sorted(layers.items()))


def layer_panels(summary: dict[str, Any], names: Sequence[str], *, mode: str, metric: str, ylabel: str) -> str | None:
    """Percent by layer, a panel per tensor; None when nothing was measured. Dashed: without routing replay."""
    found = {
        tensor: {
            name: layers
            for name in names
            if (layers := by_layer(summary, name, mode=mode, metric=metric, tensor=tensor))
        }
        for tensor in TENSORS
    }
    found = {tensor: lines for tensor, lines in found.items() if lines}
    if not found:
        return None

    def drawing(tensor: str, lines: dict[str, dict[int, list[float]]]):
        def draw(axes: Axes) -> None:
            for name, layers in lines.items():
                values = [100 * np.array(layer) for layer in layers.values()]
                spread = [v.std(ddof=1) / len(v) ** 0.5 if len(v) > 1 else 0.0 for v in values]
                axes.errorbar(
                    list(layers),
                    [v.mean() for v in values],
                    yerr=spread,
                    marker="o",
                    markersize=3,
                    elinewidth=0.8,
                    linestyle="dashed" if changes(name).get("router_replay") == "none" else "solid",
                    color=colour(name, list(names)),
                    label=label(name),
                )
            axes.set_title(TENSORS[tensor], fontsize=9)
            axes.set_xlabel("layer")
            axes.set_ylabel(ylabel)
            axes.set_xticks(sorted({layer for layers in lines.values() for layer in layers}))

        return draw

    return panels([drawing(*item) for item in found.items()], legend=True)
