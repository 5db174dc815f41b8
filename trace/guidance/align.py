"""Rollout-guided rounding: the trainer's value, rounded to where the rollout rounded (METHOD.md section 3).

    z  = clip(x * r, -6, 6)             r = 1 / (sigma_roll * (1/G)), the quantizer's own arithmetic
    {q-, q+} = the adjacent E2M1 values bracketing z (one value if z lies on the grid)
    q* = argmin_{q in {q-, q+}} |q - q_roll|
    xhat = q* * (sigma_roll * (1/G))

Because z uses the quantizer's multiplication (not a division), rounding to nearest on the rollout's scale is the
quantizer bit for bit, so feeding the rollout's own activations reproduces its codes exactly.

*Full codes* (bits = 4). q_roll is on the ladder, hence never strictly between q- and q+: the argmin is the bracket
member on q_roll's side of z. A tie is impossible except for q- = q+.
*One bit*. Neighbours on the ladder differ in the lowest bit of their index; the member with the recorded bit is taken.
*Two and three bits* (low bits of the magnitude index; at b = 3 all of it, without the sign). q_roll is first decoded as
the ladder value with those bits that is nearest to z, counted in ladder steps, on z's side of zero; then the full rule
applies. A bracket member with matching bits is therefore always chosen, and if none matches, the one towards the
decoded value.
*Gate d* (ours). The other bracket member is only chosen where z lies within d steps of the rounding boundary (the
middle of the bracket); elsewhere round-to-nearest stands. d = 0.5 always follows. However small d > 0 is, a value
exactly on the boundary follows, which power-of-two scales make common; `CLOSED`, for the analysis, never follows.

How it is computed: round to nearest gives q and the remainder z - q; its sign points to the other bracket member, one
grid step away. The rounding trick of trace_rl.formats.e2m1 leaves the multiple of the step, whose parity is the
mantissa bit, in the lowest bit of an intermediate float. The gradient is the caller's affair (straight-through).
"""

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import e2m1
from trace_rl.formats.nvfp4 import NVFP4, reciprocal
from trace_rl.formats.quantized import CHUNK_VALUES, CodewordFormat, EncodeScale, Format, row_pieces, with_codewords
from trace_rl.guidance.bits import unpack_bits

FULL_BITS = 4
UNGATED = 0.5
CLOSED = -1.0
"""The gate that never follows: no value lies a step beyond the boundary. No setting; round to nearest is QAT's."""

_NVFP4 = NVFP4()
_MAGNITUDES = torch.tensor(e2m1.MAGNITUDES)


def align(
    x: Tensor,
    block_scale: Tensor,
    guidance: Tensor | None,
    bits: int,
    encode_scale: EncodeScale,
    rollout_codes: Tensor | None = None,
    *,
    gate: float = UNGATED,
    fmt: Format | None = None,
) -> Tensor:
    """float32 xhat [..., cols]: x rounded on the rollout's scale to the bracket member the guidance selects.

    x: bfloat16 or float32 [..., cols], the trainer's values. block_scale: uint8 [..., cols/block], the rollout's.
    guidance: uint8 [..., cols], the low `bits` bits of each rollout code (or packed as by `pack_bits`); at bits = 4 the
    whole code, for which `rollout_codes` may be given instead. encode_scale: G, as the rollout used it. fmt: default
    NVFP4.
    """
    fmt = with_codewords(fmt or _NVFP4)
    guidance = _checked(x, block_scale, guidance, bits, rollout_codes, gate=gate, fmt=fmt)
    if x.numel() <= 2 * CHUNK_VALUES:
        return _follow(x, block_scale, guidance, bits, encode_scale, gate=gate, fmt=fmt, as_codes=False)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    out_rows, scale_rows, guidance_rows = (t.view(-1, t.shape[-1]) for t in (out, block_scale.contiguous(), guidance))
    for rows, piece, scale in row_pieces(x.detach().contiguous(), encode_scale):
        out_rows[rows] = _follow(
            piece, scale_rows[rows], guidance_rows[rows], bits, scale, gate=gate, fmt=fmt, as_codes=False
        )
    return out


def align_codes(
    x: Tensor,
    block_scale: Tensor,
    guidance: Tensor | None,
    bits: int,
    encode_scale: EncodeScale,
    rollout_codes: Tensor | None = None,
    *,
    gate: float = UNGATED,
    fmt: Format | None = None,
) -> Tensor:
    """The codes `align` rounds to, unpacked uint8 [..., cols]."""
    fmt = with_codewords(fmt or _NVFP4)
    guidance = _checked(x, block_scale, guidance, bits, rollout_codes, gate=gate, fmt=fmt)
    return _follow(x, block_scale, guidance, bits, encode_scale, gate=gate, fmt=fmt, as_codes=True)


