"""The gap under guidance at every combination of bits, layers, scale bits and tensors, on the same trajectories."""

from collections.abc import Callable, Sequence
from typing import Any

from trace_rl.report.document import Figure, Table
from trace_rl.report.estimate import Estimate, show, show_n
from trace_rl.report.figures.maps import Grid, heat_maps
from trace_rl.report.sections.gather import Picked, Policies, gather, seeds_note

LAYERS = ("last_eighth", "last_quarter", "deeper_half", "first_half", "all")
TENSORS = {"both": "activations and KV", "fc1": "activations", "kv": "KV"}
Combination = tuple[int, str, int, str]
"""Bits, layers, scale bits, tensors."""


def guidance_map(found: Policies, *, policy: str, words: str) -> Figure | None:
    """Gap under guidance at bits x layers, activations and KV, whole scales."""
    cells: dict[tuple[int, str], Estimate] = {}
    for bits in (1, 2, 3, 4):
        for layers in LAYERS:
            value = gather(found, lambda p, bits=bits, layers=layers: factorial_gap(p, bits=bits, layers=layers))
            if value is not None:
                cells[bits, layers] = value
    if not cells:
        return None
    bits = sorted({bits for bits, _ in cells})
    grid: Grid = (
        [f"{b} bit{'s' if b > 1 else ''}" for b in bits],
        [layers.replace("_", " ") for layers in LAYERS],
        [[cells[b, layers].mean if (b, layers) in cells else None for layers in LAYERS] for b in bits],
        [[show(cells.get((b, layers)), scale=1, digits=4) for layers in LAYERS] for b in bits],
    )
    svg = heat_maps({words: grid}, xlabel="guided layers", ylabel="", columns=1, width=6.5, log=True)
    if svg is None:
        return None
    return Figure(
        f"guidance_map_{policy}",
        svg,
        f"Mean |Δ log p| by bits and guided layers, activations and KV, {words}; {seeds_note(found)}.",
    )


def factorial_gap(
    policy: dict[str, Any], *, bits: int, layers: str, scale_bits: int = 8, tensors: str = "both"
) -> tuple[float, float] | None:
    """Gap of one combination with its error over trajectories."""
    row = row_of(policy, (bits, layers, scale_bits, tensors))
    return None if row is None else (row["gap_mean"], row["gap_stderr"])


def scale_table(found: Policies, words: str) -> Table | None:
    """Two-bit block scales beside whole ones, for one bit a value; failures counted."""
    rows = []
    for layers in LAYERS:
        for tensors, name in TENSORS.items():
            cells = [
                gather(
                    found,
                    lambda p, bits=scale_bits, layers=layers, tensors=tensors: factorial_gap(
                        p, bits=1, layers=layers, scale_bits=bits, tensors=tensors
                    ),
                )
                for scale_bits in (8, 2)
            ]
            if None in cells:
                continue
            failed, blocks = recovery(found, layers=layers, tensors=tensors)
            change = gather(
                found, lambda p, layers=layers, tensors=tensors: scale_change(p, layers=layers, tensors=tensors)
            )
            rows.append(
                (
                    layers.replace("_", " "),
                    name,
                    *(show(cell, scale=1, digits=5) for cell in cells),
                    show(change, scale=1, digits=6, signed=True),
                    f"{failed} of {blocks}",
                )
            )
    if not rows:
        return None
    header = (
        "guided layers",
        "tensors",
        "gap, 8-bit scales",
        "gap, 2-bit scales",
        "difference",
        "scales not recovered",
    )
    caption = (
        f"One bit a value; mean |Δ log p|, {words}; the difference is paired on the same trajectories; "
        f"{seeds_note(found)}. The bytes of both are under Storage."
    )
    return Table(header, tuple(rows), caption)


def scale_change(policy: dict[str, Any], *, layers: str, tensors: str) -> tuple[float, None] | None:
    """Gap with two-bit scales minus gap with whole ones, on the same trajectories."""
    two, eight = (factorial_gap(policy, bits=1, layers=layers, scale_bits=bits, tensors=tensors) for bits in (2, 8))
    return None if two is None or eight is None else (two[0] - eight[0], None)


def recovery(found: Policies, *, layers: str, tensors: str) -> tuple[int, int]:
    """(block scales that two bits did not recover, block scales), over seeds."""
    rows = [row for policy in found.values() if (row := row_of(policy, (1, layers, 2, tensors))) is not None]
    return sum(row["scale_recovery_failures"] for row in rows), sum(row["scale_blocks"] for row in rows)


def combination(row: dict[str, Any]) -> Combination:
    """What a row was measured at."""
    return row["bits"], row["layers"], row["scale_bits"], row["tensors"]


def row_of(policy: dict[str, Any], wanted: Combination) -> dict[str, Any] | None:
    """The row of one combination, when it was measured."""
    return next((row for row in policy["factorial"] if combination(row) == wanted), None)


def whole_table(policies: dict[str, Policies]) -> Table | None:
    """Every combination that was measured, in the order of measuring; ``policies``: {policy in words: by seed}."""
    every = [policy for found in policies.values() for policy in found.values()]
    measured = list(dict.fromkeys(combination(row) for policy in every for row in policy["factorial"]))
    if not measured:
        return None
    columns = ("gap mean", "mismatch (%)", "scales not recovered (%)", "n")
    header = (
        "bits",
        "guided layers",
        "scale bits",
        "tensors",
        "bytes per token",
        *(f"{column}, {words}" for words in policies for column in columns),
    )
    caption = (
        "Mean |Δ log p| and codeword mismatch over all layers and tensors. ± over seeds where n is above 1; with one "
        "seed the gap's is over its trajectories, and nothing else has one."
    )
    rows = tuple(
        (*described(every, wanted), *(cell for found in policies.values() for cell in left_by(found, wanted)))
        for wanted in measured
    )
    return Table(header, rows, caption, folded=f"All {len(rows)} combinations of bits, layers, scale bits and tensors")


def described(policies: Sequence[dict[str, Any]], wanted: Combination) -> tuple[str, ...]:
    """What a combination records, and its bytes, which follow from the layout alone."""
    bits, layers, scale_bits, tensors = wanted
    row = next(row for policy in policies if (row := row_of(policy, wanted)) is not None)
    return (
        str(bits),
        layers.replace("_", " "),
        str(scale_bits),
        TENSORS.get(tensors, tensors),
        str(row["bytes_per_token"]),
    )


def left_by(found: Policies, wanted: Combination) -> tuple[str, ...]:
    """What a combination leaves of one policy's gap and mismatch, scales it did not recover, and seeds."""

    def column(pick: Callable[[dict[str, Any]], Picked]) -> Estimate | None:
        return gather(found, lambda policy: None if (row := row_of(policy, wanted)) is None else pick(row))

    gap = column(lambda row: (row["gap_mean"], row["gap_stderr"]))
    return (
        show(gap, scale=1, digits=5),
        show(column(lambda row: (row["mismatch"]["all"], None)), digits=3),
        show(column(lambda row: (unrecovered(row), None)), digits=4),
        show_n(gap),
    )


def unrecovered(row: dict[str, Any]) -> float | None:
    """Share of the guided block scales that their recorded bits did not bring back; None where they are whole."""
    return row["scale_recovery_failures"] / row["scale_blocks"] if row.get("scale_blocks") else None
