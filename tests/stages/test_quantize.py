"""The quantize stage exports a trained policy; what it writes is what fake quantization would compute."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trace_rl import formats
from trace_rl.config.load import load_method
from trace_rl.config.method import PtqMethod
from trace_rl.config.quant import FormatChoice, QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.models.export import quantization_of, read_packed
from trace_rl.rollout.engine import open_engine
from trace_rl.stages import evaluate, quantize
from trace_rl.stages.calibrated_scales import calibrated_scales

METHODS = Path(__file__).resolve().parents[2] / "config/methods"


def ptq(format_name: str = "nvfp4") -> PtqMethod:
    return PtqMethod(name=f"ptq_{format_name}", description="test", source="test", base="bf16", format=format_name)


@pytest.fixture
def trained(tiny_run, policy_factory):
    """The calibrated run with a trained policy of method bf16, seed 1."""
    policy = tiny_run.paths.train("bf16", 1) / "policy"
    if not policy.is_dir():
        policy_factory(policy, seed=9)
    return tiny_run


@pytest.mark.parametrize("format_name", ["nvfp4", "fouroversix"])
def test_the_export_holds_the_trained_policy(trained, format_name):
    metrics = quantize.run(trained.config, trained.paths, method=ptq(format_name), seed=1)
    out = trained.paths.quantized(f"ptq_{format_name}", 1)
    assert metrics == json.loads((out / "metrics.json").read_text())
    assert metrics["bytes_saved"] == metrics["expert_bytes_bf16"] - metrics["expert_bytes_packed"] > 0
    assert 4.5 <= metrics["bits_per_weight"] < 4.6  # 4 + 8/16, and one FP32 scale per expert and matrix
    assert len(metrics["tensors"]) == 6
    assert 0 < metrics["max_relative_mse"] < 0.02
    config = quantization_of(out)
    assert config["quant"] == QuantSpec(format=format_name).model_dump(mode="json")
    weights = read_packed(out)
    name = "model.layers.2.mlp.experts.down_proj"
    policy = trained.paths.train("bf16", 1) / "policy"
    stored = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).state_dict()[name]
    for expert in range(4):
        assert torch.equal(weights[name][expert], formats.get(format_name).fake_quant(stored[expert]))


def test_scales_are_the_calibrated_ones_in_the_methods_format(trained):
    calibrated = StaticScales.load(trained.paths.scales)
    scales_of = lambda quant: calibrated_scales(trained.config, trained.paths, quant=quant)  # noqa: E731
    assert scales_of(QuantSpec()) == scales_of(QuantSpec(format="hscale")) == calibrated
    assert scales_of(QuantSpec(activations=False, kv=False)) is None
    other = scales_of(QuantSpec(format="fouroversix"))
    for tensor in ("fc1", "fc2", "k", "v"):
        for layer in range(3):
            # 256*6/amax instead of 448*6/amax.
            assert other.get(tensor, layer) == pytest.approx(calibrated.get(tensor, layer) * 256 / 448, rel=1e-5)
    mixed = scales_of(QuantSpec(format={"activations": "mxfp8", "kv": "fouroversix"}))
    assert mixed.fc1 == mixed.fc2 == dict.fromkeys(range(3), 1.0)
    assert (mixed.k, mixed.v) == (other.k, other.v)
    assert mixed.residual == calibrated.residual


def test_an_untrained_base_is_one_error_and_nothing_is_written(trained):
    with pytest.raises(UserError, match="method bf16 with seed 5 is not trained"):
        quantize.run(trained.config, trained.paths, method=ptq(), seed=5)
    assert not trained.paths.quantized("ptq_nvfp4", 5).exists()


def test_hscale_searches_by_the_calibrated_importance_and_both_engines_read_it(trained, tmp_path):
    method = load_method(METHODS / "ptq_hscale.yaml")
    metrics = quantize.run(trained.config, trained.paths, method=method, seed=1)
    plain = quantize.run(trained.config, trained.paths, method=ptq(), seed=1)
    weights = read_packed(trained.paths.quantized("ptq_hscale", 1))
    nearest = read_packed(trained.paths.quantized("ptq_nvfp4", 1))
    importance = load_file(trained.paths.importance)
    policy = trained.paths.train("bf16", 1) / "policy"
    stored = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).state_dict()
    better = 0
    for name, h_EC in importance.items():
        for expert, h in enumerate(h_EC):
            if not h.any():
                continue
            searched = formats.get("hscale", importance=h).fake_quant(stored[name][expert])
            assert torch.equal(weights[name][expert], searched)
            error, usual = (
                float(((w[name][expert].double() - stored[name][expert].double()).square() * h).sum())
                for w in (weights, nearest)
            )
            assert error <= usual
            better += error < 0.95 * usual
    assert better
    assert metrics["bits_per_weight"] == plain["bits_per_weight"]
    execution = evaluate.executions_of(trained.config, trained.paths, method=method, seed=1)["fp4"]
    engine = open_engine(
        execution.checkpoint, quant=execution.quant, scales=execution.scales, config=trained.config.engine
    )
    held = dict(engine.model.named_parameters())
    for name in importance:
        assert torch.equal(held[name].float(), weights[name].to(torch.bfloat16).float())
    with pytest.raises(UserError, match="runs an export"):
        engine.load_policy(stored.items(), 1)
    engine.close()


def test_ptq_methods_execute_in_their_own_formats(trained):
    method = load_method(METHODS / "ptq_4over6.yaml")
    quantize.run(trained.config, trained.paths, method=method, seed=1)
    execution = evaluate.executions_of(trained.config, trained.paths, method=method, seed=1)["fp4"]
    assert execution.quant == QuantSpec(format={"weights": "fouroversix", "activations": "fouroversix"})
    calibrated = StaticScales.load(trained.paths.scales)
    assert execution.scales.k == calibrated.k
    assert execution.scales.fc1[0] == pytest.approx(calibrated.fc1[0] * 256 / 448, rel=1e-5)


def test_rl_methods_execute_in_the_fp4_of_their_rollouts(trained):
    config = trained.config.model_copy(update={"format": FormatChoice.model_validate("mxfp4")})
    method = lambda name: load_method(METHODS / f"{name}.yaml")  # noqa: E731
    assert evaluate.fp4_quant(config, None) == evaluate.fp4_quant(config, method("bf16")) == QuantSpec(format="mxfp4")
    assert evaluate.fp4_quant(config, method("qat")) == QuantSpec(format="mxfp4")
    assert evaluate.fp4_quant(config, method("qat@format=fouroversix")) == QuantSpec(format="fouroversix")
    partial = evaluate.fp4_quant(config, method("qat@rollout.kv=false"))
    assert (partial.kv, partial.weights) == (False, True)
