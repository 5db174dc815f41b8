"""Refit: BF16 expert weights straight into the stored form, codes and block scales, that packed kernels read.

One launch finds the encode scale of every expert, one quantizes and packs all of them (kernels/fake_quant.py); no
unpacked code and no xhat ever exists in memory. Per BF16 value 4 bytes are read and 0.56 written. The twin is
trace_rl.kernels.reference.repack.
"""

import torch
from torch import Tensor

from trace_rl.formats import Format
from trace_rl.kernels.fake_quant import expert_rows
from trace_rl.kernels.quantize_record import launch_quantize, packed_shape, quantize_specimen
from trace_rl.kernels.reference import PackedExperts


def repack(weight_ERC: Tensor, *, fmt: Format, check: bool = True) -> PackedExperts:
    """Expert matrices (bfloat16 or float32) in the stored form, one encode scale each.

    `check`: UserError if a weight is NaN or Inf, for which the host waits.
    """
    rows, scale, encode_scale = expert_rows(weight_ERC, fmt=fmt, check=check)
    codes = torch.empty(packed_shape(rows, 2), dtype=torch.uint8, device=rows.device)
    block_scale = torch.empty(packed_shape(rows, fmt.block_size), dtype=torch.uint8, device=rows.device)
    launch_quantize(rows, scale, fmt=fmt, codes=codes, block_scale=block_scale)
    experts = weight_ERC.shape[:2]
    return PackedExperts(
        codes=codes.view(*experts, codes.shape[1]),
        block_scale=block_scale.view(*experts, block_scale.shape[1]),
        encode_scale=encode_scale,
    )


SPECIMENS = [
    quantize_specimen("repack nvfp4", x="bf16", rule="nvfp4", WANT_CODES=True, SCALE_IS_NUMBER=False, CHECK=False),
    quantize_specimen("repack mxfp4", x="bf16", rule="rceil", WANT_CODES=True, CHECK=False),
]
