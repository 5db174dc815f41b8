"""GRPO's clipped surrogate with truncated importance weights.

    rho = pi_theta / pi_old            l = -w * min(rho A, clip(rho, 1 - low, 1 + high) A)

summed over tokens; the trainer divides by the response tokens of the whole batch (token mean). w = min(pi_old /
pi_rollout, cap) is detached. The clip range 0.2 / 0.27 is MiniRL's (2512.01374); the paper does not state its own.
"""

import torch

from trace_rl.config.loss import GrpoLoss
from trace_rl.rl.importance import truncated_weights
from trace_rl.rl.losses.base import LossInput, TokenLoss


def grpo_loss(data: LossInput, spec: GrpoLoss) -> TokenLoss:
    """The summed loss; gradients flow through ``data.ratio`` only."""
    weights = truncated_weights(data.old_logprobs, data.rollout_logprobs, cap=spec.tis_cap).weights
    free = data.ratio * data.advantages
    bounded = data.ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high) * data.advantages
    total = -(weights * torch.minimum(free, bounded)).sum()
    return TokenLoss(total=total, clipped=(bounded < free).sum())
