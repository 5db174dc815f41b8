"""Residual compensation: the operand against float64, the masks by brute force, the scale of the residual, the order of
channels, and how far one BF16 operand is from the two products it stands for."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny import random_weights
from transformers import AutoModelForCausalLM

from trace_rl import formats
from trace_rl.config.load import load_method
from trace_rl.config.method import RlMethod
from trace_rl.config.quant import FormatChoice, QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.residual import HEADROOM, compensated, compensation, largest_of_group
from trace_rl.formats.residual_channels import ResidualMagnitude, top_channels
from trace_rl.formats.static_scales import StaticScales
from trace_rl.qat.attach import attach

METHODS = Path(__file__).resolve().parents[1] / "config" / "methods"
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
NVFP4 = formats.get("nvfp4")


def nearest(values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Index of the nearest grid value, ties to the even index, float64."""
    distance = (values[..., None] - grid).abs()
    best = distance == distance.amin(-1, keepdim=True)
    even = torch.arange(len(grid)) % 2 == 0
    return torch.where(best, 1 + even.long(), 0).argmax(-1)


def nvfp4_float64(x: torch.Tensor, encode_scale: float) -> torch.Tensor:
    """An independent NVFP4: nearest neighbours by distance, everything in float64."""
    blocks = x.double().unflatten(-1, (-1, 16))
    sigma = E4M3[nearest((encode_scale * blocks.abs().amax(-1) / 6).clamp(max=448.0), E4M3)]
    step = (sigma / encode_scale)[..., None]
    units = torch.where(step == 0, 0.0, blocks / torch.where(step == 0, 1.0, step))
    return (GRID[nearest(units.abs().clamp(max=6.0), GRID)] * units.sign() * step).flatten(-2)


def kept_float64(x: torch.Tensor) -> torch.Tensor:
    """2:4 by sorting every group of four in Python: by magnitude, then by index."""
    groups = x.unflatten(-1, (-1, 4))
    mask = torch.zeros_like(groups, dtype=torch.bool)
    for where in itertools.product(*(range(size) for size in groups.shape[:-1])):
        order = sorted(range(4), key=lambda i: (-abs(float(groups[where][i])), i))
        mask[where][order[:2]] = True
    return mask.flatten(-2)


