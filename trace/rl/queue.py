"""The staleness queue: batches are trained ``staleness`` versions after they were sampled.

Step t trains batch t, which policy version max(0, t - staleness) sampled. A trajectory more than ``max_version_diff``
versions old is dropped and counted. The queue is part of a checkpoint.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from torch import Tensor

from trace_rl.qat.context import Mode
from trace_rl.trajectory import RolloutBatch, Trajectory


@dataclass
class QueuedBatch:
    """A rollout batch with the rewards of its trajectories."""

    index: int
    """Number of the batch, which fixes its prompts and sampling seed."""
    batch: RolloutBatch
    rewards: list[float]
    old: dict[Mode, list[Tensor]] | None = None
    """Log-probs of each trajectory under the version that sampled it, by the trainer's forward; None: not kept."""


@dataclass
class Popped:
    """What a step trains on: trajectories young enough, and the ages of all."""

    trajectories: list[Trajectory]
    rewards: list[float]
    ages: Counter[int]
    dropped: int
    old: dict[Mode, list[Tensor]] | None


@dataclass
class StalenessQueue:
    """First in, first out, with at most ``staleness`` batches left after a pop."""

    staleness: int
    max_version_diff: int
    batches: deque[QueuedBatch] = field(default_factory=deque)

    def missing(self) -> int:
        """Batches to generate before the next pop."""
        return max(0, self.staleness + 1 - len(self.batches))

    def push(self, item: QueuedBatch) -> None:
        """Append a batch; batches arrive in order."""
        assert not self.batches or item.index == self.batches[-1].index + 1, "batches must be queued in order"
        self.batches.append(item)

    def pop(self, *, policy_version: int) -> Popped:
        """The oldest batch without the trajectories that are too old."""
        item = self.batches.popleft()
        trajectories = item.batch.trajectories
        ages = Counter(policy_version - t.policy_version for t in trajectories)
        kept = [i for i, t in enumerate(trajectories) if policy_version - t.policy_version <= self.max_version_diff]
        return Popped(
            trajectories=[trajectories[i] for i in kept],
            rewards=[item.rewards[i] for i in kept],
            ages=ages,
            dropped=len(trajectories) - len(kept),
            old=None if item.old is None else {mode: [by[i] for i in kept] for mode, by in item.old.items()},
        )
