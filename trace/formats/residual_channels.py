"""Which channels residual compensation covers: measured on the calibration tokens, then fixed.

    mean_t |X[t, c] - Q(X)[t, c]|       per layer, for the FC1 input (hidden channels, all tokens) and the FC2 input
                                        (expert-width channels, all (token, expert) pairs of the layer together)

The whole order is kept, largest first, so that the share of channels stays a setting of the method. QUADS (2607.15810)
takes the channels with the largest residuals; that they come from calibration rather than from the batch, and that the
experts of a layer share theirs, is our choice: a batch-dependent slice would make a token's arithmetic depend on who it
is batched with, and no trainer could follow it.
"""

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats.quantized import Format
from trace_rl.formats.static_scales import COMPENSATED, ChannelOrder, StaticScales


class ResidualMagnitude:
    """Sum of |X - Q(X)| per channel, by tensor and layer; feed it rows with `add`."""

    def __init__(self, *, fmt: Format, scales: StaticScales) -> None:
        self.fmt = fmt
        self.scales = scales
        self._sums: dict[str, dict[int, Tensor]] = {tensor: {} for tensor in COMPENSATED}

    def add(self, layer: int, tensor: str, x: Tensor) -> None:
        """Count rows x [..., cols] of one tensor; K and V are ignored, and so do rows of zeros not matter."""
        if tensor not in self._sums:
            return
        x = x.contiguous()
        residual = x.float() - self.fmt.fake_quant(x, self.scales.get(tensor, layer))
        total = residual.abs().double().reshape(-1, x.shape[-1]).sum(0)
        self._sums[tensor][layer] = self._sums[tensor].get(layer, 0.0) + total

    def order(self) -> ChannelOrder:
        """Channels by residual, largest first, by tensor and layer; of equal ones the lower first."""
        return {
            tensor: {
                layer: tuple(torch.sort(total, descending=True, stable=True).indices.tolist())
                for layer, total in sorted(by_layer.items())
            }
            for tensor, by_layer in self._sums.items()
        }


def top_channels(order: tuple[int, ...], *, share: float) -> Tensor:
    """int64, ascending: the first ``share`` of the channels (rounded half up, at least one)."""
    if not 0.0 < share <= 1.0:
        raise UserError(f"residual_share is {share}; choose a share of the channels above 0 and at most 1")
    count = max(1, int(share * len(order) + 0.5))
    return torch.tensor(order[:count], dtype=torch.int64).sort().values
