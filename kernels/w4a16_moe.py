"""Routed SwiGLU experts with packed 4-bit weights and BF16 activations: decoding, where weight bytes are the time.

With few tokens per expert a MoE layer reads every used expert once and computes next to nothing, so on a device without
FP4 tensor cores (Hopper) 4.5 stored bits instead of 16 are the whole gain. Weights are decoded in registers on their
way to the tensor cores:

    xhat    = q * (sigma * (1/G))      FP32, in the order of the format's `decode`; MXFP4: q * 2^(byte - 127)
    operand = bfloat16(xhat)           as the trainer and the emulated engine multiply it

Two launches. Each reads the bytes of an expert once per block of its tokens (`moe_routing`), so once while it has at
most 16, and never if it has none:

    gate_up    hidden[pair] = bfloat16(silu(gate) * up)                     FP32 sums
    down       out[pair] = weights[pair] * (down @ hidden[pair])            FP32, then added up over a token's K pairs

Every sum has a fixed order and there are no atomics: the result does not depend on the schedule.

What is easy to break:

* The matrix product is weights @ tokens. A weight then goes from its load into a tensor core's fragment inside one
  thread, and the few tokens fill the dimension that may be narrow.
* A dot product does not care about the order of its terms. Codes are read as 64-bit words, and value j of each of 16
  blocks forms one operand, which meets those columns of x: x and hidden are kept as [rows, block size, blocks]. So
  codes and scales have one shape, [rows, blocks], and unpacking to the order of the columns, which would cost a shuffle
  or a pass through shared memory per value, is not needed.
* The compiler moves a load into the layout of a fragment only through elementwise operations down to loads. That is why
  1/G is loaded again with every tile, and by the host's reciprocal (the twin's): a number of the program, broadcast,
  sends every operand through shared memory (a sixth more instructions, two barriers for each value of a block).
* Integer instructions bound the decoding: 6 instructions per value on sm_90, of which 3 move bits. Two codes are moved
  at once, to where the halves of a 32-bit word have the sign and low exponent bits of a BF16 number. E2M1's low three
  bits there are the value times 2^-126, subnormal included. The step carries 2^63 and the finished sum another 2^63;
  the whole 2^126 in the step would overflow from step 4 on. All factors are powers of two, so operands are exact images
  of bfloat16(xhat) while those lie between 2^-63 and 2^64; nothing may flush subnormals (Triton does not).

Code 8 (-0) gives -0 here and +0 in the twin; no sum can tell.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_rl.formats import Format
from trace_rl.kernels.fp4_device import (
    INTERPRETED,
    LAUNCH,
    bits_float,
    float_bits,
    load_float32,
    on_device,
    store_float32,
)
from trace_rl.kernels.moe_routing import MAX_BLOCK_PAIRS, block_pairs, check_arguments, route
from trace_rl.kernels.reference import PackedExperts
from trace_rl.kernels.specimen import Specimen

TILE_ROWS = 32  # weight rows of a program; with gate_up every other one is a gate row
TILE_BLOCKS = 16  # blocks per step along a row: the 16 terms that a tensor core adds up
NUM_WARPS = 2  # with 4 and 64 rows, Hopper's asynchronous products wait for each other every time

_STEP_FACTOR = 2.0**63
_SUM_FACTOR = tl.constexpr(2.0**63)
_E8M0_TO_EXPONENT = tl.constexpr(63)  # E8M0 and FP32 have the same bias, so this is the step factor
_E4M3_FROM_BITS = tl.constexpr(2.0**120)
_SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000
_MAGNITUDES = tl.constexpr(0x01C001C0)
_HIGH_HALF = tl.constexpr(-0x10000)  # 0xFFFF0000


def w4a16_moe(
    x_TH: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    weights_TK: Tensor,
    ids_TK: Tensor,
    *,
    fmt: Format,
    check: bool = True,
) -> Tensor:
    """Routed experts of x bfloat16 [T, H] -> bfloat16 [T, H], see `trace_rl.kernels.reference.w4a16_moe`.

    gate_up [E, 2I, H] (gate rows first), down [E, H, I], packed; weights [T, K] float32 or bfloat16; ids [T, K].
    `check`: UserError for ids outside [0, E), which waits for the device; without it the call can be captured in a CUDA
    graph. UserError for shapes, dtypes, devices and formats that the kernels cannot read.
    """
    check_arguments(x_TH, gate_up, down, weights_TK, ids_TK, fmt=fmt, check=check)
    num_tokens, hidden_size = x_TH.shape
    num_experts, num_pairs = down.codes.shape[0], ids_TK.numel()
    width = 2 * down.codes.shape[2]
    if num_pairs == 0:
        return torch.zeros_like(x_TH)
    with on_device(x_TH):
        routing = route(ids_TK, num_experts, block_pairs(num_pairs, num_experts))
        blocks = len(routing.expert)
        hidden = torch.empty(num_pairs, width, dtype=torch.bfloat16, device=x_TH.device)
        _gate_up_kernel[blocks, triton.cdiv(2 * width, TILE_ROWS)](
            by_place(x_TH, fmt.block_size), *_stored(gate_up), *routing.tensors, hidden, ids_TK.shape[1], width,
            **_constexprs(fmt.block_size, hidden_size, routing.block_pairs), **LAUNCH, num_warps=NUM_WARPS,
        )  # fmt: skip
        out = torch.empty(num_pairs, hidden_size, dtype=torch.float32, device=x_TH.device)
        _down_kernel[blocks, triton.cdiv(hidden_size, TILE_ROWS)](
            hidden, *_stored(down), *routing.tensors, weights_TK.contiguous(), out, hidden_size,
            **_constexprs(fmt.block_size, width, routing.block_pairs), **LAUNCH, num_warps=NUM_WARPS,
        )  # fmt: skip
        return out.view(num_tokens, -1, hidden_size).sum(dim=1).to(torch.bfloat16)


def by_place(x: Tensor, block_size: int) -> Tensor:
    """[rows, C] -> [rows, block size, blocks]: the columns at one place of their blocks together."""
    return x.unflatten(1, (-1, block_size)).transpose(1, 2).contiguous()


def _stored(packed: PackedExperts) -> tuple[Tensor, Tensor, Tensor]:
    """(64-bit words [E, R, C/16], block scales, 1/G times the step factor [E])."""
    return packed.codes.view(torch.int64), packed.block_scale, packed.encode_scale.reciprocal() * _STEP_FACTOR


def _constexprs(block_size: int, cols: int, tile_pairs: int) -> dict[str, Any]:
    """The row length is a constant: offsets of the operands are then immediate values instead of registers."""
    return {
        "BLOCK_SIZE": block_size,
        "BLOCKS": cols // block_size,
        "TILE_ROWS": TILE_ROWS,
        "TILE_BLOCKS": TILE_BLOCKS,
        "TILE_PAIRS": tile_pairs,
    }


@triton.jit
def _gate_up_kernel(
    x_ptr,  # bfloat16 [T, BLOCK_SIZE, BLOCKS]
    codes_ptr,  # int64 [E, 2I, BLOCKS * BLOCK_SIZE / 16]
    scale_ptr,  # uint8 [E, 2I, BLOCKS]
    inverse_ptr,  # float32 [E]
    order_ptr,  # int32: order, expert, start, end of moe_routing.Routing
    expert_ptr,
    start_ptr,
    end_ptr,
    hidden_ptr,  # bfloat16 [T*K, BLOCK_SIZE, I / BLOCK_SIZE]
    top_k,
    width,  # I
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,  # H / BLOCK_SIZE
    TILE_ROWS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
):
    """Program (block, tile): TILE_ROWS/2 channels of the hidden vectors of one block of pairs."""
    expert = tl.load(expert_ptr + tl.program_id(0))
    if expert < 0:
        return
    pair, is_pair = _pairs(order_ptr, start_ptr, end_ptr, TILE_PAIRS)
    first_channel = tl.program_id(1) * (TILE_ROWS // 2)
    tile_row = tl.arange(0, TILE_ROWS)  # gate, up, gate, up, ... of consecutive channels
    channel = first_channel + tile_row // 2
    product = _rows_times_vectors(
        codes_ptr, scale_ptr, inverse_ptr, expert, 2 * width, (tile_row % 2) * width + channel, channel < width,
        x_ptr, pair // top_k, is_pair, BLOCK_SIZE, BLOCKS, TILE_BLOCKS,
    )  # fmt: skip
    gate, up = tl.split(tl.trans(tl.reshape(product, [TILE_ROWS // 2, 2, TILE_PAIRS]), 0, 2, 1))
    hidden = gate / (1.0 + tl.exp(-gate)) * up

    channel = first_channel + tl.arange(0, TILE_ROWS // 2)
    column = (channel % BLOCK_SIZE) * (width // BLOCK_SIZE) + channel // BLOCK_SIZE
    store_float32(
        hidden_ptr + pair.to(tl.int64)[None, :] * width + column[:, None],
        hidden,
        (channel < width)[:, None] & is_pair[None, :],
    )


@triton.jit
def _down_kernel(
    hidden_ptr,  # bfloat16 [T*K, BLOCK_SIZE, BLOCKS]
    codes_ptr,  # int64 [E, H, BLOCKS * BLOCK_SIZE / 16]
    scale_ptr,  # uint8 [E, H, BLOCKS]
    inverse_ptr,  # float32 [E]
    order_ptr,  # int32: order, expert, start, end of moe_routing.Routing
    expert_ptr,
    start_ptr,
    end_ptr,
    weight_ptr,  # float32 or bfloat16 [T*K]
    out_ptr,  # float32 [T*K, H]
    rows,  # H
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,  # I / BLOCK_SIZE
    TILE_ROWS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
):
    """Program (block, tile): TILE_ROWS values of the weighted outputs of one block of pairs."""
    expert = tl.load(expert_ptr + tl.program_id(0))
    if expert < 0:
        return
    pair, is_pair = _pairs(order_ptr, start_ptr, end_ptr, TILE_PAIRS)
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    product = _rows_times_vectors(
        codes_ptr, scale_ptr, inverse_ptr, expert, rows, row, row < rows,
        hidden_ptr, pair, is_pair, BLOCK_SIZE, BLOCKS, TILE_BLOCKS,
    )  # fmt: skip
    weight = load_float32(weight_ptr + pair, is_pair)
    tl.store(
        out_ptr + pair.to(tl.int64)[None, :] * rows + row[:, None],
        product * weight[None, :],
        mask=(row < rows)[:, None] & is_pair[None, :],
    )


@triton.jit
def _pairs(order_ptr, start_ptr, end_ptr, TILE_PAIRS: tl.constexpr):
    """(pairs int32, mask) of this program's block."""
    position = tl.load(start_ptr + tl.program_id(0)) + tl.arange(0, TILE_PAIRS)
    is_pair = position < tl.load(end_ptr + tl.program_id(0))
    return tl.load(order_ptr + position, mask=is_pair, other=0), is_pair


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
    vector,
    is_vector,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """float32 [rows, vectors]: rows `row` of an expert's matrix times rows `vector` of BF16 [., BLOCK_SIZE, BLOCKS]."""
    WORDS: tl.constexpr = BLOCK_SIZE // 16  # of a block
    matrix_row = expert.to(tl.int64) * num_rows + row
    codes_ptr += matrix_row[:, None] * (BLOCKS * WORDS)
    scale_ptr += matrix_row[:, None] * BLOCKS
    inverse_ptr += expert + tl.zeros([1, TILE_BLOCKS], dtype=tl.int32)
    vector_ptr += vector.to(tl.int64)[None, :] * (BLOCKS * BLOCK_SIZE)

    product = tl.zeros([row.shape[0], vector.shape[0]], dtype=tl.float32)
    for first in range(0, BLOCKS, TILE_BLOCKS):
        block = first + tl.arange(0, TILE_BLOCKS)
        is_block = block < BLOCKS
        inside = is_row[:, None] & is_block[None, :]
        byte = tl.load(scale_ptr + block[None, :], mask=inside, other=0).to(tl.int32)
        if BLOCK_SIZE == 16:
            # E4M3 in FP32's exponent and mantissa is the value times 2^-120, subnormals included.
            step = bits_float(byte << 20) * _E4M3_FROM_BITS * tl.load(inverse_ptr, mask=is_block[None, :], other=0.0)
        else:
            step = bits_float((byte + _E8M0_TO_EXPONENT) << 23)
        for word in tl.static_range(WORDS):
            codes = tl.load(codes_ptr + (block * WORDS + word)[None, :], mask=inside, other=0)
            for nibble in tl.static_range(16):
                vectors = vector_ptr + (word * 16 + nibble) * BLOCKS + block[:, None]
                mask = is_block[:, None] & is_vector[None, :]
                product = _add_product(product, _operand(codes, step, nibble), vectors, mask)
    return product * _SUM_FACTOR


