"""Formats: the grid, packing, error messages, and identities between fast and stored paths."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_rl import formats
from trace_rl.errors import UserError
from trace_rl.formats import e2m1
from trace_rl.formats.nvfp4 import NVFP4
from trace_rl.formats.static_scales import StaticScales

ALL = [("nvfp4", {}), ("mxfp4", {"rule": "rceil"}), ("mxfp4", {"rule": "floor"}), ("mxfp4", {"rule": "even"})]
ALL += [("fouroversix", {"rule": "mse"}), ("fouroversix", {"rule": "mae"})]


def nearest_by_thresholds(y: float) -> float:
    """The rounding rule as METHOD.md states it, with comparisons."""
    a = abs(y)
    bounds = [(0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True)]
    index = next((i for i, (b, inclusive) in enumerate(bounds) if (a <= b if inclusive else a < b)), 7)
    return float(np.copysign(e2m1.MAGNITUDES[index], y)) if index else 0.0


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=64))
def test_rounding_follows_the_thresholds(values):
    y = torch.tensor(values, dtype=torch.float32)
    assert e2m1.round_nearest(y).tolist() == [nearest_by_thresholds(v) for v in y.tolist()]


def test_rounding_at_and_beside_every_midpoint():
    middle = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    y = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(9))])
    y = torch.from_numpy(np.concatenate([y, -y]))
    assert e2m1.round_nearest(y).tolist() == [nearest_by_thresholds(v) for v in y.tolist()]


def test_codes_and_values_are_inverse_and_minus_zero_is_never_made():
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1.values(codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert e2m1.codes(values).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15]
    assert e2m1.codes(e2m1.round_nearest(torch.tensor([-0.1, -0.0, 0.1]))).tolist() == [0, 0, 0]


def test_packing_puts_the_even_column_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert formats.pack_codes(codes).tolist() == [[0x21, 0x0F]]
    random = torch.randint(0, 16, (7, 64), dtype=torch.uint8)
    assert torch.equal(formats.unpack_codes(formats.pack_codes(random)), random)


@pytest.mark.parametrize(("name", "options"), ALL)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_fake_quant_equals_quantize_then_dequantize(name, options, data):
    fmt = formats.get(name, **options)
    seed = data.draw(st.integers(0, 2**31 - 1))
    exponent = data.draw(st.integers(-20, 12))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 96, generator=generator) * 2.0**exponent
    x[1, :32] = 0
    x[2] *= torch.logspace(-6, 3, 96)
    x = x.to(data.draw(st.sampled_from([torch.bfloat16, torch.float32])))
    encode_scale = data.draw(st.sampled_from([None, 1.0, 37.5, 2.0**-exponent]))
    stored = fmt.quantize(x, encode_scale)
    bits = fmt.fake_quant(x, encode_scale).view(torch.int32)
    assert torch.equal(bits, stored.dequantize().view(torch.int32))
    codes, block_scale, xhat = fmt.quantize_codes(x, encode_scale)
    assert torch.equal(formats.pack_codes(codes), stored.codes)
    assert torch.equal(block_scale, stored.block_scale)
    assert torch.equal(fmt.block_scales(x, encode_scale), block_scale)
    assert torch.equal(xhat.view(torch.int32), bits)
    assert not (codes == 8).any()


def float64_nvfp4(x: np.ndarray, encode_scale: float) -> np.ndarray:
    """xhat by exhaustive search over codes, in float64, given the FP32 block scales' definition."""
    grid = np.array(sorted({s * m for m in e2m1.MAGNITUDES for s in (1, -1)}))
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    out = np.zeros_like(x)
    for block in range(x.size // 16):
        part = x.reshape(-1)[block * 16 : block * 16 + 16]
        sigma = e4m3[np.abs(e4m3 - encode_scale * np.abs(part).max() / 6).argmin()]
        step = sigma / encode_scale
        for i, value in enumerate(part):
            out.reshape(-1)[block * 16 + i] = step * grid[np.abs(grid * step - value).argmin()] if step else 0.0
    return out


def test_nvfp4_agrees_with_an_exhaustive_float64_search():
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    fmt = formats.get("nvfp4")
    encode_scale = float(fmt.encode_scale(x.abs().max()))
    ours = fmt.fake_quant(x, encode_scale).double().numpy()
    theirs = float64_nvfp4(x.double().numpy(), encode_scale)
    np.testing.assert_allclose(ours, theirs, rtol=3e-7)


def test_zero_blocks_are_exact_zeros():
    x = torch.zeros(2, 64)
    x[1, 32:] = 1.0
    for name, options in ALL:
        quantized = formats.get(name, **options).quantize(x)
        assert torch.equal(quantized.dequantize()[:, :32], torch.zeros(2, 32))
        assert int(quantized.block_scale[0].max()) == 0
        assert torch.isfinite(quantized.dequantize()).all()
    assert formats.get("nvfp4").quantize(torch.zeros(2, 64)).encode_scale == 1


def test_extremely_small_tensors_stay_finite():
    for amax in (1e-30, 1e-36, 1e-42):
        x = torch.full((1, 16), amax)
        xhat = formats.get("nvfp4").fake_quant(x)
        assert torch.isfinite(xhat).all()
        assert xhat.abs().max() <= 1.2 * amax


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_value_is_an_error_that_names_the_tensor(bad):
    x = torch.ones(4, 32)
    x[2, 5] = bad
    with pytest.raises(UserError, match=r"layers\.3\.down_proj.*first at \(2, 5\)"):
        formats.get("nvfp4").quantize(x, name="layers.3.down_proj")


def test_errors_say_what_to_do():
    with pytest.raises(UserError, match="multiple of 16"):
        formats.get("nvfp4").fake_quant(torch.ones(2, 24))
    with pytest.raises(UserError, match="bfloat16 or float32"):
        formats.get("nvfp4").fake_quant(torch.ones(2, 32, dtype=torch.float16))
    with pytest.raises(UserError, match="choose one of"):
        formats.get("fp3")
    with pytest.raises(UserError, match="does not take"):
        formats.get("nvfp4", rule="floor")
    with pytest.raises(UserError, match="rceil, floor, even"):
        formats.get("mxfp4", rule="up")
    with pytest.raises(UserError, match="positive and finite"):
        formats.get("nvfp4").fake_quant(torch.ones(2, 32), 0.0)


@pytest.mark.parametrize("name", ["nvfp4", "fouroversix"])
def test_per_expert_scales_equal_a_loop_over_experts(name):
    fmt = formats.get(name)
    weights = (torch.randn(6, 32, 64) * torch.logspace(-3, 2, 6)[:, None, None]).bfloat16()
    encode_scale = fmt.encode_scale(weights.abs().amax(dim=(1, 2)).float())
    loop = torch.stack([fmt.fake_quant(w, float(g)) for w, g in zip(weights, encode_scale, strict=True)])
    rows = fmt.fake_quant(weights.view(-1, 64), encode_scale.repeat_interleave(32)).view_as(weights)
    assert torch.equal(loop, rows)
    assert torch.equal(loop, fmt.fake_quant(weights, encode_scale[:, None]))
    stored = fmt.quantize(weights.view(-1, 64), encode_scale.repeat_interleave(32))
    assert torch.equal(stored.dequantize().view_as(weights), loop)


def test_large_tensors_are_worked_in_pieces_with_the_same_result():
    x = torch.randn(4000, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    fmt = formats.get("nvfp4")
    per_row = fmt.encode_scale(x.float().abs().amax(-1))
    for encode_scale in (64.0, per_row):
        parts = [
            fmt.quantize_codes(
                x[r : r + 100], encode_scale if isinstance(encode_scale, float) else encode_scale[r : r + 100]
            )
            for r in range(0, 4000, 100)
        ]
        whole = fmt.quantize_codes(x, encode_scale)
        for got, expected in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(got, torch.cat(expected))
        assert torch.equal(fmt.fake_quant(x, encode_scale), whole[2])


def test_leading_dimensions_and_strides_do_not_matter_and_the_input_is_untouched():
    x = torch.randn(3, 4, 64, requires_grad=True)
    before = x.detach().clone()
    fmt = formats.get("nvfp4")
    flat = fmt.fake_quant(x.view(12, 64), 32.0)
    assert torch.equal(fmt.fake_quant(x, 32.0).view(12, 64), flat)
    assert torch.equal(fmt.fake_quant(x.transpose(0, 1), 32.0), flat.view(3, 4, 64).transpose(0, 1))
    assert torch.equal(x.detach(), before)
    assert not flat.requires_grad


def test_mxfp4_rceil_never_saturates_and_floor_may():
    x = torch.full((1, 32), 7.9)
    assert formats.get("mxfp4", rule="rceil").fake_quant(x)[0, 0] == 8.0
    assert formats.get("mxfp4", rule="floor").fake_quant(x)[0, 0] == 6.0


def test_fouroversix_is_never_worse_than_max_to_six():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    four = formats.get("fouroversix")
    encode_scale = float(four.encode_scale(x.abs().max()))
    error = (four.fake_quant(x, encode_scale) - x).square().view(-1, 16).sum(-1)
    six = (NVFP4().fake_quant(x, encode_scale) - x).square().view(-1, 16).sum(-1)
    assert (error <= six).all()
    assert (error < six).any()


def test_static_scales_round_trip(tmp_path):
    scales = StaticScales(fc1={0: 64.0, 11: 1 / 3}, fc2={0: 2.0}, k={0: 1.0}, v={0: 5.5})
    scales.save(tmp_path / "scales.json")
    assert StaticScales.load(tmp_path / "scales.json") == scales
    assert [p.name for p in tmp_path.iterdir()] == ["scales.json"]
    assert scales.get("fc1", 11) == 1 / 3
    with pytest.raises(UserError, match="'k' of layer 4"):
        scales.get("k", 4)
    with pytest.raises(UserError, match="run the calibration stage"):
        StaticScales.load(tmp_path / "other.json")
    (tmp_path / "bad.json").write_text('{"fc1": {"0": NaN}, "fc2": {}, "k": {}, "v": {}}')
    with pytest.raises(UserError, match="positive and finite"):
        StaticScales.load(tmp_path / "bad.json")
