"""One claim of the paper beside what this run measured."""

from dataclasses import dataclass
from typing import Any

from trace_rl.report.estimate import Estimate, accuracies, difference, estimate, show, verdict
from trace_rl.report.labels import base

NOT_REPORTED = "not reported"
"""Stands in a cell of the paper that the public accounts do not give."""


@dataclass(frozen=True)
class Claim:
    """One row of the table paper | here | same direction?; ``topic`` is the section it belongs to."""

    topic: str
    statement: str
    paper: str
    here: str
    verdict: str

    @property
    def evidence(self) -> str:
        return f"{self.statement} (paper {self.paper}; here {self.here})"


def reported(value: object) -> str:
    """A number of the paper as it stands there."""
    return NOT_REPORTED if value is None else str(value)


def own_execution(name: str) -> str:
    """The execution a policy is meant for: BF16 for `bf16` and its variants, FP4 for all others."""
    return "bf16" if base(name) == "bf16" else "fp4"


def show_difference(found: Estimate) -> str:
    """A difference of accuracies in points, with what its error is."""
    source = f"n = {found.n}" if found.source == "seeds" else "error of the evaluation"
    return f"{show(found, signed=True)}, {source}"


def accuracy_difference(summary: dict[str, Any], first: str, second: str) -> tuple[str, Estimate] | None:
    """("a vs b (difference)", paired difference) in the execution each is meant for; None when one was not run."""
    a, b = (accuracies(summary, name, own_execution(name)) for name in (first, second))
    gap = difference(a, b)
    if gap is None:
        return None
    return f"{show(estimate(a))} vs {show(estimate(b))} (difference {show_difference(gap)})", gap


def compare_accuracy(
    summary: dict[str, Any],
    *,
    topic: str,
    statement: str,
    first: str,
    second: str,
    paper: tuple[object, object],
    expected: int,
) -> list[Claim]:
    """The claim that ``first`` is better (``expected`` 1) or worse (-1) than ``second``; empty when one was not run."""
    compared = accuracy_difference(summary, first, second)
    if compared is None:
        return []
    here, gap = compared
    numbers = " vs ".join(map(reported, paper))
    return [Claim(topic, statement, numbers, here, verdict(gap, expected=expected))]
