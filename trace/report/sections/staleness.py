"""Guidance and staleness, a question of this project: does the importance ratio see a stale rollout, and what follows?

Two parts. The ratio table forces the old tokens through the refitted engine and asks how well each trainer's log-ratio
tracks the engine's own (`trace_rl.stages.ratio`). The training part compares methods at every staleness and learning
rate, paired over seeds; its verdicts are stated whichever way they come out. The compared rewards are those of the
rollouts, so a pair whose rollouts are executed in different precisions gets no verdict: its difference is that of the
executions as much as of the methods.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trace_rl.config.method import RlMethod
from trace_rl.config.quant import SCOPES
from trace_rl.config.targets import target_names
from trace_rl.report.claim import own_execution
from trace_rl.report.context import Context
from trace_rl.report.document import Figure, Section, Table
from trace_rl.report.estimate import Estimate, Value, difference, estimate, show, trained
from trace_rl.report.figures.curves import curve_panels
from trace_rl.report.labels import changes, label, without
from trace_rl.report.sections.dynamics import reward_area
from trace_rl.report.sections.losses import loss_activity, mean_over_steps
from trace_rl.report.sections.ratios import ratio_blocks

STALENESS, LEARNING_RATE = "training.staleness", "training.learning_rate"
FREE = (STALENESS, LEARNING_RATE, "training.steps")
"""Keys of the grid; what is left of a name is the method of a line."""
REFERENCE, GUIDED = "qat", "trace"
REFERENCES = (REFERENCE, GUIDED, *(f"{name}@ratio.old_policy=current" for name in (REFERENCE, GUIDED)))
"""What the others are compared with; those whose old policy is the current one, with their like as well."""
OTHER_EXECUTION = "other execution"

Point = tuple[float, int]
"""Learning rate and staleness."""


@dataclass(frozen=True)
class Comparison:
    """A paired difference of two methods at one point of the grid."""

    point: Point
    method: str
    reference: str
    measure: str
    gap: Estimate
    same_execution: bool
    """Whether both sampled their rewards in the same precision."""

    @property
    def verdict(self) -> str:
        """Which of the two is ahead, if that is resolved and says something about the methods."""
        if not self.same_execution:
            return OTHER_EXECUTION
        if not self.gap.resolved:
            return "not resolved"
        return "first is higher" if self.gap.mean > 0 else "first is lower"


def staleness(context: Context) -> Section:
    """Ratio table, then training."""
    grid = staleness_grid(context)
    names = [name for methods in grid.values() for name in methods.values()]
    blocks: list[str | Table | Figure] = [
        "The paper does not raise this question: this is a result of this project, told as it came out. "
        "Guidance pins the trainer's rounding to the rollout's, also where a newer policy would round otherwise. Does "
        "the importance ratio still see that a rollout is stale, and what does training make of it?",
        *old_policies(context, grid),
        *(findings(context, grid) if grid else ["No training under staleness on this page."]),
        *clipping(context, grid),
    ]
    collapsed = context.collapsed(names)
    if collapsed:
        blocks.append(f"Collapsed runs, shown like all others: {', '.join(collapsed)}.")
    blocks += ratio_blocks(context)
    if grid:
        tables = (comparison_table(context, grid), training_table(context, grid))
        blocks += [*(table for table in tables if table.rows), *loss_activity(context, names)]
        blocks += reward_figures(context, grid)
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


def old_policies(context: Context, grid: dict[Point, dict[str, str]]) -> list[str]:
    """Which pi_old the clipped ratio of the arms takes."""
    by_method = {method: name for methods in grid.values() for method, name in methods.items()}
    arms: dict[str, list[str]] = {"sampling": [], "current": []}
    for method, name in by_method.items():
        if old_policy := old_policy_of(context, name):
            arms[old_policy].append(method)
    paragraphs = []
    if arms["sampling"]:
        paragraphs.append(
            "Old policy of the clipped ratio pi_theta / pi_old: the version that sampled the batch, as in GRPO, for "
            f"{'; '.join(arms['sampling'])}. Their clipping can act on a stale batch, and the truncated weight "
            "pi_old / pi_rollout holds the mismatch of the two programs alone."
        )
    if arms["current"]:
        paragraphs.append(
            f"Controls, whose old policy is the one before the batch's update: {'; '.join(arms['current'])}. At one "
            "update per batch their clipped ratio is 1, nothing is clipped, and the staleness sits in the truncated "
            "mismatch weight."
        )
    return paragraphs


def old_policy_of(context: Context, name: str) -> str | None:
    """The method's ``ratio.old_policy``; None without settings, and for a loss that has no pi_old."""
    method = context.methods.get(name)
    if not isinstance(method, RlMethod) or not method.loss.uses_old_policy:
        return None
    return method.ratio.old_policy


def execution(context: Context, name: str) -> str:
    """The precision a method samples its rewards in: the FP4 scopes of its rollout and their formats."""
    method = context.methods.get(name)
    if not isinstance(method, RlMethod):
        return own_execution(name)
    scopes = [scope for scope in SCOPES if getattr(method.rollout, scope)]
    return f"{', '.join(scopes)} in {method.formats(context.config.format)}" if scopes else "bf16"


