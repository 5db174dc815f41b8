"""Guided rounding: the trainer's value on the rollout's scale, moved to the neighbour that the record selects.

One pass over x and the guidance (METHOD.md section 3; trace_rl.guidance.align derives it):

    z       = clip(x * r, -6, 6)          r = 1/(sigma_roll * (1/G))
    q       = nearest E2M1 value of z, the other bracket member lies half an octave away on the side of z - q
    move    = 1 bit: the recorded mantissa bit is not q's; more bits: the recorded value lies beyond z on that side
    gate    : moves are made only where |z - q| says that z lies near the middle of the bracket
    xhat    = (q or its neighbour) * step

Guidance and block scales are read where they were recorded, as column ranges of the record rows; a thread needs `bits`
bytes for its eight consecutive values. BF16, 1 bit: 2 + 1/8 + 1/16 bytes in, 2 out, against 4 for plain rounding. Rows
without a record (`valid` false) take their own scale and round to nearest in the same launch. The gradient is the
identity and the caller's affair. The twin is trace_rl.kernels.reference.guided_fake_quant.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import Format
from trace_rl.formats.quantized import EncodeScale
from trace_rl.guidance.align import UNGATED, check_gate
from trace_rl.guidance.bits import packed_bytes
from trace_rl.kernels import fp4_device
from trace_rl.kernels.fp4_device import (
    LAUNCH,
    NUM_WARPS,
    amax_bits,
    bits_float,
    choose_scale,
    e2m1_values,
    flag_values,
    float_bits,
    load_encode_scale,
    load_float32,
    load_groups,
    reciprocal,
    round_e2m1,
    scale_step,
    store_float32,
    unpack_groups,
)
from trace_rl.kernels.specimen import Specimen

_SIGN = tl.constexpr(-(2**31))

VALID_WARPS = 4
"""With rows of both kinds two scales are alive at once: on two warps sm_100 would spill."""


@triton.jit
def _rollout_values(guide, z, BITS: tl.constexpr):
    """q_roll, or for fewer than four bits the E2M1 value nearest to z (counted in steps) that has these low bits."""
    value = e2m1_values(guide)
    if BITS < 4:
        if BITS == 2:  # indices guide and guide + 4; the middle between them is guide + 2
            value = tl.where(tl.abs(z) > e2m1_values(guide + 2), e2m1_values(guide + 4), value)
        value = bits_float(float_bits(value) | (float_bits(z) & _SIGN))
    return value


@triton.jit(do_not_specialize=["num_rows", "rows_per_scale"])
def guided_fake_quant_kernel(
    x_ptr,
    x_stride,
    num_rows,
    num_cols,
    guidance_ptr,
    guidance_stride,
    block_scale_ptr,
    block_scale_stride,
    valid_ptr,
    scale_ptr,
    scale,
    inverse,
    rows_per_scale,
    threshold,
    xhat_ptr,
    flag_ptr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    GUIDANCE_ALIGNED: tl.constexpr,
    SCALE_IS_NUMBER: tl.constexpr,
    GATED: tl.constexpr,
    HAS_VALID: tl.constexpr,
    CHECK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """One tile [ROWS, COLS]. threshold: smallest |z - q| in octaves at which a gated move is made."""
    NUM_BLOCKS: tl.constexpr = COLS // BLOCK
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_col = tl.program_id(1) * COLS
    block = first_col // BLOCK + tl.arange(0, NUM_BLOCKS)[None, :]
    group = first_col // 8 + tl.arange(0, COLS // 8)[None, :]
    row_mask = row < num_rows
    block_mask = row_mask[:, None] & (block < num_cols // BLOCK)
    group_mask = row_mask[:, None] & (group < num_cols // 8)
    offset = first_col + (tl.arange(0, NUM_BLOCKS) * BLOCK)[None, :, None] + tl.arange(0, BLOCK)[None, None, :]
    long_row = row.to(tl.int64)[:, None]

    words = load_groups(guidance_ptr + long_row * guidance_stride, group, group_mask, BITS, GUIDANCE_ALIGNED)
    byte = tl.load(block_scale_ptr + long_row * block_scale_stride + block, mask=block_mask, other=0).to(tl.int32)
    x = load_float32(x_ptr + (long_row * x_stride)[:, :, None] + offset, block_mask[:, :, None])
    encode_scale, inverse_scale = load_encode_scale(
        scale_ptr, scale, inverse, row, row_mask, rows_per_scale, SCALE_IS_NUMBER
    )
    step = scale_step(byte, inverse_scale, RULE)
    if CHECK or HAS_VALID:
        largest = amax_bits(x)
        if CHECK:
            flag_values(flag_ptr, largest)
    if HAS_VALID:
        valid = tl.load(valid_ptr + row, mask=row_mask, other=1)[:, None] != 0
        _, own_step, _ = choose_scale(bits_float(largest), encode_scale, inverse_scale, RULE)
        step = tl.where(valid, step, own_step)
    q, shifted, octave, z = round_e2m1(x * reciprocal(step)[:, :, None])

    remainder = z - q
    up = remainder > 0.0
    guide = unpack_groups(words, BITS, BLOCK)
    move = remainder != 0.0
    if BITS == 1:
        move = move & (((float_bits(shifted) ^ guide) & 1) != 0)
    else:
        rollout = _rollout_values(guide, z, BITS)
        move = move & ((up & (rollout > z)) | ((up == 0) & (rollout < z)))
    if GATED:
        move = move & (tl.abs(remainder) >= octave * threshold)
    if HAS_VALID:
        move = move & valid[:, :, None]
    towards = bits_float(float_bits(octave * 0.5) | (float_bits(remainder) & _SIGN))
    q = tl.where(move, q + towards, q)
    store_float32(xhat_ptr + (long_row * num_cols)[:, :, None] + offset, q * step[:, :, None], block_mask[:, :, None])


def guided_fake_quant(
    x: Tensor,
    guidance: Tensor,
    block_scale: Tensor,
    encode_scale: EncodeScale,
    *,
    fmt: Format,
    bits: int,
    gate: float = UNGATED,
    valid: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """x [T, C] rounded on the rollout's scale to the neighbour that the guidance selects, in x's dtype.

    guidance: uint8 [T, C*bits/8] as recorded; block_scale: uint8 [T, C/block]; both may be column ranges of the record
    rows. valid: bool [T]; tokens without a record round to nearest on their own scale. `check`: UserError for NaN and
    Inf, for which the host waits.
    """
    rows = fp4_device.rows_of(x, fmt=fmt)
    if x.dim() != 2:
        raise UserError(f"guided_fake_quant wants x [T, C]; it has shape {tuple(x.shape)}: reshape it")
    if bits not in (1, 2, 3, 4):
        raise UserError(f"guidance.bits is {bits}; choose 1, 2, 3 or 4 (4 = full codes)")
    check_gate(gate)
    num_rows, num_cols = rows.shape
    guidance = _record_rows(guidance, num_rows, packed_bytes(num_cols, bits), name="guidance", fmt=fmt)
    block_scale = _record_rows(block_scale, num_rows, num_cols // fmt.block_size, name="block_scale", fmt=fmt)
    if valid is not None and (valid.shape != x.shape[:1] or valid.dtype != torch.bool):
        raise UserError(f"valid must be bool [{num_rows}]; it is {valid.dtype} {tuple(valid.shape)}")
    rule = fp4_device.rule_of(fmt)
    xhat = torch.empty((num_rows, num_cols), dtype=x.dtype, device=x.device)
    if xhat.numel() == 0:
        return xhat
    scale = fp4_device.scale_arguments(encode_scale, fmt=fmt, shape=rows.shape[:1], device=x.device)
    flag = fp4_device.new_flag(rows) if check else None
    tile_rows, cols = fp4_device.tile(num_rows, num_cols, block_size=fmt.block_size)
    with fp4_device.on_device(x):
        guided_fake_quant_kernel[fp4_device.grid(num_rows, num_cols, tile_rows, cols)](
            rows,
            rows.stride(0),
            num_rows,
            num_cols,
            guidance,
            guidance.stride(0),
            block_scale,
            block_scale.stride(0),
            None if valid is None else valid.contiguous().view(torch.uint8),
            scale.tensor,
            scale.number,
            scale.inverse,
            scale.rows_per_scale,
            0.5 * (UNGATED - gate),
            xhat,
            flag,
            RULE=rule,
            BLOCK=fmt.block_size,
            BITS=bits,
            GUIDANCE_ALIGNED=fp4_device.aligned(guidance, 0, bits),
            SCALE_IS_NUMBER=scale.is_number,
            GATED=gate < UNGATED,
            HAS_VALID=valid is not None,
            CHECK=check,
            ROWS=tile_rows,
            COLS=cols,
            num_warps=NUM_WARPS if valid is None else VALID_WARPS,
            **LAUNCH,
        )
    if flag is not None:
        fp4_device.raise_flag(flag, x, name="x")
    return xhat


def _record_rows(rows: Tensor, num_rows: int, num_bytes: int, *, name: str, fmt: Format) -> Tensor:
    """Bytes of a record with dense rows, once they are known to belong to x."""
    if rows.dtype != torch.uint8 or rows.shape != (num_rows, num_bytes):
        raise UserError(
            f"{name} must be uint8 [{num_rows}, {num_bytes}] for {fmt.name}; it is {rows.dtype} {tuple(rows.shape)}: "
            "it was recorded with another format, guidance.bits or model"
        )
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _guided_specimen(name: str, *, x: str = "bf16", rule: str = "nvfp4", bits: int, **flags: bool) -> Specimen:
    constants = {"SCALE_IS_NUMBER": True, "GATED": False, "HAS_VALID": False, "CHECK": True} | flags
    block = 16 if rule == "nvfp4" else 32
    rows, cols = fp4_device.tile(4096, 2048, block_size=block)
    signature = {
        "x_ptr": f"*{x}:16",
        "x_stride": "i32:16",
        "num_rows": "i32",
        "num_cols": "i32:16",
        "guidance_ptr": "*u8",
        "guidance_stride": "i32",
        "block_scale_ptr": "*u8",
        "block_scale_stride": "i32",
        "scale": "fp32",
        "inverse": "fp32",
        "rows_per_scale": "i32",
        "threshold": "fp32",
        "xhat_ptr": f"*{x}:16",
    }
    pointers = {
        "scale_ptr": ("*fp32:16", not constants["SCALE_IS_NUMBER"]),
        "valid_ptr": ("*u8:16", constants["HAS_VALID"]),
        "flag_ptr": ("*i32:16", constants["CHECK"]),
    }
    signature |= {name: text for name, (text, used) in pointers.items() if used}
    constants |= {name: None for name, (_, used) in pointers.items() if not used}
    constants |= {"RULE": rule, "BLOCK": block, "BITS": bits, "GUIDANCE_ALIGNED": False, "ROWS": rows, "COLS": cols}
    warps = VALID_WARPS if constants["HAS_VALID"] else NUM_WARPS
    return Specimen(name, guided_fake_quant_kernel, signature, constants, num_warps=warps)


SPECIMENS = [
    _guided_specimen("guided 1 bit", bits=1),
    _guided_specimen("guided 1 bit, valid rows, gate", bits=1, HAS_VALID=True, GATED=True),
    _guided_specimen("guided 2 bits", bits=2),
    _guided_specimen("guided 3 bits, per row", bits=3, SCALE_IS_NUMBER=False),
    _guided_specimen("guided 4 bits, fp32", x="fp32", bits=4),
    _guided_specimen("guided 1 bit mxfp4, unchecked", rule="rceil", bits=1, CHECK=False),
]
