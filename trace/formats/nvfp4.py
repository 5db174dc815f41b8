"""NVFP4: E2M1 codes, one E4M3 scale per 16 values, one FP32 global ("encode") scale per tensor.

Canonical arithmetic, FP32, in this order (METHOD.md section 1; algebraically equal variants differ in 0.03-0.2 % of
the block scales, and that alone is a train/rollout mismatch):

    G      = 448*6 / amax                       amax == 0 -> G = 1
    s_f    = G * (block_amax * (1/6))           1/6 as an FP32 constant
    sigma  = e4m3_rne(min(s_f, 448))            subnormal E4M3 scales are kept; no epsilon floor
    r      = 1 / (sigma * (1/G))                0 where sigma == 0
    q      = e2m1_rne(clamp(x * r, -6, 6))
    xhat   = q * (sigma * (1/G))

Not to be "simplified": x * r is not x / (sigma/G); 1/G is itself rounded to FP32 before it is used; the clamp to 448
comes before the cast (casts of larger values differ between devices). A block whose sigma rounds to zero becomes
exact zeros. Bitwise equal to vLLM's reference quantizer on tests/golden/nvfp4_reference.npz.
"""

import math
from ctypes import c_float
from functools import lru_cache

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import e2m1
from trace_rl.formats.quantized import CodewordFormat, EncodeScale, block_amax

E4M3_MAX = 448.0
ONE_SIXTH = c_float(1.0 / 6.0).value
# Beyond this the FP32 reciprocals overflow; only reached by tensors whose largest magnitude is below 2e-30.
MAX_ENCODE_SCALE = 2.0**110

_E4M3_NAN = 0x7F
_E4M3_VALUES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()


class NVFP4(CodewordFormat):
    """See the module's docstring. `scale_max` is 448; 4over6 uses 256 (module fouroversix)."""

    name = "nvfp4"
    block_size = 16
    largest_scale = 126
    scale_max = E4M3_MAX

    def encode_scale(self, amax: Tensor) -> Tensor:
        """G = scale_max*6/amax (any shape), float32; 1 where amax is 0."""
        amax = torch.as_tensor(amax, dtype=torch.float32)
        scale = (self.scale_max * e2m1.MAX) / amax
        return torch.where(amax == 0, 1.0, scale.clamp_max_(MAX_ENCODE_SCALE))

    def block_scales(self, x: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        x, encode_scale = self._prepare(x, encode_scale)
        scale, _ = split_encode_scale(encode_scale)
        return _e4m3(block_amax(x.unflatten(-1, (-1, self.block_size))), scale).view(torch.uint8)

    def scale_values(self, block_scale: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        """sigma * (1/G), float32 [..., n]."""
        _, inverse = split_encode_scale(1.0 if encode_scale is None else encode_scale)
        return e4m3_values(block_scale).mul_(inverse)

    def nan_scales(self, block_scale: Tensor) -> Tensor:
        return (block_scale & 0x7F) == _E4M3_NAN

    def _blocks(self, blocks: Tensor, encode_scale: EncodeScale) -> tuple[Tensor, Tensor, Tensor]:
        scale, inverse = split_encode_scale(encode_scale)
        sigma = _e4m3(block_amax(blocks), scale)
        step = sigma.float().mul_(inverse)
        q = e2m1.round_(blocks * reciprocal(step).unsqueeze(-1))
        return q, sigma.view(torch.uint8), step


def split_encode_scale(encode_scale: EncodeScale) -> tuple[EncodeScale, EncodeScale]:
    """(G, 1/G), both FP32, shaped for [..., n] block tensors. Plain numbers stay numbers (cheapest)."""
    if not isinstance(encode_scale, Tensor):
        return _split_number(float(encode_scale))
    scale = encode_scale.detach().float()
    if scale.dim():
        scale = scale.unsqueeze(-1)
    return scale, scale.reciprocal()


def reciprocal(step: Tensor) -> Tensor:
    """r = 1/step, 0 where the step is 0 (an all-zero block)."""
    return step.reciprocal().masked_fill_(step == 0, 0.0)


def e4m3_values(byte: Tensor) -> Tensor:
    """float32 values of E4M3 bit patterns (uint8, any shape)."""
    return _E4M3_VALUES.to(byte.device).index_select(0, byte.reshape(-1).to(torch.int32)).view(byte.shape)


def checked_encode_scale(encode_scale: float) -> float:
    """The number rounded to FP32; UserError unless it is positive and finite."""
    scale = c_float(encode_scale).value
    if not math.isfinite(scale) or scale <= 0:
        raise UserError(f"encode scale {encode_scale} must be positive and finite: run the calibration stage again")
    return scale


@lru_cache(maxsize=4096)
def _split_number(encode_scale: float) -> tuple[float, float]:
    scale = checked_encode_scale(encode_scale)
    return scale, c_float(1.0 / scale).value  # FP32's quotient: rounding a double quotient once more changes nothing


def _e4m3(amax: Tensor, scale: EncodeScale) -> Tensor:
    return amax.mul_(ONE_SIXTH).mul_(scale).clamp_max_(E4M3_MAX).to(torch.float8_e4m3fn)
