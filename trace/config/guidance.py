"""What the rollout records and the trainer follows (METHOD.md section 3).

The default is the paper's R-1bit-L20: one bit per value, the deeper half of the layers.
"""

from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from trace_rl.config.base import Section
from trace_rl.config.quant import QuantSpec

LayerSet = Literal["all", "deeper_half", "first_half", "last_quarter", "last_eighth"]
GuidedTensor = Literal["fc1", "k", "v"]


class GuidanceSpec(Section):
    """Which codes are recorded: how many bits of each, of which layers and tensors, and how they are followed."""

    bits: Literal[1, 2, 3, 4] = 1
    """Low bits kept of each E2M1 code; 4 keeps the whole code (full guidance)."""
    layers: LayerSet = "deeper_half"
    """The guided layers; ``first_half`` is a control."""
    scale_bits: Literal[2, 8] = 8
    """Bits kept of each block scale's code; 2 lets the trainer recover the scale from its own (not in the paper)."""
    tensors: tuple[GuidedTensor, ...] = Field(
        default=("fc1", "k", "v"), json_schema_extra={"minItems": 1, "uniqueItems": True}
    )
    """The guided tensors, each once and in any order."""
    gate: float = Field(default=0.5, gt=0.0, le=0.5)
    """Follow the rollout only within this many steps of the rounding boundary; 0.5 follows always."""

    @field_validator("tensors", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """`fc1`, or `k,v`: as a variant of a method writes it."""
        return value.split(",") if isinstance(value, str) else value

    @field_validator("tensors")
    @classmethod
    def _in_the_order_of_a_record(cls, tensors: tuple[GuidedTensor, ...]) -> tuple[GuidedTensor, ...]:
        if not tensors:
            raise ValueError(
                "guidance.tensors is empty, and guidance of nothing is qat; name some of "
                f"{', '.join(get_args(GuidedTensor))}, or set guidance: null"
            )
        if len(set(tensors)) < len(tensors):
            raise ValueError(f"guidance.tensors {', '.join(tensors)} names a tensor twice; name each once")
        return tuple(tensor for tensor in get_args(GuidedTensor) if tensor in tensors)

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The guided layers of a model with ``num_layers`` layers."""
        first, last = {
            "all": (0, num_layers),
            "deeper_half": (num_layers - num_layers // 2, num_layers),
            "first_half": (0, num_layers // 2),
            "last_quarter": (num_layers - max(1, num_layers // 4), num_layers),
            "last_eighth": (num_layers - max(1, num_layers // 8), num_layers),
        }[self.layers]
        return tuple(range(first, last))


FULL = GuidanceSpec(bits=4, layers="all")


def recordable(spec: GuidanceSpec, *, quant: QuantSpec) -> GuidanceSpec | None:
    """The spec for the tensors of it that ``quant`` rounds to codewords; None where there is none."""
    tensors = tuple(tensor for tensor in spec.tensors if tensor in quant.recordable())
    return spec.model_copy(update={"tensors": tensors}) if tensors else None


def full_recording(quant: QuantSpec) -> GuidanceSpec | None:
    """Whole codes of all layers, of the tensors that ``quant`` rounds to codewords; None where there is none."""
    return recordable(FULL, quant=quant)
