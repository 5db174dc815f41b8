"""Losses a method can train with, told apart by ``kind``; one file each in ``trace_rl.rl.losses``."""

from typing import Annotated, Literal

from pydantic import Field

from trace_rl.config.base import Section


class GrpoLoss(Section):
    """GRPO (2402.03300) with asymmetric clipping and truncated importance weights."""

    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Lower clip range of the policy ratio."""
    clip_high: float = Field(default=0.27, gt=0.0)
    """Upper clip range of the policy ratio."""
    tis_cap: float | None = Field(default=5.0, gt=0.0)
    """Cap of the token-level importance weight pi_old_train / pi_rollout; null switches the weight off."""

    @property
    def top_logprobs(self) -> int:
        """The rollout's most probable tokens per position whose log-probs the loss needs; 0: only the sampled one."""
        return 0


Loss = GrpoLoss
"""The loss of a method."""
