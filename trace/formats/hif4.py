"""HiF4 (2602.11287): 64 values share 32 bits of metadata, 4.5 bits per value, no global scale.

    base   unsigned E6M2, exponent bias 48 (ours: the accounts we saw do not state it), nearest to max64 / 7
    e8     8 bits, one per 8 values:   1 iff max8 / base >= 4
    e16    16 bits, one per 4 values:  1 iff max4 / base / 2^e8 >= 2
    value  sign and quarters S1P2, magnitude 0, .25, ..., 1.75, rounded half away from zero, saturating
    xhat   = base * 2^(e8 + e16) * value            largest: 7 * base

`block_scale` holds four bytes per block: base code, the e8 bits, the e16 bits (low byte first); bit j belongs to the
j-th group. A code is sign<<3 | quarters. Code 0 of the base is 2^-48 (there is no zero), so values below 2^-51 become
exact zeros; 0xFE is the largest base (0xFF is NaN). Emulated only: no engine executes it.
"""

import torch
from torch import Tensor

from trace_rl.formats.quantized import EncodeScale, PackedFormat, block_amax

BIAS = 48
LARGEST_BASE = 0xFE
SCALE_BYTES = 4  # per block

_FP32_BIAS = 127
_MANTISSA_BITS = 2
_SHIFT = 23 - _MANTISSA_BITS


class HiF4(PackedFormat):
    """See the module's docstring."""

    name = "hif4"
    block_size = 64
    scale_bytes = SCALE_BYTES

    def scale_values(self, block_scale: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        """base * 2^(e8 + e16), float32 [..., cols/4]: one per four values, unlike the other formats."""
        base, e8, low, high = block_scale.unflatten(-1, (-1, SCALE_BYTES)).unbind(-1)
        bits = torch.arange(8, device=block_scale.device, dtype=torch.uint8)
        e8 = (e8.unsqueeze(-1) >> bits) & 1
        e16 = torch.cat([(half.unsqueeze(-1) >> bits) & 1 for half in (low, high)], dim=-1)
        return (_base_values(base).unsqueeze(-1) * _power(e8.repeat_interleave(2, -1) + e16)).flatten(-2)

    def decode(self, codes: Tensor, block_scale: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        quarters = (codes & 7).float().mul_(0.25)
        value = torch.where(codes >= 8, -quarters, quarters).add_(0.0)  # -0 becomes +0
        return (value.unflatten(-1, (-1, 4)) * self.scale_values(block_scale).unsqueeze(-1)).view(codes.shape)

    def nan_scales(self, block_scale: Tensor) -> Tensor:
        return block_scale.unflatten(-1, (-1, SCALE_BYTES))[..., 0] > LARGEST_BASE

    def _fake_quant(self, x: Tensor, encode_scale: EncodeScale) -> Tensor:
        return self._quantize_codes(x, encode_scale)[2]

    def near_roundings(self, x: Tensor) -> list[Tensor]:
        """float32 roundings of x on the bases up to one octave around the usual one.

        Rounding moves a block's largest value, so a rounded block is on the grid of one of these, not always the usual.
        """
        usual = _base_codes(block_amax(x.unflatten(-1, (-1, self.block_size))) / 7).to(torch.int16)
        shifts = range(-(1 << _MANTISSA_BITS), (1 << _MANTISSA_BITS) + 1)
        codes = [(usual + shift).clamp_(0, LARGEST_BASE).to(torch.uint8) for shift in shifts]
        return [self._on_base(x, code)[2] for code in codes]

    def _quantize_codes(self, x: Tensor, encode_scale: EncodeScale) -> tuple[Tensor, Tensor, Tensor]:
        return self._on_base(x, _base_codes(block_amax(x.unflatten(-1, (-1, self.block_size))) / 7))

    def _on_base(self, x: Tensor, base_code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fours = x.float().unflatten(-1, (-1, 16, 4))
        max4 = block_amax(fours)
        max8 = max4.unflatten(-1, (8, 2)).amax(-1)
        base = _base_values(base_code).unsqueeze(-1)
        e8 = (max8 >= 4 * base).to(torch.uint8)  # products with powers of two are exact, quotients are not
        wide8 = e8.repeat_interleave(2, -1)
        e16 = (max4 >= 2 * (base * _power(wide8))).to(torch.uint8)
        step = base * _power(wide8 + e16)
        quarters = fours.abs() / step.unsqueeze(-1) * 4
        whole = quarters.floor()
        whole = whole.add_(quarters - whole >= 0.5).clamp_max_(7)
        negative = (fours < 0) & (whole > 0)
        codes = (whole.to(torch.uint8) | (negative.to(torch.uint8) << 3)).view(x.shape)
        scales = torch.stack([base_code, _bits(e8), _bits(e16[..., :8]), _bits(e16[..., 8:])], dim=-1).flatten(-2)
        xhat = torch.where(negative, -whole, whole).mul_(0.25).mul_(step.unsqueeze(-1)).view(x.shape)
        return codes, scales, xhat


def _base_codes(ideal: Tensor) -> Tensor:
    """uint8 E6M2 codes nearest to float32 `ideal`, ties to even, saturating."""
    bits = ideal.contiguous().view(torch.int32)
    rounded = (bits + (1 << (_SHIFT - 1)) - 1 + ((bits >> _SHIFT) & 1)) >> _SHIFT
    return (rounded - ((_FP32_BIAS - BIAS) << _MANTISSA_BITS)).clamp_(0, LARGEST_BASE).to(torch.uint8)


def _base_values(code: Tensor) -> Tensor:
    return ((code.to(torch.int32) + ((_FP32_BIAS - BIAS) << _MANTISSA_BITS)) << _SHIFT).view(torch.float32)


def _power(exponent: Tensor) -> Tensor:
    """2^exponent for 0, 1, 2, float32."""
    return ((exponent.to(torch.int32) + _FP32_BIAS) << 23).view(torch.float32)


def _bits(flags: Tensor) -> Tensor:
    """uint8 [..., 8] of 0/1 -> uint8 [...], flag j in bit j."""
    return (flags << torch.arange(8, device=flags.device, dtype=torch.uint8)).sum(-1).to(torch.uint8)
