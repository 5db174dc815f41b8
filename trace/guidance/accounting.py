"""Guidance bytes: per token, and per RL step at the paper's scale (METHOD.md section 3, "Bytes per token").

Every figure comes from the record layout that the engines really write, so the table cannot drift from the code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trace_rl.config.guidance import FULL, GuidanceSpec
from trace_rl.guidance.record import ModelDims, RecordLayout

SEQUENCES_PER_STEP = 4096  # 256 prompts x 16 samples
TOKENS_PER_SEQUENCE = 262144
LINK_BYTES_PER_S = 300e9

_KIB = 2**10
_TIB = 2**40


@dataclass(frozen=True)
class PlanRow:
    """One line of the table: what, how it is computed, the number in `unit`, and the exact bytes (0 if not bytes)."""

    name: str
    formula: str
    value: float
    unit: str
    num_bytes: int = 0

    @property
    def text(self) -> str:
        """The value as printed in the method's table."""
        if self.unit == "s":
            return f"{self.value:.0f} s"
        if self.unit == "x":
            return f"{self.value:.1f}x"
        if self.unit == "TiB" or self.value == round(self.value, 1):
            return f"{self.value:.1f} {self.unit}"
        return f"{self.value:.3f} {self.unit}" if self.value >= 1 else f"{self.value:.2f} {self.unit}"


def bytes_per_token(spec: GuidanceSpec, dims: ModelDims, *, block_size: int | Mapping[str, int] = 16) -> int:
    """Length of a token's record."""
    return RecordLayout.build(spec, dims, block_size=block_size).row_bytes


def plan(
    config: Any,
    *,
    spec: GuidanceSpec | None = None,
    sequences: int = SEQUENCES_PER_STEP,
    tokens: int = TOKENS_PER_SEQUENCE,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
    block_size: int | Mapping[str, int] = 16,
) -> list[PlanRow]:
    """The byte table of a model: config is a config.json dict (or config object), spec the compact guidance."""
    dims = ModelDims.from_config(config)
    compact = spec or GuidanceSpec()
    rows = []
    totals = {}
    for label, guidance in (("full", FULL), ("compact", compact)):
        for part, tensors in (("activations", ("fc1",)), ("KV", ("k", "v"))):
            rows.append(_per_token(f"{label}, {part}", guidance, dims, tensors, block_size))
        totals[label] = bytes_per_token(guidance, dims, block_size=block_size)
    ratio = totals["full"] / totals["compact"]
    rows.append(PlanRow("full / compact", f"{totals['full']} B / {totals['compact']} B", ratio, "x"))
    link = f"at {link_bytes_per_s / 1e9:g} GB/s"
    for label in ("full", "compact"):
        step_bytes = sequences * tokens * totals[label]
        formula = f"{sequences}*{tokens}*{totals[label]} B"
        rows.append(PlanRow(f"one RL step, {label} activations + KV", formula, step_bytes / _TIB, "TiB", step_bytes))
        seconds = step_bytes / link_bytes_per_s
        rows.append(PlanRow(f"one RL step, {label}, {link}", f"{step_bytes} B", seconds, "s"))
    cheap = compact.model_copy(update={"scale_bits": 2})
    rows.append(_per_token("compact, activations, 2-bit scales", cheap, dims, ("fc1",), block_size))
    return rows


def _per_token(
    name: str, spec: GuidanceSpec, dims: ModelDims, tensors: tuple[str, ...], block_size: int | Mapping[str, int]
) -> PlanRow:
    layout = RecordLayout.build(spec.model_copy(update={"tensors": tensors}), dims, block_size=block_size)
    layers = len({field.layer for field in layout.fields})
    values = sum(field.cols for field in layout.fields) // max(1, layers)
    block = layout.fields[0].block_size if layout.fields else 1
    formula = f"{layers}*{values}*({spec.bits} + {spec.scale_bits}/{block})/8"
    return PlanRow(name, formula, layout.row_bytes / _KIB, "KiB", layout.row_bytes)
