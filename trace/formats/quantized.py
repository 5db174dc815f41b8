"""What every format produces, and what every format can do.

``QuantizedTensor`` is the stored form (packed codes, block scales, global scale). A format is as much as it can be:

    Format           fake_quant: rounds values                                               + mxfp8
    PackedFormat     has a 4-bit stored form, which an export writes                         + hif4
    CodewordFormat   its values are E2M1 codewords times a step, so it records and guides    + nvfp4, mxfp4, ...

A new E2M1 block format implements three small methods (`block_scales`, `scale_values`, `_blocks`) and inherits the
rest, so that `fake_quant` and ``quantize().dequantize()`` are equal bit for bit by construction.

Shapes: x is [..., cols]; cols is the reduction dimension and a multiple of `block_size`; block scales are
[..., cols/block_size]. An encode scale is a number, a 0-d tensor, or a tensor that broadcasts to x.shape[:-1]
(one per row; for experts [E, R, C] pass G[:, None]).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import e2m1

EncodeScale = float | Tensor

CHUNK_VALUES = 1 << 17  # larger tensors are worked through in pieces that stay in the cache


def check_finite(x: Tensor, name: str) -> None:
    """UserError naming the tensor if it holds NaN or Inf: such a block would get a NaN scale byte."""
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        bad = int(finite.numel() - finite.sum())
        where = tuple(torch.nonzero(~finite)[0].tolist())
        raise UserError(
            f"tensor {name!r} of shape {tuple(x.shape)} has {bad} NaN/Inf values (first at {where}); "
            "it cannot be quantized: check the checkpoint, or lower the learning rate if this appeared in training"
        )


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized [rows, cols] tensor.

    codes: uint8 [rows, cols/2], even column in the low nibble. block_scale: uint8 [rows, cols/block], the bits of
    E4M3 or E8M0 numbers. encode_scale: float32, 0-d or [rows].
    """

    format: "PackedFormat"
    codes: Tensor
    block_scale: Tensor
    encode_scale: Tensor

    def dequantize(self) -> Tensor:
        """float32 [rows, cols], equal bit for bit to the format's `fake_quant` of the original."""
        return self.format.decode(e2m1.unpack_codes(self.codes), self.block_scale, self.encode_scale)

    @property
    def num_bytes(self) -> int:
        """Stored size: codes, block scales and global scales."""
        return self.codes.numel() + self.block_scale.numel() + 4 * self.encode_scale.numel()


