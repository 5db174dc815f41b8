"""Losses a method can train with, told apart by ``kind``; one file each in ``trace_rl.rl.losses``.

A loss without ``kind`` is GRPO, so that a method which only changes one of its numbers need not name it.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from trace_rl.config.base import Section


class GrpoLoss(Section):
    """GRPO (2402.03300) with asymmetric clipping and truncated importance weights."""

    kind: Literal["grpo"] = "grpo"
    """GRPO; the keys up to the next kind are its own."""
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

    @property
    def uses_old_policy(self) -> bool:
        """Whether pi_old of another version than the one in training makes a difference to the loss."""
        return True


class TbpoLoss(Section):
    """TBPO of QaRL (2604.07853): a sequence-level ratio, clipped on both sides where the advantage is negative."""

    kind: Literal["tbpo"]
    """TBPO; the keys up to the next kind are its own."""
    clip_high: float = Field(default=4e-4, gt=0.0)
    """A sequence with A > 0 is dropped once its ratio exceeds 1 + this."""
    negative_clip_low: float = Field(default=3e-4, gt=0.0, lt=1.0)
    """A sequence with A < 0 is dropped once its ratio falls below 1 - this."""
    negative_clip_high: float = Field(default=7e-4, gt=0.0)
    """A sequence with A < 0 is dropped once its ratio exceeds 1 + this."""
    tis_cap: float | None = Field(default=2.0, gt=0.0)
    """Cap of the token-level importance weight pi_old_train / pi_rollout; null switches the weight off."""

    @property
    def top_logprobs(self) -> int:
        """0: the loss needs the sampled token only."""
        return 0

    @property
    def uses_old_policy(self) -> bool:
        """True: pi_old is in the weight and in the clipped ratio."""
        return True


class ScoreCenteringLoss(Section):
    """Score centering (2609.20807): the weighted score function minus its mean under the rollout's distribution."""

    kind: Literal["score_centering"]
    """Score centering; the keys up to the next kind are its own."""
    top_k: int = Field(default=128, ge=1)
    """The rollout's most probable tokens per position that are centered one by one; the rest by one factor."""
    tis_cap: float | None = Field(default=2.0, gt=0.0)
    """Cap f of the importance weight pi_theta / pi_rollout; null switches the weight off (f = 1)."""
    floor: float = Field(default=1e-6, gt=0.0, lt=1.0)
    """Smallest probability outside the top k, of trainer and rollout alike, in their quotient rho."""

    @property
    def top_logprobs(self) -> int:
        """The rollout's most probable tokens per position whose log-probs the loss needs."""
        return self.top_k

    @property
    def uses_old_policy(self) -> bool:
        """False: the weight is pi_theta / pi_rollout."""
        return False


class TriageLoss(Section):
    """TRIAGE (2610.07043): GRPO with gated segments where A < 0 and repaired windows where A > 0.

    ``delta`` is log pi_train - log pi_rollout of a sampled token.
    """

    kind: Literal["triage"]
    """TRIAGE; the keys up to the next kind are its own."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Lower clip range of the policy ratio."""
    clip_high: float = Field(default=0.27, gt=0.0)
    """Upper clip range of the policy ratio."""
    tis_cap: float | None = Field(default=5.0, gt=0.0)
    """Cap of the token-level importance weight pi_old_train / pi_rollout; null switches the weight off."""
    segment: int = Field(default=64, ge=1)
    """Response tokens of a segment."""
    mild: float = Field(default=-0.5, le=0.0)
    """A segment with A < 0 whose mean delta is below this gets ``mild_weight``."""
    mild_weight: float = Field(default=0.3, ge=0.0, le=1.0)
    """Weight of the gated tokens of such a segment."""
    severe: float = Field(default=-1.5, le=0.0)
    """A segment with A < 0 whose mean delta is below this gets ``severe_weight``."""
    severe_weight: float = Field(default=0.1, ge=0.0, le=1.0)
    """Weight of the gated tokens of such a segment."""
    tail: float = Field(default=-6.0, le=0.0)
    """A token whose delta is below this is a tail token."""
    tail_count: int = Field(default=2, ge=1)
    """Tail tokens of a segment at which the tail weight has fallen to its lowest."""
    tail_drop: float = Field(default=0.9, ge=0.0, le=1.0)
    """How far the tail weight falls: 1 - tail_drop * min(count / tail_count, 1)."""
    repair: bool = True
    """Pull up windows with A > 0 that the trainer finds less probable than the rollout did."""
    repair_window: int = Field(default=128, ge=1)
    """Response tokens of a repaired window."""
    repair_margin: float = Field(default=0.03, ge=0.0)
    """A window is repaired once its mean delta is below minus this."""
    repair_weight: float = Field(default=0.015, ge=0.0)
    """Weight of the repair."""
    repair_beta_squared: float = Field(default=5e-4, gt=0.0)
    """Square of the missing log-prob at which the repair turns from quadratic to linear."""

    @model_validator(mode="after")
    def _check(self) -> "TriageLoss":
        if self.severe > self.mild:
            raise ValueError(f"loss.severe {self.severe} is above loss.mild {self.mild}; a severe gap is a larger one")
        return self

    @property
    def top_logprobs(self) -> int:
        """0: the loss needs the sampled token only."""
        return 0

    @property
    def uses_old_policy(self) -> bool:
        """True: pi_old is in the weight and in the clipped ratio."""
        return True


def _kind(value: Any) -> str:
    """The kind of a loss given as mapping or section; GRPO where a mapping names none."""
    return value.get("kind", "grpo") if isinstance(value, dict) else getattr(value, "kind", "grpo")


Loss = Annotated[
    Annotated[GrpoLoss, Tag("grpo")]
    | Annotated[TbpoLoss, Tag("tbpo")]
    | Annotated[ScoreCenteringLoss, Tag("score_centering")]
    | Annotated[TriageLoss, Tag("triage")],
    Discriminator(_kind),
]
"""The loss of a method."""
