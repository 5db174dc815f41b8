"""The one record that passes from rollout engine to trainer.

A trajectory of n tokens has n - 1 recorded rows: the last token is sampled but never fed, so it has no activations,
no K/V and no routing. Row i belongs to token i. Log-probabilities are those of the sampled tokens, at the sampling
temperature, as the engine computed them.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trace_rl.config.guidance import GuidanceSpec


@dataclass(frozen=True)
class Trajectory:
    """One prompt and one sampled response."""

    prompt_index: int
    """Index of the prompt in the generate() call."""
    sample_index: int
    """Index of the sample among those of its prompt."""
    token_ids: Tensor
    """int32 [n]: prompt and response; the response ends with eos when the policy stopped by itself."""
    prompt_len: int
    """Tokens of the prompt."""
    logprobs: Tensor
    """float32 [n - prompt_len]: rollout log-probability of each response token."""
    expert_ids: Tensor | None
    """int16 [n - 1, num_moe_layers, k], or None when routing was not recorded."""
    record: Tensor | None
    """uint8 [n - 1, row_bytes]: guidance rows in the layout of the batch's recording, or None."""
    policy_version: int
    """Version of the policy that sampled the response."""
    finish_reason: str
    """``stop`` (eos) or ``length``."""
    top_ids: Tensor | None = None
    """int32 [n - prompt_len, K]: the most probable tokens at each response position, most probable first, or None when
    none were asked for. The sampled token need not be among them. K is the same for every position of a call."""
    top_logprobs: Tensor | None = None
    """float32 [n - prompt_len, K]: their rollout log-probabilities."""

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return int(self.token_ids.numel())

    @property
    def response_ids(self) -> list[int]:
        """Token ids of the response."""
        return self.token_ids[self.prompt_len :].tolist()

    def check(self) -> None:
        """Assert the shapes above; a wrong one is a fault of the engine."""
        rows = self.num_tokens - 1
        assert self.logprobs.shape == (self.num_tokens - self.prompt_len,), (self.logprobs.shape, self.num_tokens)
        assert self.expert_ids is None or self.expert_ids.shape[0] == rows, (self.expert_ids.shape, rows)
        assert (self.top_ids is None) == (self.top_logprobs is None)
        if self.top_ids is not None:
            assert self.top_ids.shape == self.top_logprobs.shape, (self.top_ids.shape, self.top_logprobs.shape)
            assert self.top_ids.shape[0] == self.logprobs.numel(), (self.top_ids.shape, self.num_tokens)
        assert self.record is None or (self.record.shape[0] == rows and self.record.dtype == torch.uint8)


@dataclass
class RolloutBatch:
    """The trajectories of one generate() call."""

    trajectories: list[Trajectory]
    """Ordered by prompt, then sample."""
    recording: GuidanceSpec | None
    """What was recorded; None: nothing."""
    quant_hash: str
    """Hash of the engine's QuantSpec."""
    policy_version: int
    """Version of the policy."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds by phase: ``generate``, ``record`` (gathering)."""
    stats: dict[str, float] = field(default_factory=dict)
    """Engine counters: generated tokens, preemptions, prefix-cache hits."""
