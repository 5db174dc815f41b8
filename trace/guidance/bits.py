"""Packing of the low b bits of 4-bit codes: 8 codes become b bytes.

Order: code j of a group of eight occupies bits j*b .. j*b+b-1 of the group's b bytes, least significant byte first. For
b = 4 this is the nibble packing of trace_rl.formats (even column in the low nibble); for b = 1, bit j of the byte is
column j. Eight codes are handled as one 64-bit integer (little-endian hosts): halves are folded together three times,
and for b = 1 one multiplication does it: the products 8j + 56 - 7i never collide, so no carry disturbs the top byte.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import e2m1

GROUP = 8  # codes per packed group

_LOW_BITS = 0x0101010101010101
_GATHER_1 = sum(1 << (56 - 7 * i) for i in range(8))
_SPREAD_1 = torch.tensor(
    [sum(((byte >> j) & 1) << (8 * j) for j in range(8)) for byte in range(256)], dtype=torch.int64
)


def packed_bytes(cols: int, bits: int) -> int:
    """Bytes that `cols` codes of `bits` bits take."""
    return cols * bits // 8


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., cols] -> uint8 [..., cols*bits/8], keeping the low `bits` bits of each code. cols % 8 == 0."""
    _check(codes.shape[-1], bits)
    if bits == 4:
        return e2m1.pack_codes(codes)
    words = codes.contiguous().view(torch.int64)
    if bits == 1:
        return (words & _LOW_BITS).mul_(_GATHER_1).bitwise_right_shift_(56).to(torch.uint8)
    words = words & (_LOW_BITS * ((1 << bits) - 1))
    for shift, mask in _folds(bits):
        words = (words | (words >> shift)).bitwise_and_(mask)
    return words.view(torch.uint8).unflatten(-1, (-1, GROUP))[..., :bits].flatten(-2)


def unpack_bits(packed: Tensor, bits: int, cols: int) -> Tensor:
    """uint8 [..., cols*bits/8] -> uint8 [..., cols] of values below 2^bits."""
    _check(cols, bits)
    if packed.shape[-1] != packed_bytes(cols, bits):
        raise UserError(
            f"{cols} codes of {bits} bits take {packed_bytes(cols, bits)} bytes, the packed tensor has "
            f"{packed.shape[-1]}: it was recorded with another guidance.bits"
        )
    if bits == 4:
        return e2m1.unpack_codes(packed)
    if bits == 1:
        spread = _SPREAD_1.to(packed.device).index_select(0, packed.reshape(-1).to(torch.int32))
        return spread.view(torch.uint8).view(*packed.shape[:-1], cols)
    groups = packed.unflatten(-1, (-1, bits))
    words = torch.nn.functional.pad(groups, (0, GROUP - bits)).contiguous().view(torch.int64).squeeze(-1)
    for shift, mask in reversed(list(_unfolds(bits))):
        words = (words | (words << shift)).bitwise_and_(mask)
    return words.view(torch.uint8)


def _folds(bits: int) -> Iterator[tuple[int, int]]:
    """(shift, mask) of the three folds: neighbours become pairs, pairs quadruples, quadruples the group."""
    for width in (1, 2, 4):
        merged = (1 << (2 * width * bits)) - 1
        mask = sum(merged << offset for offset in range(0, 64, 16 * width))
        yield width * (8 - bits), _signed(mask)


def _unfolds(bits: int) -> Iterator[tuple[int, int]]:
    for width in (1, 2, 4):
        part = (1 << (width * bits)) - 1
        mask = sum(part << offset for offset in range(0, 64, 8 * width))
        yield width * (8 - bits), _signed(mask)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _check(cols: int, bits: int) -> None:
    if bits not in (1, 2, 3, 4):
        raise UserError(f"guidance.bits is {bits}; choose 1, 2, 3 or 4 (4 = full codes)")
    if cols % GROUP:
        raise UserError(f"{cols} codes per row cannot be packed: the number of columns must be a multiple of {GROUP}")
