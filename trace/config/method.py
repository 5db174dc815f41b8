"""A method is data: rollout precision, trainer forward, guidance, router replay and loss (METHOD.md section 6)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trace_rl.config.base import Section
from trace_rl.config.guidance import GuidanceSpec
from trace_rl.config.loss import GrpoLoss, Loss, ScoreCenteringLoss
from trace_rl.config.quant import (
    RESIDUAL_SHARE,
    WITHOUT_CODEWORDS,
    FormatChoice,
    QuantSpec,
    ResidualKind,
    check_residual,
)
from trace_rl.config.training import ProblemKind
from trace_rl.errors import UserError

NAME = r"^[a-z][a-z0-9_]*(@[a-zA-Z0-9_.,=+-]+)?$"
"""A method file's name, or a variant of it (`trace_rl.config.variants`)."""


class Scopes(Section):
    """Which scopes are FP4 on one side; `format` says in which numbers."""

    weights: bool = False
    """Routed-expert weights."""
    activations: bool = False
    """Routed-expert inputs."""
    kv: bool = False
    """KV cache."""

    @property
    def enabled(self) -> bool:
        return self.weights or self.activations or self.kv


class RolloutScopes(Scopes):
    """The rollout engine's scopes, and what it adds to FP4 activations; a trainer has no such thing to set."""

    residual: ResidualKind = "none"
    """Residual compensation of the experts' inputs: ``channels`` (QUADS), ``sparse`` (ResQ) or ``none``."""
    residual_share: float = Field(default=RESIDUAL_SHARE, gt=0.0, le=1.0)
    """Share of the channels that ``residual: channels`` covers."""

    @model_validator(mode="after")
    def _compensates_fp4(self) -> "RolloutScopes":
        check_residual(self.residual, share=self.residual_share, activations="FP4" if self.activations else None)
        return self


class RatioSpec(Section):
    """Which forwards the importance ratios compare.

    Two ratios correct a stale FP4 rollout: the mismatch weight pi_old / pi_rollout, truncated and detached, for two
    programs that round differently, and the clipped staleness ratio pi_theta / pi_old, for the policy that has moved.
    """

    old_policy: Literal["sampling", "current"] = "sampling"
    """pi_old: ``sampling``, the version that sampled the batch, so that the clipped ratio carries the staleness;
    ``current``, the trainer's policy before this batch's first update, so that the weight carries it."""
    mismatch: Literal["own", "rtn"] = "own"
    """Forward of pi_old in the mismatch weight: the method's own, or round to nearest without guidance."""
    staleness: Literal["own", "rtn", "bf16"] = "own"
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
    problems: ProblemKind | None = None
    """Kind of the RL problems to train on."""


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
    rollout: RolloutScopes = RolloutScopes()
    """FP4 scopes of the rollout engine."""
    trainer: Scopes = Scopes()
    """FP4 scopes of the trainer's fake quantization."""
    format: FormatChoice | None = None
    """Number formats of engine and trainer; null takes the experiment's."""
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
            if "fc1" in self.guidance.tensors and self.rollout.residual != "none":
                raise ValueError(
                    f"method {self.name}: guidance of fc1 follows Q(X), and with rollout.residual: "
                    f"{self.rollout.residual} the engine multiplies with more than that; set rollout.residual: none or "
                    "drop fc1"
                )
        if "rtn" in (self.ratio.mismatch, self.ratio.staleness) and not self.trainer.enabled:
            raise ValueError(
                f"method {self.name}: a ratio of rtn forwards needs an FP4 trainer; set trainer or use own"
            )
        if isinstance(self.loss, ScoreCenteringLoss) and self.ratio != RatioSpec():
            raise ValueError(
                f"method {self.name}: ratio has no effect on score centering, which weighs by pi_theta / pi_rollout; "
                "remove it"
            )
        if self.format is not None:
            if not (self.rollout.enabled or self.trainer.enabled):
                raise ValueError(
                    f"method {self.name}: format has no effect where neither rollout nor trainer is FP4; remove it, or "
                    "quantize the policy afterwards with a ptq method of this format"
                )
            self.check_format(self.format)
        return self

    def formats(self, default: FormatChoice) -> FormatChoice:
        """The method's own formats, else ``default``, the experiment's. UserError where they do not suit the method."""
        chosen = self.format or default
        self.check_format(chosen)
        return chosen

    def rollout_quant(self, default: FormatChoice) -> QuantSpec:
        """What the rollout engine quantizes, and how; ``default`` are the experiment's formats."""
        return QuantSpec(format=self.formats(default), **self.rollout.model_dump())

    def trainer_quant(self, default: FormatChoice) -> QuantSpec:
        """What the trainer may quantize; a BF16 trainer is attached with the rollout's scopes and runs them off."""
        scopes = self.trainer if self.trainer.enabled else self.rollout
        return QuantSpec(
            format=self.formats(default), weights=scopes.weights, activations=scopes.activations, kv=scopes.kv
        )

    def check_format(self, chosen: FormatChoice) -> None:
        """UserError for formats that this method cannot be trained with."""
        if self.rollout.residual != "none" and chosen.activations == "mxfp8":
            raise UserError(
                f"method {self.name}: rollout.residual compensates FP4 activations, and format {chosen} keeps them in "
                "8 bits; set rollout.residual: none, or choose another format"
            )
        if chosen.weights == "hscale":
            raise UserError(
                f"method {self.name}: format hscale searches the scales of a finished policy once; training changes "
                "the weights in every step. Set format: nvfp4, or quantize afterwards with ptq_hscale"
            )
        if self.guidance is None:
            return
        without = [tensor for tensor in self.guidance.tensors if chosen.of(tensor) in WITHOUT_CODEWORDS]
        if without:
            left = ",".join(tensor for tensor in self.guidance.tensors if tensor not in without)
            remedy = f"set guidance.tensors: {left}" if left else "set guidance: null"
            raise UserError(
                f"method {self.name}: guidance of {', '.join(without)} follows E2M1 codewords, and "
                f"{chosen.of(without[0])} has none; {remedy}, or choose another format"
            )
        far = [tensor for tensor in self.guidance.tensors if chosen.of(tensor).startswith("fouroversix")]
        if far and self.guidance.scale_bits == 2:
            raise UserError(
                f"method {self.name}: guidance.scale_bits 2 needs scales that trainer and rollout choose within a code "
                "or two of each other; fouroversix picks between two far ones. Set scale_bits: 8 or another format"
            )


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
    format: FormatChoice = FormatChoice()
    """Number formats of the exported weights, and of activations and KV where the export runs."""


MethodConfig = Annotated[RlMethod | PtqMethod, Field(discriminator="kind")]
