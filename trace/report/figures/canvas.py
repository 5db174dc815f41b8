"""Drawing surface of every figure: colours, axes, and SVG small enough to stand inline by the dozen.

matplotlib writes six decimals, line breaks and an id for every group; a page with fifty figures is mostly that. One
decimal of a point is a hundredth of a millimetre on paper. Text stays text, so that no glyph is drawn twice.
"""

import io
import re
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np

from trace_rl.report.labels import base

matplotlib.use("svg")
from matplotlib import pyplot as plt  # the backend must be chosen first
from matplotlib.axes import Axes

COLOURS = {
    "bf16": "#444444",
    "fp4_naive": "#c44e52",
    "qat": "#dd8452",
    "qarl": "#937860",
    "quads": "#55a868",
    "resq": "#8172b3",
    "sc": "#ccb974",
    "triage": "#da8bc3",
    "trace": "#1f77b4",
    "trace_full": "#64b5cd",
    "trace_unpinned": "#17a398",
    "trace_gated": "#6a51a3",
    "trace_anchored": "#b5179e",
    "ptq_nvfp4": "#8c8c8c",
    "ptq_4over6": "#a9a9a9",
    "ptq_hscale": "#c6c6c6",
}
SPARE = ("#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#ff9896", "#98df8a", "#c5b0d5", "#f7b6d2")
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "trace",
    "svg.fonttype": "none",
}
MAX_POINTS = 90
"""Points of a curve; more become means of neighbours."""


def colour(name: str, names: Sequence[str]) -> str:
    """The method's colour; a variant beside its base, or a method without a fixed one, takes a spare one in order."""
    bases = [base(n) for n in names]
    if base(name) in COLOURS and (name == base(name) or bases.count(base(name)) == 1):
        return COLOURS[base(name)]
    others = [n for n in names if n not in COLOURS]
    return SPARE[others.index(name) % len(SPARE)]


def svg(draw: Callable[[Axes], None], *, width: float = 7.0, height: float = 3.2) -> str:
    """Run ``draw`` on fresh axes and return the SVG element."""
    return panels([draw], width=width, height=height)


def panels(
    draws: Sequence[Callable[[Axes], None]],
    *,
    columns: int = 3,
    width: float = 9.0,
    height: float = 2.7,
    legend: bool = False,
) -> str:
    """One SVG of several axes with shared y, ``height`` inches a row; ``legend`` gathers their labels below."""
    columns = min(columns, len(draws))
    rows = -(-len(draws) // columns)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            rows, columns, figsize=(width, height * rows), layout="constrained", squeeze=False, sharey=len(draws) > 1
        )
        for index, (axes, draw) in enumerate(zip(grid.flat, draws, strict=False)):
            draw(axes)
            if index % columns:
                axes.set_ylabel("")
        for axes in grid.flat[len(draws) :]:
            axes.set_visible(False)
        if legend:
            entries = {}
            for axes in grid.flat:
                handles, labels = axes.get_legend_handles_labels()
                entries |= dict(zip(labels, handles, strict=True))
            figure.legend(
                list(entries.values()), list(entries), frameon=False, fontsize=8, ncols=4, loc="outside lower center"
            )
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        plt.close(figure)
    return compact(buffer.getvalue())


def compact(text: str) -> str:
    """The SVG element alone, scaled to the page, without metadata, ids of groups, and digits no one can see."""
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%"', text[text.index("<svg") :], count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 sans-serif", text)
    text = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", text)
    text = re.sub(r"-?\d+\.\d+(?:e-?\d+)?", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), text)
    text = re.sub(r"[ \t]*\n[ \t]*", "\n", text)
    return re.sub(r' d="([^"]*)"', lambda match: f' d="{path_data(match[1])}"', text)


def path_data(data: str) -> str:
    """Path commands on one line, coordinates with one decimal."""
    data = re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.1f}", data)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", data).replace("\n", " ").strip()


def thin(steps: np.ndarray, values: np.ndarray, *, points: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values as means of runs of neighbours, at most ``points`` of them."""
    size = -(-len(steps) // points)
    starts = np.arange(0, len(steps), size)
    counts = np.diff(np.append(starts, len(steps)))
    return np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts
