"""Block scales in the record: all 8 bits, or only the low 2 (METHOD.md section 3, "Beyond the paper").

The trainer computes its own scale code of every block; codes of positive E4M3 numbers are monotone, and the rollout's
code is nearly always the same or one step away. So two low bits determine it: the rollout's code is the one nearest to
the trainer's with those bits. Off by -1, 0 or +1 is recovered for certain. Off by 2 shows (the bits differ by 2) but
its sign does not: +2 is taken, and the block is counted. Off by 3 or more is recovered wrongly and unnoticed; the
diagnostic batches, recorded with 8-bit scales, count those too (`trace_rl.qat.collector`).
"""

import torch
from torch import Tensor

from trace_rl.errors import UserError

LARGEST_E4M3 = 126  # 448; 127 is NaN


def packed_scale_bytes(num_blocks: int, scale_bits: int) -> int:
    """Bytes that a row's block scales take."""
    return -(-num_blocks * scale_bits // 8)


def pack_scales(block_scale: Tensor, scale_bits: int) -> Tensor:
    """uint8 [..., blocks] -> itself (8 bits) or uint8 [..., ceil(blocks/4)], block j in bits 2*(j%4) (2 bits)."""
    _check(scale_bits)
    if scale_bits == 8:
        return block_scale
    low = block_scale & 3
    if low.shape[-1] % 4:
        low = torch.nn.functional.pad(low, (0, -low.shape[-1] % 4))
    words = low.contiguous().view(torch.int32)  # little-endian: block j is byte j
    return (words | (words >> 6) | (words >> 12) | (words >> 18)).to(torch.uint8)


def recover_scales(
    packed: Tensor, scale_bits: int, sigma_train: Tensor, *, largest: int = LARGEST_E4M3
) -> tuple[Tensor, Tensor | None]:
    """(the rollout's block scales uint8 [..., blocks], bool [..., blocks]: known to be uncertain).

    sigma_train: the trainer's own scale codes, uint8 [..., blocks]. largest: the format's largest scale code. With 8
    bits `packed` is returned and None: nothing was recovered.
    """
    _check(scale_bits)
    if scale_bits == 8:
        return packed, None
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)
    low = (packed.unsqueeze(-1) >> shifts).flatten(-2)[..., : sigma_train.shape[-1]] & 3
    own = sigma_train.to(torch.int16)
    delta = ((low - own + 1) & 3) - 1  # -1, 0, 1 or 2
    recovered = own + delta
    # Four codes on or back where there is no such code: below 0, and the NaN beyond the largest.
    recovered = torch.where(recovered < 0, recovered + 4, torch.where(recovered > largest, recovered - 4, recovered))
    return recovered.to(torch.uint8), delta == 2


def _check(scale_bits: int) -> None:
    if scale_bits not in (2, 8):
        raise UserError(f"guidance.scale_bits is {scale_bits}; choose 8 (the whole scale) or 2 (recovered)")
