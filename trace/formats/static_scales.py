"""Static global scales of activations and KV cache, one per layer: written by calibration, read by both sides.

The rollout engine cannot look ahead at a tensor's largest value, and the guidance record has no room for per-token
FP32 scales, so the encode scale G of every quantized activation is fixed per layer (METHOD.md section 2). Larger
values than calibration saw saturate at the block scale 448; they do not fail.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trace_rl.errors import UserError

TENSORS = ("fc1", "fc2", "k", "v")


@dataclass(frozen=True)
class StaticScales:
    """Encode scale G by layer id for the FC1 input, FC2 input, K and V."""

    fc1: dict[int, float] = field(default_factory=dict)
    fc2: dict[int, float] = field(default_factory=dict)
    k: dict[int, float] = field(default_factory=dict)
    v: dict[int, float] = field(default_factory=dict)

    def get(self, tensor: str, layer: int) -> float:
        """The encode scale, or a UserError naming the missing entry."""
        try:
            return getattr(self, tensor)[layer]
        except KeyError:
            raise UserError(
                f"static scales have no entry for tensor {tensor!r} of layer {layer}: "
                "they were calibrated on another model; run the calibration stage again"
            ) from None

    def save(self, path: str | Path) -> None:
        """Write JSON (write to temp, fsync, rename)."""
        path = Path(path)
        temporary = path.with_name(path.name + ".partial")
        with open(temporary, "w") as handle:
            json.dump(asdict(self), handle, indent=1, sort_keys=True)
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
        if not isinstance(content, dict) or set(content) != set(TENSORS):
            raise UserError(f"{path} must have exactly the keys {', '.join(TENSORS)}: run the calibration stage again")
        scales = {name: {int(layer): float(value) for layer, value in content[name].items()} for name in TENSORS}
        for name, by_layer in scales.items():
            for layer, value in by_layer.items():
                if not (math.isfinite(value) and value > 0):
                    raise UserError(
                        f"{path}: scale of {name!r} in layer {layer} is {value}, it must be positive and finite: "
                        "look for NaN/Inf activations and run the calibration stage again"
                    )
        return cls(**scales)