def _follow(
    x: Tensor,
    block_scale: Tensor,
    guidance: Tensor,
    bits: int,
    encode_scale: EncodeScale,
    *,
    gate: float,
    fmt: CodewordFormat,
    as_codes: bool,
) -> Tensor:
    step = fmt.scale_values(block_scale.view(torch.uint8), encode_scale)
    blocks = x.detach().unflatten(-1, (-1, fmt.block_size))
    z = (blocks * reciprocal(step).unsqueeze(-1)).clamp_(-e2m1.MAX, e2m1.MAX)
    octave = e2m1.octave_(z)
    shifted = torch.add(z, octave, alpha=e2m1.STEP_TO_MAGIC)
    q = torch.sub(shifted, octave, alpha=e2m1.STEP_TO_MAGIC)
    remainder = z - q
    other = remainder.sign()  # direction of the other bracket member, 0 on the grid
    guide = guidance.view(z.shape)
    if bits == 1:
        move = (shifted.view(torch.int32) ^ guide).bitwise_and_(1)
    else:
        move = ((_rollout_values(guide, z, bits) - z).mul_(other) > 0).view(torch.uint8)  # bool is slow to multiply
    if gate < UNGATED:
        move = move * (remainder.abs() >= octave * (0.5 * (0.5 - gate))).view(torch.uint8)
    q.add_(other.mul_(octave).mul_(move), alpha=0.5)
    return e2m1.codes(q).view(x.shape) if as_codes else q.mul_(step.unsqueeze(-1)).view(x.shape)


def _rollout_values(guide: Tensor, z: Tensor, bits: int) -> Tensor:
    """q_roll, or for bits < 4 the ladder value nearest to z that has these low bits."""
    if bits == FULL_BITS:
        return e2m1.values(guide)
    magnitudes = _MAGNITUDES.to(z.device)
    low = (guide & ((1 << bits) - 1)).reshape(-1).to(torch.int32)
    value = magnitudes.index_select(0, low).view(z.shape)
    if bits == 2:  # indices low and low+4; the middle between them is low+2
        middle = magnitudes.index_select(0, low + 2).view(z.shape)
        value = torch.where(z.abs() > middle, magnitudes.index_select(0, low + 4).view(z.shape), value)
    return value.copysign_(z)


def _checked(
    x: Tensor,
    block_scale: Tensor,
    guidance: Tensor | None,
    bits: int,
    rollout_codes: Tensor | None,
    *,
    gate: float,
    fmt: CodewordFormat,
) -> Tensor:
    """The guidance, unpacked and contiguous, once everything is known to belong together."""
    check_guidance(x, block_scale, bits, gate=gate, fmt=fmt)
    if rollout_codes is not None and (bits == FULL_BITS or guidance is None):
        whole = rollout_codes.shape[-1] == x.shape[-1]
        guidance = rollout_codes if whole else unpack_bits(rollout_codes, FULL_BITS, x.shape[-1])
    if guidance is None:
        raise UserError("align needs `guidance`, or `rollout_codes` for full guidance")
    if guidance.shape[-1] != x.shape[-1]:
        guidance = unpack_bits(guidance, bits, x.shape[-1])
    if guidance.shape != x.shape:
        raise UserError(
            f"guidance of shape {tuple(guidance.shape)} does not belong to a tensor of shape {tuple(x.shape)}: "
            "pass the rows of the same tokens, unpacked or packed by pack_bits"
        )
    return guidance.contiguous()


def check_guidance(x: Tensor, block_scale: Tensor, bits: int, *, gate: float, fmt: Format) -> None:
    """UserError unless bits and gate are in range and the block scales belong to a tensor of x's shape."""
    if bits not in (1, 2, 3, FULL_BITS):
        raise UserError(f"guidance.bits is {bits}; choose 1, 2, 3 or 4 (4 = full codes)")
    check_gate(gate)
    if block_scale.shape[:-1] != x.shape[:-1] or block_scale.shape[-1] * fmt.block_size != x.shape[-1]:
        raise UserError(
            f"block scales of shape {tuple(block_scale.shape)} do not belong to a tensor of shape {tuple(x.shape)}: "
            f"{fmt.name} has one per {fmt.block_size} columns; the guidance was recorded with another format or model"
        )


def check_gate(gate: float) -> None:
    """UserError unless the gate is one that a method may set, or `CLOSED`."""
    if not 0 < gate <= UNGATED and gate != CLOSED:
        raise UserError(f"guidance.gate is {gate}; it must be above 0 and at most 0.5 (0.5 = always follow)")
