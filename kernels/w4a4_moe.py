"""Routed SwiGLU experts with both operands in FP4, on the tensor cores that multiply it (Blackwell: sm_100, sm_120).

The packed bytes go to `tl.dot_scaled` as they are: E2M1 codes, with one E8M0 scale per 32 values (MXFP4) or one E4M3
scale per 16 (NVFP4). The encode scales are no part of the instruction; they multiply the finished sum, in FP32:

    out = (sum_k q_w sigma_w q_x sigma_x) * (1/G_w) * (1/G_x)

Four launches: quantize x, gate_up with SiLU(gate) * up -> bfloat16 hidden, quantize hidden, down. Blocks of pairs are
`moe_routing`'s, outputs are added up as in `w4a16_moe`.

Where this differs from the twin in rounding (MXFP4, whose steps are powers of two: only in the second point):

* The twin, like the trainer, multiplies operands bfloat16(q * step) with step = sigma * (1/G) rounded to FP32. Here a
  product q_w sigma_w q_x sigma_x is exact (6 significant bits a side), and each 1/G is rounded once per sum. So the
  twin's terms are off by up to 2^-8 per operand relative to these, independently of each other.
* The order of summation, and the width of the tensor core's sums, are the device's own.

Weight rows are the operand's first dimension: 128 of them fill the instruction, an expert's few tokens its narrow side.

Triton's interpreter reads E4M3 scales as if they were E8M0, so NVFP4 is decoded there before an FP32 product (the same
terms, each exact); what it cannot show is the instruction itself.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import Format
from trace_rl.formats.nvfp4 import split_encode_scale
from trace_rl.kernels.fp4_device import (
    INTERPRETED,
    LAUNCH,
    bits_float,
    e2m1_values,
    load_float32,
    on_device,
    store_float32,
)
from trace_rl.kernels.moe_routing import (
    MAX_BLOCK_PAIRS,
    Routing,
    block_pairs,
    check_arguments,
    route,
)
from trace_rl.kernels.quantize_record import quantize_record
from trace_rl.kernels.reference import PackedExperts, Quantized
from trace_rl.kernels.specimen import Specimen

MIN_CAPABILITY = 100
TILE_ROWS = 128
TILE_COLS = 128
NUM_WARPS = 4

_E4M3_FROM_BITS = tl.constexpr(2.0**120)


def w4a4_moe(
    x_TH: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    weights_TK: Tensor,
    ids_TK: Tensor,
    *,
    fc1_scale: float,
    fc2_scale: float,
    fmt: Format,
    check: bool = True,
) -> Tensor:
    """Routed experts of x bfloat16 [T, H] -> bfloat16 [T, H], see `trace_rl.kernels.reference.w4a4_moe`.

    gate_up [E, 2I, H] (gate rows first), down [E, H, I], packed; weights [T, K] float32 or bfloat16; ids [T, K];
    fc1_scale, fc2_scale: static encode scales of the two activations. `check`: UserError for ids outside [0, E) and for
    NaN or Inf in x or the hidden vectors, all of which wait for the device. UserError for shapes, dtypes,
    devices and formats that the kernels cannot read.
    """
    check_arguments(x_TH, gate_up, down, weights_TK, ids_TK, fmt=fmt, check=check)
    if not INTERPRETED and 10 * torch.cuda.get_device_capability(x_TH.device)[0] < MIN_CAPABILITY:
        raise UserError(
            f"{torch.cuda.get_device_name(x_TH.device)} has no FP4 tensor cores: use w4a16_moe, or the backend `torch`"
        )
    num_experts, num_pairs = down.codes.shape[0], ids_TK.numel()
    if num_pairs == 0:
        return torch.zeros_like(x_TH)
    with on_device(x_TH):
        routing = route(ids_TK, num_experts, block_pairs(num_pairs, num_experts))
        x = quantize_record(x_TH, fc1_scale, fmt=fmt, want_xhat=False, want_codes=True, check=check)
        hidden = hidden_vectors(x, gate_up, routing, ids_TK.shape, encode_scale=fc1_scale, fmt=fmt)
        hidden = quantize_record(hidden, fc2_scale, fmt=fmt, want_xhat=False, want_codes=True, check=check)
        out = weighted_outputs(hidden, down, weights_TK, routing, encode_scale=fc2_scale, fmt=fmt)
        return out.view(*ids_TK.shape, -1).sum(dim=1).to(torch.bfloat16)


def hidden_vectors(
    x: Quantized, gate_up: PackedExperts, routing: Routing, ids_shape: torch.Size, *, encode_scale: float, fmt: Format
) -> Tensor:
    """bfloat16 [T*K, I]: silu(gate) * up of every pair; `encode_scale` is x's."""
    num_tokens, top_k = ids_shape
    width = gate_up.codes.shape[1] // 2
    hidden = torch.empty(num_tokens * top_k, width, dtype=torch.bfloat16, device=gate_up.codes.device)
    constexprs = _constexprs(fmt.block_size, routing.block_pairs)
    _gate_up_kernel[len(routing.expert), triton.cdiv(2 * width, TILE_ROWS)](
        x.codes, x.block_scale, _inverse(encode_scale, fmt), *_stored(gate_up, fmt), *routing.tensors, hidden, top_k,
        width, 2 * gate_up.codes.shape[2], **constexprs, **LAUNCH, num_warps=NUM_WARPS,
    )  # fmt: skip
    return hidden


def weighted_outputs(
    hidden: Quantized, down: PackedExperts, weights_TK: Tensor, routing: Routing, *, encode_scale: float, fmt: Format
) -> Tensor:
    """float32 [T*K, H]: weight times expert output of every pair; `encode_scale` is hidden's."""
    _, rows, packed_width = down.codes.shape
    out = torch.empty(weights_TK.numel(), rows, dtype=torch.float32, device=down.codes.device)
    constexprs = _constexprs(fmt.block_size, routing.block_pairs)
    _down_kernel[len(routing.expert), triton.cdiv(rows, TILE_ROWS)](
        hidden.codes, hidden.block_scale, _inverse(encode_scale, fmt), *_stored(down, fmt), *routing.tensors,
        weights_TK.contiguous(), out, rows, 2 * packed_width, **constexprs, **LAUNCH, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def _inverse(encode_scale: float, fmt: Format) -> float:
    """1/G in FP32; MXFP4 has no encode scale."""
    return float(split_encode_scale(encode_scale)[1]) if fmt.block_size == 16 else 1.0


def _stored(packed: PackedExperts, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, block scales, 1/G [E]); MXFP4 has no encode scale."""
    scale = packed.encode_scale
    return packed.codes, packed.block_scale, scale.reciprocal() if fmt.block_size == 16 else torch.ones_like(scale)


def _constexprs(block_size: int, tile_pairs: int) -> dict[str, Any]:
    return {
        "BLOCK_SIZE": block_size,
        "TILE_ROWS": TILE_ROWS,
        "TILE_COLS": TILE_COLS,
        "TILE_PAIRS": tile_pairs,
    }


@triton.jit
def _gate_up_kernel(
    x_ptr,  # uint8 [T, H/2]
    x_scale_ptr,  # uint8 [T, H/BLOCK_SIZE]
    x_inverse,  # 1/G of x
    codes_ptr,  # uint8 [E, 2I, H/2]
    scale_ptr,  # uint8 [E, 2I, H/BLOCK_SIZE]
    inverse_ptr,  # float32 [E]
    order_ptr,  # int32: order, expert, start, end of moe_routing.Routing
    expert_ptr,
    start_ptr,
    end_ptr,
    hidden_ptr,  # bfloat16 [T*K, I]
    top_k,
    width,  # I
    cols,  # H
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
):
    """Program (block, tile): TILE_ROWS/2 channels of the hidden vectors of one block of pairs."""
    expert = tl.load(expert_ptr + tl.program_id(0))
    if expert < 0:
        return
    position = tl.load(start_ptr + tl.program_id(0)) + tl.arange(0, TILE_PAIRS)
    is_pair = position < tl.load(end_ptr + tl.program_id(0))
    pair = tl.load(order_ptr + position, mask=is_pair, other=0)

    first_channel = tl.program_id(1) * (TILE_ROWS // 2)
    tile_row = tl.arange(0, TILE_ROWS)  # gate, up, gate, up, ... of consecutive channels
    channel = first_channel + tile_row // 2
    product = _rows_times_vectors(
        codes_ptr, scale_ptr, inverse_ptr, expert, 2 * width, (tile_row % 2) * width + channel, channel < width,
        x_ptr, x_scale_ptr, x_inverse, pair // top_k, is_pair, cols, BLOCK_SIZE, TILE_COLS,
    )  # fmt: skip
    gate, up = tl.split(tl.trans(tl.reshape(product, [TILE_ROWS // 2, 2, TILE_PAIRS]), 0, 2, 1))
    hidden = gate / (1.0 + tl.exp(-gate)) * up

    channel = first_channel + tl.arange(0, TILE_ROWS // 2)
    store_float32(
        hidden_ptr + pair.to(tl.int64)[None, :] * width + channel[:, None],
        hidden,
        (channel < width)[:, None] & is_pair[None, :],
    )


@triton.jit
def _down_kernel(
    hidden_ptr,  # uint8 [T*K, I/2]
    hidden_scale_ptr,  # uint8 [T*K, I/BLOCK_SIZE]
    hidden_inverse,  # 1/G of hidden
    codes_ptr,  # uint8 [E, H, I/2]
    scale_ptr,  # uint8 [E, H, I/BLOCK_SIZE]
    inverse_ptr,  # float32 [E]
    order_ptr,  # int32: order, expert, start, end of moe_routing.Routing
    expert_ptr,
    start_ptr,
    end_ptr,
    weight_ptr,  # float32 or bfloat16 [T*K]
    out_ptr,  # float32 [T*K, H]
    rows,  # H
    cols,  # I
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
):
    """Program (block, tile): TILE_ROWS values of the weighted outputs of one block of pairs."""
    expert = tl.load(expert_ptr + tl.program_id(0))
    if expert < 0:
        return
    position = tl.load(start_ptr + tl.program_id(0)) + tl.arange(0, TILE_PAIRS)
    is_pair = position < tl.load(end_ptr + tl.program_id(0))
    pair = tl.load(order_ptr + position, mask=is_pair, other=0)

    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    product = _rows_times_vectors(
        codes_ptr, scale_ptr, inverse_ptr, expert, rows, row, row < rows,
        hidden_ptr, hidden_scale_ptr, hidden_inverse, pair, is_pair, cols, BLOCK_SIZE, TILE_COLS,
    )  # fmt: skip
    weight = load_float32(weight_ptr + pair, is_pair)
    tl.store(
        out_ptr + pair.to(tl.int64)[None, :] * rows + row[:, None],
        product * weight[None, :],
        mask=(row < rows)[:, None] & is_pair[None, :],
    )


@triton.jit
def _rows_times_vectors(
    codes_ptr,
    scale_ptr,
    inverse_ptr,
    expert,
    num_rows,
    row,
    is_row,
    vector_ptr,
    vector_scale_ptr,
    vector_inverse,
    vector,
    is_vector,
    cols,
    BLOCK_SIZE: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    """float32 [rows, vectors]: rows `row` of an expert's matrix times rows `vector` of quantized activations."""
    matrix_row = expert.to(tl.int64) * num_rows + row
    vector = vector.to(tl.int64)
    byte = tl.arange(0, TILE_COLS // 2)
    block = tl.arange(0, TILE_COLS // BLOCK_SIZE)

    product = tl.zeros([row.shape[0], vector.shape[0]], dtype=tl.float32)
    for first in range(0, cols, TILE_COLS):
        tile_byte = first // 2 + byte
        is_byte = tile_byte < cols // 2
        tile_block = first // BLOCK_SIZE + block
        is_block = tile_block < cols // BLOCK_SIZE
        codes = tl.load(
            codes_ptr + matrix_row[:, None] * (cols // 2) + tile_byte[None, :],
            mask=is_row[:, None] & is_byte[None, :],
            other=0,
        )
        scale = tl.load(
            scale_ptr + matrix_row[:, None] * (cols // BLOCK_SIZE) + tile_block[None, :],
            mask=is_row[:, None] & is_block[None, :],
            other=0,
        )
        vector_codes = tl.load(
            vector_ptr + vector[None, :] * (cols // 2) + tile_byte[:, None],
            mask=is_byte[:, None] & is_vector[None, :],
            other=0,
        )
        vector_scale = tl.load(
            vector_scale_ptr + vector[:, None] * (cols // BLOCK_SIZE) + tile_block[None, :],
            mask=is_vector[:, None] & is_block[None, :],
            other=0,
        )
        if BLOCK_SIZE == 32:
            product = tl.dot_scaled(codes, scale, "e2m1", vector_codes, vector_scale, "e2m1", product)
        elif INTERPRETED:
            product = tl.dot(
                _decode(codes, scale), tl.trans(_decode(tl.trans(vector_codes), vector_scale)), product,
                input_precision="ieee",
            )  # fmt: skip
        else:
            e4m3 = scale.to(tl.float8e4nv, bitcast=True)
            vector_e4m3 = vector_scale.to(tl.float8e4nv, bitcast=True)
            product = tl.dot_scaled(codes, e4m3, "e2m1", vector_codes, vector_e4m3, "e2m1", product)
    return product * tl.load(inverse_ptr + expert) * vector_inverse


@triton.jit
def _decode(codes, scale):
    """float32 [R, C], q * sigma: codes uint8 [R, C/2], E4M3 scales uint8 [R, C/16]."""
    code = codes.to(tl.int32)
    q = e2m1_values(tl.reshape(tl.join(code & 15, code >> 4), [scale.shape[0], scale.shape[1], 16]))
    sigma = bits_float(scale.to(tl.int32) << 20) * _E4M3_FROM_BITS
    return tl.reshape(q * sigma[:, :, None], [codes.shape[0], 2 * codes.shape[1]])


def _specimen(name: str, kernel: Any, *, block_size: int, tile_pairs: int) -> Specimen:
    types = {
        "x_ptr": "*u8:16", "x_scale_ptr": "*u8:16", "x_inverse": "fp32", "hidden_scale_ptr": "*u8:16",
        "hidden_inverse": "fp32", "codes_ptr": "*u8:16", "scale_ptr": "*u8:16", "inverse_ptr": "*fp32:16",
        "order_ptr": "*i32:16", "expert_ptr": "*i32:16", "start_ptr": "*i32:16", "end_ptr": "*i32:16",
        "hidden_ptr": "*bf16:16" if kernel is _gate_up_kernel else "*u8:16", "weight_ptr": "*fp32:16",
        "out_ptr": "*fp32:16", "top_k": "i32", "width": "i32:16", "rows": "i32:16", "cols": "i32:16",
    }  # fmt: skip
    constexprs = _constexprs(block_size, tile_pairs)
    return Specimen(
        name,
        kernel,
        {argument: types[argument] for argument in kernel.arg_names if argument not in constexprs},
        constexprs,
        num_warps=NUM_WARPS,
        min_capability=MIN_CAPABILITY,
        bit_exact=False,
    )


# The largest tile alone: the smaller one is the same code with fewer vectors.
SPECIMENS = [
    _specimen(f"w4a4 {name} {fmt}", kernel, block_size=block_size, tile_pairs=MAX_BLOCK_PAIRS)
    for name, kernel in (("gate_up", _gate_up_kernel), ("down", _down_kernel))
    for fmt, block_size in (("nvfp4", 16), ("mxfp4", 32))
]
