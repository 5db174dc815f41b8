"""Where low-bit guidance picks another codeword than whole codes would.

Guidance chooses between the two E2M1 neighbours {q-, q+} of the trainer's value on the rollout's scale. A *miss* is a
rollout code outside that bracket. Whole codes then take the member on its side; one bit takes the member of its parity.
Parities alternate along the signed ladder, so of codes outside,

    1, 3, ... rungs beyond the nearer member    one bit picks the farther member: a wrong pick
    2, 4, ... rungs                             one bit picks the nearer member, as whole codes do

and inside the bracket there is no wrong pick. ``rungs`` counts misses by that distance.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trace_rl.qat.collector import Collector, TensorCounts, ladder

MOST_RUNGS = 3
"""Distances from here on are counted together."""


@dataclass
class Picks:
    """Counts of one tensor of one layer."""

    values: int = 0
    misses: int = 0
    wrong: int = 0
    """Codes that differ from what whole codes would have chosen."""
    wrong_at_zero: int = 0
    """Of those, where the code or the whole-code choice is zero: there a wrong pick may change the sign."""
    rungs: list[int] = field(default_factory=lambda: [0] * MOST_RUNGS)
    """Misses by rungs beyond the bracket: 1, 2, 3 and more."""


@dataclass
class PickCollector(Collector):
    """A collector that also compares each code with the one whole codes would have chosen."""

    picks: dict[tuple[int, str], Picks] = field(default_factory=dict)

    def on_compared(self, *, layer: int, tensor: str, codes: Tensor, whole: Tensor, rollout: Tensor) -> None:
        count_picks(self.picks.setdefault((layer, tensor), Picks()), codes=codes, whole=whole, rollout=rollout)

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer and tensor: rates per value, and the counts behind them."""
        return [
            {"layer": layer, "tensor": tensor}
            | describe_counts(counts)
            | describe_picks(self.picks.get((layer, tensor)))
            for (layer, tensor), counts in sorted(self.tensors.items())
        ]


def count_picks(picks: Picks, *, codes: Tensor, whole: Tensor, rollout: Tensor) -> None:
    """Add unpacked codes [N, C] as rounded, as whole codes would have it, and as the rollout has it."""
    beyond = (ladder(whole) - ladder(rollout)).abs()
    wrong = ladder(codes) != ladder(whole)
    zero = (ladder(codes) == 0) | (ladder(whole) == 0)
    picks.values += codes.numel()
    picks.misses += int((beyond > 0).sum())
    picks.wrong += int(wrong.sum())
    picks.wrong_at_zero += int((wrong & zero).sum())
    counted = torch.bincount(beyond.clamp(max=MOST_RUNGS).reshape(-1).long(), minlength=MOST_RUNGS + 1)[1:]
    picks.rungs = [a + b for a, b in zip(picks.rungs, counted.tolist(), strict=True)]


def describe_counts(counts: TensorCounts) -> dict[str, Any]:
    """Rates and counts of one tensor, or of several added up."""
    values, blocks = max(1, counts.values), max(1, counts.blocks)
    return {
        "values": counts.values,
        "mismatch": counts.mismatches / values,
        "adjacent": counts.adjacent_share,
        "lower": counts.lower / values,
        "higher": counts.higher / values,
        "bracket_miss": counts.bracket_misses / values,
        "blocks": counts.blocks,
        "scale_mismatch": counts.scale_mismatches / blocks,
        "scale_steps_over_one": counts.scale_steps_over_one / blocks,
        "scale_recovery_failures": counts.scale_recovery_failures,
    }


def describe_picks(picks: Picks | None) -> dict[str, Any]:
    """Wrong picks per value, and misses by rungs."""
    if picks is None:
        return {}
    return {
        "wrong_pick": picks.wrong / max(1, picks.values),
        "wrong_at_zero": picks.wrong_at_zero / max(1, picks.wrong),
        "miss_rungs": picks.rungs,
    }
