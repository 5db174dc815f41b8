"""What the RL step needs of a rollout engine.

Two engines implement the protocol: ``vllm`` (default everywhere) and ``torch`` (oracle). Each executes the policy with
the experiment's quantizer and records what it rounded to.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash
from torch import Tensor

from trace_rl.config.guidance import GuidanceSpec
from trace_rl.config.quant import SCOPE_OF, QuantSpec
from trace_rl.config.rollout import EngineConfig
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.guidance.record import ModelDims
from trace_rl.trajectory import RolloutBatch


@dataclass(frozen=True)
class Sampling:
    """One generate() call's sampling."""

    temperature: float
    """0 decodes greedily."""
    max_new_tokens: int
    """Longest response."""
    n: int = 1
    """Samples per prompt."""
    seed: int = 0
    """Seed of the call; each sample has its own, see :func:`sample_seed`."""
    ignore_eos: bool = False
    """Decode exactly ``max_new_tokens`` (benchmarks)."""
    top_logprobs: int = 0
    """Return each response position's most probable tokens, this many or the whole vocabulary if that is smaller."""


def sample_seed(seed: int, prompt_index: int, sample_index: int) -> int:
    """Seed of one sample, independent of batching, of the order of requests and of what else is sampled."""
    return xxhash.xxh64_intdigest(f"{seed}/{prompt_index}/{sample_index}".encode()) & (2**63 - 1)


def check_prompts(prompts: Sequence[Sequence[int]], *, sampling: Sampling, max_model_len: int) -> None:
    """Raise UserError for an empty list, a zero-length prompt, or one that leaves no room for its response."""
    if not prompts:
        raise UserError("generate: no prompts; the dataset is empty")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"generate: prompt {index} has zero tokens; every prompt needs at least one")
        if len(prompt) + sampling.max_new_tokens > max_model_len:
            raise UserError(
                f"generate: prompt {index} has {len(prompt)} tokens; with {sampling.max_new_tokens} new tokens it "
                f"exceeds engine.max_model_len {max_model_len}; raise max_model_len or lower sampling.max_new_tokens"
            )


def check_recording(recording: GuidanceSpec, *, quant: QuantSpec) -> None:
    """Raise UserError when ``recording`` names a tensor that an engine with ``quant`` rounds to no codewords."""
    for tensor in recording.tensors:
        scope, name = SCOPE_OF[tensor], quant.format_of(tensor)
        if name is None:
            raise UserError(
                f"guidance.tensors has {tensor!r}, which this engine keeps in BF16; remove it or switch "
                f"quant.{scope} on"
            )
        if tensor not in quant.recordable():
            raise UserError(
                f"guidance.tensors has {tensor!r}, which this engine keeps in {name}, a format without codewords; "
                f"remove it or choose another format.{scope}"
            )


class RolloutEngine(Protocol):
    """A policy that samples, records, scores, and takes new weights in place."""

    quant: QuantSpec
    dims: ModelDims
    scales: StaticScales | None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        recording: GuidanceSpec | None,
        *,
        record_experts: bool = True,
    ) -> RolloutBatch:
        """Sample ``sampling.n`` responses per prompt (token ids), recording guidance and routing."""

    def load_policy(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take BF16 tensors under Hugging Face names (transformers 5.19 state dict) and requantize."""

    def score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[Tensor]:
        """float32 log-probabilities of tokens 1..n-1 of each sequence, in the engine's own execution."""

    def close(self) -> None:
        """Release memory and workers."""


def open_engine(
    checkpoint_dir: Path, *, quant: QuantSpec, scales: StaticScales | None, config: EngineConfig, capture: bool = False
) -> RolloutEngine:
    """Open the engine that ``config.name`` names on a Hugging Face checkpoint directory.

    ``capture`` keeps the tensors the engine multiplied with, for tests. Raises UserError for a missing or unsuitable
    checkpoint, and when ``quant`` needs static scales and none are given.
    """
    if not (checkpoint_dir / "config.json").is_file():
        raise UserError(f"{checkpoint_dir}: no config.json; expected a Hugging Face checkpoint directory")
    if scales is None and (quant.activations or quant.kv):
        raise UserError("FP4 activations and KV need calibrated static scales; run `trace-rl calibrate` first")
    # Imported here: each engine pulls in a large library that the other does not need.
    if config.name == "vllm":
        from trace_rl.rollout.vllm_engine import VllmEngine as Engine
    else:
        from trace_rl.rollout.torch_engine import TorchEngine as Engine
    return Engine(checkpoint_dir, quant=quant, scales=scales, config=config, capture=capture)
