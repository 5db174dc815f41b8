"""Where training collapses: learning rate x answer length x updates per rollout, a map for every method.

Answer length is that of the problems trained on: programs take longer answers than chains. A cell is stable when none
of its seeds collapsed. The page says whether TRACE widens the stable region, whichever way.
"""

import math
import statistics
from collections.abc import Sequence

from trace_rl.config.targets import STABILITY, target_names
from trace_rl.report.claim import own_execution
from trace_rl.report.context import COLLAPSE_RULE, Context
from trace_rl.report.document import Figure, Section, Table
from trace_rl.report.estimate import accuracies, estimate, show, trained
from trace_rl.report.figures.maps import Grid, heat_maps
from trace_rl.report.labels import changes, without
from trace_rl.report.sections.dynamics import reward_area

RATE, PROBLEMS, UPDATES = "training.learning_rate", "training.problems", "training.updates_per_rollout"
FREE = (RATE, PROBLEMS, UPDATES, "training.steps")
KINDS = {"math": "chains", "code": "programs"}
"""Kinds of problems in words; others as they are."""

Point = tuple[float, str, int]
"""Learning rate, kind of the problems (their answers differ in length), updates per rollout."""


def stability(context: Context) -> Section:
    """Reading, map, table."""
    grid = stability_grid(context)
    blocks: list[str | Table | Figure] = list(reading(context, grid))
    figure = stability_map(context, grid)
    blocks += [figure] if figure is not None else []
    blocks.append(stability_table(context, grid))
    return Section("Stability", blocks)


def stability_grid(context: Context) -> dict[str, dict[Point, str]]:
    """{method in words: {point: name of the run}}."""
    training = context.config.training
    grid: dict[str, dict[Point, str]] = {}
    for name in context.run_of(target_names(context.config, STABILITY)):
        varied = changes(name)
        point = (
            float(varied.get(RATE, training.learning_rate)),
            varied.get(PROBLEMS, training.problems or "all"),
            int(varied.get(UPDATES, training.updates_per_rollout)),
        )
        grid.setdefault(without(name, *FREE), {})[point] = name
    return grid


def collapsed_seeds(context: Context, name: str) -> tuple[int, int]:
    """(collapsed, all) seeds of a run."""
    seeds = context.summary["methods"][name].values()
    return sum(bool(record["collapsed"]) for record in seeds), len(seeds)


def stable(context: Context, points: dict[Point, str]) -> set[Point]:
    """Points without a collapsed seed."""
    return {point for point, name in points.items() if collapsed_seeds(context, name)[0] == 0}


def reading(context: Context, grid: dict[str, dict[Point, str]]) -> Sequence[str]:
    """Whether TRACE widens the stable region, against each other FP4 method."""
    counts = ", ".join(f"{method} {len(stable(context, points))} of {len(points)}" for method, points in grid.items())
    paragraphs = [f"Stable cells: {counts}."]
    if "trace" in grid:
        guided = stable(context, grid["trace"])
        for method in ("qat", "fp4_naive"):
            if method not in grid:
                continue
            common = grid[method].keys() & grid["trace"].keys()
            other, mine = stable(context, grid[method]) & common, guided & common
            gained, lost = len(mine - other), len(other - mine)
            if gained and not lost:
                text = f"TRACE widens the stable region of {method} by {gained} of {len(common)} cells"
            elif not gained and not lost:
                text = f"TRACE does not widen the stable region of {method}: both are stable in the same cells"
            elif lost and not gained:
                text = f"TRACE does not widen the stable region of {method}: it collapses in {lost} cells more"
            else:
                text = f"TRACE does not simply widen the stable region of {method}: {gained} cells gained, {lost} lost"
            paragraphs.insert(0, f"{text}.")
    if context.num_seeds == 1:
        paragraphs.append("One seed a cell: a single collapse near the edge of the region may go either way.")
    paragraphs.append(f"The paper's accounts have no such map. {COLLAPSE_RULE}")
    return paragraphs


