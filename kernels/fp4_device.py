"""FP4 inside Triton: rounding to E2M1, E4M3 and E8M0, packing, and what every launcher hands to a kernel.

The device functions repeat trace_rl.formats operation by operation, in IEEE float32 and integers only, so a kernel
gives the same bits in the interpreter and on every architecture:

* Rounding is two additions, (v + c) - c with c = 1.5 * 2^k times the power of two below v, chosen so that the unit in
  the last place of c is the grid step (trace_rl.formats.e2m1 explains it). FP8 and FP4 conversion instructions are not
  used: which exist, how they treat values beyond the largest and whether the interpreter has them differs.
* The sum v + c holds the multiple of the step in its low bits: they *are* the mantissa bit and the E4M3 code.
* Division is `tl.div_rn`. Plain `/` is approximate on the device.
* Scaling by 2^-126 (or 2^-120) moves the octaves of E2M1 (E4M3) onto the subnormal range and first octaves of
  float32, whose top bits are then the code. Exact, and in need of subnormals: nothing may flush them (no `.ftz`).
* Every launch sets `enable_fp_fusion=False` (`LAUNCH`): Triton's default contracts a*b+c, which rounds once, not twice.

Only bfloat16 conversion differs between the two: the interpreter truncates, and reads subnormals wrongly, so there it
is integer arithmetic; on the device rounding is the `cvt.rn` instruction, defined as round to nearest even.

Shapes in comments: R rows, N blocks, B values of a block (16 or 32), G groups of eight values. A tile is [R, N, B].
"""

import contextlib
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import Format, check_finite
from trace_rl.formats.mxfp4 import MXFP4
from trace_rl.formats.nvfp4 import E4M3_MAX, NVFP4, ONE_SIXTH, split_encode_scale
from trace_rl.formats.quantized import EncodeScale

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_EXPONENT = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
NOT_FINITE = tl.constexpr(0x7F800000)  # magnitude bits from here on are Inf and NaN
_E2M1_MAX = tl.constexpr(6.0)
_E2M1_MAGIC = tl.constexpr(1.5 * 2**22)
_E2M1_TO_BITS = tl.constexpr(2.0**-126)
_E2M1_FROM_BITS = tl.constexpr(2.0**126)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_E4M3_SMALLEST_OCTAVE = tl.constexpr(2.0**-6)
_E4M3_MAGIC = tl.constexpr(1.5 * 2**20)
_E4M3_FROM_BITS = tl.constexpr(2.0**120)
_ONE_SIXTH = tl.constexpr(ONE_SIXTH)
_E8M0_SMALLEST = tl.constexpr(0x00400000)  # bits of 2^-127

# Entries of the flag tensor of a checking kernel: plain stores, because whoever writes writes 1.
BAD_VALUE = tl.constexpr(0)
BAD_SLOT = tl.constexpr(1)


