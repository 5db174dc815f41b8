"""Truncated importance weights between trainer and rollout engine (TIS).

w = min(pi_old_train / pi_rollout, cap) per token, detached. The weight corrects for the two programs disagreeing about
one policy, not for the policy moving: that is the clipped ratio's part in the loss.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights of one batch's response tokens."""

    weights: Tensor
    """float32, the shape of the log-probs; 1 everywhere when the cap is None."""
    truncated: float
    """Share of tokens at the cap."""
    ess: float
    """Effective sample size of the untruncated weights, as a share of the tokens."""


def truncated_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float | None) -> ImportanceWeights:
    """Weights of flat response tokens (float32 [N] both)."""
    raw = (old_logprobs.detach() - rollout_logprobs).exp()
    ess = float(raw.sum().square() / (raw.numel() * raw.square().sum()))
    if cap is None:
        return ImportanceWeights(weights=raw.new_ones(raw.shape), truncated=0.0, ess=ess)
    return ImportanceWeights(weights=raw.clamp(max=cap), truncated=float((raw > cap).float().mean()), ess=ess)
