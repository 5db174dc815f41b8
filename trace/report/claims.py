"""The paper's claims, each beside what this run measured, with a verdict that knows its own error bar.

A verdict is ``same direction``, ``opposite direction`` or ``not resolved``: the last when the difference is within two
standard errors of zero. That is for accuracies; gaps, codewords, bytes and seconds come from so many tokens, or are
exact, that their direction alone counts (``weaker``: the paper's direction, short of its number). "On par" is the same
direction only when a loss of more than five points is excluded. Standard
errors are those of the evaluation (binomial) or, with several seeds, of the seeds; the
larger one counts. A claim whose methods are not in the suite is left out, never guessed.
"""

import math
import statistics
from dataclasses import dataclass
from typing import Any

RESOLVED_AT = 2.0
"""Standard errors a difference must reach to be called resolved."""
PARITY_MARGIN = 0.05
"""Largest loss of accuracy that still counts as on par; its whole error bar must lie within."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error."""

    mean: float
    stderr: float
    n: int

    def __sub__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.mean - other.mean, math.hypot(self.stderr, other.stderr), min(self.n, other.n))


@dataclass(frozen=True)
class Claim:
    """One row of the table paper | here | same direction?"""

    statement: str
    paper: str
    here: str
    verdict: str

    @property
    def disagrees(self) -> bool:
        return self.verdict == "opposite direction"


def average(summary: dict[str, Any], name: str, execution: str) -> Estimate | None:
    """Mean accuracy over tasks, pooled over seeds; None when the method is not in the suite."""
    seeds = summary["methods"].get(name)
    if not seeds:
        return None
    per_seed, variance, n = [], 0.0, 0
    for record in seeds.values():
        scores = [task[execution] for task in record["accuracy"].values()]
        per_seed.append(statistics.fmean(score["mean"] for score in scores))
        variance += sum(score["stderr"] ** 2 for score in scores) / len(scores) ** 2
        n += sum(score["n"] for score in scores)
    within = math.sqrt(variance) / len(per_seed)
    between = statistics.stdev(per_seed) / math.sqrt(len(per_seed)) if len(per_seed) > 1 else 0.0
    return Estimate(statistics.fmean(per_seed), max(within, between), n)


def seed_mean(summary: dict[str, Any], name: str, key: str, *inner: str) -> float | None:
    """Mean over seeds of a training number; None when absent."""
    values = []
    for record in summary["methods"].get(name, {}).values():
        value: Any = record.get(key)
        for part in inner:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            values.append(value)
    return statistics.fmean(values) if values else None


def verdict(difference: Estimate, *, expected: int) -> str:
    """Direction of a difference against the paper's sign."""
    if abs(difference.mean) <= RESOLVED_AT * difference.stderr:
        return "not resolved"
    return "same direction" if math.copysign(1, difference.mean) == expected else "opposite direction"


def parity(difference: Estimate) -> str:
    """Whether a difference is no loss of more than ``PARITY_MARGIN``, a resolved loss, or neither."""
    slack = RESOLVED_AT * difference.stderr
    if difference.stderr == 0:  # all right or all wrong: nothing was measured
        return "not resolved"
    if difference.mean + slack < 0:
        return "opposite direction"
    return "same direction" if difference.mean - slack > -PARITY_MARGIN else "not resolved"


def show(estimate: Estimate) -> str:
    """Percent with standard error."""
    return f"{100 * estimate.mean:.1f} ± {100 * estimate.stderr:.1f}"


