"""GRPO's clipped surrogate with truncated importance weights.

    rho = pi / pi_old_train            l = -w * min(rho A, clip(rho, 1 - low, 1 + high) A)

summed over tokens; the trainer divides by the response tokens of the whole batch (token mean). pi_old_train is the
trainer's own log-prob before this rollout's first update, w = min(pi_old_train / pi_rollout, cap) is detached. The
clip range 0.2 / 0.27 is MiniRL's (2512.01374); the paper does not state its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLoss:
    """A loss summed over the tokens of a micro-batch."""

    total: Tensor
    """Scalar with gradient: the sum over tokens."""
    clipped: Tensor
    """Scalar: tokens whose ratio was clipped."""


def grpo_loss(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    weights: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """The summed loss of flat response tokens (all float32 [N]); gradients flow through ``logprobs`` only."""
    ratio = (logprobs - old_logprobs.detach()).exp()
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    total = -(weights.detach() * torch.minimum(free, bounded)).sum()
    return TokenLoss(total=total, clipped=(bounded < free).sum())
