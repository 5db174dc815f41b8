"""Residual compensation in the vLLM engine: experts multiply with the compensated inputs, the record stays Q(X), and
the engine comes closer to itself with exact activations."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from vllm_tiny import LAYERS, SAMPLING, SCALES, engine, prompts, qwen3_moe

from trace_rl import formats
from trace_rl.config.guidance import FULL
from trace_rl.config.quant import QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.residual import compensated
from trace_rl.guidance.record import RecordLayout

pytestmark = pytest.mark.engine

HIDDEN, WIDTH = 64, 32
NVFP4 = formats.get("nvfp4")


def shuffled(size: int, *, seed: int) -> tuple[int, ...]:
    return tuple(torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist())


ORDERED = replace(
    SCALES,
    residual={
        "fc1": {layer: shuffled(HIDDEN, seed=layer) for layer in range(LAYERS)},
        "fc2": {layer: shuffled(WIDTH, seed=10 + layer) for layer in range(LAYERS)},
    },
)
SPECS = {kind: QuantSpec(residual=kind) for kind in ("channels", "sparse")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return qwen3_moe(tmp_path_factory.mktemp("qwen3_moe"))


def operand(x: torch.Tensor, *, tensor: str, layer: int, kind: str) -> torch.Tensor:
    """The compensated input of x, from the definition; the first half of the channel order is covered."""
    channels = None
    if kind == "channels":
        order = ORDERED.residual[tensor][layer]
        channels = torch.tensor(sorted(order[: len(order) // 2]))
    scale = ORDERED.get(tensor, layer)
    return compensated(x, NVFP4.fake_quant(x, scale), fmt=NVFP4, encode_scale=scale, kind=kind, channels=channels)


def experts(fc1: torch.Tensor, call, *, round_hidden) -> torch.Tensor:
    """The layer's output from its FC1 operand, expert by expert in float32."""
    _, layer, _, weights, ids, _ = call
    out = torch.zeros(fc1.shape)
    for token, k in torch.cartesian_prod(torch.arange(len(fc1)), torch.arange(ids.shape[1])).tolist():
        gate_up, down = (w.data[int(ids[token, k])].float() for w in (layer.w13_weight, layer.w2_weight))
        gate, up = (gate_up @ fc1[token].float()).bfloat16().chunk(2)
        hidden = round_hidden((F.silu(gate) * up)[None])[0]
        out[token] += float(weights[token, k]) * (down @ hidden.float())
    return out


@pytest.mark.parametrize("kind", ["channels", "sparse"])
def test_experts_multiply_with_the_compensated_inputs(checkpoint, monkeypatch, kind):
    eng = engine(checkpoint, quant=SPECS[kind], scales=ORDERED, capture=True)
    from trace_rl.rollout.vllm_plugin.moe import TraceMoEMethod

    calls, apply = [], TraceMoEMethod.apply

    def listening(self, layer, x, topk_weights, topk_ids, **shared):
        out = apply(self, layer, x, topk_weights, topk_ids, **shared)
        calls.append((self.layer_id, layer, x.clone(), topk_weights.clone(), topk_ids.clone(), out.clone()))
        return out

    monkeypatch.setattr(TraceMoEMethod, "apply", listening)
    batch = eng.generate(prompts(count=1), replace(SAMPLING, n=1), FULL)
    (trajectory,), (captured,) = batch.trajectories, eng.captured
    layout = RecordLayout.build(FULL, eng.dims)
    for layer in range(LAYERS):
        x = torch.cat([call[2] for call in calls if call[0] == layer])
        expected = operand(x, tensor="fc1", layer=layer, kind=kind)
        assert torch.equal(captured[layer, "fc1"], expected)
        assert not torch.equal(expected, NVFP4.fake_quant(x, SCALES.get("fc1", layer)).bfloat16())
        codes, block_scale = layout.read(trajectory.record, layer, "fc1")
        assert torch.equal(codes, NVFP4.quantize_codes(x, SCALES.get("fc1", layer))[0])
        assert torch.equal(block_scale, NVFP4.block_scales(x, SCALES.get("fc1", layer)))

        prefill = next(call for call in calls if call[0] == layer)
        fc1 = operand(prefill[2], tensor="fc1", layer=layer, kind=kind)
        off = {
            name: float((experts(fc1, prefill, round_hidden=round_hidden) - prefill[5].float()).norm())
            for name, round_hidden in {
                "compensated": lambda h, layer=layer: operand(h, tensor="fc2", layer=layer, kind=kind),
                "nearest": lambda h, layer=layer: NVFP4.fake_quant(h, SCALES.get("fc2", layer)).bfloat16(),
            }.items()
        }
        print(f"{kind} layer {layer}: output off by {off} of {float(prefill[5].float().norm()):.3f}")
        assert off["compensated"] < 0.2 * off["nearest"]
    eng.close()


@pytest.mark.parametrize("others", [False, True], ids=["bf16", "w4a16"])
def test_compensation_brings_the_engine_closer_to_exact_activations(checkpoint, others):
    """The control rounds everything but activations: with FP4 weights and KV, their error would hide the rest."""
    control = engine(checkpoint, quant=QuantSpec(weights=others, activations=False, kv=others), scales=ORDERED)
    sequences = [t.token_ids.tolist() for t in control.generate(prompts(count=12), SAMPLING, None).trajectories]
    reference = torch.cat(control.score(sequences, 1.0))
    control.close()
    gaps = {}
    for kind in ("none", *SPECS):
        eng = engine(checkpoint, quant=QuantSpec(residual=kind, weights=others, kv=others), scales=ORDERED)
        gaps[kind] = float((torch.cat(eng.score(sequences, 1.0)) - reference).abs().mean())
        eng.close()
    print(f"mean |delta log p| to the control over {len(reference)} tokens, FP4 weights and KV {others}: {gaps}")
    assert gaps["sparse"] < 0.8 * gaps["none"] and gaps["sparse"] < gaps["channels"] < 0.9 * gaps["none"]


def test_channels_without_calibration_are_refused(checkpoint):
    with pytest.raises(UserError, match="trace-rl calibrate"):
        engine(checkpoint, quant=SPECS["channels"])
