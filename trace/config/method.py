"""A method is data: rollout precision, trainer forward, guidance, router replay and loss (METHOD.md section 6)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trace_rl.config.base import Section
from trace_rl.config.guidance import GuidanceSpec
from trace_rl.config.loss import GrpoLoss, Loss

NAME = r"^[a-z][a-z0-9_]*(@[a-zA-Z0-9_.,=+-]+)?$"
"""A method file's name, or a variant of it (`trace_rl.config.variants`)."""


class Scopes(Section):
    """Which scopes are FP4 on one side; the format is the experiment's."""

    weights: bool = False
    """Routed-expert weights."""
    activations: bool = False
    """Routed-expert inputs."""
    kv: bool = False
    """KV cache."""

    @property
    def enabled(self) -> bool:
        return self.weights or self.activations or self.kv


class RatioSpec(Section):
    """Which forwards the importance ratios compare.

    Two ratios correct a stale FP4 rollout: the mismatch weight pi_old / pi_rollout, truncated and detached, for two
    programs that round differently, and the clipped staleness ratio pi_theta / pi_old, for the policy that has moved.
    """

    old_policy: Literal["current", "sampling"] = "current"
    """pi_old: ``current``, the trainer's policy before this batch's first update, so that the weight carries the
    staleness; ``sampling``, the version that sampled the batch, so that the clipped ratio carries it."""
    mismatch: Literal["own", "rtn"] = "own"
    """Forward of pi_old in the mismatch weight: the method's own, or round to nearest without guidance."""
    staleness: Literal["own", "rtn", "off"] = "own"
    """Forward of both sides of the staleness ratio: the method's own, round to nearest, or BF16. The gradient goes
    through the method's own forward in every case."""


class TrainingOverrides(Section):
    """Settings of ``training`` and ``sampling`` that a variant of a method changes; null keeps the experiment's."""

    steps: int | None = Field(default=None, ge=1)
    """Policy versions to train."""
    learning_rate: float | None = Field(default=None, gt=0.0)
    """Peak AdamW learning rate."""
    staleness: int | None = Field(default=None, ge=0)
    """Policy versions between the generation of a batch and its use."""
    updates_per_rollout: int | None = Field(default=None, ge=1)
    """Optimizer steps per rollout batch."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest response in tokens."""


class RlMethod(Section):
    """A policy trained by RL."""

    kind: Literal["rl"] = "rl"
    name: str = Field(pattern=NAME)
    """Name in the suite, in results and in MLflow."""
    description: str
    """One line for the report."""
    source: str
    """Where the method comes from: an arXiv id, or `control`."""
    departures: tuple[str, ...] = ()
    """Where this implementation departs from its source."""
    rollout: Scopes = Scopes()
    """FP4 scopes of the rollout engine."""
    trainer: Scopes = Scopes()
    """FP4 scopes of the trainer's fake quantization."""
    guidance: GuidanceSpec | None = None
    """Recorded and followed codes; null records nothing."""
    router_replay: Literal["r3", "none"] = "r3"
    """Replay of the rollout's routing (2510.11370)."""
    loss: Loss = GrpoLoss()
    """The loss."""
    ratio: RatioSpec = RatioSpec()
    """Which forwards the importance ratios compare."""
    training: TrainingOverrides = TrainingOverrides()
    """What a variant changes of the experiment's budget; empty in every shipped method, so that methods compare."""

    @model_validator(mode="after")
    def _check(self) -> "RlMethod":
        if self.guidance is not None:
            for side, scopes in (("rollout", self.rollout), ("trainer", self.trainer)):
                if "fc1" in self.guidance.tensors and not scopes.activations:
                    raise ValueError(
                        f"method {self.name}: guidance of fc1 needs {side}.activations: true; set it or drop fc1"
                    )
                if {"k", "v"} & set(self.guidance.tensors) and not scopes.kv:
                    raise ValueError(f"method {self.name}: guidance of k, v needs {side}.kv: true; set it or drop k, v")
        return self


class PtqMethod(Section):
    """A trained policy quantized afterwards."""

    kind: Literal["ptq"] = "ptq"
    name: str = Field(pattern=NAME)
    """Name in the suite, in results and in MLflow."""
    description: str
    """One line for the report."""
    source: str
    """Where the method comes from."""
    departures: tuple[str, ...] = ()
    """Where this implementation departs from its source."""
    base: str = "bf16"
    """The RL method whose final policy is quantized."""
    format: Literal["nvfp4", "fouroversix"] = "nvfp4"
    """Format of the exported weights; activations and KV use it too."""


MethodConfig = Annotated[RlMethod | PtqMethod, Field(discriminator="kind")]
