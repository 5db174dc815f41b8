"""The paper's claims about codewords, gaps, bytes and seconds, beside this run's."""

import json
import re
from typing import Any

from trace_rl.guidance.accounting import plan
from trace_rl.report.accuracy_claims import TABLE4_WORDS, table4_cells
from trace_rl.report.claim import Claim, reported
from trace_rl.report.estimate import (
    COMPUTED,
    OPEN,
    OPPOSITE,
    OPPOSITE_BARE,
    SAME,
    SAME_BARE,
    UNTESTED,
    UNTIMED,
    WEAKER,
    WEAKER_BARE,
    Estimate,
    Value,
    difference,
    estimate,
    parity,
    quotient,
    show,
    trained,
    verdict,
)
from trace_rl.report.paper import PAPER_MODEL

ADJACENT = 0.99
"""Share of mismatches one codeword apart that the paper's ``>99`` percent asks for."""
MOSTLY = 0.9
"""Share from which on the observation holds in kind."""
SILENT = "no number in the accounts"


def mechanism_claims(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """Every claim that is not an accuracy."""
    return [*codeword_claims(summary, paper), *gap_claims(summary, paper), *cost_claims(summary, paper)]


def codeword_claims(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """What the paper observes of mismatching codewords."""
    rows = []
    adjacent = estimate(trained(summary, "qat", "diagnostics", "diag/own/adjacent"))
    if adjacent is not None:
        rows.append(
            Claim(
                topic="mismatch",
                statement="Mismatching codewords lie one step apart (plain QAT)",
                paper=f"{paper['observations']['mismatches_one_codeword_apart_percent']} %",
                here=f"{show(adjacent)} %, n = {adjacent.n}",
                verdict=adjacency_verdict(adjacent),
            )
        )
    rows += lower_corrections(summary, paper)
    rows += smaller(
        summary,
        topic="mismatch",
        statement="Guidance removes codeword mismatch of the guided tensors (deeper half, qat → trace)",
        keys=("diagnostics", "diag/own/mismatch/deeper_half"),
        scale=100.0,
        unit=" %",
    )
    return rows


def adjacency_verdict(share: Estimate) -> str:
    """Above 99 % with its whole error bar, below it with its whole error bar, or neither; bare without an error bar."""
    if share.source == "none":
        return SAME_BARE if share.mean > ADJACENT else WEAKER_BARE if share.mean > MOSTLY else OPPOSITE_BARE
    if share.mean - share.slack > ADJACENT:
        return SAME
    if share.mean + share.slack > ADJACENT:
        return OPEN
    return WEAKER if share.mean > MOSTLY else OPPOSITE


def lower_corrections(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """Where guidance lowers a codeword: where the trainer, rounding to nearest, lies above the rollout.

    Mismatch of either direction grows with depth, so more than half of *all* corrections lie in the deeper half. What
    decides is whether those to a lower codeword lie there more than those to a higher one, seed by seed.
    """
    lower, upper = (deeper_share(summary, "trace", direction) for direction in ("higher", "lower"))
    excess = difference(lower, upper)
    if excess is None:
        return []
    return [
        Claim(
            topic="mismatch",
            statement="Corrections to a lower codeword are concentrated in the deeper layers (TRACE)",
            paper=paper["observations"]["lower_codeword_corrections"],
            here=f"{show(estimate(lower))} % of them in the deeper half, of corrections to a higher codeword "
            f"{show(estimate(upper))} % (difference {show(excess, signed=True)}, n = {excess.n})",
            verdict=verdict(excess, expected=1),
        )
    ]


def deeper_share(summary: dict[str, Any], name: str, direction: str) -> dict[str, Value]:
    """Share of the trainer's codewords ``higher`` or ``lower`` than the rollout's that lies in the deeper half."""
    shares = {}
    for seed, record in summary["methods"].get(name, {}).items():
        found = record.get("diagnostics") or {}
        layers = {int(m[1]) for key in found if (m := re.fullmatch(r"diag/rtn/mismatch/\w+/(\d+)", key))}
        total, deeper = found.get(f"diag/rtn/{direction}"), found.get(f"diag/rtn/{direction}/deeper_half")
        if total and deeper is not None and layers:
            num_layers = max(layers) + 1
            shares[seed] = Value(deeper / total * (num_layers // 2) / num_layers)
    return shares


def gap_claims(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """The log-prob gap, and its largest values under score centering."""
    control = estimate(trained(summary, "bf16", "logprob_gap_mean"))
    rows = smaller(
        summary,
        topic="dynamics",
        statement="Guidance closes the log-prob gap between trainer and rollout (mean |Δ log p|, qat → trace)",
        keys=("logprob_gap_mean",),
        digits=4,
        after="" if control is None else f", BF16 control {show(control, scale=1, digits=4)}",
    )
    for column, pair in table4_cells(summary).items():
        if pair.keys() == {"qat", "trace"}:
            rows += smaller(
                summary,
                topic="table4",
                statement=f"Guidance closes the log-prob gap in MXFP4 {TABLE4_WORDS[column]} (mean |Δ log p|, "
                "qat → trace)",
                keys=("logprob_gap_mean",),
                digits=4,
                names=(pair["qat"], pair["trace"]),
            )
    largest = {name: estimate(trained(summary, name, "logprob_gap_max")) for name in ("sc", "trace")}
    if all(largest.values()):
        low, high = paper["table6"]["sc_logprob_diff_max"]
        here = ", ".join(f"{name} {show(found, scale=1, digits=2)}, n = {found.n}" for name, found in largest.items())
        rows.append(
            Claim(
                topic="table6",
                statement="Largest log-prob difference under score centering",
                paper=f"{low}–{high} (TRACE: {reported(None)})",
                here=f"{here} (largest of any token and step)",
                verdict=UNTESTED,
            )
        )
    return rows


def smaller(
    summary: dict[str, Any],
    *,
    topic: str,
    statement: str,
    keys: tuple[str, ...],
    scale: float = 1.0,
    digits: int = 2,
    unit: str = "",
    after: str = "",
    names: tuple[str, str] = ("qat", "trace"),
) -> list[Claim]:
    """The claim that a training number of TRACE lies below that of QAT; the paper gives no number for it.

    ``names``: the two methods, QAT first.
    """
    qat, trace = (trained(summary, name, *keys) for name in names)
    gap = difference(trace, qat)
    if gap is None:
        return []
    texts = (show(estimate(values), scale=scale, digits=digits) for values in (qat, trace))
    here = f"{' → '.join(texts)}{unit}{after}, n = {gap.n}"
    return [Claim(topic, statement, SILENT, here, verdict(gap, expected=-1))]


def cost_claims(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """Seconds and bytes."""
    decoding = Claim(
        topic="time",
        statement="Decoding speed of FP4 over BF16 at 128K tokens",
        paper=f"{paper['efficiency']['decode_speedup_128k']}x",
        here="FP4 is emulated here; docs/performance.md predicts decoding from a model of the hardware",
        verdict=UNTESTED,
    )
    return [*step_claims(summary, paper), decoding, *byte_claims(summary, paper)]


def step_claims(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """Seconds of a step: stated, not judged.

    Trainings go side by side. The seeds of a method may all have had the same neighbours, those of another method
    others, so a spread over seeds need not hold what the neighbours cost.
    """
    efficiency = paper["efficiency"]
    naive, trace = (trained(summary, name, "step_s", "step") for name in ("fp4_naive", "trace"))
    times = quotient(trace, naive)
    overhead = estimate({seed: Value(value.mean - 1.0) for seed, value in times.items()})
    if overhead is None:
        return []
    step = efficiency["step_time"]
    seconds = " → ".join(show(estimate(values), scale=1, digits=2) for values in (naive, trace))
    parts = ", ".join(f"{part.replace('_', ' ')} {share} %" for part, share in efficiency["breakdown_percent"].items())
    weights, activations = (
        show(estimate(quotient(trained(summary, "trace", "quantize_s", part), trace)))
        for part in ("weights", "activations")
    )
    return [
        Claim(
            topic="time",
            statement="A step of TRACE takes longer than one of naive FP4 (here FP4 is emulated on CPU)",
            paper=f"{step['fp4_naive']} → {step['trace']} (unit not stated), +{step['overhead_percent']} %",
            here=f"{seconds} s, {show(overhead, signed=True)} %, n = {overhead.n}",
            verdict=UNTIMED,
        ),
        Claim(
            topic="time",
            statement="What the added time is made of",
            paper=parts,
            here=f"quantizing weights {weights} %, activations and KV {activations} % of a step, n = {len(trace)}; the "
            "paper's parts are not timed apart here",
            verdict=UNTESTED,
        ),
    ]


def byte_claims(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """The ratio measured here, and the six figures of the paper's own model from the same record layout."""
    guidance, rows = paper["guidance"], []
    full, compact = (trained(summary, name, "guidance_bytes_per_token") for name in ("trace_full", "trace"))
    ratio = estimate(quotient(full, compact))
    if ratio is not None and ratio.mean:
        sizes = " / ".join(show(estimate(values), scale=1, digits=0) for values in (full, compact))
        rows.append(
            Claim(
                topic="storage",
                statement="Compact guidance is a sixth of full guidance (bytes per token)",
                paper=f"{guidance['ratio']}x",
                here=f"{sizes} = {show(ratio, scale=1)}x, n = {ratio.n}",
                verdict=SAME if abs(ratio.mean / guidance["ratio"] - 1) < 0.05 else OPPOSITE,
            )
        )
    computed = {row.name: row for row in plan(json.loads(PAPER_MODEL.read_text()))}
    for name, key, unit in (
        ("full, activations", "full_activation_kib_per_token", " KiB"),
        ("full, KV", "full_kv_kib_per_token", " KiB"),
        ("compact, activations", "compact_kib_per_token", " KiB"),
        ("full / compact", "ratio", "x"),
        ("one RL step, full activations + KV", "step_tib", " TiB"),
        ("one RL step, full, at 300 GB/s", "step_transfer_s", " s"),
    ):
        number, row = guidance.get(key), computed[name]
        agrees = None if number is None else abs(row.value / number - 1) < 0.02
        rows.append(
            Claim(
                topic="storage",
                statement=f"Qwen3.5-35B-A3B, computed from the record layout: {name}",
                paper=reported(None) if number is None else f"{number}{unit}",
                here=row.text,
                verdict=UNTESTED if agrees is None else COMPUTED if agrees else OPPOSITE,
            )
        )
    return rows


def parity_step_claim(summary: dict[str, Any], curves: dict[str, list[float]], paper: dict[str, Any]) -> list[Claim]:
    """Whether TRACE's reward ends on par with BF16's, with the step from which its curve is no longer below.

    ``curves``: smoothed reward by step of `trace` and `bf16`, means over seeds. Two equal methods cross somewhere by
    chance, so the step is a description; the paired difference of the last rewards decides.
    """
    behind = difference(*(trained(summary, name, "reward_end") for name in ("trace", "bf16")))
    if behind is None or not {"trace", "bf16"} <= curves.keys():
        return []
    pairs = list(zip(curves["trace"], curves["bf16"], strict=False))
    below = [step for step, (trace, bf16) in enumerate(pairs) if trace < bf16]
    first = below[-1] + 1 if below else 0
    crossing = f"no longer below it from step {first} of {len(pairs)}"
    if first == len(pairs):
        crossing = f"below it at the last of {len(pairs)} steps"
    return [
        Claim(
            topic="dynamics",
            statement="TRACE's reward reaches that of BF16 RL during training (10-step means)",
            paper=f"step {paper['observations']['bf16_parity_step']}",
            here=f"{show(behind, signed=True)} points at the end, n = {behind.n}; {crossing}",
            verdict=parity(behind),
        )
    ]
