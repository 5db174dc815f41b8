"""Numbers of the analysis artifacts over seeds: each comes with the error of its own trajectories."""

from collections.abc import Callable
from typing import Any

from trace_rl.report.estimate import Estimate, Value, estimate

Policies = dict[int, dict[str, Any]]
"""One policy's part of the artifact, by seed."""
Picked = tuple[float | None, float | None] | None
"""A mean and its error, either unknown."""


def seeds_note(found: Policies) -> str:
    """What the ± of such a table is."""
    if len(found) > 1:
        return f"± over n = {len(found)} seeds"
    return "n = 1 seed, ± over its trajectories"


def gather(found: Policies, pick: Callable[[dict[str, Any]], Picked]) -> Estimate | None:
    """(mean, error) of each seed's policy as one estimate; seeds without it do not count."""
    values = {}
    for seed, policy in found.items():
        picked = pick(policy)
        if picked is not None and picked[0] is not None:
            values[str(seed)] = Value(picked[0], picked[1])
    return estimate(values)
