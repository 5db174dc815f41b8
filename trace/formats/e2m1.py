"""E2M1, the 4-bit float: code = sign<<3 | index, magnitudes by index 0, .5, 1, 1.5, 2, 3, 4, 6.

Rounding is to nearest, ties to the even index, saturating at 6 (METHOD.md section 1). Instead of comparing with
seven thresholds we let FP32 addition round: in [0, 2) the grid step is 1/2, in [2, 4) it is 1, in [4, 6] it is 2,
so with p = the power of two below |y|, clamped to [1, 4], the step is p/2, and ``(y + c) - c`` with
c = p * 1.5 * 2^22 (whose unit in the last place is p/2) rounds to it. Two things are easy to break:

* The even *index* is the even *multiple of the step* in every octave (2 = 2*1, 4 = 2*2, but 3 = 3*1), which is why
  FP32's round-half-even gives E2M1's.
* ``t - c`` is +0 whenever y rounds to zero, also for negative y. Code 8 (-0) is therefore never produced.

Eager PyTorch rounds after every operation, which this relies on (c is exact, so a fused multiply-add is harmless).
Codes and values map one to one, except that code 8 (-0), if a foreign tool wrote it, reads as 0.
"""

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0
SIGN_BIT = 8

_EXPONENT_MASK = 0x7F800000
STEP_TO_MAGIC = 1.5 * 2**22  # times p: a float whose unit in the last place is p/2
_VALUES = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES))
_VALUES[SIGN_BIT] = 0.0  # plain zero for -0


def octave_(y: Tensor) -> Tensor:
    """p = 2^floor(log2|y|) clamped from below to 1; the grid step at y is p/2. y: float32, |y| <= 6."""
    return (y.view(torch.int32) & _EXPONENT_MASK).view(torch.float32).clamp_min_(1.0)


def round_(y: Tensor) -> Tensor:
    """Round float32 ``y`` (modified: it is clamped to [-6, 6]) to the nearest E2M1 value; new tensor."""
    y.clamp_(-MAX, MAX)
    p = octave_(y)
    t = torch.add(y, p, alpha=STEP_TO_MAGIC)
    return t.sub_(p, alpha=STEP_TO_MAGIC)


def round_nearest(y: Tensor) -> Tensor:
    """Nearest E2M1 value of each element, float32, ties to the even index, saturating at +-6."""
    return round_(y.detach().to(torch.float32, copy=True))


def codes(q: Tensor) -> Tensor:
    """uint8 codes of float32 values already on the E2M1 grid.

    An E4M3 float with q/64 in it has sign<<7 | index<<2 as its bits, because E2M1's octaves 1/2..6 become exactly
    E4M3's subnormal range and first octaves; two shifts and a subtraction move the sign to bit 3.
    """
    byte = (q * 2**-6).to(torch.float8_e4m3fn).view(torch.uint8)
    sign = byte >> 7
    return (byte >> 2).sub_(sign, alpha=24)


def values(codes: Tensor) -> Tensor:
    """float32 values of uint8 codes (any shape)."""
    table = _VALUES.to(codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def pack_codes(codes: Tensor) -> Tensor:
    """uint8 [..., cols] -> uint8 [..., cols/2]; even column in the low nibble."""
    pairs = codes.contiguous().view(torch.int16)  # little-endian: even column is the low byte
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack_codes(packed: Tensor) -> Tensor:
    """uint8 [..., cols/2] -> uint8 [..., cols]."""
    wide = packed.contiguous().to(torch.int16)
    return (wide | (wide << 4)).bitwise_and_(0x0F0F).view(torch.uint8)
