"""The gates on the vLLM engine: one test, because every engine start costs seconds."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from trace_rl.config.method import PtqMethod
from trace_rl.config.quant import QuantSpec
from trace_rl.formats.static_scales import StaticScales
from trace_rl.models.observed_formats import quantized_weight
from trace_rl.qat.attach import attach
from trace_rl.rollout.engine import Sampling, open_engine
from trace_rl.stages import audit, calibrate, parity, quantize
from trace_rl.stages.rl_prompts import rl_prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def vllm_run(run_factory, tmp_path_factory):
    run = run_factory(tmp_path_factory.mktemp("vllm"), engine="vllm")
    calibrate.run(run.config, run.paths)
    return run


def test_calibration_audit_and_parity_pass(vllm_run):
    config, paths = vllm_run.config, vllm_run.paths
    assert audit.run(config, paths)["differences"] == []
    metrics = parity.run(config, paths)
    assert metrics["passed"]
    for moment in parity.MOMENTS:
        gaps = {mode: value["gap_mean"] for mode, value in metrics["gaps"]["fp4"][moment].items()}
        assert gaps["guided"] < gaps["rtn"] < gaps["off"]
    assert json.loads(paths.audit("nvfp4").read_text())["engine"] == "vllm"


def test_one_damaged_expert_and_one_quantized_router_are_seen(vllm_run):
    config, paths, quant = vllm_run.config, vllm_run.paths, QuantSpec()
    scales = StaticScales.load(paths.scales)
    reference = audit.reference_tensors(paths.checkpoint)
    engine = open_engine(paths.checkpoint, quant=quant, scales=scales, config=config.engine, capture=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(paths.checkpoint, dtype=torch.bfloat16).eval()
        qat = attach(model, quant=quant, scales=scales)
        prompts = rl_prompts(paths.checkpoint, data=paths.data, count=12, setting="parity.num_prompts")
        sampling = Sampling(temperature=1.0, max_new_tokens=12, seed=3)
        sound = parity.measure_gaps(engine, model, qat, prompts=prompts, sampling=sampling, pad=0)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        expert = state["model.layers.1.mlp.experts.down_proj"][2]
        expert.copy_(expert.roll(1, dims=0))
        engine.load_policy(state.items(), 1)
        damaged = parity.measure_gaps(engine, model, qat, prompts=prompts, sampling=sampling, pad=0)
        assert damaged["guided"]["gap_mean"] > 5 * sound["guided"]["gap_mean"]

        router = "model.layers.1.mlp.gate.weight"
        state = dict(reference) | {router: quantized_weight(reference[router], format_name="nvfp4")}
        engine.load_policy(state.items(), 2)
        found = audit.observe_vllm_engine(engine, reference=reference)
        rows = audit.audit_table(quant=quant, trainer=found, engine=found, export=found)
        assert [row["name"] for row in audit.differing_rows(rows)] == [router]
    finally:
        engine.close()


def test_the_packed_export_runs_in_the_engine_as_the_quantized_policy_does(vllm_run, policy_factory):
    config, paths, quant = vllm_run.config, vllm_run.paths, QuantSpec()
    policy = policy_factory(paths.train("bf16", 0) / "policy", seed=4)
    method = PtqMethod(name="ptq_nvfp4", description="test", source="test")
    quantize.run(config, paths, method=method, seed=0)
    scales = StaticScales.load(paths.scales)
    prompts = rl_prompts(paths.checkpoint, data=paths.data, count=4, setting="parity.num_prompts")
    sampling = Sampling(temperature=1.0, max_new_tokens=8, seed=5)
    results = []
    for directory in (policy, paths.quantized("ptq_nvfp4", 0)):
        engine = open_engine(directory, quant=quant, scales=scales, config=config.engine)
        try:
            results.append(engine.generate(prompts, sampling, None).trajectories)
        finally:
            engine.close()
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.logprobs, theirs.logprobs)
