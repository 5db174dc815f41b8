"""Means over seeds with their standard errors, differences between methods, and when a difference is resolved.

The rule of every verdict in the report:

- With several seeds a number is the mean over seeds with the standard error of that mean (their standard deviation
  divided by sqrt(n)). Two methods are compared by their *paired* differences: same seed, hence same prompts in the same
  order and the same evaluation problems. The difference is resolved when it exceeds t standard errors of the paired
  mean, t being the 97.5 % quantile of Student's distribution with n - 1 degrees of freedom (4.3 for three seeds, not 2:
  the spread of three numbers is itself badly known). Seeds that agree exactly fall back on the evaluation's own error,
  which they share: their problems are the same, so it does not shrink with their number.
- With one seed an accuracy carries the evaluation's own (binomial) error, named as such, and a difference is resolved
  beyond two of them. Gaps, codewords and rewards of one seed have no known error: their direction is shown as such and
  neither agrees nor disagrees with the paper.
- Seconds of trainings get no verdict: they shared the machine with different neighbours.
- "On par" is the same direction only when a loss of more than five points is excluded by the whole error bar.

The standard error of seeds holds the start policy and the evaluation problems fixed: it says how RL scatters, not how
another start policy would. About one in twenty comparisons without an effect comes out resolved.
"""

import math
import statistics
from dataclasses import dataclass
from typing import Any, Literal

RESOLVED_AT = 2.0
"""Standard errors of the evaluation a difference must reach, with one seed, to be called resolved."""
PARITY_MARGIN = 0.05
"""Largest loss of accuracy that still counts as on par; its whole error bar must lie within."""
SAME_NUMBER = 1e-12
"""Relative spread below which seeds agree but for the rounding of sums."""
_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t for 1 to 10 degrees of freedom."""

SAME, WEAKER, OPPOSITE, OPEN = "same direction", "weaker", "opposite direction", "not resolved"
UNTESTED = "not tested"
"""Verdicts; ``weaker`` is the paper's direction short of its number, ``not tested`` has no number on one side."""
UNTIMED = "not tested: timed beside other jobs"
"""Seconds of trainings that shared the machine with different neighbours: their differences are not the methods'."""
SAME_BARE, OPPOSITE_BARE = "same direction, error unknown", "opposite direction, error unknown"
WEAKER_BARE = "weaker, error unknown"
"""One seed's numbers that have no error of their own."""
COMPUTED = "agrees, computed"
"""A figure that follows from a formula: agreement is no measurement."""
UNMEASURED = (UNTESTED, UNTIMED, COMPUTED)
"""Verdicts that are counted neither as agreement nor as disagreement."""

Source = Literal["seeds", "evaluation", "none"]