def rows(*shape: int, seed: int = 0) -> tuple[torch.Tensor, float]:
    """BF16 activations with a few large channels and a zero block, and an encode scale (odd: no ties of scales)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * (1 + 9 * (torch.rand(shape[-1], generator=generator) < 0.05))
    x[0, :16] = 0.0
    x = x.bfloat16()
    return x, float(NVFP4.encode_scale(1.2347 * x.abs().amax().float()))


@pytest.mark.parametrize("kind", ["channels", "sparse"])
def test_operand_is_the_formula_in_float64(kind):
    x, encode_scale = rows(64, 96)
    channels = torch.tensor([1, 2, 5, *range(16, 45), 80, 95]) if kind == "channels" else None  # 34: a block filled up
    got = compensated(
        x, NVFP4.fake_quant(x, encode_scale), fmt=NVFP4, encode_scale=encode_scale, kind=kind, channels=channels
    )
    assert got.dtype == torch.bfloat16 and got.shape == x.shape

    xhat = nvfp4_float64(x, encode_scale)
    residual = x.double() - xhat
    extra = torch.zeros_like(residual)
    if kind == "channels":
        picked = torch.zeros(64, 48, dtype=torch.float64)
        picked[:, :34] = residual[:, channels]
        extra[:, channels] = nvfp4_float64(picked, 6 * encode_scale)[:, :34]
    else:
        quantized = nvfp4_float64(residual, 6 * encode_scale)
        extra = torch.where(kept_float64(quantized), quantized, 0.0)
    expected = xhat + extra
    assert torch.equal(got.double(), expected.bfloat16().double())
    assert not got[0, :16].any()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fouroversix"])
@pytest.mark.parametrize("kind", ["channels", "sparse"])
def test_compensation_never_makes_a_value_worse_and_touches_only_what_it_keeps(name, kind):
    fmt = formats.get(name)
    x, _ = rows(256, 128, seed=1)
    encode_scale = float(fmt.encode_scale(0.5 * x.abs().amax().float()))  # some values saturate
    channels = torch.arange(0, 128, 2) if kind == "channels" else None
    xhat = fmt.fake_quant(x, encode_scale)
    residual = x.float() - xhat
    extra = compensation(residual, fmt=fmt, encode_scale=HEADROOM * encode_scale, kind=kind, channels=channels)
    assert ((residual - extra).abs() <= residual.abs() * (1 + 2**-20)).all()
    assert (residual - extra).square().sum() < 0.6 * residual.square().sum()
    if kind == "channels":
        assert not extra[:, 1::2].any()
    else:
        assert int((extra.unflatten(-1, (-1, 4)) != 0).sum(-1).max()) == 2


values = st.lists(st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -2.0, 3.0, 6.0, -6.0]), min_size=8, max_size=8)


@given(values)
def test_largest_of_group_keeps_two_and_the_lower_channel_of_equal_ones(x):
    x = torch.tensor([x])
    mask = largest_of_group(x)
    assert mask.unflatten(-1, (2, 4)).sum(-1).tolist() == [[2, 2]]
    assert torch.equal(mask, kept_float64(x))


def test_residual_scale_neither_saturates_nor_exceeds_the_tensors_own():
    """Within calibration: R's block scale is at most X's, and no block needs more than the largest E4M3 scale."""
    for seed in range(8):
        x, _ = rows(512, 256, seed=seed)
        encode_scale = float(NVFP4.encode_scale(x.abs().amax().float()))  # no margin: X itself uses the whole range
        xhat = NVFP4.fake_quant(x, encode_scale)
        residual = x.float() - xhat
        wanted = HEADROOM * encode_scale * residual.unflatten(-1, (-1, 16)).abs().amax(-1) / 6
        assert float(wanted.max()) <= 448.0
        own, of_residual = NVFP4.block_scales(x, encode_scale), NVFP4.block_scales(residual, HEADROOM * encode_scale)
        assert (of_residual <= own).all()  # E4M3 codes of positive numbers are monotone
        # A scale rounds down by up to 1/16, so a block's largest residual may be cut by as much, and by no more.
        residual_hat = NVFP4.fake_quant(residual, HEADROOM * encode_scale)
        normal = of_residual.repeat_interleave(16, -1) >= 8  # smaller scales are subnormal E4M3 numbers
        step = NVFP4.scale_values(of_residual, HEADROOM * encode_scale).repeat_interleave(16, -1)
        assert ((residual - residual_hat).abs() <= 1.001 * step)[normal].all()


def test_one_operand_is_close_to_two_products_accumulated_in_fp32():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 512, generator=generator).bfloat16()
    weight = torch.randn(256, 512, generator=generator).bfloat16()
    weight = NVFP4.fake_quant(weight).bfloat16().double()
    encode_scale = float(NVFP4.encode_scale(1.2347 * x.abs().amax().float()))
    xhat = NVFP4.fake_quant(x, encode_scale)
    exact = x.double() @ weight.T
    for kind, channels in (("channels", torch.arange(256)), ("sparse", None)):
        options = {"fmt": NVFP4, "kind": kind, "channels": channels}
        extra = compensation(x.float() - xhat, encode_scale=HEADROOM * encode_scale, **options)
        two = xhat.double() @ weight.T + extra.double() @ weight.T
        one = compensated(x, xhat, encode_scale=encode_scale, **options).double() @ weight.T
        relative = float((one - two).norm() / two.norm())
        plain, left = (float((y - exact).norm() / exact.norm()) for y in (xhat.double() @ weight.T, two))
        print(f"{kind}: one BF16 operand {relative:.5f} from two products; FP4 {plain:.4f}, compensated {left:.4f}")
        assert relative < 0.003 < left < 0.75 * plain


def test_refusals():
    x, encode_scale = rows(16, 32)
    xhat = NVFP4.fake_quant(x, encode_scale)
    with pytest.raises(UserError, match="channels"):
        compensated(x, xhat, fmt=NVFP4, encode_scale=encode_scale, kind="channels")
    with pytest.raises(UserError, match="channels"):
        compensated(x, xhat, fmt=NVFP4, encode_scale=encode_scale, kind="sparse", channels=torch.arange(4))
    with pytest.raises(UserError, match="30 columns"):
        compensated(x[:, :30], xhat[:, :30], fmt=NVFP4, encode_scale=encode_scale, kind="sparse")
    with pytest.raises(UserError, match="residual_share"):
        top_channels((0, 1), share=0.0)


def test_channels_with_the_largest_residual_come_first(tmp_path):
    scales = StaticScales(fc1={3: 100.0}, fc2={3: 100.0}, k={}, v={})
    measured = ResidualMagnitude(fmt=NVFP4, scales=scales)
    total = torch.zeros(64, dtype=torch.float64)
    for seed in range(3):
        x, _ = rows(40, 64, seed=seed)
        measured.add(3, "fc1", x)
        measured.add(3, "fc2", torch.zeros(5, 32).bfloat16())
        measured.add(3, "k", x)
        total += (x.double() - nvfp4_float64(x, 100.0)).abs().sum(0)
    order = measured.order()
    assert order["fc1"][3] == tuple(sorted(range(64), key=lambda c: (-float(total[c]), c)))
    assert order["fc2"][3] == tuple(range(32))
    top = top_channels(order["fc1"][3], share=0.5)
    assert len(top) == 32 and top.tolist() == sorted(top.tolist())
    assert total[top].min() >= total.sort().values[31]

    saved = StaticScales(fc1={3: 100.0}, fc2={3: 100.0}, k={}, v={}, residual=order)
    saved.save(tmp_path / "scales.json")
    assert StaticScales.load(tmp_path / "scales.json") == saved
    assert StaticScales.from_json(json.loads(json.dumps(saved.to_json(residual=False)))) == scales
    with pytest.raises(UserError, match="calibrat"):
        scales.channel_order("fc1", 3)
    broken = saved.to_json() | {"residual": {"fc1": {3: [0, 0]}}}
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    with pytest.raises(UserError, match="no order of all its channels"):
        StaticScales.load(tmp_path / "broken.json")


def test_residual_is_a_setting_of_fp4_rollouts():
    specs = [QuantSpec(), QuantSpec(residual="sparse"), QuantSpec(residual="channels")]
    specs.append(QuantSpec(residual="channels", residual_share=0.25))
    assert len({spec.hash() for spec in specs}) == 4
    for settings, what in [
        ({"residual": "sparse", "activations": False}, "BF16"),
        ({"residual": "channels", "format": "mxfp4_w4a8"}, "mxfp8"),
        ({"residual": "sparse", "residual_share": 0.25}, "residual_share"),
    ]:
        with pytest.raises(ValidationError, match=what):
            QuantSpec(**settings)
    named = {"name": "a", "description": "", "source": ""}
    with pytest.raises(ValidationError, match=r"trainer.residual"):
        RlMethod(**named, trainer={"activations": True, "residual": "sparse"})
    with pytest.raises(ValidationError, match="BF16"):
        RlMethod(**named, rollout={"weights": True, "residual": "sparse"})
    with pytest.raises(ValidationError, match="8 bits"):
        RlMethod(**named, rollout={"activations": True, "residual": "sparse"}, format="mxfp4_w4a8")


@pytest.mark.parametrize(("name", "kind"), [("quads", "channels"), ("resq", "sparse")])
def test_methods_carry_the_residual_to_the_engine_and_never_to_the_trainer(name, kind):
    method = load_method(METHODS / f"{name}.yaml")
    rollout, trainer = (quant(FormatChoice()) for quant in (method.rollout_quant, method.trainer_quant))
    assert rollout == QuantSpec(residual=kind)
    assert trainer == QuantSpec(activations=name == "resq", kv=name == "resq")
    bf16_trainer = method.model_copy(update={"trainer": type(method.trainer)()})
    assert bf16_trainer.trainer_quant(FormatChoice()).residual == "none"
    quarter = load_method(METHODS / "quads@rollout.residual_share=0.25.yaml")
    assert quarter.rollout_quant(FormatChoice()).residual_share == 0.25


@pytest.mark.parametrize("kind", ["channels", "sparse"])
def test_pytorch_engines_model_multiplies_with_the_compensated_inputs(tmp_path, kind):
    random_weights(tmp_path, num_layers=2, initializer_range=0.06)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    same = dict.fromkeys(range(2), 256.0)
    order = {"fc1": dict.fromkeys(range(2), tuple(range(64))), "fc2": dict.fromkeys(range(2), tuple(range(31, -1, -1)))}
    scales = StaticScales(fc1=same, fc2=same, k=same, v=same, residual=order)
    qat = attach(model, quant=QuantSpec(residual=kind), scales=scales)
    assert not qat.fused_experts
    covered = {"fc1": torch.arange(32), "fc2": torch.arange(16, 32)}
    for tensor, cols in (("fc1", 64), ("fc2", 32)):
        x, _ = rows(48, cols)
        channels = covered[tensor] if kind == "channels" else None
        with qat.forward(mode="rtn"):
            got = qat.quantize(x, layer=1, tensor=tensor)
        xhat = NVFP4.fake_quant(x, 256.0)
        expected = compensated(x, xhat, fmt=NVFP4, encode_scale=256.0, kind=kind, channels=channels)
        assert torch.equal(got, expected) and not torch.equal(got, xhat.bfloat16())
