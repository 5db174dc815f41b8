"""The RL step: GRPO with truncated importance weights (METHOD.md section 5). One setting for every method."""

from typing import Literal

from pydantic import Field, model_validator

from trace_rl.config.base import Section

ProblemKind = Literal["math", "code", "sum"]
"""``math``: arithmetic chains, ``code``: small programs, both of the generated data; ``sum``: of the packaged data."""


class TrainingConfig(Section):
    """Budget and hyperparameters, equal for every method of a suite."""

    steps: int = Field(default=120, ge=1)
    """Policy versions to train; one rollout batch each."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts of one rollout batch."""
    samples_per_prompt: int = Field(default=8, ge=2)
    """Responses per prompt: the group of the group-relative advantage."""
    problems: ProblemKind | None = None
    """Kind of the RL problems to train on; null takes all. Answers to ``code`` are the longer ones, by half."""
    updates_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps per rollout batch; the batch is split by prompts."""
    micro_batch_sequences: int = Field(default=64, ge=1)
    """Sequences, of like length, of one forward and backward pass; gradients accumulate over the batch."""
    learning_rate: float = Field(default=3e-4, gt=0.0)
    """Peak AdamW learning rate."""
    warmup_steps: int = Field(default=10, ge=0)
    """Steps of linear warm-up; constant afterwards."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """AdamW weight decay."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW moment decay rates."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradient clipping by global norm."""
    staleness: int = Field(default=0, ge=0)
    """Policy versions between the generation of a batch and its use."""
    max_version_diff: int = Field(default=3, ge=0)
    """Trajectories older than this many versions are dropped and counted."""
    advantage_std: bool = True
    """Divide group-relative advantages by the group's standard deviation; false is the MiniRL form (2512.01374)."""
    checkpoint_every: int = Field(default=20, ge=1)
    """Steps between checkpoints."""
    diagnose_every: int = Field(default=20, ge=1)
    """Steps between diagnostic batches (full recording, guided and unguided forwards, codeword statistics)."""
    diagnose_prompts: int = Field(default=8, ge=1)
    """Prompts of a diagnostic batch, one sample each."""

    @model_validator(mode="after")
    def _check(self) -> "TrainingConfig":
        if self.staleness > self.max_version_diff:
            raise ValueError(
                f"training.staleness {self.staleness} exceeds training.max_version_diff {self.max_version_diff}: every "
                "trajectory would be dropped; raise max_version_diff or lower staleness"
            )
        if self.updates_per_rollout > self.prompts_per_step:
            raise ValueError(
                f"training.updates_per_rollout {self.updates_per_rollout} exceeds training.prompts_per_step "
                f"{self.prompts_per_step}: a batch is split by prompts; lower updates_per_rollout"
            )
        return self
