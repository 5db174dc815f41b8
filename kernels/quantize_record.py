"""Quantize once, write everything: xhat, packed codes with block scales, and the guidance record, in one pass over x.

What a rollout engine needs of an activation is read from memory once. A program takes a tile of whole blocks; a block's
16 (32) values sit in the registers of two (four) neighbouring threads, eight consecutive values each, so the block
maximum costs one (two) shuffles, and a packed group of eight codes is made inside a thread. Outputs that were not asked
for are compiled away. The twin is trace_rl.kernels.reference.quantize_record.

Bytes per value, BF16 in and out, NVFP4, 1 bit with 8-bit scales: 2 + 2 + 1/8 + 1/16 = 4.19. Rows of the record are
written as bytes unless they are aligned: a record row has no padding, so a field may start anywhere.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import Format
from trace_rl.formats.quantized import EncodeScale
from trace_rl.kernels import fp4_device
from trace_rl.kernels.fp4_device import (
    LAUNCH,
    NUM_WARPS,
    ScaleArguments,
    amax_bits,
    bits_float,
    choose_scale,
    e2m1_codes,
    flag_values,
    load_encode_scale,
    load_float32,
    load_slots,
    low_bits,
    pack_groups,
    round_e2m1,
    store_float32,
    store_groups,
)
from trace_rl.kernels.reference import Quantized, RecordTarget
from trace_rl.kernels.specimen import Specimen


@triton.jit(do_not_specialize=["num_rows", "rows_per_scale", "num_slots", "num_record_slots"])
def quantize_kernel(
    x_ptr,
    x_stride,
    num_rows,
    num_cols,
    scale_ptr,
    scale,
    inverse,
    rows_per_scale,
    xhat_ptr,
    codes_ptr,
    codes_stride,
    block_scale_ptr,
    block_scale_stride,
    slots_ptr,
    num_slots,
    record_ptr,
    record_stride,
    record_slots_ptr,
    num_record_slots,
    record_start,
    flag_ptr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE_IS_NUMBER: tl.constexpr,
    WANT_XHAT: tl.constexpr,
    WANT_CODES: tl.constexpr,
    BY_SLOT: tl.constexpr,
    CODES_ALIGNED: tl.constexpr,
    RECORD_BITS: tl.constexpr,
    RECORD_SCALE_BITS: tl.constexpr,
    RECORD_ALIGNED: tl.constexpr,
    CHECK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """One tile [ROWS, COLS]. RECORD_BITS 0: no record. BY_SLOT: codes go to rows `slots` of a cache."""
    NUM_BLOCKS: tl.constexpr = COLS // BLOCK
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_col = tl.program_id(1) * COLS
    block = first_col // BLOCK + tl.arange(0, NUM_BLOCKS)
    row_mask = row < num_rows
    block_mask = row_mask[:, None] & (block < num_cols // BLOCK)[None, :]
    offset = first_col + (tl.arange(0, NUM_BLOCKS) * BLOCK)[None, :, None] + tl.arange(0, BLOCK)[None, None, :]
    long_row = row.to(tl.int64)[:, None]

    if WANT_CODES:
        if BY_SLOT:
            to, to_mask = load_slots(slots_ptr, row, row_mask, num_slots, flag_ptr, CHECK)
        else:
            to = row.to(tl.int64)
            to_mask = row_mask
    if RECORD_BITS > 0:
        record_to, record_mask = load_slots(record_slots_ptr, row, row_mask, num_record_slots, flag_ptr, CHECK)
    x = load_float32(x_ptr + (long_row * x_stride)[:, :, None] + offset, block_mask[:, :, None])
    encode_scale, inverse_scale = load_encode_scale(
        scale_ptr, scale, inverse, row, row_mask, rows_per_scale, SCALE_IS_NUMBER
    )
    largest = amax_bits(x)
    if CHECK:
        flag_values(flag_ptr, largest)
    byte, step, inverse_step = choose_scale(bits_float(largest), encode_scale, inverse_scale, RULE)
    q, shifted, _, _ = round_e2m1(x * inverse_step[:, :, None])

    if WANT_XHAT:
        out = xhat_ptr + (long_row * num_cols)[:, :, None] + offset
        store_float32(out, q * step[:, :, None], block_mask[:, :, None])
    group = first_col // 8 + tl.arange(0, COLS // 8)[None, :]
    group_mask = group < num_cols // 8
    if WANT_CODES:
        words = pack_groups(e2m1_codes(q), 4)
        codes_row = codes_ptr + to[:, None] * codes_stride
        store_groups(codes_row, group, words, to_mask[:, None] & group_mask, 4, CODES_ALIGNED)
        scales_row = block_scale_ptr + to[:, None] * block_scale_stride
        tl.store(scales_row + block[None, :], byte.to(tl.uint8), mask=to_mask[:, None] & block_mask)
    if RECORD_BITS > 0:
        record_row = record_ptr + record_to[:, None] * record_stride + record_start
        words = pack_groups(low_bits(q, shifted, RECORD_BITS), RECORD_BITS)
        store_groups(record_row, group, words, record_mask[:, None] & group_mask, RECORD_BITS, RECORD_ALIGNED)
        scales = record_row + num_cols // 8 * RECORD_BITS
        if RECORD_SCALE_BITS == 8:
            tl.store(scales + block[None, :], byte.to(tl.uint8), mask=record_mask[:, None] & block_mask)
        else:
            quads = tl.reshape(byte & 3, [ROWS, NUM_BLOCKS // 4, 4])
            four = tl.sum(quads << (tl.arange(0, 4) * 2)[None, None, :], axis=2)
            index = first_col // BLOCK // 4 + tl.arange(0, NUM_BLOCKS // 4)[None, :]
            inside = index * 4 < num_cols // BLOCK
            tl.store(scales + index, four.to(tl.uint8), mask=record_mask[:, None] & inside)


def launch_quantize(
    x: Tensor,
    scale: ScaleArguments,
    *,
    fmt: Format,
    xhat: Tensor | None = None,
    codes: Tensor | None = None,
    block_scale: Tensor | None = None,
    slots: Tensor | None = None,
    target: RecordTarget | None = None,
    flag: Tensor | None = None,
) -> None:
    """Run `quantize_kernel` on x [T, C] (dense rows) into the tensors that are given; nothing is read back.

    codes uint8 [S, C/2] and block_scale uint8 [S, C/block] have one row per row of x, or are indexed by `slots`.
    """
    num_rows, num_cols = x.shape
    if num_rows == 0 or num_cols == 0:
        return
    rows, cols = fp4_device.tile(num_rows, num_cols, block_size=fmt.block_size)
    with fp4_device.on_device(x):
        quantize_kernel[fp4_device.grid(num_rows, num_cols, rows, cols)](
            x,
            x.stride(0),
            num_rows,
            num_cols,
            scale.tensor,
            scale.number,
            scale.inverse,
            scale.rows_per_scale,
            xhat,
            codes,
            0 if codes is None else codes.stride(0),
            block_scale,
            0 if block_scale is None else block_scale.stride(0),
            slots,
            0 if codes is None else codes.shape[0],
            None if target is None else target.buffer,
            0 if target is None else target.buffer.stride(0),
            None if target is None else target.slots,
            0 if target is None else target.buffer.shape[0],
            0 if target is None else target.start,
            flag,
            RULE=fp4_device.rule_of(fmt),
            BLOCK=fmt.block_size,
            SCALE_IS_NUMBER=scale.is_number,
            WANT_XHAT=xhat is not None,
            WANT_CODES=codes is not None,
            BY_SLOT=slots is not None,
            CODES_ALIGNED=codes is not None and fp4_device.aligned(codes, 0, 4),
            RECORD_BITS=0 if target is None else target.bits,
            RECORD_SCALE_BITS=0 if target is None else target.scale_bits,
            RECORD_ALIGNED=target is not None and fp4_device.aligned(target.buffer, target.start, target.bits),
            CHECK=flag is not None,
            ROWS=rows,
            COLS=cols,
            num_warps=NUM_WARPS,
            **LAUNCH,
        )


def quantize_record(
    x: Tensor,
    encode_scale: EncodeScale,
    *,
    fmt: Format,
    target: RecordTarget | None = None,
    want_xhat: bool = True,
    want_codes: bool = False,
    check: bool = True,
) -> Quantized:
    """Quantize x [T, C] once: xhat and/or packed codes and scales as asked, and the guidance written to `target`.

    x: bfloat16 or float32, any strides. `check`: UserError for NaN, Inf and slots outside the buffer, known once the
    kernel has run: what it wrote must then not be used. Without it nothing is read back and the host does not wait.
    """
    rows = fp4_device.rows_of(x, fmt=fmt)
    if x.dim() != 2:
        raise UserError(f"quantize_record wants x [T, C]; it has shape {tuple(x.shape)}: reshape it")
    if target is not None:
        target.check(rows, fmt=fmt)
    scale = fp4_device.scale_arguments(encode_scale, fmt=fmt, shape=rows.shape[:1], device=x.device)
    xhat = torch.empty(rows.shape, dtype=x.dtype, device=x.device) if want_xhat else None
    codes = block_scale = None
    if want_codes:
        codes = torch.empty(packed_shape(rows, 2), dtype=torch.uint8, device=x.device)
        block_scale = torch.empty(packed_shape(rows, fmt.block_size), dtype=torch.uint8, device=x.device)
    flag = fp4_device.new_flag(rows) if check else None
    launch_quantize(rows, scale, fmt=fmt, xhat=xhat, codes=codes, block_scale=block_scale, target=target, flag=flag)
    if flag is not None:
        fp4_device.raise_flag(flag, x, name="x")
    return Quantized(xhat=xhat, codes=codes, block_scale=block_scale)


def packed_shape(x: Tensor, values: int) -> tuple[int, int]:
    """Shape of a tensor with one entry per `values` columns of x [T, C]."""
    return x.shape[0], x.shape[1] // values


def quantize_specimen(name: str, *, x: str, rule: str, **flags: Any) -> Specimen:
    """A specimen of `quantize_kernel`: x is the dtype, `flags` the constants that differ from a bare quantization."""
    constants = {
        "WANT_XHAT": False,
        "WANT_CODES": False,
        "BY_SLOT": False,
        "CODES_ALIGNED": True,
        "RECORD_BITS": 0,
        "RECORD_SCALE_BITS": 8,
        "RECORD_ALIGNED": False,
        "SCALE_IS_NUMBER": True,
        "CHECK": True,
    } | flags
    rows, cols = fp4_device.tile(4096, 2048, block_size=16 if rule == "nvfp4" else 32)
    constants |= {"RULE": rule, "BLOCK": 16 if rule == "nvfp4" else 32, "ROWS": rows, "COLS": cols}
    signature = {
        "x_ptr": f"*{x}:16",
        "x_stride": "i32:16",
        "num_rows": "i32",
        "num_cols": "i32:16",
        "scale": "fp32",
        "inverse": "fp32",
        "rows_per_scale": "i32",
        "codes_stride": "i32:16",
        "block_scale_stride": "i32:16",
        "num_slots": "i32",
        "record_stride": "i32",
        "num_record_slots": "i32",
        "record_start": "i32",
    }
    pointers = {
        "scale_ptr": ("*fp32:16", not constants["SCALE_IS_NUMBER"]),
        "xhat_ptr": (f"*{x}:16", constants["WANT_XHAT"]),
        "codes_ptr": ("*u8:16", constants["WANT_CODES"]),
        "block_scale_ptr": ("*u8:16", constants["WANT_CODES"]),
        "slots_ptr": ("*i64:16", constants["BY_SLOT"]),
        "record_ptr": ("*u8:16", constants["RECORD_BITS"] > 0),
        "record_slots_ptr": ("*i64:16", constants["RECORD_BITS"] > 0),
        "flag_ptr": ("*i32:16", constants["CHECK"]),
    }
    signature |= {name: text for name, (text, used) in pointers.items() if used}
    constants |= {name: None for name, (_, used) in pointers.items() if not used}
    return Specimen(name, quantize_kernel, signature, constants, num_warps=NUM_WARPS)


SPECIMENS = [
    quantize_specimen("record 1 bit", x="bf16", rule="nvfp4", WANT_XHAT=True, RECORD_BITS=1),
    quantize_specimen(
        "record 2 bits, 2-bit scales", x="bf16", rule="nvfp4", WANT_XHAT=True, RECORD_BITS=2, RECORD_SCALE_BITS=2
    ),
    quantize_specimen("record 3 bits, fp32", x="fp32", rule="nvfp4", WANT_XHAT=True, RECORD_BITS=3),
    quantize_specimen(
        "record 4 bits, codes, aligned",
        x="bf16",
        rule="nvfp4",
        WANT_XHAT=True,
        WANT_CODES=True,
        RECORD_BITS=4,
        RECORD_ALIGNED=True,
    ),
    quantize_specimen("codes, per row", x="fp32", rule="nvfp4", WANT_CODES=True, SCALE_IS_NUMBER=False),
    quantize_specimen("mxfp4 floor", x="bf16", rule="floor", WANT_XHAT=True, WANT_CODES=True, RECORD_BITS=1),
]
