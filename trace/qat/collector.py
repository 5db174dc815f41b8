"""Counts of where trainer and rollout disagree: codewords, block scales, routing (METHOD.md section 7).

The rollout's *whole* codes are the reference: a record with ``bits=4`` (of all layers, to see the unguided ones too).
A forward in mode ``rtn`` with a collector measures plain QAT; one in mode ``guided``, what guidance leaves.

A codeword mismatch compares codes alone, whatever the two block scales are. *Adjacent* means one step apart on the
signed ladder -6 … 6 (both zeros are code 0, so the ladder has 15 rungs). *Lower* and *higher* say where the trainer's
codeword lies relative to the rollout's. A *bracket miss* is a rollout codeword that is neither neighbour of the
trainer's value on the rollout's scale: there, low-bit guidance may pick a wrong codeword.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats.quantized import Format
from trace_rl.guidance.align import align_codes
from trace_rl.guidance.record import RecordLayout


@dataclass
class TensorCounts:
    """Counters of one (layer, tensor); ``values`` and ``blocks`` are the denominators."""

    values: int = 0
    mismatches: int = 0
    adjacent: int = 0
    lower: int = 0
    higher: int = 0
    bracket_misses: int = 0
    blocks: int = 0
    scale_mismatches: int = 0
    scale_steps_over_one: int = 0
    scale_recovery_failures: int = 0

    def add(self, other: "TensorCounts") -> None:
        """Add another counter in place."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def mismatch_rate(self) -> float:
        """Mismatching codewords per value; 0 when nothing was compared."""
        return self.mismatches / self.values if self.values else 0.0

    @property
    def adjacent_share(self) -> float:
        """Share of the mismatches that are one codeword apart; 1 when there are none."""
        return self.adjacent / self.mismatches if self.mismatches else 1.0


@dataclass
class RoutingCounts:
    """The model's own choice against the rollout's in one MoE layer."""

    tokens: int = 0
    disagreeing_tokens: int = 0
    slots: int = 0
    disagreeing_slots: int = 0


@dataclass
class Collector:
    """Pass one to ``Qat.forward(collect=...)``; it accumulates over forwards until ``clear``.

    ``reference`` is (rows uint8 [B, T, row_bytes], layout with bits=4); None counts routing only. Set it anew for
    every batch.
    """

    reference: tuple[Tensor, RecordLayout] | None = None
    tensors: dict[tuple[int, str], TensorCounts] = field(default_factory=dict)
    routing: dict[int, RoutingCounts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reference is not None and self.reference[1].spec.bits != 4:
            raise UserError("codeword mismatch needs the rollout's whole codes; record with bits: 4 on metric steps")

    def clear(self) -> None:
        """Forget everything counted so far."""
        self.tensors.clear()
        self.routing.clear()

    def wants(self, *, layer: int, tensor: str) -> bool:
        """Whether the reference holds this tensor."""
        return self.reference is not None and self.reference[1].field(layer, tensor) is not None

    def on_codes(
        self,
        *,
        fmt: Format,
        layer: int,
        tensor: str,
        x: Tensor,
        codes: Tensor,
        block_scale: Tensor,
        encode_scale: float,
        valid: Tensor,
    ) -> None:
        """Compare the trainer's codes [N, C] and block scales [N, C/block] with the reference at valid rows."""
        rows, layout = self.reference
        keep = valid.nonzero().squeeze(1)
        ref_codes, ref_scales = layout.read(rows.reshape(-1, rows.shape[-1])[keep], layer, tensor)
        codes, block_scale, x = codes[keep], block_scale[keep], x[keep]
        step = ladder(codes) - ladder(ref_codes)
        counts = TensorCounts(
            values=step.numel(),
            mismatches=int((step != 0).sum()),
            adjacent=int((step.abs() == 1).sum()),
            lower=int((step < 0).sum()),
            higher=int((step > 0).sum()),
            blocks=block_scale.numel(),
        )
        nearest = align_codes(x, ref_scales, ref_codes, 4, encode_scale, fmt=fmt)
        counts.bracket_misses = int((nearest != ref_codes).sum())
        if layout.spec.scale_bits == 8:
            scale_step = (block_scale.int() - ref_scales.int()).abs()
            counts.scale_mismatches = int((scale_step != 0).sum())
            counts.scale_steps_over_one = int((scale_step > 1).sum())
        self.tensors.setdefault((layer, tensor), TensorCounts()).add(counts)
        self.on_compared(layer=layer, tensor=tensor, codes=codes, whole=nearest, rollout=ref_codes)

    def on_compared(self, *, layer: int, tensor: str, codes: Tensor, whole: Tensor, rollout: Tensor) -> None:
        """For collectors that count more; unpacked codes uint8 [N, C] of the valid rows.

        As the trainer rounded, as whole codes would have it on the rollout's scale, and as the rollout has it.
        """

    def on_scale_recovery(self, *, layer: int, tensor: str, recovered: Tensor, valid: Tensor, detected: int) -> None:
        """Count block scales that two recorded bits did not bring back: exactly, or only the detected ones."""
        failures = detected
        if self.wants(layer=layer, tensor=tensor) and self.reference[1].spec.scale_bits == 8:
            rows, layout = self.reference
            keep = valid.nonzero().squeeze(1)
            _, ref_scales = layout.read(rows.reshape(-1, rows.shape[-1])[keep], layer, tensor)
            failures = int((recovered[keep] != ref_scales).sum())
        counts = self.tensors.setdefault((layer, tensor), TensorCounts())
        counts.scale_recovery_failures += failures

    def on_routing(self, *, layer: int, live: Tensor, replayed: Tensor, valid: Tensor) -> None:
        """Compare live expert sets [N, K] with the rollout's at valid rows."""
        live, replayed = live[valid], replayed[valid]
        missing = (replayed.unsqueeze(2) != live.unsqueeze(1)).all(dim=2)
        counts = self.routing.setdefault(layer, RoutingCounts())
        counts.tokens += missing.shape[0]
        counts.disagreeing_tokens += int(missing.any(dim=1).sum())
        counts.slots += missing.numel()
        counts.disagreeing_slots += int(missing.sum())

    def total(self, tensor: str | None = None, *, layers: tuple[int, ...] | None = None) -> TensorCounts:
        """Sum over layers and tensors, optionally of one tensor or of some layers."""
        out = TensorCounts()
        for (layer, name), counts in self.tensors.items():
            if (tensor is None or name == tensor) and (layers is None or layer in layers):
                out.add(counts)
        return out

    def router_disagreement(self) -> float:
        """Share of (token, MoE layer) pairs whose live expert set differs from the rollout's."""
        tokens = sum(c.tokens for c in self.routing.values())
        return sum(c.disagreeing_tokens for c in self.routing.values()) / tokens if tokens else 0.0


def ladder(codes: Tensor) -> Tensor:
    """Rung -7 … 7 of E2M1 codes on the signed ladder, int16."""
    magnitude = (codes & 7).to(torch.int16)
    return torch.where(codes >= 8, -magnitude, magnitude)
