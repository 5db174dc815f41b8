"""Numbers with error bars over a few values of x, one line a forward or method, one panel a question."""

from collections.abc import Callable

from matplotlib.axes import Axes

from trace_rl.report.estimate import Estimate
from trace_rl.report.figures.canvas import colour, panels

Lines = dict[str, dict[int, Estimate]]
"""{name of the line: {x: estimate}}."""


def point_panels(groups: dict[str, Lines], *, xlabel: str, ylabel: str, names: dict[str, str]) -> str | None:
    """One panel per group on a common y axis; ``names``: what each line is called. None when there are no points."""
    if not any(points for lines in groups.values() for points in lines.values()):
        return None

    def drawing(title: str, lines: Lines) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            for name, points in lines.items():
                axes.errorbar(
                    list(points),
                    [point.mean for point in points.values()],
                    yerr=[point.stderr for point in points.values()],
                    marker="o",
                    markersize=3,
                    elinewidth=0.8,
                    color=colour(name, list(names)),
                    label=names[name],
                )
            axes.set_title(title, fontsize=9)
            axes.set_xlabel(xlabel)
            axes.set_ylabel(ylabel)
            axes.set_xticks(sorted({x for points in lines.values() for x in points}))

        return draw

    return panels([drawing(*item) for item in groups.items()], columns=2, legend=True)
