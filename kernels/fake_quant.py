"""Round to nearest: quantize and dequantize in one pass, for activations and for expert weights.

Activations have a known encode scale, so this is `quantize_kernel` with xhat as its only output: two bytes read and two
written per BF16 value. Expert weights take theirs from the largest magnitude of each expert matrix, which is a pass of
its own: `expert_amax_kernel` reduces every expert in one launch (integer maximum of the magnitude bits, so the order of
the programs cannot matter), and the second launch quantizes all experts, each row with its expert's scale. Weights are
thus read twice; nothing else can be, since a scale must be known before the first value is rounded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import Format, check_finite
from trace_rl.formats.quantized import EncodeScale
from trace_rl.kernels import fp4_device
from trace_rl.kernels.fp4_device import LAUNCH, NOT_FINITE, ScaleArguments, float_bits, load_float32
from trace_rl.kernels.quantize_record import launch_quantize, quantize_specimen
from trace_rl.kernels.specimen import Specimen

AMAX_TILE = 4096
AMAX_TILES = 8  # per program: one atomic for 32768 values
AMAX_WARPS = 4


@triton.jit
def expert_amax_kernel(x_ptr, amax_ptr, expert_values, TILE: tl.constexpr, TILES: tl.constexpr):
    """Raise int32 amax[expert] to the magnitude bits of TILES tiles of that expert's values (dense)."""
    expert = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * (TILE * TILES)
    expert_ptr = x_ptr + expert.to(tl.int64) * expert_values
    largest = tl.zeros([TILE], dtype=tl.int32)
    for i in range(TILES):
        index = first + i * TILE + tl.arange(0, TILE)
        value = load_float32(expert_ptr + index, index < expert_values)
        largest = tl.maximum(largest, float_bits(value) & 0x7FFFFFFF)
    tl.atomic_max(amax_ptr + expert, tl.max(largest, axis=0))


def fake_quant(x: Tensor, encode_scale: EncodeScale, *, fmt: Format, check: bool = True) -> Tensor:
    """x [..., C] (bfloat16 or float32) rounded to the nearest value of the format, in x's dtype.

    `check`: UserError if x holds NaN or Inf, for which the host waits.
    """
    rows = fp4_device.rows_of(x, fmt=fmt)
    scale = fp4_device.scale_arguments(encode_scale, fmt=fmt, shape=x.shape[:-1], device=x.device)
    xhat = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    flag = fp4_device.new_flag(rows) if check else None
    launch_quantize(rows, scale, fmt=fmt, xhat=xhat, flag=flag)
    if flag is not None:
        fp4_device.raise_flag(flag, x, name="x")
    return xhat.view(x.shape)


def fake_quant_experts(weight_ERC: Tensor, *, fmt: Format, check: bool = True) -> Tensor:
    """Expert matrices rounded to the format, each with its own encode scale, in the weight's dtype.

    `check`: UserError if a weight is NaN or Inf, for which the host waits.
    """
    rows, scale, _ = expert_rows(weight_ERC, fmt=fmt, check=check)
    xhat = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    launch_quantize(rows, scale, fmt=fmt, xhat=xhat)
    return xhat.view(weight_ERC.shape)


def expert_rows(weight_ERC: Tensor, *, fmt: Format, check: bool) -> tuple[Tensor, ScaleArguments, Tensor]:
    """(weights [E*R, C], their scales as kernels take them, float32 [E] encode scales)."""
    if weight_ERC.dim() != 3:
        raise UserError(f"expert weights must be [experts, rows, columns]; they have shape {tuple(weight_ERC.shape)}")
    num_experts, num_rows, _ = weight_ERC.shape
    rows = fp4_device.rows_of(weight_ERC.detach().contiguous(), fmt=fmt, name="expert weights")
    amax_bits = torch.zeros(num_experts, dtype=torch.int32, device=rows.device)
    expert_values = num_rows * rows.shape[1]
    if rows.numel():
        grid = (triton.cdiv(expert_values, AMAX_TILE * AMAX_TILES), num_experts)
        with fp4_device.on_device(rows):
            expert_amax_kernel[grid](
                rows, amax_bits, expert_values, TILE=AMAX_TILE, TILES=AMAX_TILES, num_warps=AMAX_WARPS, **LAUNCH
            )
    if check and bool((amax_bits >= NOT_FINITE.value).any()):
        check_finite(weight_ERC, "expert weights")
    encode_scale = fmt.encode_scale(amax_bits.view(torch.float32))
    if fp4_device.rule_of(fmt) != "nvfp4":
        return rows, fp4_device.scale_arguments(1.0, fmt=fmt, shape=rows.shape[:1], device=rows.device), encode_scale
    return rows, ScaleArguments(encode_scale, 1.0, 1.0, max(1, num_rows)), encode_scale


def _amax_specimen(dtype: str) -> Specimen:
    signature = {"x_ptr": f"*{dtype}:16", "amax_ptr": "*i32:16", "expert_values": "i32:16"}
    constants = {"TILE": AMAX_TILE, "TILES": AMAX_TILES}
    return Specimen(f"expert_amax {dtype}", expert_amax_kernel, signature, constants, num_warps=AMAX_WARPS)


SPECIMENS = [
    quantize_specimen("fake_quant nvfp4", x="bf16", rule="nvfp4", WANT_XHAT=True),
    quantize_specimen("fake_quant nvfp4 fp32", x="fp32", rule="nvfp4", WANT_XHAT=True),
    quantize_specimen("fake_quant mxfp4 even, unchecked", x="bf16", rule="even", WANT_XHAT=True, CHECK=False),
    quantize_specimen("fake_quant_experts", x="bf16", rule="nvfp4", WANT_XHAT=True, CHECK=False, SCALE_IS_NUMBER=False),
    _amax_specimen("bf16"),
    _amax_specimen("fp32"),
]
