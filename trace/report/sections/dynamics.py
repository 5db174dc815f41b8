"""Training curves: reward, log-prob gap, entropy and length, and the reward table behind them."""

from collections.abc import Sequence

from trace_rl.config.targets import target_names
from trace_rl.report.context import COLLAPSE_RULE, Context
from trace_rl.report.document import Figure, Section, Table
from trace_rl.report.estimate import Value, estimate, show, trained
from trace_rl.report.figures.curves import curve
from trace_rl.report.labels import label
from trace_rl.report.sections.opening import opening

CURVES = (
    ("reward", "reward", "reward", False, "Reward at the sampling temperature."),
    ("gap", "gap_mean", "mean |Δ log p|", True, "Train-rollout gap on the sampled tokens, as the method computes it."),
    ("entropy", "entropy", "entropy (nats)", False, "Entropy of the trainer's policy."),
    ("length", "response_length", "response length (tokens)", False, "Response length."),
)
READING = "Line: 10-step mean, averaged over seeds; band: lowest and highest seed; faint: raw values."


def dynamics(context: Context) -> Section:
    """The paper's figures over steps."""
    names = context.run_of(target_names(context.config, "dynamics"))
    return Section(
        "Dynamics",
        [
            *opening(context.about("dynamics"), collapsed=context.collapsed(names)),
            reward_table(context, names),
            *curve_figures(context, names),
        ],
    )


def learning_section(context: Context) -> Section:
    """The same for all methods of the core suite, run by run."""
    names = list(context.summary["methods"])
    gap = "gap"  # stands with the mismatch there
    figures = [figure for figure in curve_figures(context, names) if figure.name != gap]
    return Section("Learning", [reward_table(context, names), *figures])


def curve_figures(context: Context, names: Sequence[str], *, prefix: str = "") -> list[Figure]:
    """One figure per metric that was logged."""
    found = []
    for name, key, ylabel, log, caption in CURVES:
        svg = curve(context.runs, key, names=list(names), ylabel=ylabel, log=log)
        if svg is not None:
            found.append(Figure(f"{prefix}{name}", svg, f"{caption} {READING}"))
    return found


def reward_table(context: Context, names: Sequence[str]) -> Table:
    """Reward at both ends, reward area, seeds and collapsed runs of every trained method."""
    summary, rows, window = context.summary, [], 0
    for name in context.run_of(list(names)):
        start, end, gain = (trained(summary, name, key) for key in ("reward_start", "reward_end", "reward_gain"))
        if not start:
            continue
        records = summary["methods"][name].values()
        window = max(window, *(record["reward_window_steps"] for record in records))
        rows.append(
            (
                label(name),
                str(max(record["steps"] for record in records)),
                show(estimate(start), scale=1, digits=3),
                show(estimate(end), scale=1, digits=3),
                show(estimate(gain), scale=1, digits=3, signed=True),
                show(estimate(reward_area(context, name)), scale=1, digits=3),
                f"{sum(bool(record['collapsed']) for record in records)} of {len(records)}",
                str(len(start)),
            )
        )
    header = ("method", "steps", "reward, first", "reward, last", "gain", "area", "collapsed", "n")
    caption = (
        f"Reward at the sampling temperature, averaged over the first and last {window} steps; area is its mean "
        f"over all steps; ± over seeds, none with one. {COLLAPSE_RULE}"
    )
    return Table(header, tuple(rows), caption)


def reward_area(context: Context, name: str) -> dict[str, Value]:
    """Mean reward over all steps of each seed."""
    areas = {}
    for (method, seed), rows in context.runs.items():
        rewards = [row["reward"] for row in rows if "reward" in row] if method == name else []
        if rewards:
            areas[str(seed)] = Value(sum(rewards) / len(rewards))
    return areas
