"""The rollout engine and how it samples."""

from typing import Literal

from pydantic import Field

from trace_rl.config.base import Section


class EngineConfig(Section):
    """Settings of the rollout engine; the same for training, parity, evaluation and benchmarks."""

    name: Literal["vllm", "torch"] = "vllm"
    """``vllm``, or ``torch``: the plain PyTorch engine that serves as an oracle."""
    max_model_len: int = Field(default=128, ge=8)
    """Longest sequence, prompt and response, in tokens."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences decoded together."""
    max_num_batched_tokens: int = Field(default=2048, ge=16)
    """Tokens of one engine step; longer prompts are prefilled in chunks."""
    block_size: int = Field(default=32, ge=32, multiple_of=32)
    """Tokens per KV-cache block; vLLM on CPU takes multiples of 32."""
    num_kv_blocks: int | None = Field(default=None, ge=2)
    """KV-cache blocks; null sizes the cache from ``kv_cache_gib``. Few blocks force preemption."""
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    """Memory for the KV cache in GiB."""
    enable_prefix_caching: bool = True
    """Share the KV cache, and the guidance recorded with it, between samples of one prompt."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """vLLM tensor parallelism."""


class SamplingConfig(Section):
    """How responses are sampled; log-probabilities on both sides are at this temperature."""

    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature of rollouts; evaluation is greedy."""
    max_new_tokens: int = Field(default=48, ge=1)
    """Longest response in tokens."""
