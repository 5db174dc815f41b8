"""What the train-rollout gap is made of: differences between forwards over the same tokens.

With gap(f) = mean |log pi_train - log pi_rollout| of the trainer's forward f on FP4 rollouts, routing replayed:

    format     gap(BF16 trainer) - gap(QAT)           what computing in the rollout's format removes
    scales     gap(QAT) - gap(RTN, recorded scale)    block scales that trainer and engine chose differently
    codes      gap(RTN, recorded scale) - gap(full)   values that round to another side on the same scale
    rounding   gap(QAT) - gap(full) = scales + codes  FP4 rounding flips of FC1 input, K and V
    engine     gap(full)                              what is left: arithmetic order, and FC2 flips (not guided)
    routing    gap(f without R3) - gap(f)             of QAT, of full guidance, and of BF16 on both sides

The parts of QAT's gap, rounding and engine, add up by construction; the shares are of gap(QAT). Differences are taken
token by token, so their standard errors (over trajectories) are those of paired measurements.
"""

from typing import Any

import torch
from torch import Tensor

from trace_rl.analysis.clusters import binned_means, clustered_mean
from trace_rl.analysis.forwards import Recorded
from trace_rl.rl.mismatch import logprob_gap

PARTS = {
    "format": ("bf16", "qat"),
    "scales": ("qat", "recorded_scale"),
    "codes": ("recorded_scale", "full"),
    "rounding": ("qat", "full"),
    "left_by_trace": ("trace", "full"),
    "routing_qat": ("qat_no_r3", "qat"),
    "routing_trace": ("trace_no_r3", "trace"),
    "routing_full": ("full_no_r3", "full"),
    "routing_bf16_trainer": ("bf16_no_r3", "bf16"),
}
"""Part -> (forward with this source, forward without it)."""


def describe_gap(train: Tensor, rollout: Tensor, clusters: Tensor) -> dict[str, Any]:
    """Mean with standard error, p99, max and KL of log-probs [N] of one pair of programs."""
    gap = logprob_gap(train, rollout)
    return {
        "tokens": rollout.numel(),
        "gap_mean": gap["gap_mean"],
        "gap_stderr": clustered_mean((train - rollout).abs(), clusters)["stderr"],
        "gap_p99": gap["gap_p99"],
        "gap_max": gap["gap_max"],
        "kl_k3": gap["kl_k3"],
    }


def decompose(gaps: dict[str, Tensor], clusters: Tensor) -> dict[str, Any]:
    """Parts of the gap from |d| [N] by forward: difference of means, paired standard error, share of QAT's gap."""
    whole = float(gaps["qat"].double().mean())
    parts: dict[str, Any] = {}
    for name, (with_source, without) in PARTS.items():
        parts[name] = clustered_mean(gaps[with_source] - gaps[without], clusters)
    parts["engine"] = clustered_mean(gaps["full"], clusters)
    return {name: part | {"share_of_qat": part["mean"] / whole if whole else None} for name, part in parts.items()}


def where(
    gaps: dict[str, Tensor], recorded: Recorded, *, entropy: Tensor, entropy_edges: tuple[float, ...], width: int
) -> dict[str, Any]:
    """|d| by token entropy and by position in the response, for each of the forwards given.

    ``entropy`` [N] is one forward's, the same for all, so that every forward is binned alike.
    """
    by_entropy = torch.bucketize(entropy, torch.tensor(entropy_edges), right=True)
    by_position = recorded.positions // width
    edges = [0.0, *entropy_edges, None]
    tables: dict[str, Any] = {"entropy": {}, "position": {}}
    for name, gap in gaps.items():
        rows = binned_means(gap, by_entropy, recorded.clusters, num_bins=len(entropy_edges) + 1)
        tables["entropy"][name] = [
            row | {"from": low, "below": high} for row, low, high in zip(rows, edges[:-1], edges[1:], strict=True)
        ]
        rows = binned_means(gap, by_position, recorded.clusters, num_bins=int(by_position.max()) + 1)
        tables["position"][name] = [
            row | {"from": row["bin"] * width, "below": (row["bin"] + 1) * width} for row in rows
        ]
    return tables
