"""The gap under guidance at every combination of bits, layers, scale bits and tensors, on the same trajectories."""

from typing import Any

from trace_rl.report.document import Figure, Table
from trace_rl.report.estimate import Estimate, show
from trace_rl.report.figures.maps import Grid, heat_maps
from trace_rl.report.sections.gather import Policies, gather, seeds_note

LAYERS = ("last_eighth", "last_quarter", "deeper_half", "first_half", "all")


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
    for row in policy["factorial"]:
        if (row["bits"], row["layers"], row["scale_bits"], row["tensors"]) == (bits, layers, scale_bits, tensors):
            return row["gap_mean"], row["gap_stderr"]
    return None


def scale_table(found: Policies, words: str) -> Table | None:
    """Two-bit block scales beside whole ones, for one bit a value; failures counted."""
    rows = []
    for layers in LAYERS:
        for tensors, name in (("both", "activations and KV"), ("fc1", "activations"), ("kv", "KV")):
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
    failed = blocks = 0
    for policy in found.values():
        for row in policy["factorial"]:
            if (row["bits"], row["layers"], row["scale_bits"], row["tensors"]) == (1, layers, 2, tensors):
                failed += row["scale_recovery_failures"]
                blocks += row["scale_blocks"]
    return failed, blocks