def comparisons(context: Context, grid: dict[Point, dict[str, str]]) -> list[Comparison]:
    """Every method against QAT, TRACE and its like."""
    found = []
    for point, methods in grid.items():
        for rank, reference in enumerate(map(label, REFERENCES)):
            before = [label(name) for name in REFERENCES[: rank + 1]]
            for method, name in methods.items():
                # A pair of references stands once; the method's other changes are compared at the same old policy.
                if reference not in methods or method in before or not comparable(context, name, methods[reference]):
                    continue
                alike = execution(context, name) == execution(context, methods[reference])
                for measure, of in measures(context).items():
                    gap = difference(of(name), of(methods[reference]))
                    if gap is not None:
                        found.append(Comparison(point, method, reference, measure, gap, alike))
    return found


def comparable(context: Context, name: str, reference: str) -> bool:
    """Whether a pair is shown: anything against the plain methods, and against the others what has their old policy."""
    return without(reference, *FREE) in (REFERENCE, GUIDED) or old_policy_of(context, name) == "current"


def findings(context: Context, grid: dict[Point, dict[str, str]]) -> list[str]:
    """What the training part says of TRACE against QAT, and of the other methods against TRACE."""
    texts: dict[str, list[str]] = {"worse": [], "better": [], "open": []}
    cures: list[str] = []
    compared = [pair for pair in comparisons(context, grid) if pair.same_execution]
    for pair in compared:
        (rate, age), gap = pair.point, pair.gap
        where = f"staleness {age}, lr {rate:g}, {pair.measure} {points(gap)}"
        if (pair.method, pair.reference) == (GUIDED, REFERENCE):
            kind = "open" if not gap.resolved else "worse" if gap.mean < 0 else "better"
            texts[kind].append(where)
        elif pair.reference == GUIDED and pair.method != "fp4_naive" and age and gap.resolved:
            cures.append(f"{pair.method} {'above' if gap.mean > 0 else 'below'} trace at {where}")
    paragraphs = []
    if texts["worse"]:
        paragraphs.append(f"TRACE is worse than QAT: {'; '.join(texts['worse'])}.")
    if texts["better"]:
        paragraphs.append(f"TRACE is better than QAT: {'; '.join(texts['better'])}.")
    if texts["open"]:
        paragraphs.append(f"TRACE and QAT are not told apart: {'; '.join(texts['open'])}.")
    if cures:
        paragraphs.append(f"Resolved differences of the other methods to TRACE under staleness: {'; '.join(cures)}.")
    tested = [pair.gap for pair in compared if pair.gap.source != "none"]
    if tested:
        paragraphs.append(
            f"{sum(gap.resolved for gap in tested)} of the {len(tested)} comparisons of the table below whose rewards "
            f"were sampled in the same execution are resolved, each at 5 %: about {len(tested) / 20:.0f} would be if "
            "nothing had any effect."
        )
    return paragraphs


def clipping(context: Context, grid: dict[Point, dict[str, str]]) -> list[str]:
    """What share of the response tokens (mean over steps, in percent) each arm clips where a batch is stale."""
    cells = []
    for (rate, age), methods in grid.items():
        shares = {
            method: mean_over_steps(context, name, "clip_fraction")
            for method, name in methods.items()
            if age and old_policy_of(context, name) == "sampling"
        }
        texts = [f"{method} {show(share, digits=2)} %" for method, share in shares.items() if share is not None]
        if texts:
            cells.append(f"at staleness {age}, lr {rate:g}, {', '.join(texts)}")
    if not cells:
        return []
    return [
        f"Clipped tokens: {'; '.join(cells)}. The ratio of BF16 forwards moves with the update alone. Between forwards "
        "that each round to nearest it moves with FP4 rounding flips as well, and clipping cannot tell the two apart; "
        "forwards that both follow the rollout share its flips."
    ]


def points(gap: Estimate) -> str:
    """A difference in points with its error."""
    return show(gap, signed=True)


def comparison_table(context: Context, grid: dict[Point, dict[str, str]]) -> Table:
    """Every comparison with its verdict."""
    rows = tuple(
        (
            f"{pair.point[0]:g}",
            str(pair.point[1]),
            f"{pair.method} − {pair.reference}",
            pair.measure,
            points(pair.gap),
            str(pair.gap.n),
            pair.verdict,
        )
        for pair in comparisons(context, grid)
    )
    header = ("learning rate", "staleness", "difference", "of", "points", "n", "resolved?")
    caption = "Paired over seeds where there are several; points are hundredths."
    if any(row[-1] == OTHER_EXECUTION for row in rows):
        caption += (
            f" {OTHER_EXECUTION[0].upper()}{OTHER_EXECUTION[1:]}: rewards are those of the rollouts, and these two are "
            "executed in different precisions, so that the difference is no effect of the method alone; not counted."
        )
    return Table(header, rows, caption)


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
