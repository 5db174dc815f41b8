"""Guidance and staleness, a question of this project: does the importance ratio see a stale rollout, and what follows?

Two parts. The ratio table forces the old tokens through the refitted engine and asks how well each trainer's log-ratio
tracks the engine's own (`trace_rl.stages.ratio`). The training part compares methods at every staleness and learning
rate, paired over seeds; its verdicts are stated whichever way they come out.
"""

from collections.abc import Callable

from trace_rl.config.method import RlMethod
from trace_rl.config.targets import target_names
from trace_rl.report.context import Context
from trace_rl.report.document import Figure, Section, Table
from trace_rl.report.estimate import Estimate, Value, difference, estimate, show, trained
from trace_rl.report.figures.curves import curve_panels
from trace_rl.report.labels import changes, label, without
from trace_rl.report.sections.dynamics import reward_area
from trace_rl.report.sections.ratios import ratio_blocks

STALENESS, LEARNING_RATE = "training.staleness", "training.learning_rate"
FREE = (STALENESS, LEARNING_RATE, "training.steps")
"""Keys of the grid; what is left of a name is the method of a line."""
REFERENCE, GUIDED = "qat", "trace"
REFERENCES = (REFERENCE, GUIDED, *(f"{name}@ratio.old_policy=sampling" for name in (REFERENCE, GUIDED)))
"""What the others are compared with; those whose old policy is the sampling one, with their like as well."""

Point = tuple[float, int]
"""Learning rate and staleness."""


def staleness(context: Context) -> Section:
    """Ratio table, then training."""
    grid = staleness_grid(context)
    names = [name for methods in grid.values() for name in methods.values()]
    blocks: list[str | Table | Figure] = [
        "The paper does not raise this question: this is a result of this project, told as it came out. "
        "Guidance pins the trainer's rounding to the rollout's, also where a newer policy would round otherwise. Does "
        "the importance ratio still see that a rollout is stale, and what does training make of it?",
        *(findings(context, grid) if grid else ["No training under staleness on this page."]),
    ]
    collapsed = context.collapsed(names)
    if collapsed:
        blocks.append(f"Collapsed runs, shown like all others: {', '.join(collapsed)}.")
    blocks += ratio_blocks(context)
    if grid:
        blocks += [comparison_table(context, grid), training_table(context, grid), *reward_figures(context, grid)]
    return Section("Staleness", blocks)


def staleness_grid(context: Context) -> dict[Point, dict[str, str]]:
    """{(learning rate, staleness): {method in words: name of the run}}, ascending."""
    grid: dict[Point, dict[str, str]] = {}
    for name in context.run_of(target_names(context.config, "staleness")):
        varied = changes(name)
        point = (
            float(varied.get(LEARNING_RATE, context.config.training.learning_rate)),
            int(varied.get(STALENESS, context.config.training.staleness)),
        )
        grid.setdefault(point, {})[without(name, *FREE)] = name
    return dict(sorted(grid.items()))


def measures(context: Context) -> dict[str, Callable[[str], dict[str, Value]]]:
    """What methods are compared by, each by seed."""
    return {
        "reward area": lambda name: reward_area(context, name),
        "reward, last": lambda name: trained(context.summary, name, "reward_end"),
    }


def comparisons(context: Context, grid: dict[Point, dict[str, str]]) -> list[tuple[Point, str, str, str, Estimate]]:
    """(point, method, reference, measure, paired difference): every method against QAT, TRACE and its like."""
    found = []
    for point, methods in grid.items():
        for rank, reference in enumerate(map(label, REFERENCES)):
            before = [label(name) for name in REFERENCES[: rank + 1]]
            for method, name in methods.items():
                # A pair of references stands once; the method's other changes are compared at the same old policy.
                if reference not in methods or method in before or not comparable(context, name, methods[reference]):
                    continue
                for measure, of in measures(context).items():
                    gap = difference(of(name), of(methods[reference]))
                    if gap is not None:
                        found.append((point, method, reference, measure, gap))
    return found


def comparable(context: Context, name: str, reference: str) -> bool:
    """Whether a pair is shown: anything against the plain methods, and against the others what has their old policy."""
    if without(reference, *FREE) in (REFERENCE, GUIDED):
        return True
    method = context.methods.get(name)
    return isinstance(method, RlMethod) and method.ratio.old_policy == "sampling"


