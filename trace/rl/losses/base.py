"""What every loss sees of a micro-batch, and what it returns.

N response tokens of B trajectories, flat, trajectory after trajectory, in order of position. All float32. ``logprobs``
and ``distribution`` are the only tensors a gradient may flow through.
"""

from dataclasses import dataclass, field

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


def num_trajectories(trajectory_index: Tensor) -> int:
    """B of a non-empty micro-batch."""
    return int(trajectory_index[-1]) + 1


def trajectory_means(values: Tensor, trajectory_index: Tensor) -> Tensor:
    """[B] mean over each trajectory's tokens of ``values`` [N]; differentiable."""
    num = num_trajectories(trajectory_index)
    sums = values.new_zeros(num).index_add(0, trajectory_index, values)
    counts = values.new_zeros(num).index_add(0, trajectory_index, values.new_ones(values.shape))
    return sums / counts
