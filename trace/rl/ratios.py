"""Which log-probs the two importance ratios compare.

A token sampled in FP4 by policy version v and trained on by version theta >= v is off-policy twice:

    pi_theta / pi_rollout = (pi_old / pi_rollout) * (pi_theta / pi_old)
                             mismatch weight        staleness ratio
                             truncated, detached    clipped, carries the gradient

``old_policy: sampling`` takes pi_old from version v, as GRPO and PPO do: the weight holds only that two programs round
differently, the clipped ratio holds that the policy moved. ``current`` takes it from the weights before the batch's
first update (decoupled PPO, 2505.24298): the weight holds mismatch and staleness together, and a batch that is trained
once has nothing to clip. Where nothing is stale both are the same.

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

LOG_RATIO_BOUND = 20.0
"""Far outside every clip range; an overflowing ratio would make the clipped side's gradient 0 * inf, and so NaN that of
the whole update."""


@dataclass(frozen=True)
class Ratios:
    """A method's ratios, with the forwards by their mode."""

    own: Mode
    mismatch: Mode
    staleness: Mode
    from_sampling: bool
    """pi_old is computed when a batch is sampled, and waits with it in the queue."""
    from_current: bool
    """pi_old is computed before the batch's first update, of several. With neither, pi_old is pi_theta."""

    @classmethod
    def of(cls, spec: RatioSpec, *, mode: Mode, training: TrainingConfig, uses_old: bool = True) -> "Ratios":
        """The ratios of a method whose own forward is ``mode``; ``uses_old``: its loss knows a pi_old.

        A batch that is trained on once, by the version that sampled it, has pi_old = pi_theta whatever the spec says,
        and needs no log-probs kept.
        """
        stale, several = training.staleness > 0, training.updates_per_rollout > 1
        sampling = uses_old and spec.old_policy == "sampling" and (stale or several)
        return cls(
            own=mode,
            mismatch=mode if spec.mismatch == "own" else spec.mismatch,
            staleness={"own": mode, "rtn": "rtn", "bf16": "off"}[spec.staleness],
            from_sampling=sampling,
            from_current=uses_old and several and not sampling,
        )

    def forwards(self, *, has_old: bool) -> tuple[Mode, ...]:
        """Modes whose log-probs are needed; where pi_old is pi_theta the staleness ratio is 1 and needs none."""
        return tuple(dict.fromkeys((self.mismatch, *((self.staleness,) if has_old else ()))))

    def staleness_ratio(self, logprobs: Tensor, *, now: dict[Mode, Tensor], old: dict[Mode, Tensor] | None) -> Tensor:
        """pi_theta / pi_old [N]; ``logprobs``: the own forward's, with gradient; ``old`` None: pi_old is pi_theta."""
        through = logprobs - logprobs.detach()
        if old is None:
            return through.exp()
        moved = (now[self.staleness] - old[self.staleness]).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return (moved + through).exp()
