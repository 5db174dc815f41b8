"""The KV cache in FP4: writing quantizes, packs and records in one pass, reading dequantizes.

K and V are quantized where the engine writes them: row `slots[t]` of the packed cache gets the codes and block scales
of token t, row `target.slots[t]` of the record its guidance, and no BF16 copy is kept. It is `quantize_kernel` with its
codes addressed by slot. Reading gathers rows: 0.56 bytes in, 2 bytes out per value. Every value read is one of the
format, times its block's step, rounded once to bfloat16, so trainer and rollout can be compared bit for bit.
The twins are trace_rl.kernels.reference.kv_quantize_record and kv_dequantize.
"""

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
    e2m1_values,
    load_encode_scale,
    load_groups,
    load_slots,
    scale_step,
    store_float32,
    unpack_groups,
)
from trace_rl.kernels.quantize_record import launch_quantize, quantize_specimen
from trace_rl.kernels.reference import RecordTarget, check_slots
from trace_rl.kernels.specimen import Specimen


@triton.jit(do_not_specialize=["num_rows", "rows_per_scale", "num_slots"])
def kv_dequantize_kernel(
    codes_ptr,
    codes_stride,
    block_scale_ptr,
    block_scale_stride,
    slots_ptr,
    num_slots,
    num_rows,
    num_cols,
    scale_ptr,
    scale,
    inverse,
    rows_per_scale,
    out_ptr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE_IS_NUMBER: tl.constexpr,
    CODES_ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """One tile [ROWS, COLS] of the output; rows whose slot lies outside the cache become NaN."""
    NUM_BLOCKS: tl.constexpr = COLS // BLOCK
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_col = tl.program_id(1) * COLS
    block = first_col // BLOCK + tl.arange(0, NUM_BLOCKS)[None, :]
    group = first_col // 8 + tl.arange(0, COLS // 8)[None, :]
    offset = first_col + (tl.arange(0, NUM_BLOCKS) * BLOCK)[None, :, None] + tl.arange(0, BLOCK)[None, None, :]
    row_mask = row < num_rows

    slot, readable = load_slots(slots_ptr, row, row_mask, num_slots, None, False)
    codes_row = codes_ptr + slot[:, None] * codes_stride
    words = load_groups(codes_row, group, readable[:, None] & (group < num_cols // 8), 4, CODES_ALIGNED)
    scales_row = block_scale_ptr + slot[:, None] * block_scale_stride
    inside = block < num_cols // BLOCK
    byte = tl.load(scales_row + block, mask=readable[:, None] & inside, other=0).to(tl.int32)
    _, inverse_scale = load_encode_scale(scale_ptr, scale, inverse, row, row_mask, rows_per_scale, SCALE_IS_NUMBER)
    step = tl.where(readable[:, None], scale_step(byte, inverse_scale, RULE), float("nan"))
    value = e2m1_values(unpack_groups(words, 4, BLOCK)) * step[:, :, None]
    out = out_ptr + (row.to(tl.int64) * num_cols)[:, None, None] + offset
    store_float32(out, value, (row_mask[:, None] & inside)[:, :, None])


def kv_quantize_record(
    x: Tensor,
    encode_scale: EncodeScale,
    cache_codes: Tensor,
    cache_scale: Tensor,
    slots: Tensor,
    *,
    fmt: Format,
    target: RecordTarget | None = None,
    check: bool = True,
) -> None:
    """K or V of T tokens [T, heads*head_dim] into a packed cache: uint8 [S, C/2] and [S, C/block], rows `slots`.

    The cache's rows may have any stride. `check`: UserError for NaN, Inf and slots outside the cache or the record,
    known once the kernel has run; without it the host does not wait, and such slots are left out.
    """
    rows = fp4_device.rows_of(x, fmt=fmt)
    if x.dim() != 2:
        raise UserError(f"kv_quantize_record wants x [T, C]; it has shape {tuple(x.shape)}: reshape it")
    if target is not None:
        target.check(rows, fmt=fmt)
    _check_cache(cache_codes, cache_scale, rows.shape[1], fmt=fmt)
    check_slots(slots, rows.shape[0])
    scale = fp4_device.scale_arguments(encode_scale, fmt=fmt, shape=rows.shape[:1], device=x.device)
    flag = fp4_device.new_flag(rows) if check else None
    launch_quantize(
        rows, scale, fmt=fmt, codes=cache_codes, block_scale=cache_scale, slots=slots, target=target, flag=flag
    )
    if flag is not None:
        fp4_device.raise_flag(flag, x, name="x")


def kv_dequantize(
    cache_codes: Tensor, cache_scale: Tensor, slots: Tensor, encode_scale: EncodeScale, *, fmt: Format
) -> Tensor:
    """bfloat16 [T, C]: the cache's rows `slots`, as attention reads them. A slot outside the cache reads as NaN."""
    num_rows, num_cols = slots.shape[0], 2 * cache_codes.shape[1]
    check_slots(slots, num_rows)
    fp4_device.check_device(cache_codes, name="cache_codes")
    _check_cache(cache_codes, cache_scale, num_cols, fmt=fmt)
    rule = fp4_device.rule_of(fmt)
    out = torch.empty((num_rows, num_cols), dtype=torch.bfloat16, device=cache_codes.device)
    if out.numel() == 0:
        return out
    scale = fp4_device.scale_arguments(encode_scale, fmt=fmt, shape=slots.shape, device=out.device)
    rows, cols = fp4_device.tile(num_rows, num_cols, block_size=fmt.block_size)
    with fp4_device.on_device(out):
        kv_dequantize_kernel[fp4_device.grid(num_rows, num_cols, rows, cols)](
            cache_codes,
            cache_codes.stride(0),
            cache_scale,
            cache_scale.stride(0),
            slots,
            cache_codes.shape[0],
            num_rows,
            num_cols,
            scale.tensor,
            scale.number,
            scale.inverse,
            scale.rows_per_scale,
            out,
            RULE=rule,
            BLOCK=fmt.block_size,
            SCALE_IS_NUMBER=scale.is_number,
            CODES_ALIGNED=fp4_device.aligned(cache_codes, 0, 4),
            ROWS=rows,
            COLS=cols,
            num_warps=NUM_WARPS,
            **LAUNCH,
        )
    return out


def _check_cache(codes: Tensor, block_scale: Tensor, cols: int, *, fmt: Format) -> None:
    for name, tensor, width in (
        ("cache_codes", codes, cols // 2),
        ("cache_scale", block_scale, cols // fmt.block_size),
    ):
        fits = tensor.dim() == 2 and tensor.shape[1] == width and tensor.shape[0] == codes.shape[0]
        if tensor.dtype != torch.uint8 or not fits or (tensor.stride(1) != 1 and width > 1):
            raise UserError(
                f"{name} must be uint8 [{codes.shape[0]}, {width}] with dense rows for {cols} columns of {fmt.name}; "
                f"it is {tensor.dtype} {tuple(tensor.shape)}"
            )


def _dequantize_specimen(name: str, *, rule: str, number: bool, is_aligned: bool) -> Specimen:
    block = 16 if rule == "nvfp4" else 32
    rows, cols = fp4_device.tile(4096, 512, block_size=block)
    signature = {
        "codes_ptr": "*u8:16",
        "codes_stride": "i32:16",
        "block_scale_ptr": "*u8:16",
        "block_scale_stride": "i32:16",
        "slots_ptr": "*i64:16",
        "num_slots": "i32",
        "num_rows": "i32",
        "num_cols": "i32:16",
        "scale": "fp32",
        "inverse": "fp32",
        "rows_per_scale": "i32",
        "out_ptr": "*bf16:16",
    }
    constants = {"RULE": rule, "BLOCK": block, "SCALE_IS_NUMBER": number, "CODES_ALIGNED": is_aligned}
    if number:
        constants["scale_ptr"] = None
    else:
        signature["scale_ptr"] = "*fp32:16"
    constants |= {"ROWS": rows, "COLS": cols}
    return Specimen(name, kv_dequantize_kernel, signature, constants, num_warps=NUM_WARPS)


SPECIMENS = [
    quantize_specimen("kv_quantize_record 1 bit", x="bf16", rule="nvfp4", WANT_CODES=True, BY_SLOT=True, RECORD_BITS=1),
    quantize_specimen(
        "kv_quantize_record 4 bits mxfp4", x="bf16", rule="rceil", WANT_CODES=True, BY_SLOT=True, RECORD_BITS=4
    ),
    _dequantize_specimen("kv_dequantize nvfp4", rule="nvfp4", number=True, is_aligned=True),
    _dequantize_specimen("kv_dequantize mxfp4, per row, unaligned", rule="rceil", number=False, is_aligned=False),
]
