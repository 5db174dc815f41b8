"""Where training collapses: learning rate x answer length x updates per rollout, a map for every method.

A cell is stable when none of its seeds collapsed. The page says whether TRACE widens the stable region, whichever way.
"""

from collections.abc import Sequence

from trace_rl.config.targets import STABILITY, target_names
from trace_rl.report.claim import own_execution
from trace_rl.report.context import COLLAPSE_RULE, Context
from trace_rl.report.document import Figure, Section, Table
from trace_rl.report.estimate import accuracies, estimate, show, trained
from trace_rl.report.figures.maps import Grid, heat_maps
from trace_rl.report.labels import changes, without
from trace_rl.report.sections.dynamics import reward_area

RATE, LENGTH, UPDATES = "training.learning_rate", "training.max_new_tokens", "training.updates_per_rollout"
FREE = (RATE, LENGTH, UPDATES, "training.steps")

Point = tuple[float, int, int]
"""Learning rate, answer length, updates per rollout."""


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
    training, sampling = context.config.training, context.config.sampling
    grid: dict[str, dict[Point, str]] = {}
    for name in context.run_of(target_names(context.config, STABILITY)):
        varied = changes(name)
        point = (
            float(varied.get(RATE, training.learning_rate)),
            int(varied.get(LENGTH, sampling.max_new_tokens)),
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
            lengths = sorted({point[1] for point in points})
            values: list[list[float | None]] = []
            texts: list[list[str]] = []
            for length in lengths:
                cells = [points.get((rate, length, updates)) for rate in rates]
                areas = [estimate(reward_area(context, name)) if name else None for name in cells]
                values.append([area.mean if area else None for area in areas])
                texts.append([cell_text(context, name) if name else "" for name in cells])
            title = f"{method}, {updates} update{'s' if updates > 1 else ''} per rollout"
            grids[title] = ([f"{length} tokens" for length in lengths], [f"{rate:g}" for rate in rates], values, texts)
    svg = heat_maps(grids, xlabel="learning rate", ylabel="", height=1.9)
    if svg is None:
        return None
    caption = (
        "Colour: mean reward over all steps. Text: reward area, final accuracy; ✕ marks a collapsed run, ↓ one that "
        "ends below the reward it started from."
    )
    caption += f" {evaluated_at(context)}"
    return Figure("stability", svg, caption)


def evaluated_at(context: Context) -> str:
    """The length of answers at evaluation, one for the whole map: the stage knows nothing of a run's own."""
    length = context.config.evaluate.max_new_tokens or context.config.sampling.max_new_tokens
    return f"Every policy is evaluated with answers of up to {length} tokens, whatever it was trained with."


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
        for (rate, length, updates), name in sorted(points.items()):
            collapsed, total = collapsed_seeds(context, name)
            rows.append(
                (
                    method,
                    f"{rate:g}",
                    str(length),
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
        "tokens",
        "updates",
        "reward area",
        "gain (points)",
        "accuracy (%)",
        "collapsed",
    )
    return Table(header, tuple(rows), f"Accuracy in the execution a policy is meant for. {evaluated_at(context)}")
