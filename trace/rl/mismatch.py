"""How far trainer and rollout engine are apart, from the log-probs both gave the sampled tokens (METHOD.md section 7).

With d = log pi_train - log pi_rollout on tokens sampled by the rollout: gap = |d|; k1 = mean(-d) and
k3 = mean(e^d - 1 - d) estimate KL(rollout || train); the perplexity ratio is e^{mean(-d)}.
"""

import torch
from torch import Tensor


def logprob_gap(train_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, float]:
    """Metrics of flat response tokens (float32 [N] both): gap mean, p99 and max, k1, k3, perplexity ratio."""
    delta = train_logprobs.detach().float() - rollout_logprobs.float()
    gap = delta.abs()
    return {
        "gap_mean": float(gap.mean()),
        "gap_p99": float(torch.quantile(gap, 0.99))
        if gap.numel() < 1_000_000
        else float(gap.kthvalue(int(0.99 * gap.numel()))[0]),
        "gap_max": float(gap.max()),
        "kl_k1": float(-delta.mean()),
        "kl_k3": float((delta.exp() - 1.0 - delta).mean()),
        "perplexity_ratio": float((-delta).mean().exp()),
    }
