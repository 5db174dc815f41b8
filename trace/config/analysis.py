"""The analysis: where the train-rollout gap comes from, and what guidance does to the importance ratio."""

from pydantic import Field, model_validator

from trace_rl.config.base import Section


class AnalysisConfig(Section):
    """Stages ``gap_sources`` and ``ratio``: one policy, one set of rollouts, many trainer forwards."""

    num_prompts: int = Field(default=128, ge=2)
    """Prompts rolled out, one sample each."""
    factorial: bool = True
    """Measure guidance at every combination of bits, layers, scale bits and tensors."""
    entropy_edges: tuple[float, ...] = (0.001, 0.05, 0.3)
    """Inner edges of the token entropy bins, in nats, ascending."""
    position_width: int = Field(default=4, ge=1)
    """Response tokens of one position bin."""
    updates: tuple[int, ...] = Field(default=(1, 2, 3), min_length=1)
    """Numbers of updates after which the importance ratio is measured, ascending."""
    burn_in: int = Field(default=10, ge=0)
    """Updates before the old policy rolls out. With 0 the measured updates are the optimizer's first, at the full
    learning rate; otherwise the warm-up falls into the burn-in."""
    resamples: int = Field(default=200, ge=2)
    """Bootstrap resamples of the trajectories behind a standard error of a correlation or a slope."""
    seed: int = 0
    """Seed of the resamples."""

    @model_validator(mode="after")
    def _check(self) -> "AnalysisConfig":
        if list(self.entropy_edges) != sorted(set(self.entropy_edges)):
            raise ValueError(f"analysis.entropy_edges {self.entropy_edges} must ascend; sort them")
        if list(self.updates) != sorted(set(self.updates)) or self.updates[0] < 1:
            raise ValueError(f"analysis.updates {self.updates} must ascend and start at 1 or later; sort them")
        return self
