"""Residual compensation: a rollout spends a second, sparse product on what rounding the activations threw away.

With R = X - Q(X), the two published forms of an expert's product X W^T are

    channels   Q(X) Q(W)^T + Q(R[:, C]) Q(W[:, C])^T      QUADS (2607.15810), C half of the channels
    sparse     (Q(X) + S(Q(R))) Q(W)^T                    ResQ (2607.26515), S the two largest magnitudes of every four

C holds the channels whose residual is largest, and it is a slice of a matrix product: the same for every token, and
here fixed by calibration (`residual_channels`). S is chosen per token among four neighbouring channels (the 2:4 pattern
of sparse tensor cores); equal magnitudes go to the lower channel, which matters: E2M1 has eight of them.

Both forms multiply Q(W) with Q(X) plus something, so both are emulated as one product with one BF16 operand:

    Q(X) + P(Q(R))      channels: P scatters the quantized columns C back; sparse: P = S

- The sum is formed in float32 and rounded to BF16 once. Two products accumulated in FP32 round nothing there: on normal
  data the emulated product is 0.18 % away from them (RMS), as far as rounding Q(X) alone to BF16 takes any emulated FP4
  product; FP4 is 9.6 % away from BF16 there, compensated 6.8 % (channels, half of them) and 3.3 % (sparse).
- Q(W[:, C]) is taken as the columns C of Q(W); blocks of its own would give the slice other scales.
- X, not the BF16 rounding of Q(X), defines the residual: pass xhat in float32.

The residual needs no calibrated scale. |R| is at most one unit of its block's scale (half of the widest gap, 4 to 6), a
sixth of what the block can hold, so its encode scale is 6G where the tensor's is G: then R's block scale never exceeds
X's (formats without an encode scale ignore both). Where a value lies beyond what calibration saw and X saturates, R may
saturate too. Zero is a value of every format, so no value of Q(R) is farther from R than zero is: compensation never
makes a value worse.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from trace_rl.errors import UserError
from trace_rl.formats.quantized import Format

Kind = Literal["channels", "sparse"]
Quantizer = Callable[[Tensor, float], Tensor]
"""(float32 x, encode scale) -> float32 xhat: the format's `fake_quant`, or a kernel of the same bits."""

HEADROOM = 6.0
"""Encode scale of the residual over that of its tensor: the largest E2M1 value over the largest residual, one unit."""
GROUP, KEPT = 4, 2
"""The 2:4 pattern."""


def compensated(
    x: Tensor,
    xhat: Tensor,
    *,
    fmt: Format,
    encode_scale: float,
    kind: Kind,
    channels: Tensor | None = None,
    quantize: Quantizer | None = None,
) -> Tensor:
    """bfloat16 [..., cols]: the operand Q(X) + P(Q(X - Q(X))).

    x: bfloat16 or float32 [..., cols]. xhat: float32 Q(X), unrounded. encode_scale: that of x. channels: int64,
    distinct and ascending, for kind ``channels`` only. quantize: a faster quantizer of the same format. UserError as
    in `compensation`.
    """
    residual = x.float() - xhat
    extra = compensation(
        residual, fmt=fmt, encode_scale=HEADROOM * encode_scale, kind=kind, channels=channels, quantize=quantize
    )
    return extra.add_(xhat).to(torch.bfloat16)


def compensation(
    residual: Tensor,
    *,
    fmt: Format,
    encode_scale: float,
    kind: Kind,
    channels: Tensor | None = None,
    quantize: Quantizer | None = None,
) -> Tensor:
    """float32 [..., cols]: P(Q(R)) of a float32 residual; encode_scale is the residual's own.

    UserError where kind and channels do not go together, or where the columns do not divide into groups of four.
    """
    quantize = quantize or fmt.fake_quant
    if (kind == "channels") != (channels is not None):
        raise UserError(
            f"residual compensation {kind!r} {'needs' if channels is None else 'takes no'} channels; they are for "
            "'channels' only and come from calibration"
        )
    if kind == "sparse":
        if residual.shape[-1] % GROUP:
            raise UserError(
                f"{residual.shape[-1]} columns do not divide into groups of {GROUP} for 2:4 compensation; "
                "choose residual: channels, or none"
            )
        residual_hat = quantize(residual, encode_scale)
        return residual_hat.mul_(largest_of_group(residual_hat))
    assert channels is not None
    # Blocks run over the gathered columns, as in a product that reads only those; a last one is filled up with zeros.
    gathered = residual.index_select(-1, channels)
    residual_hat = quantize(pad(gathered, (0, -len(channels) % fmt.block_size)), encode_scale)[..., : len(channels)]
    return torch.zeros_like(residual).index_copy_(-1, channels, residual_hat)


def largest_of_group(x: Tensor) -> Tensor:
    """bool [..., cols]: the two largest magnitudes of every four neighbours; of equal ones the lower index is larger.

    Six comparisons instead of a sort: a value is kept when at most one of its neighbours beats it.
    """
    values = x.abs().unflatten(-1, (-1, GROUP)).unbind(-1)
    beaten = [torch.zeros_like(values[0], dtype=torch.int8) for _ in values]
    for first in range(GROUP):
        for second in range(first + 1, GROUP):
            first_wins = values[first] >= values[second]
            beaten[second] += first_wins
            beaten[first] += ~first_wins
    return torch.stack([count < KEPT for count in beaten], dim=-1).view(x.shape)
