"""An upcycled model (Mixtral layout, tied embeddings, head dimension 64) through the gates on the vLLM engine."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trace_rl import formats
from trace_rl.config.experiment import CalibrateConfig, ExperimentConfig, ParityConfig, TrackingConfig
from trace_rl.config.guidance import FULL
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import QuantSpec
from trace_rl.config.rollout import EngineConfig, SamplingConfig
from trace_rl.formats import e2m1
from trace_rl.formats.static_scales import StaticScales
from trace_rl.guidance.record import RecordLayout
from trace_rl.models import smollm
from trace_rl.models.checkpoint_io import build_manifest, validate_checkpoint, write_json
from trace_rl.models.families import cast_parameters
from trace_rl.models.tokenizer import build_tokenizer
from trace_rl.rollout.engine import Sampling, open_engine
from trace_rl.stages import audit, calibrate, parity
from trace_rl.stages.rl_prompts import rl_prompts
from trace_rl.tasks.dataset import build_splits
from trace_rl.tasks.problem import write_jsonl

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def upcycled_run(tmp_path_factory):
    """A random upcycled policy with data in the places of a run."""
    config = ExperimentConfig(
        run="upcycled",
        engine=EngineConfig(max_model_len=64, max_num_seqs=32, kv_cache_gib=0.05),
        sampling=SamplingConfig(max_new_tokens=12),
        calibrate=CalibrateConfig(num_prompts=8),
        parity=ParityConfig(num_prompts=8),
        tracking=TrackingConfig(enabled=False),
    )
    paths = RunPaths(config.run, root=tmp_path_factory.mktemp("upcycled"))
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    dense = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.08,
            rope_parameters={"rope_theta": 100000.0, "rope_type": "default"},
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model = smollm.upcycle(dense, num_experts=4, num_experts_per_tok=2)
    smollm.perturb_experts(model, scale=0.5)
    cast_parameters(model, torch.bfloat16)
    smollm.save_checkpoint(paths.checkpoint, model=model, tokenizer=tokenizer)
    info = validate_checkpoint(paths.checkpoint, quant=QuantSpec())
    write_json(paths.checkpoint / "manifest.json", build_manifest(info, source={"kind": "test"}))
    paths.data.mkdir(parents=True)
    rows = build_splits(seed=0, train_problems=8, rl_problems=16, eval_problems=8, code_share=0.0)["rl"]
    write_jsonl(paths.data / "rl.jsonl", problems=rows)
    calibrate.run(config, paths)
    return config, paths


def test_audit_and_parity_hold(upcycled_run):
    config, paths = upcycled_run
    assert audit.run(config, paths)["differences"] == []
    metrics = parity.run(config, paths)
    assert metrics["passed"]
    for moment in parity.MOMENTS:
        gaps = {mode: value["gap_mean"] for mode, value in metrics["gaps"]["fp4"][moment].items()}
        assert gaps["guided"] < gaps["rtn"] < gaps["off"]


def test_recorded_is_what_the_engine_multiplied_with(upcycled_run):
    config, paths = upcycled_run
    scales, fmt = StaticScales.load(paths.scales), formats.get("nvfp4")
    prompts = rl_prompts(paths.checkpoint, data=paths.data, count=4, setting="test")
    engine = open_engine(paths.checkpoint, quant=QuantSpec(), scales=scales, config=config.engine, capture=True)
    try:
        batch = engine.generate(prompts, Sampling(temperature=1.0, max_new_tokens=12, n=3, seed=5), FULL)
        layout = RecordLayout.build(FULL, engine.dims)
        assert {field.tensor for field in layout.fields} == {"fc1", "k", "v"} and len(layout.fields) == 12
        for trajectory, operands in zip(batch.trajectories, engine.captured, strict=True):
            for field in layout.fields:
                codes, block_scale = layout.read(trajectory.record, field.layer, field.tensor)
                step = fmt.scale_values(block_scale, scales.get(field.tensor, field.layer))
                xhat = (e2m1.values(codes).unflatten(-1, (-1, fmt.block_size)) * step[..., None]).flatten(-2)
                assert torch.equal(xhat.to(torch.bfloat16), operands[field.layer, field.tensor])
    finally:
        engine.close()