@triton.jit
def float_bits(value):
    """int32 bits of float32 values."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(bits):
    """float32 values of int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_float32(pointer, mask):
    """Load bfloat16 or float32 as float32; masked values are +0."""
    value = tl.load(pointer, mask=mask, other=0.0)
    if value.dtype == tl.bfloat16:
        value = bits_float(value.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return value


@triton.jit
def store_float32(pointer, value, mask):
    """Store float32 values as the pointer's bfloat16 (round to nearest even) or float32."""
    if pointer.dtype.element_ty == tl.bfloat16:
        if INTERPRETED:
            bits = float_bits(value)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            value = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            value = value.to(tl.bfloat16)
    tl.store(pointer, value, mask=mask)


@triton.jit
def reciprocal(step):
    """1/step correctly rounded, 0 where the step is 0."""
    zero = step == 0.0
    return tl.where(zero, 0.0, tl.div_rn(1.0, tl.where(zero, 1.0, step)))


@triton.jit
def flag_values(flag_ptr, largest):
    """Raise the flag where the largest magnitude (bits) of a block is NaN or Inf."""
    tl.store(flag_ptr + BAD_VALUE + (largest & 0), 1, mask=largest >= NOT_FINITE)


@triton.jit
def load_slots(slots_ptr, row, row_mask, num_slots, flag_ptr, CHECK: tl.constexpr):
    """(int64 slots [R], mask [R]): rows whose slot lies outside the buffer are flagged and left alone."""
    slot = tl.load(slots_ptr + row, mask=row_mask, other=0).to(tl.int64)
    inside = (slot >= 0) & (slot < num_slots)
    if CHECK:
        tl.store(flag_ptr + BAD_SLOT + (row & 0), 1, mask=row_mask & (inside == 0))
    return slot, row_mask & inside


@triton.jit
def amax_bits(x):
    """int32 [R, N]: bits of the largest magnitude of each block of x [R, N, B].

    As integers, because non-negative floats order alike and NaN comes out on top: one comparison with NOT_FINITE then
    finds every NaN and Inf, where a float maximum would lose NaN.
    """
    return tl.max(float_bits(x) & _MAGNITUDE, axis=2)


@triton.jit
def _e8m0_value(byte):
    return bits_float(tl.maximum(byte << 23, _E8M0_SMALLEST))


@triton.jit
def choose_scale(amax, encode_scale, inverse, RULE: tl.constexpr):
    """(byte int32, step, 1/step) of blocks with this largest magnitude.

    RULE: nvfp4 (E4M3 under the encode scale), or a rule of mxfp4 (E8M0). inverse: 1/encode_scale, rounded.
    """
    if RULE == "nvfp4":
        wanted = tl.minimum(amax * _ONE_SIXTH * encode_scale, _E4M3_MAX)
        octave = tl.maximum(bits_float(float_bits(wanted) & _EXPONENT), _E4M3_SMALLEST_OCTAVE)
        magic = octave * _E4M3_MAGIC
        shifted = wanted + magic
        # Multiples of octave/8 (0..16) continue the codes of the octaves below; the first octave holds the subnormals.
        byte = ((float_bits(octave) >> 23) - 121) * 8 + float_bits(shifted) - float_bits(magic)
        step = (shifted - magic) * inverse
        inverse_step = reciprocal(step)
    else:
        if RULE == "rceil":
            exponent = (float_bits(tl.div_rn(amax, 6.0)) + 0x7FFFFF) >> 23
        elif RULE == "floor":
            exponent = (float_bits(amax) >> 23) - 2
        else:
            tl.static_assert(RULE == "even")
            exponent = ((float_bits(amax) + (1 << 21)) >> 23) - 2
        byte = tl.minimum(tl.maximum(exponent, 0), 254)
        step = _e8m0_value(byte)
        inverse_step = _e8m0_value(254 - byte)
    return byte, step, inverse_step


@triton.jit
def scale_step(byte, inverse, RULE: tl.constexpr):
    """float32 step of stored block scales (int32 0..255); a NaN byte gives NaN, as in the formats' tables."""
    if RULE == "nvfp4":
        low = byte & 0x7F
        value = bits_float((low << 20) | ((byte & 0x80) << 24)) * _E4M3_FROM_BITS
        step = tl.where(low == 0x7F, float("nan"), value) * inverse
    else:
        step = _e8m0_value(byte)
    return step


@triton.jit
def round_e2m1(y):
    """(q, shifted, octave) of float32 y: nearest E2M1 value, y + magic, and the power of two below |y| (at least 1).

    The lowest bit of `shifted` is q's mantissa bit. q is never -0. y is clamped to [-6, 6] first: returned as the last.
    """
    z = tl.clamp(y, -_E2M1_MAX, _E2M1_MAX)
    octave = tl.maximum(bits_float(float_bits(z) & _EXPONENT), 1.0)
    magic = octave * _E2M1_MAGIC
    shifted = z + magic
    return shifted - magic, shifted, octave, z


@triton.jit
def e2m1_codes(q):
    """int32 codes of E2M1 values (q is not -0)."""
    bits = float_bits(q * _E2M1_TO_BITS)
    return ((bits >> 22) & 7) | ((bits >> 28) & 8)


@triton.jit
def e2m1_values(code):
    """float32 values of int32 codes; code 8 (-0, never written here) reads as +0."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits_float(bits) * _E2M1_FROM_BITS + 0.0


@triton.jit
def low_bits(q, shifted, BITS: tl.constexpr):
    """The low bits of the codes, int32."""
    if BITS == 1:
        code = float_bits(shifted) & 1
    else:
        code = e2m1_codes(q) & ((1 << BITS) - 1)
    return code


@triton.jit
def pack_groups(code, BITS: tl.constexpr):
    """int32 [R, G] of codes [R, N, B] below 2^BITS: value j of a group of eight in bits j*BITS and up."""
    groups = tl.reshape(code, [code.shape[0], code.shape[1] * code.shape[2] // 8, 8])
    return tl.sum(groups << (tl.arange(0, 8) * BITS)[None, None, :], axis=2)


@triton.jit
def unpack_groups(words, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """int32 [R, N, B], the inverse of `pack_groups`."""
    code = (words[:, :, None] >> (tl.arange(0, 8) * BITS)[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(code, [words.shape[0], words.shape[1] * 8 // BLOCK, BLOCK])


@triton.jit
def store_groups(row_pointer, group, words, mask, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    """Store the BITS bytes of each group: row_pointer uint8 [R, 1], group int32 [1, G], words and mask [R, G].

    ALIGNED: the rows start at multiples of BITS bytes, so a group of 2 or 4 bytes is one store.
    """
    if BITS == 4 and ALIGNED:
        tl.store(row_pointer.to(tl.pointer_type(tl.int32), bitcast=True) + group, words, mask=mask)
    elif BITS == 2 and ALIGNED:
        tl.store(row_pointer.to(tl.pointer_type(tl.int16), bitcast=True) + group, words.to(tl.int16), mask=mask)
    else:
        for i in tl.static_range(BITS):
            tl.store(row_pointer + group * BITS + i, (words >> (8 * i)).to(tl.uint8), mask=mask)


@triton.jit
def load_groups(row_pointer, group, mask, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    """int32 [R, G], the inverse of `store_groups` (bits above 8*BITS are not defined)."""
    if BITS == 4 and ALIGNED:
        words = tl.load(row_pointer.to(tl.pointer_type(tl.int32), bitcast=True) + group, mask=mask, other=0)
    elif BITS == 2 and ALIGNED:
        halves = tl.load(row_pointer.to(tl.pointer_type(tl.int16), bitcast=True) + group, mask=mask, other=0)
        words = halves.to(tl.int32)
    else:
        words = tl.load(row_pointer + group * BITS, mask=mask, other=0).to(tl.int32)
        for i in tl.static_range(1, BITS):
            words |= tl.load(row_pointer + group * BITS + i, mask=mask, other=0).to(tl.int32) << (8 * i)
    return words


@triton.jit
def load_encode_scale(scale_ptr, number, inverse, row, row_mask, rows_per_scale, IS_NUMBER: tl.constexpr):
    """(G, 1/G): two numbers, or [R, 1] each from entry row // rows_per_scale of a tensor."""
    if IS_NUMBER:
        encode_scale = number
        inverse_scale = inverse
    else:
        encode_scale = tl.load(scale_ptr + row // rows_per_scale, mask=row_mask, other=1.0)[:, None]
        inverse_scale = tl.div_rn(1.0, encode_scale)
    return encode_scale, inverse_scale


# What launchers share, on the host.

LAUNCH = {"enable_fp_fusion": False}
"""Options of every launch."""

TILE_VALUES = 2048
NUM_WARPS = 2
"""32 values per thread, the same on every device instead of autotuning. A thread has four 16-byte loads of BF16 under
way, and 11 programs of 90 registers share a Hopper multiprocessor: 45 KB in flight, which HBM's latency needs. What
every program does once (addresses, slots, divisions) is spread over enough values: sm_90 machine code of a 1-bit
recording has 24 instructions per value, 28 at 16 values per thread. Two warps wait little at their barriers."""

_MAX_TILE_COLS = 1024
_INTERPRETED_ROWS = 32


@dataclass(frozen=True)
class ScaleArguments:
    """An encode scale as kernels take it: tensor or number, never both."""

    tensor: Tensor | None
    number: float
    inverse: float
    rows_per_scale: int

    @property
    def is_number(self) -> bool:
        """Whether the scale travels as a kernel argument."""
        return self.tensor is None


def rule_of(fmt: Format) -> str:
    """The kernels' name of a format: nvfp4, rceil, floor or even. UserError for formats without a kernel."""
    if type(fmt) is NVFP4:
        return "nvfp4"
    if type(fmt) is MXFP4:
        return fmt.rule
    raise UserError(f"there is no Triton kernel for format {fmt.name!r}: use the backend `torch`, or nvfp4 or mxfp4")


def rows_of(x: Tensor, *, fmt: Format, name: str = "x") -> Tensor:
    """x [..., C] as [T, C] with dense rows (a view where possible), once it is known to be quantizable."""
    if x.dim() == 0 or x.shape[-1] % fmt.block_size:
        raise UserError(
            f"tensor {name!r} of shape {tuple(x.shape)}: the last dimension must be a multiple of {fmt.block_size} for "
            f"{fmt.name}; choose a format with a smaller block or pad the model dimension"
        )
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise UserError(f"tensor {name!r} is {x.dtype}; {fmt.name} quantizes bfloat16 or float32: cast it first")
    check_device(x, name=name)
    x = x.detach()
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def check_device(x: Tensor, *, name: str) -> None:
    """UserError where the kernel cannot reach the tensor."""
    if x.device.type != "cuda" and not INTERPRETED:
        raise UserError(
            f"tensor {name!r} is on {x.device}, where Triton cannot run: move it to a GPU, use the backend `torch`, or "
            "set TRITON_INTERPRET=1 before the first import to interpret the kernels"
        )


def scale_arguments(
    encode_scale: EncodeScale, *, fmt: Format, shape: torch.Size, device: torch.device
) -> ScaleArguments:
    """An encode scale for rows of x, `shape` = x.shape[:-1]; formats without a global scale ignore it, as the twin."""
    if not isinstance(fmt, NVFP4):
        return ScaleArguments(None, 1.0, 1.0, 1)
    if not isinstance(encode_scale, Tensor):
        number, inverse = split_encode_scale(encode_scale)
        return ScaleArguments(None, float(number), float(inverse), 1)
    scale = encode_scale.detach().to(device=device, dtype=torch.float32)
    if scale.dim() == 0 or scale.numel() == 1:
        return ScaleArguments(scale.reshape(1), 1.0, 1.0, max(1, shape.numel()))
    return ScaleArguments(scale.expand(shape).reshape(-1).contiguous(), 1.0, 1.0, 1)


def tile(num_rows: int, num_cols: int, *, block_size: int) -> tuple[int, int]:
    """(rows, columns) of a program's tile, powers of two.

    Columns: the largest power of two that divides the row and leaves no lane idle, up to 1024; short or odd rows are
    covered with masked lanes. Up to 64 rows (decoding) a tile has one row, so that more multiprocessors take part.
    """
    cols = min(num_cols & -num_cols, _MAX_TILE_COLS)
    if cols < 256:
        cols = min(triton.next_power_of_2(num_cols), 256)
    cols = max(cols, 4 * block_size)  # four blocks share a byte of 2-bit scales
    if INTERPRETED:  # where a program costs milliseconds, whatever its size
        return min(triton.next_power_of_2(max(1, num_rows)), _INTERPRETED_ROWS), cols
    return 1 if num_rows <= 64 else max(1, TILE_VALUES // cols), cols


def grid(num_rows: int, num_cols: int, rows: int, cols: int) -> tuple[int, int]:
    """Programs of a launch: row tiles by column tiles. Two dimensions, so that no program divides to find its tile."""
    return triton.cdiv(num_rows, rows), triton.cdiv(num_cols, cols)


def aligned(tensor: Tensor, start: int, bits: int) -> bool:
    """Whether groups of `bits` bytes from byte `start` of each row can be moved in one access."""
    return bits in (2, 4) and (tensor.data_ptr() + start) % bits == 0 and tensor.stride(0) % bits == 0


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Launch on x's device."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def new_flag(x: Tensor) -> Tensor:
    """int32 [2]: whether a checking kernel found BAD_VALUE, BAD_SLOT."""
    return torch.zeros(2, dtype=torch.int32, device=x.device)


def raise_flag(flag: Tensor, x: Tensor, *, name: str) -> None:
    """UserError for what the kernel found; waits for it. By then the outputs are written: they must not be used."""
    found = flag.tolist()
    if found[BAD_VALUE.value]:
        check_finite(x, name)
    if found[BAD_SLOT.value]:
        raise UserError("a slot lies outside the buffer it points into: the slots belong to another, larger buffer")
