"""TRIAGE (2610.07043): GRPO with gated segments where it would push down, repaired windows where it should keep.

    delta_t = log pi_train(t) - log pi_rollout(t)
    l_t     = g_t * GRPO_t  +  repair_t

Gate, by segments of 64 response tokens, for those with mean A < 0. A token the trainer already finds much less
probable than the rollout did would be pushed down further for what rounding did.

    base = .1 if mean delta < -1.5, .3 if mean delta < -.5, else 1
    tail = 1 - .9 min(k / 2, 1),  k = tokens of the segment with delta < -6
    g_t  = min(base, tail) where delta_t < 0, else 1

Repair, by windows of 128 tokens, for those with A > 0: a pseudo-Huber pull on windows that lost probability.

    q        = max(-.03 - mean delta, 0)
    repair_t = .015 beta^2 (sqrt(1 + (q / beta)^2) - 1),   beta = sqrt(5e-4)

GRPO_t is the clipped surrogate of `grpo` with the token's truncated weight.

Where this departs from the source, or METHOD.md leaves it open:

- Both gates end at .1, so they combine by the smaller one, not by the product.
- The gate's delta is that of pi_old, detached: the gap between the programs, not what this batch's own updates did. The
  repair's is that of pi_theta, through which its gradient flows. With one update per rollout they are equal.
- Segments and windows are consecutive and start with the response; the last one is shorter and has its own mean. A
  response shorter than a segment is one segment.
- Every token of a repaired window carries the window's repair, so that it counts in the token mean like the rest.
- Weight of the surrogate: truncated at 5 and clipped at .2 / .27, as for the other methods.
"""

import torch
from torch import Tensor

from trace_rl.config.loss import TriageLoss
from trace_rl.rl.importance import truncated_weights
from trace_rl.rl.losses.base import LossInput, TokenLoss, group_means, group_sums, windows


def triage_loss(data: LossInput, spec: TriageLoss) -> TokenLoss:
    """The summed loss; gradients flow through ``data.ratio`` and, for the repair, ``data.logprobs``.

    Counts: ``gated``, tokens whose weight is below 1; ``gate``, the sum of the weights; ``repaired``, tokens of
    repaired windows; ``repair``, the sum of the repair.
    """
    weights = truncated_weights(data.old_logprobs, data.rollout_logprobs, cap=spec.tis_cap).weights
    free = data.ratio * data.advantages
    bounded = data.ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high) * data.advantages
    gates = segment_gates(data, spec)
    repair, repaired = window_repair(data, spec)
    return TokenLoss(
        total=-(gates * weights * torch.minimum(free, bounded)).sum() + repair.sum(),
        clipped=(bounded < free).sum(),
        counts={
            "gated": (gates < 1.0).sum(),
            "gate": gates.sum(),
            "repaired": repaired.sum(),
            "repair": repair.detach().sum(),
        },
    )


def segment_gates(data: LossInput, spec: TriageLoss) -> Tensor:
    """g [N], without gradient."""
    delta = data.old_logprobs.detach() - data.rollout_logprobs
    segment = windows(data.trajectory_index, size=spec.segment)
    mean = group_means(delta, segment)
    base = torch.where(mean < spec.mild, spec.mild_weight, mean.new_ones(mean.shape))
    base = torch.where(mean < spec.severe, spec.severe_weight, base)
    tail_tokens = group_sums((delta < spec.tail).to(delta.dtype), segment)
    tail = 1.0 - spec.tail_drop * (tail_tokens / spec.tail_count).clamp(max=1.0)
    gated = (group_means(data.advantages, segment) < 0)[segment] & (delta < 0)
    return torch.where(gated, torch.minimum(base, tail)[segment], 1.0)


def window_repair(data: LossInput, spec: TriageLoss) -> tuple[Tensor, Tensor]:
    """The repair [N], with gradient, and which tokens it acts on (bool [N])."""
    if not spec.repair:
        return data.logprobs.new_zeros(data.logprobs.shape), torch.zeros_like(data.logprobs, dtype=torch.bool)
    window = windows(data.trajectory_index, size=spec.repair_window)
    missing = -spec.repair_margin - group_means(data.logprobs - data.rollout_logprobs, window)
    active = (group_means(data.advantages, window) > 0) & (missing > 0)
    q = torch.where(active, missing, 0.0)
    huber = spec.repair_beta_squared * ((1.0 + q.square() / spec.repair_beta_squared).sqrt() - 1.0)
    return spec.repair_weight * huber[window], active[window]
