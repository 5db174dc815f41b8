"""The paper's claims, each beside what this run measured, with a verdict that knows its own error bar.

A verdict is ``same direction``, ``weaker`` (the paper's direction, short of its number), ``opposite direction``, ``not
resolved``, or ``not tested`` when the paper or this run has no number, or none that compares (seconds of trainings
that had different neighbours); `trace_rl.report.estimate` states the rule. A claim whose methods were not run is left
out, never guessed.
"""

from typing import Any

from trace_rl.report.accuracy_claims import accuracy_claims
from trace_rl.report.claim import Claim
from trace_rl.report.mechanism_claims import mechanism_claims


def claims(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """Every claim this suite can test."""
    return [*accuracy_claims(summary, paper), *mechanism_claims(summary, paper)]
