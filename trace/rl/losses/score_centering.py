"""Score centering (2609.20807): subtract from the weighted score function its mean under the rollout's distribution.

Under the policy's own samples the score function has mean zero, so a baseline costs nothing. Under the rollout's
distribution q the truncated, weighted one has not: E_q[f(p/q) d log p] is a drift that no reward asked for. With p the
trainer's distribution, a the sampled token, H the rollout's top-k tokens and f(x) = min(x, cap):

    l = -A ( sg(f(p_a / q_a)) log p_a  -  sum_{v in H} sg(q_v f(p_v / q_v) - alpha p_v) log p_v )
    rho = (1 - Q) / (1 - P),   alpha = rho f(1 / rho),   P = sum_H p,   Q = sum_H q

Outside H, q is taken to be rho p, whose mean score is alpha sum_{v not in H} p_v d log p_v; because the scores of all
tokens sum to zero under p, that is minus the same sum over H, which is where - alpha p_v comes from. Where f truncates
nothing the importance weight alone has mean zero, and every coefficient is zero; so for p = q, where l is the plain
policy gradient. Otherwise alpha = min(1, cap rho) <= 1 and every coefficient lies between -p_v and p_v.

q_v f(p_v / q_v) is computed as min(p_v, cap q_v), which no underflow of q can upset.

Where this departs from the source, or METHOD.md leaves it open:

- The floor, 1e-6, is that of 1 - P and of 1 - Q. When H holds the whole vocabulary rho is then 1 instead of 0 / 0; its
  value does not matter there, because sum_H p_v d log p_v = 0.
- p is pi_theta, so the weight corrects mismatch and staleness together; there is no clipped ratio beside it, and
  ``ratio`` settings of the method have no effect.
- tis_cap null means f = 1, no weight: the sum then takes q's mean off the plain score function.
"""

import torch
from torch import Tensor

from trace_rl.config.loss import ScoreCenteringLoss
from trace_rl.rl.losses.base import LossInput, TokenLoss


def score_centering_loss(data: LossInput, spec: ScoreCenteringLoss) -> TokenLoss:
    """The summed loss; gradients flow through ``data.logprobs`` and ``data.distribution``.

    Counts: ``truncated``, sampled tokens whose weight is at the cap; ``tail``, the rollout's probability outside H;
    ``centering``, the sum of the absolute coefficients over H.
    """
    assert data.distribution is not None and data.top_ids is not None and data.top_logprobs is not None, spec
    sampled = (data.logprobs.detach() - data.rollout_logprobs).exp()
    head = data.distribution.gather(1, data.top_ids)
    coefficients = centering_coefficients(head.detach().exp(), data.top_logprobs.exp(), spec)
    centered = _truncate(sampled, spec.tis_cap) * data.logprobs - (coefficients * head).sum(-1)
    truncated = (sampled > spec.tis_cap).sum() if spec.tis_cap is not None else sampled.new_zeros(())
    return TokenLoss(
        total=-(data.advantages * centered).sum(),
        clipped=sampled.new_zeros(()),
        counts={
            "truncated": truncated,
            "tail": (1.0 - data.top_logprobs.exp().sum(-1)).clamp(min=0.0).sum(),
            "centering": coefficients.abs().sum(),
        },
    )


def centering_coefficients(p: Tensor, q: Tensor, spec: ScoreCenteringLoss) -> Tensor:
    """q_v f(p_v / q_v) - alpha p_v [N, K] from the trainer's and the rollout's probabilities of H, [N, K] both."""
    rho = (1.0 - q.sum(-1)).clamp(min=spec.floor) / (1.0 - p.sum(-1)).clamp(min=spec.floor)
    alpha = rho * _truncate(1.0 / rho, spec.tis_cap)
    weighted = q if spec.tis_cap is None else torch.minimum(p, spec.tis_cap * q)
    return weighted - alpha[:, None] * p


def _truncate(ratio: Tensor, cap: float | None) -> Tensor:
    """f: the weight itself up to the cap, or 1 without one."""
    return ratio.new_ones(ratio.shape) if cap is None else ratio.clamp(max=cap)