def claims(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """Every claim this suite can test."""
    rows: list[Claim] = []
    table = paper["table1"]["average"]
    accuracy = {
        "bf16": average(summary, "bf16", "bf16"),
        "qat": average(summary, "qat", "fp4"),
        "trace": average(summary, "trace", "fp4"),
        "ptq_nvfp4": average(summary, "ptq_nvfp4", "fp4"),
    }

    def compare(statement: str, first: str, second: str, *, reported: tuple[float, float], expected: int) -> None:
        a, b = accuracy[first], accuracy[second]
        if a is None or b is None:
            return
        difference = a - b
        rows.append(
            Claim(
                statement=statement,
                paper=f"{reported[0]} vs {reported[1]}",
                here=f"{show(a)} vs {show(b)} (difference {show(difference)})",
                verdict=verdict(difference, expected=expected),
            )
        )

    compare(
        "Plain FP4 QAT loses accuracy against BF16 RL",
        "qat",
        "bf16",
        reported=(table["qat"], table["bf16"]),
        expected=-1,
    )
    compare("TRACE beats plain QAT", "trace", "qat", reported=(table["trace"], table["qat"]), expected=1)
    if accuracy["trace"] and accuracy["bf16"]:
        difference = accuracy["trace"] - accuracy["bf16"]
        rows.append(
            Claim(
                statement="TRACE in FP4 execution is on par with BF16 RL in BF16 execution",
                paper=f"{table['trace']} vs {table['bf16']}",
                here=f"{show(accuracy['trace'])} vs {show(accuracy['bf16'])} (difference {show(difference)})",
                verdict=parity(difference),
            )
        )
    compare(
        "FP4 in the loop beats quantizing the BF16 policy afterwards",
        "trace",
        "ptq_nvfp4",
        reported=(paper["table7"]["trace"], paper["table7"]["ptq_nvfp4"]),
        expected=1,
    )
    rows += mismatch_claims(summary, paper)
    rows += cost_claims(summary, paper)
    return rows


def mismatch_claims(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """What the paper observes of codewords, and the gap that guidance closes."""
    rows = []
    adjacent = seed_mean(summary, "qat", "diagnostics", "diag/own/adjacent")
    if adjacent is not None:
        rows.append(
            Claim(
                statement="Mismatching codewords lie one step apart",
                paper=f"{paper['observations']['mismatches_one_codeword_apart_percent']} %",
                here=f"{100 * adjacent:.1f} %",
                verdict="same direction" if adjacent > 0.99 else "weaker" if adjacent > 0.9 else "opposite direction",
            )
        )
    gaps = {name: seed_mean(summary, name, "logprob_gap_mean") for name in ("bf16", "qat", "trace", "trace_full")}
    if gaps["qat"] is not None and gaps["trace"] is not None:
        control = f", BF16 control {gaps['bf16']:.4f}" if gaps["bf16"] is not None else ""
        rows.append(
            Claim(
                statement="Guidance closes the log-prob gap between trainer and rollout (mean |Δ log p|, qat → trace)",
                paper="no number in the accounts",
                here=f"{gaps['qat']:.4f} → {gaps['trace']:.4f}{control}",
                verdict="same direction" if gaps["trace"] < gaps["qat"] else "opposite direction",
            )
        )
    qat = seed_mean(summary, "qat", "diagnostics", "diag/own/mismatch/deeper_half")
    guided = seed_mean(summary, "trace", "diagnostics", "diag/own/mismatch/deeper_half")
    if qat is not None and guided is not None:
        rows.append(
            Claim(
                statement="Guidance removes codeword mismatch of the guided tensors (deeper half, qat → trace)",
                paper="no number in the accounts",
                here=f"{100 * qat:.2f} % → {100 * guided:.3f} %",
                verdict="same direction" if guided < qat else "opposite direction",
            )
        )
    return rows


def cost_claims(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """Step time and bytes."""
    rows = []
    naive = seed_mean(summary, "fp4_naive", "step_s", "step")
    trace = seed_mean(summary, "trace", "step_s", "step")
    if naive and trace:
        overhead = 100 * (trace / naive - 1)
        rows.append(
            Claim(
                statement="Step-time overhead of TRACE over naive FP4 (here FP4 is emulated on CPU)",
                paper=f"+{paper['efficiency']['step_time']['overhead_percent']} %",
                here=f"{overhead:+.1f} %",
                verdict="same direction" if overhead > 0 else "opposite direction",
            )
        )
    full = seed_mean(summary, "trace_full", "guidance_bytes_per_token")
    compact = seed_mean(summary, "trace", "guidance_bytes_per_token")
    if full and compact:
        ratio = full / compact
        rows.append(
            Claim(
                statement="Compact guidance is a sixth of full guidance (bytes per token)",
                paper=f"{paper['guidance']['ratio']}x",
                here=f"{full:.0f} / {compact:.0f} = {ratio:.1f}x",
                verdict="same direction"
                if abs(ratio / paper["guidance"]["ratio"] - 1) < 0.05
                else "opposite direction",
            )
        )
    return rows
