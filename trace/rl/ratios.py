"""Which log-probs the two importance ratios compare.

A token sampled in FP4 by policy version v and trained on by version theta >= v is off-policy twice:

    pi_theta / pi_rollout = (pi_old / pi_rollout) * (pi_theta / pi_old)
                             mismatch weight        staleness ratio
                             truncated, detached    clipped, carries the gradient

``old_policy: current`` takes pi_old from the weights before the batch's first update (decoupled PPO, 2505.24298): the
weight holds mismatch and staleness together. ``sampling`` takes it from version v: the weight holds only that two
programs round differently, the clipped ratio holds that the policy moved.

Guidance pins the trainer's codes to the rollout's, so a guided log-prob of a *later* version still looks like the
rollout's: the ratio of two guided forwards, or of a guided one and the rollout, hardly sees the policy move. So either
ratio may be taken from other forwards than the gradient: both sides of a ratio must round alike, which is what makes
rounding cancel and movement stay. The gradient always goes through the method's own forward: the ratio's value comes
from the chosen forward, its derivative is value * d log pi_own.
"""

from dataclasses import dataclass

from torch import Tensor

from trace_rl.config.method import RatioSpec
from trace_rl.config.training import TrainingConfig
from trace_rl.qat.context import Mode


@dataclass(frozen=True)
class Ratios:
    """A method's ratios, with the forwards by their mode."""

    own: Mode
    mismatch: Mode
    staleness: Mode
    from_sampling: bool
    """pi_old is computed when a batch is sampled, and waits with it in the queue."""
    from_current: bool
    """pi_old is that of the weights before the batch's first update."""

    @classmethod
    def of(cls, spec: RatioSpec, *, mode: Mode, training: TrainingConfig) -> "Ratios":
        """The ratios of a method whose own forward is ``mode``.

        A batch that is trained on once, by the version that sampled it, has pi_old = pi_theta whatever the spec says,
        and needs no log-probs kept.
        """
        moves = training.staleness > 0 or training.updates_per_rollout > 1
        sampling = spec.old_policy == "sampling" and moves
        return cls(
            own=mode,
            mismatch=mode if spec.mismatch == "own" else spec.mismatch,
            staleness={"own": mode, "rtn": "rtn", "bf16": "off"}[spec.staleness],
            from_sampling=sampling,
            from_current=not sampling,
        )

    def forwards(self, *, has_old: bool) -> tuple[Mode, ...]:
        """Modes whose log-probs are needed; where pi_old is pi_theta the staleness ratio is 1 and needs none."""
        return tuple(dict.fromkeys((self.mismatch, *((self.staleness,) if has_old else ()))))

    def staleness_ratio(self, logprobs: Tensor, *, now: dict[Mode, Tensor], old: dict[Mode, Tensor] | None) -> Tensor:
        """pi_theta / pi_old [N]; ``logprobs``: the own forward's, with gradient; ``old`` None: pi_old is pi_theta."""
        through = logprobs - logprobs.detach()
        if old is None:
            return through.exp()
        return (now[self.staleness] - old[self.staleness] + through).exp()