def stability_map(context: Context, grid: dict[str, dict[Point, str]]) -> Figure | None:
    """Reward area as colour, accuracy and a cross for a collapsed run as text; a panel per method and updates."""
    grids: dict[str, Grid] = {}
    for method, points in grid.items():
        for updates in sorted({point[2] for point in points}):
            rates = sorted({point[0] for point in points})
            kinds = by_length(context, points)
            values: list[list[float | None]] = []
            texts: list[list[str]] = []
            for kind in kinds:
                cells = [points.get((rate, kind, updates)) for rate in rates]
                areas = [estimate(reward_area(context, name)) if name else None for name in cells]
                values.append([area.mean if area else None for area in areas])
                texts.append([cell_text(context, name) if name else "" for name in cells])
            title = f"{method}, {updates} update{'s' if updates > 1 else ''} per rollout"
            labels = [
                KINDS.get(kind, kind) + ("" if math.isnan(length) else f", {length:.0f} tokens")
                for kind, length in kinds.items()
            ]
            grids[title] = (labels, [f"{rate:g}" for rate in rates], values, texts)
    svg = heat_maps(grids, xlabel="learning rate", ylabel="", height=1.9)
    if svg is None:
        return None
    caption = (
        "Colour: mean reward over all steps. Text: reward area, final accuracy; ✕ marks a collapsed run, ↓ one that "
        "ends below the reward it started from."
    )
    caption += f" {evaluated_at(context)}"
    return Figure("stability", svg, caption)


def by_length(context: Context, points: dict[Point, str]) -> dict[str, float]:
    """Mean length of the responses trained on, tokens, by kind of problem, ascending; NaN where no run says."""
    found: dict[str, float] = {}
    for kind in {point[1] for point in points}:
        runs = [name for point, name in points.items() if point[1] == kind]
        lengths = [estimate(trained(context.summary, name, "response_length")) for name in runs]
        known = [length.mean for length in lengths if length is not None]
        found[kind] = statistics.fmean(known) if known else math.nan
    return dict(sorted(found.items(), key=lambda item: (item[1], item[0])))


def evaluated_at(context: Context) -> str:
    """What a policy of the map is evaluated on, the same for all."""
    length = context.config.evaluate.max_new_tokens or context.config.sampling.max_new_tokens
    return f"Every policy is evaluated on all tasks, whatever it was trained on, with answers of up to {length} tokens."


def cell_text(context: Context, name: str) -> str:
    """Reward area, accuracy, and collapsed seeds of one cell."""
    area = estimate(reward_area(context, name))
    accuracy = estimate(accuracies(context.summary, name, own_execution(name)))
    collapsed, total = collapsed_seeds(context, name)
    mark = "" if not collapsed else " ✕" if total == 1 else f" ✕{collapsed}/{total}"
    gain = estimate(trained(context.summary, name, "reward_gain"))
    mark += " ↓" if gain is not None and gain.mean < 0 else ""
    shown = f"{area.mean:.2f}" if area else "–"
    return f"{shown}, {100 * accuracy.mean:.0f} %{mark}" if accuracy else f"{shown}{mark}"


def stability_table(context: Context, grid: dict[str, dict[Point, str]]) -> Table:
    """The map in numbers."""
    rows = []
    for method, points in grid.items():
        for (rate, kind, updates), name in sorted(points.items()):
            collapsed, total = collapsed_seeds(context, name)
            rows.append(
                (
                    method,
                    f"{rate:g}",
                    KINDS.get(kind, kind),
                    show(estimate(trained(context.summary, name, "response_length")), scale=1),
                    show(estimate(trained(context.summary, name, "truncated_responses"))),
                    str(updates),
                    show(estimate(reward_area(context, name)), scale=1, digits=3),
                    show(estimate(trained(context.summary, name, "reward_gain")), signed=True),
                    show(estimate(accuracies(context.summary, name, own_execution(name)))),
                    f"{collapsed} of {total}",
                )
            )
    header = (
        "method",
        "learning rate",
        "problems",
        "answer length (tokens)",
        "cut off (%)",
        "updates",
        "reward area",
        "gain (points)",
        "accuracy (%)",
        "collapsed",
    )
    return Table(header, tuple(rows), f"Accuracy in the execution a policy is meant for. {evaluated_at(context)}")
