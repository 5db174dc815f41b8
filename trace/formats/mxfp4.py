"""MXFP4: E2M1 codes, one power-of-two (E8M0) scale per 32 values, no global scale.

Scale exponent rules for a block with largest magnitude amax (all computed on FP32 bit patterns, hence exact):

    rceil   ceil(log2(amax / 6))                 nothing saturates; the default
    floor   floor(log2 amax) - 2                 the OCP specification; values above 6 units saturate
    even    floor(log2(round amax to E2M1's one mantissa bit, half up)) - 2

Scale byte = exponent + 127, saturated to 0..254. Byte 0 stands for 2^-127, which only all-zero blocks (codes 0, hence
exact zeros) and blocks below 1e-37 have. Scaling by a power of two is exact, so operation order cannot matter here.
Bitwise equal to torchao 0.18 on tests/golden/mxfp4_*.npz.
"""

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import e2m1
from trace_rl.formats.quantized import CodewordFormat, EncodeScale, block_amax

RULES = ("rceil", "floor", "even")

E8M0_NAN = 0xFF
_MANTISSA = 0x7FFFFF
_MIN_STEP_BITS = 0x00400000  # 2^-127, a subnormal float32


class MXFP4(CodewordFormat):
    """See the module's docstring. `rule`: rceil | floor | even."""

    name = "mxfp4"
    block_size = 32
    largest_scale = 254

    def __init__(self, rule: str = "rceil"):
        if rule not in RULES:
            raise UserError(f"mxfp4 scale rule {rule!r} is unknown; choose one of {', '.join(RULES)}")
        self.rule = rule

    def block_scales(self, x: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        x, _ = self._prepare(x, 1.0)
        return self._scale_bytes(block_amax(x.unflatten(-1, (-1, self.block_size)))).to(torch.uint8)

    def scale_values(self, block_scale: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        """2^(byte - 127), float32."""
        return power_of_two(block_scale.to(torch.int32))

    def nan_scales(self, block_scale: Tensor) -> Tensor:
        return block_scale == E8M0_NAN

    def _blocks(self, blocks: Tensor, encode_scale: EncodeScale) -> tuple[Tensor, Tensor, Tensor]:
        byte = self._scale_bytes(block_amax(blocks))
        inverse = power_of_two(254 - byte)  # 2^(127 - byte), exact
        q = e2m1.round_(blocks * inverse.unsqueeze(-1))
        return q, byte.to(torch.uint8), power_of_two(byte)

    def _scale_bytes(self, amax: Tensor) -> Tensor:
        """int32 biased exponents."""
        if self.rule == "rceil":
            bits = (amax / e2m1.MAX).view(torch.int32)
            exponent = (bits + _MANTISSA) >> 23  # any mantissa bit set carries into the exponent
        elif self.rule == "floor":
            exponent = (amax.view(torch.int32) >> 23) - 2
        else:
            exponent = ((amax.view(torch.int32) + (1 << 21)) >> 23) - 2
        return exponent.clamp_(0, 254)


def power_of_two(byte: Tensor) -> Tensor:
    """2^(byte - 127) of int32 E8M0 bytes 0..254, float32."""
    return (byte << 23).clamp_min_(_MIN_STEP_BITS).view(torch.float32)
