"""H-Scale (2608.28113): NVFP4 weights whose block scales are chosen by the error they cause, not by the largest value.

With h = diag(X^T X) from calibration (X: the tokens routed to that expert), the output error of rounding a row w is
about sum_j h_j (w_j - what_j)^2. Per block of 16 the E4M3 codes from 9 below to 6 above the usual one are tried, each
rounding the block to nearest on its own scale, and the one with the smallest error is kept; on a tie, the one nearest
to the usual code (the lower of two equally near). Stored as plain NVFP4. Weights only: activations have no second
look.
"""

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import e2m1
from trace_rl.formats.nvfp4 import NVFP4, e4m3_values, reciprocal, split_encode_scale
from trace_rl.formats.quantized import EncodeScale

DOWN = 9
UP = 6
_LARGEST_CODE = 126  # 448


class HScale(NVFP4):
    """See the module's docstring. `importance`: h, float [cols]; without it every column counts the same."""

    name = "hscale"

    def __init__(self, importance: Tensor | None = None):
        if importance is not None and (importance.dim() != 1 or bool((importance < 0).any())):
            raise UserError(
                f"hscale importance of shape {tuple(importance.shape)} must be one non-negative number per column: "
                "pass the mean square of each input channel from calibration"
            )
        self.importance = importance

    def block_scales(self, x: Tensor, encode_scale: EncodeScale | None = None) -> Tensor:
        return self.quantize_codes(x, encode_scale)[1]

    def _blocks(self, blocks: Tensor, encode_scale: EncodeScale) -> tuple[Tensor, Tensor, Tensor]:
        blocks = blocks.float()
        _, inverse = split_encode_scale(encode_scale)
        best_q, usual, best_step = super()._blocks(blocks, encode_scale)
        weight = self._weight(blocks)
        best_code, least = usual, _error(blocks, best_q, best_step, weight)
        for offset in sorted(range(-DOWN, UP + 1), key=lambda offset: (abs(offset), offset)):
            code = (usual.to(torch.int16) + offset).clamp_(1, _LARGEST_CODE).to(torch.uint8)
            step = e4m3_values(code).mul_(inverse)
            q = e2m1.round_(blocks * reciprocal(step).unsqueeze(-1))
            error = _error(blocks, q, step, weight)
            better = error < least
            least = torch.where(better, error, least)
            best_code = torch.where(better, code, best_code)
            best_step = torch.where(better, step, best_step)
            best_q = torch.where(better.unsqueeze(-1), q, best_q)
        return best_q, best_code, best_step

    def _weight(self, blocks: Tensor) -> Tensor | float:
        if self.importance is None:
            return 1.0
        if self.importance.numel() != blocks.shape[-2] * self.block_size:
            raise UserError(
                f"hscale importance has {self.importance.numel()} columns, the weight "
                f"{blocks.shape[-2] * self.block_size}: it was calibrated for another matrix"
            )
        return self.importance.to(blocks.device, torch.float32).view(-1, self.block_size)


def _error(blocks: Tensor, q: Tensor, step: Tensor, weight: Tensor | float) -> Tensor:
    return (q * step.unsqueeze(-1)).sub_(blocks).square_().mul_(weight).sum(-1)
