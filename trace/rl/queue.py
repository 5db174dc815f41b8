"""The staleness queue: batches are trained ``staleness`` versions after they were sampled.

Step t trains batch t, which policy version max(0, t - staleness) sampled. A trajectory more than ``max_version_diff``
versions old is dropped and counted. The queue is part of a checkpoint.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from trace_rl.trajectory import RolloutBatch, Trajectory


@dataclass
class QueuedBatch:
    """A rollout batch with the rewards of its trajectories."""

    index: int
    """Number of the batch, which fixes its prompts and sampling seed."""
    batch: RolloutBatch
    rewards: list[float]


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

    def pop(self, *, policy_version: int) -> tuple[list[Trajectory], list[float], Counter[int], int]:
        """The oldest batch: its young trajectories, their rewards, the ages of all, and the number dropped."""
        item = self.batches.popleft()
        ages = Counter(policy_version - t.policy_version for t in item.batch.trajectories)
        kept = [
            (trajectory, reward)
            for trajectory, reward in zip(item.batch.trajectories, item.rewards, strict=True)
            if policy_version - trajectory.policy_version <= self.max_version_diff
        ]
        dropped = len(item.batch.trajectories) - len(kept)
        return [t for t, _ in kept], [r for _, r in kept], ages, dropped
