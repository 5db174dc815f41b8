"""Static global scales of activations and KV cache, one per layer: written by calibration, read by both sides.

The rollout engine cannot look ahead at a tensor's largest value, and the guidance record has no room for per-token
FP32 scales, so the encode scale G of every quantized activation is fixed per layer (METHOD.md section 2). Larger
values than calibration saw saturate at the block scale 448; they do not fail.

Calibration also leaves the order of the experts' input channels by residual, for methods that compensate it
(`trace_rl.formats.residual`): like the scales it must not depend on the batch.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trace_rl.errors import UserError

TENSORS = ("fc1", "fc2", "k", "v")
COMPENSATED = ("fc1", "fc2")
"""Tensors whose residual can be compensated."""
RESIDUAL = "residual"

ChannelOrder = dict[str, dict[int, tuple[int, ...]]]
"""By tensor and layer: all channels, those with the largest residual first."""


@dataclass(frozen=True)
class StaticScales:
    """Encode scale G by layer id for the FC1 input, FC2 input, K and V; channels by residual for the first two."""

    fc1: dict[int, float] = field(default_factory=dict)
    fc2: dict[int, float] = field(default_factory=dict)
    k: dict[int, float] = field(default_factory=dict)
    v: dict[int, float] = field(default_factory=dict)
    residual: ChannelOrder = field(default_factory=dict)
    """Empty where calibration did not measure it."""

    def get(self, tensor: str, layer: int) -> float:
        """The encode scale, or a UserError naming the missing entry."""
        try:
            return getattr(self, tensor)[layer]
        except KeyError:
            raise UserError(
                f"static scales have no entry for tensor {tensor!r} of layer {layer}: "
                "they were calibrated on another model; run the calibration stage again"
            ) from None

    def channel_order(self, tensor: str, layer: int) -> tuple[int, ...]:
        """All channels of a tensor, largest residual first; UserError where calibration did not measure them."""
        order = self.residual.get(tensor, {}).get(layer)
        if order is None:
            raise UserError(
                f"the calibration has no residual channels for tensor {tensor!r} of layer {layer}, which residual: "
                "channels needs; run the calibration stage again (`trace-rl calibrate`)"
            )
        return order

    def to_json(self, *, residual: bool = True) -> dict[str, Any]:
        """Plain values for JSON; without ``residual`` the channel orders, thousands of numbers per layer, stay out."""
        content = asdict(self)
        if not (residual and self.residual):
            del content[RESIDUAL]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "StaticScales":
        """Back from `to_json`, whose layer ids JSON has turned into strings."""
        scales = {name: {int(layer): float(value) for layer, value in content[name].items()} for name in TENSORS}
        residual = {
            tensor: {int(layer): tuple(order) for layer, order in by_layer.items()}
            for tensor, by_layer in content.get(RESIDUAL, {}).items()
        }
        return cls(**scales, residual=residual)

    def save(self, path: str | Path) -> None:
        """Write JSON (write to temp, fsync, rename)."""
        path = Path(path)
        temporary = path.with_name(path.name + ".partial")
        with open(temporary, "w") as handle:
            json.dump(self.to_json(), handle, indent=1, sort_keys=True)
            handle.write("\n")
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | Path) -> "StaticScales":
        """Read what `save` wrote; every scale must be positive and finite."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"no static scales at {path}: run the calibration stage, which writes them")
        try:
            content = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is not JSON ({error}): run the calibration stage again") from error
        if not isinstance(content, dict) or set(content) - {RESIDUAL} != set(TENSORS):
            raise UserError(
                f"{path} must have exactly the keys {', '.join(TENSORS)} (and {RESIDUAL}): run the calibration stage "
                "again"
            )
        scales = cls.from_json(content)
        for name in TENSORS:
            for layer, value in getattr(scales, name).items():
                if not (math.isfinite(value) and value > 0):
                    raise UserError(
                        f"{path}: scale of {name!r} in layer {layer} is {value}, it must be positive and finite: "
                        "look for NaN/Inf activations and run the calibration stage again"
                    )
        for tensor, orders in scales.residual.items():
            for layer, order in orders.items():
                if tensor not in COMPENSATED or sorted(order) != list(range(len(order))):
                    raise UserError(
                        f"{path}: residual channels of {tensor!r} in layer {layer} are no order of all its channels: "
                        "run the calibration stage again"
                    )
        return scales
