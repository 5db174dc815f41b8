"""What every loss sees of a micro-batch, and what it returns.

N response tokens of B trajectories, flat, trajectory after trajectory, in order of position. All float32. ``logprobs``
and ``distribution`` are the only tensors a gradient may flow through.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInput:
    """One micro-batch."""

    logprobs: Tensor
    """[N] log pi_theta of the sampled tokens, with gradient."""
    old_logprobs: Tensor
    """[N] log pi_old of the trainer that the mismatch weight pi_old / pi_rollout uses."""
    rollout_logprobs: Tensor
    """[N] log-prob the engine sampled with."""
    ratio: Tensor
    """[N] the staleness ratio pi_theta / pi_old; its gradient is that of ``logprobs`` times its value."""
    advantages: Tensor
    """[N] advantage of the token's trajectory."""
    trajectory_index: Tensor
    """int64 [N] row of the token's trajectory, 0..B-1, ascending."""
    distribution: Tensor | None = None
    """[N, V] log-probs of the whole vocabulary, with gradient, for losses whose ``top_logprobs`` is not 0."""
    top_ids: Tensor | None = None
    """int64 [N, K] the rollout's most probable tokens."""
    top_logprobs: Tensor | None = None
    """[N, K] their log-probs in the engine."""


@dataclass(frozen=True)
class TokenLoss:
    """A loss summed over the tokens of a micro-batch; the trainer divides by the tokens of the whole update."""

    total: Tensor
    """Scalar with gradient."""
    clipped: Tensor
    """Scalar: tokens whose ratio was clipped, or that were dropped."""
    counts: dict[str, Tensor] = field(default_factory=dict)
    """Further scalars summed over tokens, logged as ``loss/<name>`` per response token."""


def num_groups(index: Tensor) -> int:
    """Number of trajectories or windows of a non-empty micro-batch, whose ``index`` ascends from 0 without gaps."""
    return int(index[-1]) + 1


def group_sums(values: Tensor, index: Tensor) -> Tensor:
    """[G] sum of ``values`` [N] over the tokens of each trajectory or window; differentiable."""
    return values.new_zeros(num_groups(index)).index_add(0, index, values)


def group_means(values: Tensor, index: Tensor) -> Tensor:
    """[G] mean of ``values`` [N] over the tokens of each trajectory or window; differentiable."""
    return group_sums(values, index) / group_sums(values.new_ones(values.shape), index)


def windows(trajectory_index: Tensor, *, size: int) -> Tensor:
    """int64 [N]: each response cut into consecutive windows of ``size`` tokens, the last one shorter, numbered from 0
    through the whole micro-batch."""
    lengths = torch.bincount(trajectory_index)
    starts = lengths.cumsum(0) - lengths
    per_trajectory = (lengths + size - 1) // size
    first = per_trajectory.cumsum(0) - per_trajectory
    position = torch.arange(trajectory_index.numel(), device=trajectory_index.device) - starts[trajectory_index]
    return first[trajectory_index] + position // size
