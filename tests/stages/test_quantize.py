"""The quantize stage exports a trained policy; what it writes is what fake quantization would compute."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from trace_rl import formats
from trace_rl.config.method import PtqMethod
from trace_rl.config.quant import QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.models.export import quantization_of, read_packed
from trace_rl.stages import quantize


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
    same = quantize.scales_for(trained.config, trained.paths, quant=QuantSpec())
    assert same == calibrated
    other = quantize.scales_for(trained.config, trained.paths, quant=QuantSpec(format="fouroversix"))
    for tensor in ("fc1", "fc2", "k", "v"):
        for layer in range(3):
            # 256*6/amax instead of 448*6/amax.
            assert other.get(tensor, layer) == pytest.approx(calibrated.get(tensor, layer) * 256 / 448, rel=1e-5)


def test_an_untrained_base_is_one_error_and_nothing_is_written(trained):
    with pytest.raises(UserError, match="method bf16 with seed 5 is not trained"):
        quantize.run(trained.config, trained.paths, method=ptq(), seed=5)
    assert not trained.paths.quantized("ptq_nvfp4", 5).exists()
