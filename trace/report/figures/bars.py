"""Bars: seconds per step by phase, and accuracy by task."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from trace_rl.report.estimate import accuracies, estimate
from trace_rl.report.figures.canvas import colour, svg
from trace_rl.report.labels import label


def step_time(summary: dict[str, Any]) -> str | None:
    """Median seconds per step, mean over seeds, split by phase, or None when no method was trained."""
    methods = {}
    for name, seeds in summary["methods"].items():
        splits = [record["step_s"] for record in seeds.values() if record.get("step_s")]
        if splits:
            phases = dict.fromkeys(phase for split in splits for phase in split)
            methods[label(name)] = {
                phase: sum(split.get(phase, 0.0) for split in splits) / len(splits) for phase in phases
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

    return svg(draw, height=1.4 + 0.3 * len(methods))


def accuracy(summary: dict[str, Any], *, execution: str, names: Sequence[str] | None = None) -> str:
    """Mean accuracy per task and method with standard errors; the dashed line is the policy before RL."""
    names = list(names if names is not None else summary["methods"])
    tasks = list(summary["start"]["accuracy"])

    def draw(axes: Axes) -> None:
        width = 0.8 / len(names)
        for position, name in enumerate(names):
            found = [estimate(accuracies(summary, name, execution, task=task)) for task in tasks]
            where = np.arange(len(tasks)) + (position - (len(names) - 1) / 2) * width
            axes.bar(
                where,
                [100 * f.mean for f in found],
                width * 0.92,
                yerr=[100 * f.stderr for f in found],
                color=colour(name, names),
                label=label(name),
                error_kw={"lw": 0.8},
            )
        for index, task in enumerate(tasks):
            level = 100 * summary["start"]["accuracy"][task][execution]["mean"]
            axes.hlines(level, index - 0.45, index + 0.45, colors="black", linestyles="dashed", linewidth=0.9)
        axes.set_xticks(range(len(tasks)), tasks)
        axes.set_ylabel(f"accuracy, {execution} execution (%)")
        axes.legend(frameon=False, ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))

    return svg(draw, height=3.4)
