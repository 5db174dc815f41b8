"""Tiny random MoE checkpoints for the vLLM engine's tests, and transformers forwards to compare with."""

import random
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from trace_rl.config.quant import QuantSpec
from trace_rl.config.rollout import EngineConfig
from trace_rl.formats.static_scales import StaticScales
from trace_rl.qat.attach import attach
from trace_rl.rollout.engine import Sampling, open_engine
from trace_rl.rollout.vllm_engine import VllmEngine
from trace_rl.trajectory import RolloutBatch, Trajectory

LAYERS = 3
VOCAB = 32
SCALES = StaticScales(**{name: dict.fromkeys(range(LAYERS), 256.0) for name in ("fc1", "fc2", "k", "v")})
SAMPLING = Sampling(temperature=1.0, max_new_tokens=36, n=4, seed=3)


def qwen3_moe(directory: Path, *, tie: bool = False) -> Path:
    """3 layers, hidden 64, 8 experts top-2, head dimension 32."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.06,
        eos_token_id=1,
        tie_word_embeddings=tie,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def mixtral(directory: Path) -> Path:
    """The Mixtral layout: 4 experts top-2, head dimension 64, its router built without a quantization config."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        initializer_range=0.06,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def prompts(*, count: int = 6, length: int = 40, seed: int = 0) -> list[list[int]]:
    """Random prompts that do not contain the eos token."""
    generator = random.Random(seed)
    return [[generator.randrange(2, VOCAB) for _ in range(length)] for _ in range(count)]


def engine(
    checkpoint: Path, *, quant: QuantSpec, scales: StaticScales = SCALES, capture: bool = False, **config: object
) -> VllmEngine:
    """An engine with a small KV cache."""
    settings = {"max_num_seqs": 32, "kv_cache_gib": 0.02} | config
    return open_engine(checkpoint, quant=quant, scales=scales, config=EngineConfig(**settings), capture=capture)


def trainer(checkpoint: Path) -> nn.Module:
    """The checkpoint in transformers, BF16."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)


def move(model: nn.Module, *, std: float = 0.02) -> None:
    """Change every weight, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * std)


def gap(
    model: nn.Module, batch: RolloutBatch, *, quant: QuantSpec, temperature: float = 1.0, **forward: object
) -> float:
    """Mean |log pi_train - log pi_rollout| over the responses, routing replayed; ``forward`` are qat.forward's."""
    qat = attach(model, quant=quant, scales=SCALES)
    gaps = [_gap(model, qat, t, temperature=temperature, **forward) for t in batch.trajectories]
    return float(torch.cat(gaps).mean())


def _gap(
    model: nn.Module, qat: object, t: Trajectory, *, temperature: float, mode: str, layout: object = None
) -> Tensor:
    ids = t.token_ids.long()[None]
    # The last token has no record: it is fed to the trainer, and its output is not used.
    pad = lambda rows: torch.cat([rows, rows[-1:]])[None]  # noqa: E731
    valid = torch.ones_like(ids, dtype=torch.bool)
    guidance = None if layout is None else (pad(t.record), layout)
    with torch.no_grad(), qat.forward(mode=mode, guidance=guidance, valid=valid, expert_ids=pad(t.expert_ids)):
        logits = model(input_ids=ids).logits[0, t.prompt_len - 1 : -1].float()
    logprobs = (logits / temperature).log_softmax(-1).gather(1, ids[0, t.prompt_len :, None])[:, 0]
    return (logprobs - t.logprobs).abs()