def findings(context: Context, grid: dict[Point, dict[str, str]]) -> list[str]:
    """What the training part says of TRACE against QAT, and of the other methods against TRACE."""
    texts: dict[str, list[str]] = {"worse": [], "better": [], "open": []}
    cures: list[str] = []
    compared = comparisons(context, grid)
    for (rate, age), method, reference, measure, gap in compared:
        where = f"staleness {age}, lr {rate:g}, {measure} {points(gap)}"
        if (method, reference) == (GUIDED, REFERENCE):
            kind = "open" if not gap.resolved else "worse" if gap.mean < 0 else "better"
            texts[kind].append(where)
        elif reference == GUIDED and method not in ("bf16", "fp4_naive") and age and gap.resolved:
            cures.append(f"{method} {'above' if gap.mean > 0 else 'below'} trace at {where}")
    paragraphs = []
    if texts["worse"]:
        paragraphs.append(f"TRACE is worse than QAT: {'; '.join(texts['worse'])}.")
    if texts["better"]:
        paragraphs.append(f"TRACE is better than QAT: {'; '.join(texts['better'])}.")
    if texts["open"]:
        paragraphs.append(f"TRACE and QAT are not told apart: {'; '.join(texts['open'])}.")
    if cures:
        paragraphs.append(f"Resolved differences of the other methods to TRACE under staleness: {'; '.join(cures)}.")
    tested = [gap for *_, gap in compared if gap.source != "none"]
    if tested:
        paragraphs.append(
            f"{sum(gap.resolved for gap in tested)} of the {len(tested)} comparisons of the table below are resolved, "
            f"each at 5 %: about {len(tested) / 20:.0f} would be if nothing had any effect."
        )
    return paragraphs


def points(gap: Estimate) -> str:
    """A difference in points with its error."""
    return show(gap, signed=True)


def comparison_table(context: Context, grid: dict[Point, dict[str, str]]) -> Table:
    """Every comparison with its verdict."""
    rows = tuple(
        (f"{rate:g}", str(age), f"{method} − {reference}", measure, points(gap), str(gap.n), verdict(gap))
        for (rate, age), method, reference, measure, gap in comparisons(context, grid)
    )
    header = ("learning rate", "staleness", "difference", "of", "points", "n", "resolved?")
    return Table(header, rows, "Paired over seeds where there are several; points are hundredths.")


def verdict(gap: Estimate) -> str:
    """Which of the two is ahead, if that is resolved."""
    return ("first is higher" if gap.mean > 0 else "first is lower") if gap.resolved else "not resolved"


def training_table(context: Context, grid: dict[Point, dict[str, str]]) -> Table:
    """Every run of the grid in numbers."""
    summary, rows = context.summary, []
    for (rate, age), methods in grid.items():
        for method, name in methods.items():
            seeds = summary["methods"][name]
            rows.append(
                (
                    f"{rate:g}",
                    str(age),
                    method,
                    show(estimate(reward_area(context, name)), scale=1, digits=3),
                    show(estimate(trained(summary, name, "reward_end")), scale=1, digits=3),
                    show(estimate(trained(summary, name, "logprob_gap_mean")), scale=1, digits=4),
                    f"{sum(bool(record['collapsed']) for record in seeds.values())} of {len(seeds)}",
                    str(len(seeds)),
                )
            )
    header = (
        "learning rate",
        "staleness",
        "method",
        "reward area",
        "reward, last",
        "gap",
        "collapsed",
        "n",
    )
    caption = (
        "Reward at the sampling temperature, in the rollout's own precision; policies of this study are not evaluated."
    )
    return Table(header, tuple(rows), caption)


def reward_figures(context: Context, grid: dict[Point, dict[str, str]]) -> list[Figure]:
    """Reward over steps: a panel per staleness, a figure per learning rate."""
    figures = []
    for rate in dict.fromkeys(rate for rate, _ in grid):
        groups = {
            f"staleness {age}": {name: method for method, name in methods.items()}
            for (other, age), methods in grid.items()
            if other == rate
        }
        for key, words in (("reward", "reward"), ("gap_mean", "mean |Δ log p|")):
            svg = curve_panels(context.runs, key, groups=groups, ylabel=words)
            if svg is not None:
                caption = f"{words[0].upper()}{words[1:]} at learning rate {rate:g}; mean and range of the seeds."
                figures.append(Figure(f"staleness_{key}_{rate:g}".replace(".", "_"), svg, caption))
    return figures
