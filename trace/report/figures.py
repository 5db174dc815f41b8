"""Figures of the report as inline SVG.

A method keeps its colour in every figure. Curves show the moving average with the raw values behind it, so that
smoothing hides nothing.
"""

import io
import re
from collections.abc import Callable

import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot as plt  # the backend must be chosen first
from matplotlib.axes import Axes

COLOURS = {
    "bf16": "#444444",
    "fp4_naive": "#c44e52",
    "qat": "#dd8452",
    "trace": "#1f77b4",
    "trace_full": "#64b5cd",
    "ptq_nvfp4": "#8c8c8c",
}
SPARE = ("#55a868", "#8172b3", "#937860", "#da8bc3", "#ccb974")
Rows = list[dict[str, float]]
Runs = dict[tuple[str, int], Rows]
"""Step metrics by (method, seed)."""


def colour(name: str, names: list[str]) -> str:
    """The method's colour; methods without a fixed one share the spare colours in order."""
    if name in COLOURS:
        return COLOURS[name]
    return SPARE[[n for n in names if n not in COLOURS].index(name) % len(SPARE)]


def svg(draw: Callable[[Axes], None], *, width: float = 7.0, height: float = 3.2) -> str:
    """Run ``draw`` on fresh axes and return the SVG element."""
    style = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "trace",
        "svg.fonttype": "none",
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        plt.close(figure)
    text = buffer.getvalue()
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%"', text[text.index("<svg") :], count=1)


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Trailing mean over at most ``window`` values."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    index = np.arange(1, len(values) + 1)
    start = np.maximum(0, index - window)
    return (sums[index] - sums[start]) / (index - start)


def curve(runs: Runs, key: str, *, label: str, log: bool = False, window: int = 10) -> str:
    """A step metric of every run."""
    names = list(dict.fromkeys(name for name, _ in runs))

    def draw(axes: Axes) -> None:
        shown = set()
        for (name, _), rows in runs.items():
            points = [(row["step"], row[key]) for row in rows if key in row]
            if not points:
                continue
            steps, values = (np.array(column, dtype=float) for column in zip(*points, strict=True))
            line = colour(name, names)
            axes.plot(steps, values, color=line, alpha=0.18, linewidth=0.8)
            label_once = name if name not in shown else None
            axes.plot(steps, moving_average(values, window), color=line, linewidth=1.6, label=label_once)
            shown.add(name)
        if log:
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.legend(frameon=False, ncols=3, fontsize=8)

    return svg(draw)


def mismatch_by_layer(summary: dict, *, tensor: str) -> str | None:
    """Codeword mismatch per layer with the methods' own forwards, or None when nothing was measured."""
    names = list(summary["methods"])
    series: dict[str, list[tuple[int, float]]] = {}
    for name, seeds in summary["methods"].items():
        layers: dict[int, list[float]] = {}
        for record in seeds.values():
            for key, value in (record.get("diagnostics") or {}).items():
                match = re.fullmatch(rf"diag/own/mismatch/{tensor}/(\d+)", key)
                if match and value is not None:
                    layers.setdefault(int(match[1]), []).append(value)
        if layers:
            series[name] = [(layer, float(np.mean(values))) for layer, values in sorted(layers.items())]
    if not series:
        return None

    def draw(axes: Axes) -> None:
        for name, points in series.items():
            layers, values = zip(*points, strict=True)
            axes.plot(
                layers, [100 * v for v in values], marker="o", markersize=4, color=colour(name, names), label=name
            )
        axes.set_xlabel("layer")
        axes.set_ylabel("mismatching codewords (%)")
        axes.set_xticks(sorted({layer for points in series.values() for layer, _ in points}))
        axes.legend(frameon=False, fontsize=8)

    return svg(draw, width=5.2)


def step_time(summary: dict) -> str | None:
    """Median seconds per step, split by phase, or None when no method was trained."""
    methods = {
        name: record["step_s"]
        for name, seeds in summary["methods"].items()
        for record in list(seeds.values())[:1]
        if record.get("step_s")
    }
    if not methods:
        return None
    phases = list(dict.fromkeys(phase for split in methods.values() for phase in split if phase != "step"))

    def draw(axes: Axes) -> None:
        left = np.zeros(len(methods))
        cmap = plt.get_cmap("tab20")
        for index, phase in enumerate(phases):
            values = np.array([split.get(phase, 0.0) for split in methods.values()])
            axes.barh(list(methods), values, left=left, color=cmap(index), label=phase)
            left += values
        axes.invert_yaxis()
        axes.set_xlabel("seconds per step (median)")
        axes.legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))

    return svg(draw, height=0.6 + 0.45 * len(methods) + 0.8)


def accuracy(summary: dict, *, execution: str) -> str:
    """Mean accuracy per task and method with standard errors; the dashed line is the policy before RL."""
    names = list(summary["methods"])
    tasks = list(summary["start"]["accuracy"])

    def draw(axes: Axes) -> None:
        width = 0.8 / len(names)
        for position, name in enumerate(names):
            records = list(summary["methods"][name].values())
            means = [100 * np.mean([r["accuracy"][task][execution]["mean"] for r in records]) for task in tasks]
            errors = [
                100 * np.sqrt(np.sum([r["accuracy"][task][execution]["stderr"] ** 2 for r in records])) / len(records)
                for task in tasks
            ]
            where = np.arange(len(tasks)) + (position - (len(names) - 1) / 2) * width
            axes.bar(
                where, means, width * 0.92, yerr=errors, color=colour(name, names), label=name, error_kw={"lw": 0.8}
            )
        for index, task in enumerate(tasks):
            level = 100 * summary["start"]["accuracy"][task][execution]["mean"]
            axes.hlines(level, index - 0.45, index + 0.45, colors="black", linestyles="dashed", linewidth=0.9)
        axes.set_xticks(range(len(tasks)), tasks)
        axes.set_ylabel(f"accuracy, {execution} execution (%)")
        axes.legend(frameon=False, ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.2))

    return svg(draw)