def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t; from eleven degrees on a bound from above, within 1 %."""
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom; a spread needs at least two seeds")
    if degrees <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees - 1]
    return 1.96 + 2.7 / degrees


@dataclass(frozen=True)
class Value:
    """One seed's number with the error of its own measurement, when it has one."""

    mean: float
    stderr: float | None = None


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` seeds with its standard error and where that comes from; ``none``: a bare number."""

    mean: float
    stderr: float
    n: int
    source: Source = "evaluation"

    @property
    def slack(self) -> float:
        """What the mean must exceed to differ from zero."""
        return (t_quantile(self.n - 1) if self.source == "seeds" else RESOLVED_AT) * self.stderr

    @property
    def resolved(self) -> bool:
        """Whether the mean is beyond its error; a bare number has none and is not."""
        return self.source != "none" and abs(self.mean) > self.slack


def estimate(values: dict[str, Value]) -> Estimate | None:
    """Mean over seeds; None without any."""
    if not values:
        return None
    n = len(values)
    means = [value.mean for value in values.values()]
    errors = [value.stderr for value in values.values() if value.stderr is not None]
    mean = statistics.fmean(means)
    spread = statistics.stdev(means) if n > 1 else 0.0
    if spread > SAME_NUMBER * max(map(abs, means)):
        return Estimate(mean, spread / math.sqrt(n), n, "seeds")
    if len(errors) == n:
        return Estimate(mean, statistics.fmean(errors), n, "evaluation")
    return Estimate(mean, 0.0, n, "none")


def difference(first: dict[str, Value], second: dict[str, Value]) -> Estimate | None:
    """Paired difference ``first - second`` over the seeds both have; None when they share none."""
    paired = {}
    for seed in first.keys() & second.keys():
        a, b = first[seed], second[seed]
        known = a.stderr is not None and b.stderr is not None
        paired[seed] = Value(a.mean - b.mean, math.hypot(a.stderr, b.stderr) if known else None)
    return estimate(dict(sorted(paired.items())))


def quotient(first: dict[str, Value], second: dict[str, Value]) -> dict[str, Value]:
    """``first / second`` of training numbers, for every seed that has both; their own errors are not carried."""
    common = sorted(first.keys() & second.keys())
    return {seed: Value(first[seed].mean / second[seed].mean) for seed in common if second[seed].mean}


def accuracies(summary: dict[str, Any], name: str, execution: str, *, task: str | None = None) -> dict[str, Value]:
    """Accuracy of each seed, on one task or as the mean over tasks; empty when the method was not
    evaluated."""
    values = {}
    for seed, record in summary["methods"].get(name, {}).items():
        if not record["accuracy"]:
            continue
        tasks = record["accuracy"] if task is None else {task: record["accuracy"][task]}
        scores = [by_execution[execution] for by_execution in tasks.values()]
        stderr = math.hypot(*(score["stderr"] for score in scores)) / len(scores)
        values[seed] = Value(statistics.fmean(score["mean"] for score in scores), stderr)
    return values


def trained(summary: dict[str, Any], name: str, key: str, *inner: str) -> dict[str, Value]:
    """A training number of each seed that has it."""
    values = {}
    for seed, record in summary["methods"].get(name, {}).items():
        value: Any = record.get(key)
        for part in inner:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            values[seed] = Value(float(value))
    return values


def average(summary: dict[str, Any], name: str, execution: str) -> Estimate | None:
    """Mean accuracy over tasks and seeds; None when the method was not run."""
    return estimate(accuracies(summary, name, execution))


def seed_mean(summary: dict[str, Any], name: str, key: str, *inner: str) -> float | None:
    """Mean over seeds of a training number; None when absent."""
    found = estimate(trained(summary, name, key, *inner))
    return None if found is None else found.mean


def verdict(gap: Estimate, *, expected: int) -> str:
    """Direction of a difference against the paper's sign."""
    agrees = math.copysign(1, gap.mean) == expected
    if gap.source == "none" and gap.mean:
        return SAME_BARE if agrees else OPPOSITE_BARE
    if not gap.resolved:
        return OPEN
    return SAME if agrees else OPPOSITE


def parity(gap: Estimate) -> str:
    """Whether a difference is no loss of more than ``PARITY_MARGIN``, a resolved loss, or neither."""
    if gap.stderr == 0:  # all right or all wrong: nothing was measured
        return OPEN
    if gap.mean + gap.slack < 0:
        return OPPOSITE
    return SAME if gap.mean - gap.slack > -PARITY_MARGIN else OPEN


def show(found: Estimate | None, *, scale: float = 100.0, digits: int = 1, signed: bool = False) -> str:
    """``mean ± standard error``, in percent unless scaled otherwise; a bare number has no error to show."""
    if found is None:
        return "–"
    mean = f"{scale * found.mean:{'+' if signed else ''}.{digits}f}"
    return mean if found.source == "none" else f"{mean} ± {scale * found.stderr:.{digits}f}"


def show_n(found: Estimate | None) -> str:
    """Number of seeds behind an estimate."""
    return "–" if found is None else str(found.n)


def error_note(num_seeds: int) -> str:
    """What the ± of a table is."""
    if num_seeds > 1:
        return (
            f"± is the standard error over n = {num_seeds} seeds unless the row's n says otherwise: how RL scatters on "
            "one start policy and one set of problems."
        )
    return "n = 1 seed: ± is the evaluation's own (binomial) standard error; training numbers have none."


def resolution_rule(num_seeds: int) -> str:
    """When a page calls a difference resolved."""
    if num_seeds > 1:
        rule = (
            f"Methods are compared seed by seed; a difference is resolved beyond {t_quantile(num_seeds - 1):.1f} "
            f"standard errors of its paired mean (Student's t, n = {num_seeds})"
        )
    else:
        rule = (
            "With one seed a difference of accuracies is resolved beyond two standard errors of the evaluation, and "
            "nothing else is"
        )
    return f"{rule}; about one in twenty comparisons without an effect comes out resolved."
