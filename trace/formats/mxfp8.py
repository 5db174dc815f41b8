"""MXFP8: E4M3 values, one power-of-two (E8M0) scale per 32 values, no global scale. Activations beside MXFP4 weights.

OCP Microscaling Formats v1.0, section 6.3, with the scale rule that it gives and round-to-nearest elements:

    e     = floor(log2 amax) - 8             8 = exponent of E4M3's largest value, 448 = 1.75 * 2^8
    xhat  = 2^e * e4m3_rne(clamp(x / 2^e, -448, 448))

A block's largest value lies between 256 and 512 units, so what exceeds 448 units saturates: up to one part in eight of
values in the top eighth of an octave. The scale byte is e + 127, saturated to 0..254; byte 0 is 2^-127, which blocks
below 2^-118 share. Scaling by a power of two is exact, so operation order cannot matter. Clamping comes before the cast
because casts of larger values differ between devices. Only values are emulated: nothing stores MXFP8 or records it.
"""

import torch
from torch import Tensor

from trace_rl.formats.mxfp4 import power_of_two
from trace_rl.formats.nvfp4 import E4M3_MAX
from trace_rl.formats.quantized import EncodeScale, Format, block_amax

E4M3_EXPONENT = 8


class MXFP8(Format):
    """See the module's docstring."""

    name = "mxfp8"
    block_size = 32

    def _fake_quant(self, x: Tensor, encode_scale: EncodeScale) -> Tensor:
        blocks = x.unflatten(-1, (-1, self.block_size))
        byte = ((block_amax(blocks).view(torch.int32) >> 23) - E4M3_EXPONENT).clamp_(0, 254).unsqueeze(-1)
        units = (blocks * power_of_two(254 - byte)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return units.float().mul_(power_of_two(byte)).view(x.shape)
