"""A method is data: rollout precision, trainer forward, guidance, router replay and loss (METHOD.md section 6)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trace_rl.config.base import Section
from trace_rl.config.guidance import GuidanceSpec


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


class GrpoLoss(Section):
    """GRPO (2402.03300) with asymmetric clipping and truncated importance weights."""

    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Lower clip range of the policy ratio."""
    clip_high: float = Field(default=0.27, gt=0.0)
    """Upper clip range of the policy ratio."""
    tis_cap: float | None = Field(default=5.0, gt=0.0)
    """Cap of the token-level importance weight pi_old_train / pi_rollout; null switches the weight off."""


class RlMethod(Section):
    """A policy trained by RL."""

    kind: Literal["rl"] = "rl"
    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
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
    loss: GrpoLoss = GrpoLoss()
    """The loss."""

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
    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
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
