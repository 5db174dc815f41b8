"""What every kernel computes, in plain PyTorch: backend `torch`, the definition that the other backends must equal.

Each function is a thin composition of `trace_rl.formats` and `trace_rl.guidance`; nothing is rounded here. Except for
the two matrix products, whose order of summation is the backend's own, results are equal bit for bit on every backend.

Shapes: T tokens, C columns (a multiple of the format's block), E experts, K experts per token, R rows, H hidden, I
expert width, S slots. An encode scale is a number or a tensor that broadcasts to x.shape[:-1].
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import Format, QuantizedTensor, check_finite, pack_codes, unpack_codes, with_codewords
from trace_rl.formats.quantized import EncodeScale
from trace_rl.guidance.align import UNGATED, align
from trace_rl.guidance.bits import pack_bits, packed_bytes
from trace_rl.guidance.scales import pack_scales, packed_scale_bytes


@dataclass(frozen=True)
class RecordTarget:
    """Where the guidance of T tokens goes: row `slots[t]` of `buffer`, from byte `start`.

    The bytes of a row are [codes: C*bits/8 | scales: C/block, or a quarter of it with scale_bits 2], the field of
    `trace_rl.guidance.record`. buffer: uint8 [S, row_bytes]. slots: int64 [T], distinct.
    """

    buffer: Tensor
    slots: Tensor
    start: int
    bits: int
    scale_bits: int

    def num_bytes(self, cols: int, block_size: int) -> int:
        """Bytes that one token takes."""
        return packed_bytes(cols, self.bits) + packed_scale_bytes(cols // block_size, self.scale_bits)

    def check(self, x: Tensor, *, fmt: Format) -> None:
        """UserError if the record of x [T, C] cannot be written there. Whether the slots lie inside, kernels see."""
        if self.bits not in (1, 2, 3, 4):
            raise UserError(f"guidance.bits is {self.bits}; choose 1, 2, 3 or 4 (4 = full codes)")
        if self.scale_bits not in (2, 8):
            raise UserError(f"guidance.scale_bits is {self.scale_bits}; choose 8 (the whole scale) or 2 (recovered)")
        buffer, stop = self.buffer, self.start + self.num_bytes(x.shape[1], fmt.block_size)
        fits = buffer.dim() == 2 and buffer.stride(1) == 1 and self.start >= 0 and stop <= buffer.shape[1]
        if buffer.dtype != torch.uint8 or not fits:
            raise UserError(
                f"the record of {x.shape[1]} columns needs bytes {self.start} to {stop} of uint8 rows; the buffer is "
                f"{buffer.dtype} {tuple(buffer.shape)}: it was made for another layout"
            )
        check_slots(self.slots, x.shape[0])


def check_slots(slots: Tensor, num_rows: int) -> None:
    """UserError unless there is one slot for each row, int64 and dense."""
    if slots.shape != (num_rows,) or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise UserError(
            f"slots must be int64 [{num_rows}], dense, one per row; they are {slots.dtype} {tuple(slots.shape)}"
        )


class Quantized(NamedTuple):
    """Parts of a quantized x [..., C] that were asked for, the others None."""

    xhat: Tensor | None
    """x rounded to the format, in x's dtype."""
    codes: Tensor | None
    """uint8 [..., C/2], even column in the low nibble."""
    block_scale: Tensor | None
    """uint8 [..., C/block]."""


class PackedExperts(NamedTuple):
    """Expert matrices [E, R, C] in the stored form."""

    codes: Tensor
    """uint8 [E, R, C/2]."""
    block_scale: Tensor
    """uint8 [E, R, C/block]."""
    encode_scale: Tensor
    """float32 [E]."""


def fake_quant(x: Tensor, encode_scale: EncodeScale, *, fmt: Format, check: bool = True) -> Tensor:
    """x [..., C] (bfloat16 or float32) rounded to the nearest value of the format, in x's dtype.

    `check`: UserError if x holds NaN or Inf.
    """
    if check:
        check_finite(x, "x")
    return fmt.fake_quant(x, encode_scale).to(x.dtype)


def fake_quant_experts(weight_ERC: Tensor, *, fmt: Format, check: bool = True) -> Tensor:
    """Expert matrices rounded to the format, each with its own encode scale, in the weight's dtype."""
    if check:
        check_finite(weight_ERC, "expert weights")
    return fmt.fake_quant(weight_ERC, expert_encode_scale(weight_ERC, fmt=fmt)[:, None]).to(weight_ERC.dtype)