@triton.jit
def _operand(codes, step, nibble: tl.constexpr):
    """float32 q * step * 2^-126 of one nibble of 64-bit words."""
    half = (codes >> (32 * (nibble // 8))).to(tl.int32)
    place: tl.constexpr = nibble % 4  # of the nibble in its 16 bits; `place + 4` lies alike in the upper ones
    if place == 0:
        magnitude = half << 6
    elif place == 1:
        magnitude = half << 2
    elif place == 2:
        magnitude = half >> 2
    else:
        magnitude = half >> 6
    two = ((half << (12 - 4 * place)) & _SIGNS) | (magnitude & _MAGNITUDES)
    if nibble % 8 < 4:
        bits = two << 16
    else:
        bits = two & _HIGH_HALF
    return bits_float(bits) * step


@triton.jit
def _add_product(product, operand, vectors, mask):
    """product + bfloat16(operand) @ *vectors in FP32. Triton's interpreter would multiply the bits of BF16 numbers."""
    if INTERPRETED:
        bits = float_bits(operand)
        rounded = bits_float((bits + 0x7FFF + ((bits >> 16) & 1)) & _HIGH_HALF)
        product = tl.dot(rounded, load_float32(vectors, mask), product, input_precision="ieee")
    else:
        product = tl.dot(operand.to(tl.bfloat16), tl.load(vectors, mask=mask, other=0.0), product)
    return product


def _specimen(name: str, kernel: Any, *, cols: int, block_size: int, tile_pairs: int) -> Specimen:
    types = {
        "x_ptr": "*bf16:16", "codes_ptr": "*i64:16", "scale_ptr": "*u8:16", "inverse_ptr": "*fp32:16",
        "order_ptr": "*i32:16", "expert_ptr": "*i32:16", "start_ptr": "*i32:16", "end_ptr": "*i32:16",
        "hidden_ptr": "*bf16:16", "weight_ptr": "*fp32:16", "out_ptr": "*fp32:16",
        "top_k": "i32", "width": "i32:16", "rows": "i32:16",
    }  # fmt: skip
    constexprs = _constexprs(block_size, cols, tile_pairs)
    signature = {name: types[name] for name in kernel.arg_names if name not in constexprs}
    return Specimen(name, kernel, signature, constexprs, num_warps=NUM_WARPS, bit_exact=False)


# The largest tile alone: the smaller one is the same code with half the accumulators and vectors, so it needs fewer
# registers and less shared memory, and MXFP4's unrolled block takes Triton 5 s to lay out.
SPECIMENS = [
    _specimen(f"w4a16 {name} {fmt}", kernel, cols=cols, block_size=block_size, tile_pairs=MAX_BLOCK_PAIRS)
    for name, kernel, cols in (("gate_up", _gate_up_kernel, 2048), ("down", _down_kernel, 768))  # Qwen3-30B-A3B
    for fmt, block_size in (("nvfp4", 16), ("mxfp4", 32))
]
