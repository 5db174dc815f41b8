"""A run directory with a tiny random policy, problems and calibrated scales: what stage tests start from."""

import json
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import QuantSpec
from trace_rl.formats.static_scales import StaticScales
from trace_rl.models.checkpoint_io import build_manifest, validate_checkpoint, write_json
from trace_rl.models.families import cast_parameters
from trace_rl.models.miniature import build_model, miniature_config, save_checkpoint
from trace_rl.models.tokenizer import build_tokenizer
from trace_rl.tasks.dataset import build_splits
from trace_rl.tasks.problem import write_jsonl

ENCODE_SCALE = 256.0
"""Static encode scale of every activation: covers magnitudes up to about 10."""


def tiny_config(**sections) -> ExperimentConfig:
    """An experiment of seconds; ``sections`` override."""
    base = {
        "run": "tiny",
        "engine": {"name": "torch", "max_model_len": 64, "max_num_seqs": 32, "max_num_batched_tokens": 256},
        "sampling": {"max_new_tokens": 12},
        "calibrate": {"num_prompts": 8},
        "training": {
            "steps": 4,
            "prompts_per_step": 3,
            "samples_per_prompt": 4,
            "learning_rate": 1e-3,
            "warmup_steps": 1,
            "checkpoint_every": 2,
            "diagnose_every": 2,
            "diagnose_prompts": 3,
        },
        "tracking": {"enabled": False},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return ExperimentConfig.model_validate(base)


def tiny_policy(directory: Path, *, seed: int = 0) -> None:
    """A random Qwen3-MoE checkpoint: 3 layers, hidden 64, 8 experts top-2, with its manifest."""
    tokenizer = build_tokenizer()
    config = miniature_config(
        tokenizer, num_layers=3, hidden_size=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32
    )
    state = build_model(config, seed=seed).state_dict()
    save_checkpoint(directory, config=config, state=state, tokenizer=tokenizer)
    info = validate_checkpoint(directory, quant=QuantSpec())
    write_json(directory / "manifest.json", build_manifest(info, source={"kind": "test"}))


def tiny_run(root: Path, *, config: ExperimentConfig) -> RunPaths:
    """Checkpoint, RL problems, constant scales and channels in their order under ``root``."""
    torch.set_num_threads(1)
    paths = RunPaths(config.run, root=root)
    tiny_policy(paths.checkpoint)
    paths.data.mkdir(parents=True)
    write_jsonl(paths.data / "rl.jsonl", problems=tiny_problems())
    (paths.data / "manifest.json").write_text(json.dumps({"digest": "test"}))
    layers = dict.fromkeys(range(3), ENCODE_SCALE)
    paths.scales.parent.mkdir(parents=True)
    residual = {"fc1": dict.fromkeys(layers, tuple(range(64))), "fc2": dict.fromkeys(layers, tuple(range(32)))}
    StaticScales(fc1=layers, fc2=layers, k=layers, v=layers, residual=residual).save(paths.scales)
    return paths


def tiny_problems() -> list:
    """A few RL problems of both families."""
    return build_splits(
        **ExperimentConfig().data.model_dump(exclude={"source"})
        | {"train_problems": 64, "rl_problems": 32, "eval_problems": 8}
    )["rl"]


def random_weights(directory: Path, *, num_layers: int, initializer_range: float) -> None:
    """A random Qwen3-MoE without a tokenizer, its weights wide enough that FP4 rounding matters."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=24,
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        max_position_embeddings=64,
        norm_topk_prob=True,
        initializer_range=initializer_range,
        eos_token_id=1,
    )
    cast_parameters(Qwen3MoeForCausalLM(config), torch.bfloat16).save_pretrained(directory)