class Format(ABC):
    """A number format in blocks along the last dimension. Instances hold only their options and are free to share."""

    name: str
    block_size: int

    @abstractmethod
    def _fake_quant(self, x: Tensor, encode_scale: EncodeScale) -> Tensor:
        """float32 xhat of a checked, contiguous x."""

    def encode_scale(self, amax: Tensor) -> Tensor:
        """Global scale of a tensor (or of each slice) with this largest magnitude; 1 for formats without one."""
        return torch.ones_like(torch.as_tensor(amax, dtype=torch.float32))

    def fake_quant(self, x: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        """float32 xhat, same shape: quantize and dequantize in one pass. No autograd, no finiteness check."""
        x, encode_scale = self._prepare(x, encode_scale)
        if x.numel() <= 2 * CHUNK_VALUES:
            return self._fake_quant(x, encode_scale)
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for rows, piece, scale in row_pieces(x, encode_scale):
            out.view(-1, x.shape[-1])[rows] = self._fake_quant(piece, scale)
        return out

    def check_columns(self, x: Tensor, *, name: str = "x") -> None:
        """UserError unless x is bfloat16 or float32 and its columns divide into blocks."""
        if x.shape[-1] % self.block_size:
            raise UserError(
                f"tensor {name!r} of shape {tuple(x.shape)}: the last dimension must be a multiple of "
                f"{self.block_size} for {self.name}; choose a format with a smaller block or pad the model dimension"
            )
        if x.dtype not in (torch.bfloat16, torch.float32):
            raise UserError(f"tensor {name!r} is {x.dtype}; {self.name} quantizes bfloat16 or float32: cast it first")

    def _prepare(self, x: Tensor, encode_scale: EncodeScale | None, *, name: str = "x") -> tuple[Tensor, EncodeScale]:
        self.check_columns(x, name=name)
        x = x.detach()
        if encode_scale is None:
            encode_scale = self.encode_scale(x.abs().amax().float() if x.numel() else torch.zeros(()))
        return (x if x.is_contiguous() else x.contiguous()), encode_scale


class PackedFormat(Format):
    """A format with a stored form of 4 bits per value and scale bytes: what an export writes."""

    scale_bytes = 1
    """Scale bytes of one block."""

    @property
    def bits_per_value(self) -> float:
        """Stored bits of one value, block scales included."""
        return 4 + 8 * self.scale_bytes / self.block_size

    @abstractmethod
    def _quantize_codes(self, x: Tensor, encode_scale: EncodeScale) -> tuple[Tensor, Tensor, Tensor]:
        """As `quantize_codes`, of a checked, contiguous x."""

    @abstractmethod
    def decode(self, codes: Tensor, block_scale: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        """float32 xhat [..., cols] of unpacked codes and block scales."""

    @abstractmethod
    def nan_scales(self, block_scale: Tensor) -> Tensor:
        """bool: which scale bytes stand for NaN."""

    def quantize_codes(self, x: Tensor, encode_scale: EncodeScale | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(unpacked uint8 codes [..., cols], uint8 block scales, float32 xhat) in one pass, for recorders."""
        x, encode_scale = self._prepare(x, encode_scale)
        if x.numel() <= 2 * CHUNK_VALUES:
            return self._quantize_codes(x, encode_scale)
        scales = x.shape[-1] // self.block_size * self.scale_bytes
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        block_scale = torch.empty((*x.shape[:-1], scales), dtype=torch.uint8, device=x.device)
        xhat = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for rows, piece, scale in row_pieces(x, encode_scale):
            parts = self._quantize_codes(piece, scale)
            for whole, part in zip((codes, block_scale, xhat), parts, strict=True):
                whole.view(-1, whole.shape[-1])[rows] = part
        return codes, block_scale, xhat

    def quantize(
        self, x: Tensor, encode_scale: EncodeScale | None = None, *, name: str = "x", check: bool = True
    ) -> QuantizedTensor:
        """Quantize a [rows, cols] tensor. `name` appears in error messages; `check` looks for NaN and Inf."""
        if x.dim() != 2:
            raise UserError(f"quantize wants a [rows, cols] tensor; {name!r} has shape {tuple(x.shape)}: reshape it")
        if check:
            check_finite(x, name)
        x, encode_scale = self._prepare(x, encode_scale, name=name)
        codes, scale, _ = self.quantize_codes(x, encode_scale)
        stored = torch.as_tensor(encode_scale, dtype=torch.float32, device=x.device)
        return QuantizedTensor(format=self, codes=e2m1.pack_codes(codes), block_scale=scale, encode_scale=stored)


class CodewordFormat(PackedFormat):
    """A format whose values are E2M1 codewords times one step per block: what is recorded, and what guides."""

    largest_scale: int
    """The largest block scale byte that is a number."""

    @abstractmethod
    def block_scales(self, x: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        """uint8 block scales [..., cols/block] that round-to-nearest quantization of x uses."""

    @abstractmethod
    def scale_values(self, block_scale: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        """float32 value of one step unit per block: what a codeword value is multiplied with."""

    @abstractmethod
    def _blocks(self, blocks: Tensor, encode_scale: EncodeScale) -> tuple[Tensor, Tensor, Tensor]:
        """[..., n, block] -> (codeword values q [..., n, block], uint8 scales [..., n], step [..., n])."""

    def decode(self, codes: Tensor, block_scale: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        """float32 xhat [..., cols] of unpacked codes and block scales."""
        q = e2m1.values(codes).unflatten(-1, (-1, self.block_size))
        return q.mul_(self.scale_values(block_scale, encode_scale).unsqueeze(-1)).view(codes.shape)

    def _fake_quant(self, x: Tensor, encode_scale: EncodeScale) -> Tensor:
        q, _, step = self._blocks(x.unflatten(-1, (-1, self.block_size)), encode_scale)
        return q.mul_(step.unsqueeze(-1)).view(x.shape)

    def _quantize_codes(self, x: Tensor, encode_scale: EncodeScale) -> tuple[Tensor, Tensor, Tensor]:
        q, scale, step = self._blocks(x.unflatten(-1, (-1, self.block_size)), encode_scale)
        codes = e2m1.codes(q).view(x.shape)
        return codes, scale, q.mul_(step.unsqueeze(-1)).view(x.shape)


def with_codewords(fmt: Format) -> CodewordFormat:
    """The format itself; UserError if it has no E2M1 codewords to record or to follow."""
    if not isinstance(fmt, CodewordFormat):
        raise UserError(f"{fmt.name} has no E2M1 codewords: guidance needs nvfp4, mxfp4 or fouroversix")
    return fmt


def block_amax(blocks: Tensor) -> Tensor:
    """float32 largest magnitude of each block [..., n, block] -> [..., n].

    Compares bit patterns as integers (monotone for non-negative floats): three times faster than a float reduction.
    """
    integer = torch.int16 if blocks.dtype == torch.bfloat16 else torch.int32
    mask = 0x7FFF if blocks.dtype == torch.bfloat16 else 0x7FFFFFFF
    return (blocks.view(integer) & mask).amax(-1).view(blocks.dtype).float()


def row_pieces(x: Tensor, encode_scale: EncodeScale) -> Iterator[tuple[slice, Tensor, EncodeScale]]:
    """Yield (row slice, rows, their encode scale) so that each piece's intermediates stay in the cache."""
    cols = x.shape[-1]
    x_rows = x.view(-1, cols)
    per_row = None
    if isinstance(encode_scale, Tensor) and encode_scale.dim():
        per_row = encode_scale.expand(x.shape[:-1]).reshape(-1)
    step = max(1, CHUNK_VALUES // cols)
    for start in range(0, x_rows.shape[0], step):
        rows = slice(start, start + step)
        yield rows, x_rows[rows], encode_scale if per_row is None else per_row[rows]
