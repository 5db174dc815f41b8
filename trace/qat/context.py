"""The state of one forward: which rounding is in force, what guides it, who listens.

A ``ForwardState`` exists only inside ``with qat.forward(...)``. The registered functions and hooks look it up through
the handle on their module; outside, they refuse to run, so no forward ever happens at an unstated precision. With
activation checkpointing the backward must also run inside the block, since it repeats the forward.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from trace_rl.config.quant import SCOPE_OF, QuantSpec
from trace_rl.guidance.record import RecordLayout
from trace_rl.qat.collector import Collector

Mode = Literal["off", "rtn", "guided", "record"]
"""``off``: BF16. ``rtn``: own rounding everywhere. ``guided``: the rollout's where recorded. ``record``: rtn, handing
out what it rounded to."""


class Recorder(Protocol):
    """Receives what a ``record`` forward rounded to, rows in [B*T] order."""

    def on_codes(self, layer: int, tensor: str, codes: Tensor, block_scale: Tensor) -> None:
        """Unpacked codes uint8 [N, C] and block scales uint8 [N, C/block], N = B*T (for ``fc2``: expert slots)."""

    def on_operand(self, layer: int, tensor: str, x: Tensor) -> None:
        """The FC1 input [N, H] as the experts multiply with it."""

    def on_experts(self, moe_index: int, ids: Tensor) -> None:
        """Selected expert ids [N, K] of the ``moe_index``-th MoE layer."""


@dataclass
class ForwardState:
    """What one forward needs; rows are the batch's positions flattened to N = B*T."""

    mode: Mode
    quant: QuantSpec
    rows: Tensor | None = None
    """uint8 [N, row_bytes] guidance rows."""
    layout: RecordLayout | None = None
    valid: Tensor | None = None
    """bool [N]: positions that have a record."""
    invalid_index: Tensor | None = None
    """int64: positions without one, rounded by themselves."""
    expert_ids: Tensor | None = None
    """int64 [N, moe_layers, K]: the rollout's routing."""
    replay: bool = True
    """Replay ``expert_ids``; otherwise they are only compared with the model's own choice."""
    collector: Collector | None = None
    recorder: Recorder | None = None
    kv_in_cache: bool = False
    """K and V are quantized by the cache as they enter it, not by the attention function."""
    replayed_layers: set[int] = field(default_factory=set)

    def quantizes(self, tensor: str) -> bool:
        """Whether this forward quantizes the tensor ``fc1``, ``fc2``, ``k`` or ``v``."""
        return self.mode != "off" and getattr(self.quant, SCOPE_OF[tensor])

    def touches_alone(self, *, layer: int, tensor: str) -> bool:
        """Whether someone wants this tensor by itself: a recorder, or a collector that counts it."""
        return self.recorder is not None or (
            self.collector is not None and self.collector.wants(layer=layer, tensor=tensor)
        )

    def touches(self, *, layer: int, tensor: str) -> bool:
        """Whether the tensor must pass through ``Qat.quantize``: to be rounded, or to be counted."""
        counted = self.collector is not None and self.collector.wants(layer=layer, tensor=tensor)
        return counted or self.quantizes(tensor)