def expert_encode_scale(weight_ERC: Tensor, *, fmt: Format) -> Tensor:
    """float32 [E]: encode scale of each expert matrix."""
    return fmt.encode_scale(weight_ERC.abs().amax(dim=(1, 2)).float())


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
    """Quantize x [T, C] once: xhat and/or packed codes and scales as asked, and the guidance written to `target`."""
    if check:
        check_finite(x, "x")
    if target is None and not want_codes:
        return Quantized(fmt.fake_quant(x, encode_scale).to(x.dtype) if want_xhat else None, None, None)
    codes, block_scale, xhat = with_codewords(fmt).quantize_codes(x, encode_scale)
    if target is not None:
        row = torch.cat((pack_bits(codes, target.bits), pack_scales(block_scale, target.scale_bits)), dim=1)
        target.buffer[:, target.start : target.start + row.shape[1]].index_copy_(0, target.slots, row)
    return Quantized(
        xhat=xhat.to(x.dtype) if want_xhat else None,
        codes=pack_codes(codes) if want_codes else None,
        block_scale=block_scale if want_codes else None,
    )


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
    """x [T, C] rounded on the rollout's scale to the neighbour that the guidance selects (METHOD.md section 3).

    guidance: uint8 [T, C*bits/8] as recorded; block_scale: uint8 [T, C/block]. Both may be column ranges of the record
    rows (only the last dimension must be dense). valid: bool [T]; tokens without a record round to nearest on their
    own scale. The result has x's dtype; its gradient is the identity and the caller's affair.
    """
    if check:
        check_finite(x, "x")
    xhat = align(x, block_scale.contiguous(), guidance.contiguous(), bits, encode_scale, gate=gate, fmt=fmt)
    if valid is not None and not bool(valid.all()):
        own = (~valid).nonzero().squeeze(1)
        per_row = isinstance(encode_scale, Tensor) and encode_scale.numel() > 1
        own_scale = encode_scale.index_select(0, own) if per_row else encode_scale
        xhat = xhat.index_copy(0, own, fmt.fake_quant(x.index_select(0, own), own_scale))
    return xhat.to(x.dtype)


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
    """K or V of T tokens [T, heads*head_dim] into a packed cache: uint8 [S, C/2] and [S, C/block], rows `slots`."""
    _, codes, block_scale = quantize_record(
        x, encode_scale, fmt=fmt, target=target, want_xhat=False, want_codes=True, check=check
    )
    cache_codes.index_copy_(0, slots, codes)
    cache_scale.index_copy_(0, slots, block_scale)


def kv_dequantize(
    cache_codes: Tensor, cache_scale: Tensor, slots: Tensor, encode_scale: EncodeScale, *, fmt: Format
) -> Tensor:
    """bfloat16 [T, C]: the cache's rows `slots`, as attention reads them."""
    codes = unpack_codes(cache_codes.index_select(0, slots))
    return fmt.decode(codes, cache_scale.index_select(0, slots), encode_scale).to(torch.bfloat16)


def repack(weight_ERC: Tensor, *, fmt: Format, check: bool = True) -> PackedExperts:
    """BF16 expert matrices in the stored form, one encode scale each: what a refit of packed weights writes."""
    if check:
        check_finite(weight_ERC, "expert weights")
    encode_scale = expert_encode_scale(weight_ERC, fmt=fmt)
    codes, block_scale, _ = fmt.quantize_codes(weight_ERC, encode_scale[:, None])
    return PackedExperts(codes=pack_codes(codes), block_scale=block_scale, encode_scale=encode_scale)


def unpack_experts(packed: PackedExperts, *, fmt: Format) -> Tensor:
    """float32 [E, R, C]."""
    return fmt.decode(unpack_codes(packed.codes), packed.block_scale, packed.encode_scale[:, None])


def w4a16_moe(
    x_TH: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    weights_TK: Tensor,
    ids_TK: Tensor,
    *,
    fmt: Format,
) -> Tensor:
    """Routed SwiGLU experts with 4-bit weights and BF16 activations, [T, H] -> [T, H] in x's dtype.

    gate_up [E, 2I, H] (gate rows first), down [E, H, I]; every product accumulates in FP32, the hidden vector is
    rounded to BF16 before the second one, the sum over experts is FP32.
    """
    return _moe(x_TH, gate_up, down, weights_TK, ids_TK, fmt=fmt, fc2_scale=None)


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
) -> Tensor:
    """As `w4a16_moe` with both activations quantized, at static encode scales."""
    x_TH = fake_quant(x_TH, fc1_scale, fmt=fmt)
    return _moe(x_TH, gate_up, down, weights_TK, ids_TK, fmt=fmt, fc2_scale=fc2_scale)


def _moe(
    x_TH: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    weights_TK: Tensor,
    ids_TK: Tensor,
    *,
    fmt: Format,
    fc2_scale: float | None,
) -> Tensor:
    if ids_TK.numel() and not 0 <= int(ids_TK.min()) <= int(ids_TK.max()) < gate_up.codes.shape[0]:
        raise UserError(f"expert ids must lie in [0, {gate_up.codes.shape[0]})")
    out = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for expert in torch.unique(ids_TK).tolist():
        token, k = (ids_TK == expert).nonzero(as_tuple=True)
        first, second = (_expert_matrix(packed, expert, fmt=fmt) for packed in (gate_up, down))
        gate, up = (x_TH.index_select(0, token).float() @ first.T).chunk(2, dim=1)
        hidden = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
        if fc2_scale is not None:
            hidden = fake_quant(hidden, fc2_scale, fmt=fmt)
        out.index_add_(0, token, (hidden.float() @ second.T) * weights_TK[token, k, None].float())
    return out.to(x_TH.dtype)


def _expert_matrix(packed: PackedExperts, expert: int, *, fmt: Format) -> Tensor:
    """float32 [R, C] of one expert, rounded to BF16: the operand of the trainer and the engine."""
    parts = (packed.codes[expert], packed.block_scale[expert], packed.encode_scale[expert])
    return QuantizedTensor(fmt, *parts).dequantize().to(torch.bfloat16).float()
