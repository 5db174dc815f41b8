"""Where the gap comes from, beyond the paper: its sources, where it sits, and what each kind of guidance leaves.

Measured on the same trajectories, by switching one source off at a time (`trace_rl.stages.gap_sources`).
The error is that of the seeds when there are several, else over the trajectories of the one.
"""

from typing import Any

from trace_rl.report.context import Context
from trace_rl.report.document import Figure, Section, Table
from trace_rl.report.estimate import Estimate, show
from trace_rl.report.sections.factorial import guidance_map, scale_table, whole_table
from trace_rl.report.sections.gather import Picked, Policies, gather, seeds_note

PARTS = {
    "format": "computing in BF16 instead of the rollout's format (added to the gap of QAT)",
    "scales": "block scales that differ",
    "codes": "values that round to the other side on the same scale",
    "rounding": "FP4 rounding flips of FC1 input, K and V (scales + codes)",
    "engine": "engine noise: order of operations, and FC2 flips (what full guidance leaves)",
    "left_by_trace": "what one bit in the deeper half leaves of the rounding flips",
    "routing_qat": "routing flips without R3, QAT",
    "routing_trace": "routing flips without R3, TRACE",
    "routing_full": "routing flips without R3, full guidance",
    "routing_bf16_trainer": "routing flips without R3, BF16 trainer",
}
FORWARDS = {
    "bf16": "BF16",
    "qat": "QAT (nearest)",
    "recorded_scale": "nearest on the recorded scale",
    "trace": "TRACE, 1 bit, deeper half",
    "trace_gated": "TRACE, gated",
    "trace_all": "TRACE, 1 bit, all layers",
    "full": "whole codes, all layers",
}
COMPARISONS = {
    "bf16": "BF16 trainer",
    "qat": "QAT (nearest)",
    "recorded_scale": "nearest on the recorded scale",
    "trace": "TRACE, 1 bit, deeper half",
    "trace_all": "TRACE, 1 bit, all layers",
    "full": "whole codes, all layers",
    "bf16_no_r3": "BF16 trainer, without R3",
    "qat_no_r3": "QAT, without R3",
    "trace_no_r3": "TRACE, without R3",
    "full_no_r3": "whole codes, without R3",
    "qat_weights": "QAT of weights alone",
    "qat_weights_activations": "QAT of weights and activations",
    "qat_weights_kv": "QAT of weights and KV",
    "qat_activations_kv": "QAT of activations and KV",
    "bf16_both": "BF16 engine and trainer",
    "bf16_both_no_r3": "BF16 engine and trainer, without R3",
    "bf16_both_on_fp4_tokens_no_r3": "BF16 engine and trainer on the FP4 engine's tokens, without R3",
    "engine_fp4_rescored": "FP4 engine on its own tokens, as a prefill (no trainer)",
    "engine_bf16_on_fp4_tokens": "BF16 engine on the FP4 engine's tokens (no trainer)",
}
POLICIES = {"start": "policy before RL", "trace": "policy trained by TRACE"}


def gap_sources(context: Context) -> Section | None:
    """The section, or None when the analysis was not run."""
    artifacts = context.analysis.get("gap_sources") or {}
    if not artifacts:
        return None
    blocks: list[str | Table | Figure] = [
        "The paper has no such analysis; this is a measurement of this project. Each source is switched off on the "
        "same rollouts, so the parts are paired."
    ]
    by_policy = {}
    for policy, words in POLICIES.items():
        found = {seed: a["policies"][policy] for seed, a in artifacts.items() if policy in a["policies"]}
        if not found:
            continue
        by_policy[words] = found
        blocks += [
            reading(found, words),
            decomposition_table(found, words),
            sources_table(found, words),
            *where_tables(found, words),
            *layer_tables(found, words),
            *bracket_tables(found, words),
        ]
        figure = guidance_map(found, policy=policy, words=words)
        blocks += [figure] if figure is not None else []
        recovery = scale_table(found, words)
        blocks += [recovery] if recovery is not None else []
    whole = whole_table(by_policy)
    blocks += [whole] if whole is not None else []
    return Section("Where the gap comes from", blocks)


def part_of(found: Policies, name: str, *, share: bool = False) -> Estimate | None:
    """A part of the decomposition, or its share of QAT's gap."""

    def pick(policy: dict[str, Any]) -> Picked:
        part = policy["decomposition"].get(name)
        if part is None:
            return None
        return (part["share_of_qat"], None) if share else (part["mean"], part["stderr"])

    return gather(found, pick)


def reading(found: Policies, words: str) -> str:
    """The decomposition in one sentence."""
    rounding, engine, routing = (part_of(found, name, share=True) for name in ("rounding", "engine", "routing_qat"))
    texts = []
    for share, what in ((rounding, "FP4 rounding flips"), (engine, "engine noise and FC2")):
        if share is not None:
            texts.append(f"{show(share)} % of QAT's gap is {what}")
    if routing is not None:
        texts.append(f"without routing replay it would be larger by {show(routing)} %")
    return f"{words[0].upper()}{words[1:]}: {'; '.join(texts)}."


def decomposition_table(found: Policies, words: str) -> Table:
    """Parts of the gap."""
    rows = tuple(
        (text, show(part, scale=1, digits=5), show(part_of(found, name, share=True)), str(part.n))
        for name, text in PARTS.items()
        if (part := part_of(found, name)) is not None
    )
    return Table(("source", "mean abs Δ log p", "share of QAT's gap (%)", "n"), rows, f"Parts of the gap, {words}.")


