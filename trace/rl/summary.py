"""A finished run in a few numbers.

``collapsed`` is a stated rule, the same for every method: the mean reward of the last steps is below half of the best
that as many steps in a row reached, or an update of the last steps had a gradient that was not finite.
"""

import statistics
from collections.abc import Iterable

from trace_rl.models.checkpoint_io import finite_or_none

COLLAPSE_RATIO = 0.5
REWARD_WINDOW = 10
"""Steps at either end whose mean reward counts; fewer in a run of less than ten times as many."""


def mean_of(rows: Iterable[dict[str, float]], key: str) -> float | None:
    """Mean of a metric over the rows that have it."""
    values = [row[key] for row in rows if key in row]
    return statistics.fmean(values) if values else None


def best_mean(rows: list[dict[str, float]], *, window: int) -> float:
    """The highest mean reward of ``window`` steps in a row."""
    rewards = [row["reward"] for row in rows]
    return max(statistics.fmean(rewards[i : i + window]) for i in range(len(rewards) - window + 1))


def summarize(rows: list[dict[str, float]]) -> dict[str, object]:
    """Reward at both ends, gap, codeword mismatch, guidance bytes and median seconds per phase.

    Numbers that a diverging run left NaN or infinite are null: its page is still to be written.
    """
    window = min(REWARD_WINDOW, max(1, len(rows) // 10))
    start, end = mean_of(rows[:window], "reward"), mean_of(rows[-window:], "reward")
    best = best_mean(rows, window=window)
    skipped = [row.get("nonfinite_gradients", 0.0) for row in rows]
    skipped_lately = skipped[-1] > (skipped[-window - 1] if len(rows) > window else 0.0)
    phases = sorted({key for row in rows for key in row if key.startswith("seconds/")})
    diagnostics = sorted({key for row in rows for key in row if key.startswith("diag/")})
    summary = {
        "steps": len(rows),
        "reward_start": start,
        "reward_end": end,
        "reward_gain": end - start,
        "reward_best": best,
        "reward_window_steps": window,
        "nonfinite_gradients": skipped[-1],
        "logprob_gap_mean": mean_of(rows, "gap_mean"),
        "logprob_gap_p99": mean_of(rows, "gap_p99"),
        "logprob_gap_max": max(row["gap_max"] for row in rows),
        "codeword_mismatch": mean_of(rows, "diag/own/mismatch"),
        "adjacent_share": mean_of(rows, "diag/rtn/adjacent"),
        "response_length": mean_of(rows, "response_length"),
        "truncated_responses": mean_of(rows, "truncated_responses"),
        "guidance_bytes_per_token": mean_of(rows, "guidance_bytes_per_token") or 0.0,
        "guidance_scales_uncertain": mean_of(rows, "guidance_scales_uncertain"),
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows),
        "step_s": {
            key.removeprefix("seconds/"): statistics.median(row[key] for row in rows if key in row) for key in phases
        },
        "quantize_s": {
            part: statistics.median(row[f"quantize_s/{part}"] for row in rows) for part in ("activations", "weights")
        },
        "diagnostics": {key: mean_of(rows, key) for key in diagnostics},
        "collapsed": end < COLLAPSE_RATIO * best or skipped_lately,
    }
    return finite_or_none(summary)
