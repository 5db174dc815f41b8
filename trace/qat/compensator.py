"""The compensated input of one layer's experts, as the rollout engines multiply with it.

Binds what `trace_rl.formats.residual` needs to one tensor of one layer (format, encode scale, channels) and to the
fastest quantizer of the device. What an engine records stays Q(X): the trainer's guidance knows no residual.
"""

from dataclasses import dataclass

from torch import Tensor

from trace_rl.config.quant import QuantSpec
from trace_rl.formats import Format
from trace_rl.formats.residual import Kind, compensated
from trace_rl.formats.residual_channels import top_channels
from trace_rl.formats.static_scales import COMPENSATED, StaticScales
from trace_rl.kernels import dispatch as kernels


@dataclass(frozen=True)
class Compensator:
    """Residual compensation of ``fc1`` or ``fc2`` in one layer."""

    fmt: Format
    encode_scale: float
    kind: Kind
    channels: Tensor | None

    @classmethod
    def of(
        cls, quant: QuantSpec, *, scales: StaticScales | None, fmt: Format, tensor: str, layer: int
    ) -> "Compensator | None":
        """None where ``quant`` compensates nothing; UserError where calibration did not measure the channels."""
        if quant.residual == "none" or tensor not in COMPENSATED:
            return None
        assert scales is not None, "engines refuse FP4 activations without scales"
        channels = None
        if quant.residual == "channels":
            channels = top_channels(scales.channel_order(tensor, layer), share=quant.residual_share)
        return cls(fmt=fmt, encode_scale=scales.get(tensor, layer), kind=quant.residual, channels=channels)

    def operand(self, x: Tensor, xhat: Tensor) -> Tensor:
        """bfloat16 [..., cols] of x and its float32 Q(X)."""
        return compensated(
            x,
            xhat,
            fmt=self.fmt,
            encode_scale=self.encode_scale,
            kind=self.kind,
            channels=self.channels,
            quantize=lambda residual, scale: kernels.fake_quant(residual, scale, fmt=self.fmt, check=False),
        )

    def quantize(self, x: Tensor) -> Tensor:
        """bfloat16 [..., cols]: the operand of x, which nobody records."""
        return self.operand(x, kernels.fake_quant(x.float(), self.encode_scale, fmt=self.fmt, check=False))
