"""How well a trainer's log-ratio stands for the engine's.

Per response token, with x = r the engine's own log-ratio of new to old policy and y = the trainer's estimate of it:
mean |y|, mean |y - r|, correlation, slope of y on r (1: the estimate moves as r does; 0: it is blind to r). As an
importance weight e^y: the share above the cap, and the effective sample size (sum w)^2 / (N sum w^2).

Mean |y| of a forward is also its train-rollout gap. What staleness adds to it, gap(new) - gap(old), is taken token by
token, so that its standard error is that of a paired measurement, as for the other parts (`trace_rl.analysis.sources`).
"""

from typing import Any

from torch import Tensor

from trace_rl.analysis.clusters import association, clustered_mean
from trace_rl.rl.importance import truncated_weights

CAP = 5.0
"""The weight's cap in the paper's setting."""


def describe_weight(log_ratio: Tensor, clusters: Tensor) -> dict[str, Any]:
    """Size of log-ratios [N] and what they do as importance weights."""
    weights = truncated_weights(log_ratio, log_ratio.new_zeros(log_ratio.shape), cap=CAP)
    size = clustered_mean(log_ratio.abs(), clusters)
    return {
        "mean_abs": size["mean"],
        "mean_abs_stderr": size["stderr"],
        "mean": float(log_ratio.double().mean()),
        "std": float(log_ratio.double().std()),
        "truncated": weights.truncated,
        "ess": weights.ess,
    }


def describe_estimate(
    estimate: Tensor, truth: Tensor, clusters: Tensor, *, resamples: int, seed: int
) -> dict[str, Any]:
    """An estimate [N] beside the truth [N]."""
    error = clustered_mean((estimate - truth).abs(), clusters)
    return (
        describe_weight(estimate, clusters)
        | {"mean_abs_error": error["mean"], "mean_abs_error_stderr": error["stderr"]}
        | association(truth, estimate, clusters, resamples=resamples, seed=seed)
    )


def staleness_part(new: Tensor, old: Tensor, rollout: Tensor, clusters: Tensor) -> dict[str, float | None]:
    """Mean of |new - rollout| - |old - rollout| over log-probs [N] of one forward of two versions, and its error."""
    part = clustered_mean((new - rollout).abs() - (old - rollout).abs(), clusters)
    return {"mean": part["mean"], "mean_stderr": part["stderr"]}
