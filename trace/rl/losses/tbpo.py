"""TBPO, the sequence-level objective of QaRL (2604.07853).

    s = exp(mean_t log(pi_theta / pi_old))           one ratio per trajectory, the geometric mean of its tokens'
    A > 0:  l_t = -w_t A min(s, 1 + high)
    A < 0:  l_t = -w_t A clip(s, 1 - negative_low, 1 + negative_high)         clipped on both sides

Every token carries the clipped ratio of its trajectory, so that one outside the band is a constant without gradient:
it is dropped, and only counted in the mean over tokens. w = min(pi_old / pi_rollout, cap), token by token, detached.

Where this departs from the source, or METHOD.md leaves it open:

- Inside the band the gradient is w_t s A d log pi_theta(t), the token form of a sequence ratio (2507.18071): the
  weight of a token multiplies that token's gradient. Differentiating s itself would give every token the mean weight
  of its trajectory, which is near 1 and corrects nothing. With equal weights the two are the same.
- The trainer's token mean weighs a trajectory by its length, as for every other method here; a mean over sequences
  does not.

With one update per rollout and no staleness pi_old is pi_theta: s = 1, nothing is clipped, and what is left is the
policy gradient with weights capped at 2. The band is live with several updates per rollout or stale batches. It is as
narrow as long responses need: the mean over few tokens leaves it sooner.
"""

import torch

from trace_rl.config.loss import TbpoLoss
from trace_rl.rl.importance import truncated_weights
from trace_rl.rl.losses.base import LossInput, TokenLoss, group_means


def tbpo_loss(data: LossInput, spec: TbpoLoss) -> TokenLoss:
    """The summed loss; gradients flow through ``data.logprobs`` only.

    Counts: ``dropped_positive`` and ``dropped_negative``, tokens of dropped trajectories by the sign of A.
    """
    weights = truncated_weights(data.old_logprobs, data.rollout_logprobs, cap=spec.tis_cap).weights
    ratio = data.ratio.detach()
    # Ratios that vanished and overflowed in one trajectory would have no mean; clamped they are outside the band.
    finite = torch.finfo(ratio.dtype)
    sequence = group_means(ratio.clamp(finite.tiny, finite.max).log(), data.trajectory_index).exp()
    sequence = sequence[data.trajectory_index]
    high = sequence.clamp(max=1.0 + spec.clip_high)
    band = sequence.clamp(1.0 - spec.negative_clip_low, 1.0 + spec.negative_clip_high)
    negative = data.advantages < 0
    bounded = torch.where(negative, band, high)
    dropped = bounded != sequence
    through = torch.where(dropped, 0.0, data.logprobs - data.logprobs.detach()).exp()
    total = -(weights * data.advantages * bounded * through).sum()
    counts = {"dropped_positive": (dropped & ~negative).sum(), "dropped_negative": (dropped & negative).sum()}
    return TokenLoss(total=total, clipped=dropped.sum(), counts=counts)