def sources_table(found: Policies, words: str) -> Table:
    """The gap and the codeword mismatch of every comparison."""
    measured = {name for policy in found.values() for name in policy["sources"]}
    names = [name for name in COMPARISONS if name in measured] + sorted(measured - COMPARISONS.keys())

    def column(name: str, key: str, error: str | None = None) -> Estimate | None:
        def pick(policy: dict[str, Any]) -> Picked:
            row = policy["sources"].get(name, {})
            return (row[key], row[error] if error else None) if key in row else None

        return gather(found, pick)

    rows = []
    for name in names:
        mismatch = gather(
            found,
            lambda policy, name=name: (
                (rate, None)
                if (rate := policy["sources"].get(name, {}).get("mismatch", {}).get("all")) is not None
                else None
            ),
        )
        rows.append(
            (
                COMPARISONS.get(name, name),
                show(column(name, "gap_mean", "gap_stderr"), scale=1, digits=5),
                show(column(name, "gap_p99"), scale=1, digits=4),
                show(column(name, "gap_max"), scale=1, digits=2),
                show(mismatch, digits=3),
            )
        )
    return Table(
        ("trainer or comparison", "gap mean", "gap p99", "gap max", "mismatch (%)"),
        tuple(rows),
        f"Each against the log-probs the FP4 engine sampled with unless it says otherwise, {words}; "
        f"{seeds_note(found)}.",
    )


def where_tables(found: Policies, words: str) -> list[Table]:
    """The gap by token entropy and by position."""
    tables = []
    for kind, unit in (("entropy", "nats"), ("position", "tokens")):
        any_policy = next(iter(found.values()))["where"][kind]
        forwards = list(any_policy)
        bins = max((len(policy["where"][kind][forwards[0]]) for policy in found.values()), default=0)
        rows = []
        for index in range(bins):
            cells, tokens, interval = [], 0, ""
            for forward in forwards:

                def row_of(policy: dict[str, Any], forward: str = forward) -> dict[str, Any]:
                    table = policy["where"][kind][forward]  # noqa: B023 - called within this iteration
                    return table[index] if index < len(table) else {}  # noqa: B023

                first = next((row for policy in found.values() if (row := row_of(policy))), {})
                upper = "" if first.get("below") is None else f"{first['below']:g}"
                interval = f"{first['from']:g}–{upper}" if upper else f"from {first['from']:g}"
                tokens = sum(row_of(policy).get("tokens", 0) for policy in found.values())
                mean = gather(
                    found,
                    lambda policy, row_of=row_of: (
                        (row["mean"], row["stderr"]) if "mean" in (row := row_of(policy)) else None
                    ),
                )
                share = gather(
                    found,
                    lambda policy, row_of=row_of: (row["share"], None) if "share" in (row := row_of(policy)) else None,
                )
                cells.append(f"{show(mean, scale=1, digits=4)} ({show(share, digits=0)} %)" if mean else "–")
            rows.append((interval, str(tokens), *cells))
        header = (f"{kind} ({unit})", "tokens", *(FORWARDS.get(name, name) for name in forwards))
        tables.append(
            Table(
                header,
                tuple(rows),
                f"Mean |Δ log p| and its share of the whole, by {kind} of the token, {words}; {seeds_note(found)}.",
            )
        )
    return tables


def layer_tables(found: Policies, words: str) -> list[Table]:
    """What following whole codes in one layer takes off the gap, and what leaving out one leaves."""
    layers = sorted({row["layer"] for policy in found.values() for row in policy.get("layers", [])})
    rows = []
    for layer in layers:

        def cell(key: str, layer: int = layer) -> str:
            def pick(policy: dict[str, Any]) -> Picked:
                for row in policy.get("layers", []):
                    if row["layer"] == layer:
                        return row[key]["mean"], row[key]["stderr"]
                return None

            return show(gather(found, pick), scale=1, digits=5)

        rows.append((str(layer), cell("alone"), cell("without")))
    if not rows:
        return []
    header = ("layer", "taken off QAT's gap by following it alone", "left when it alone is not followed")
    caption = (
        f"Mean |Δ log p|, whole codes of FC1 input, K and V, {words}; {seeds_note(found)}. Layers do not add up: a "
        "code that flips in one moves every value behind it."
    )
    return [Table(header, tuple(rows), caption)]


def bracket_tables(found: Policies, words: str) -> list[Table]:
    """Bracket misses and wrong picks by layer and tensor under the paper's default."""
    rows = []
    keys = list(
        dict.fromkeys((row["layer"], row["tensor"]) for p in found.values() for row in p["codes"].get("trace_all", []))
    )
    for layer, tensor in keys:

        def cell(forward: str, key: str, layer: int = layer, tensor: str = tensor) -> str:
            def pick(policy: dict[str, Any]) -> Picked:
                for row in policy["codes"].get(forward, []):
                    if (row["layer"], row["tensor"]) == (layer, tensor) and key in row:
                        return row[key], None
                return None

            return show(gather(found, pick), digits=4)

        rows.append(
            (
                str(layer),
                tensor,
                cell("qat", "mismatch"),
                cell("trace", "bracket_miss"),
                cell("trace", "wrong_pick"),
                cell("trace_all", "bracket_miss"),
                cell("trace_all", "wrong_pick"),
            )
        )
    if not rows:
        return []
    header = (
        "layer",
        "tensor",
        "mismatch, QAT (%)",
        "bracket misses, deeper half guided (%)",
        "picked otherwise than whole codes (%)",
        "bracket misses, all layers guided (%)",
        "picked otherwise than whole codes (%)",
    )
    caption = (
        f"Where one bit may differ from whole codes, {words}. A miss is a rollout codeword outside the two neighbours "
        f"of the trainer's value; in layers that are not guided the pick is the nearest codeword; {seeds_note(found)}."
    )
    return [Table(header, tuple(rows), caption)]
