"""4over6 (2512.02010): NVFP4 whose blocks may put their largest value on 4 instead of 6.

E2M1 has no value between 4 and 6, so a block full of values near 5/6 of its largest loses a lot. Per block both
scalings are tried and the one with the strictly smaller error wins (the first, max -> 6, on a tie):

    G = 256*6 / amax                  256, not 448: room for the 1.5 times larger scale
    sigma6 = e4m3(s_f)                sigma4 = e4m3(1.5 * s_f)
    error  = sum (x - xhat)^2 (`mse`) or sum |x - xhat| (`mae`), FP32

The stored form is plain NVFP4: dequantization needs no flag.
"""

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import e2m1
from trace_rl.formats.nvfp4 import E4M3_MAX, NVFP4, ONE_SIXTH, reciprocal, split_encode_scale
from trace_rl.formats.quantized import EncodeScale, block_amax

RULES = ("mse", "mae")


class FourOverSix(NVFP4):
    """See the module's docstring. `rule`: mse | mae."""

    name = "fouroversix"
    scale_max = 256.0

    def __init__(self, rule: str = "mse"):
        if rule not in RULES:
            raise UserError(f"fouroversix rule {rule!r} is unknown; choose one of {', '.join(RULES)}")
        self.rule = rule

    def block_scales(self, x: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        x, encode_scale = self._prepare(x, encode_scale)
        return self._blocks(x.unflatten(-1, (-1, self.block_size)), encode_scale)[1]

    def _blocks(self, blocks: Tensor, encode_scale: EncodeScale) -> tuple[Tensor, Tensor, Tensor]:
        scale, inverse = split_encode_scale(encode_scale)
        blocks = blocks.float()
        ideal = block_amax(blocks).mul_(ONE_SIXTH).mul_(scale)
        six, four = (self._candidate(blocks, ideal * stretch, inverse) for stretch in (1.0, 1.5))
        take_four = four[3] < six[3]
        q = torch.where(take_four.unsqueeze(-1), four[0], six[0])
        sigma = torch.where(take_four, four[1].view(torch.uint8), six[1].view(torch.uint8))
        return q, sigma, torch.where(take_four, four[2], six[2])

    def _candidate(self, blocks: Tensor, ideal: Tensor, inverse: EncodeScale) -> tuple[Tensor, ...]:
        sigma = ideal.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
        step = sigma.float().mul_(inverse)
        q = e2m1.round_(blocks * reciprocal(step).unsqueeze(-1))
        error = (q * step.unsqueeze(-1)).sub_(blocks)
        error = error.square_() if self.rule == "mse" else error.abs_()
        return q, sigma, step, error.sum(-1)
