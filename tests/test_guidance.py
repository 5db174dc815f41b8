"""Guided rounding: METHOD.md section 3 as properties, against a scalar float64 oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_rl import formats
from trace_rl.errors import UserError
from trace_rl.formats import e2m1
from trace_rl.guidance import align, align_codes, pack_bits

LADDER = np.array(sorted({s * m for m in e2m1.MAGNITUDES for s in (1.0, -1.0)}))
UNIT = 0x38  # E4M3 code of 1.0
NVFP4 = formats.get("nvfp4")


def bracket(z: float) -> tuple[float, float]:
    return LADDER[z >= LADDER].max(), LADDER[z <= LADDER].min()


def guided(z: list[float], codes: list[int], bits: int, **options) -> list[float]:
    """q* of values on scale 1, padded to whole blocks."""
    size = -(-len(z) // 16) * 16
    x = torch.zeros(1, size)
    x[0, : len(z)] = torch.tensor(z)
    guide = torch.zeros(1, size, dtype=torch.uint8)
    guide[0, : len(z)] = torch.tensor(codes, dtype=torch.uint8)
    scale = torch.full((1, size // 16), UNIT, dtype=torch.uint8)
    guide = guide & ((1 << bits) - 1)
    return align(x, scale, guide, bits, 1.0, **options)[0, : len(z)].tolist()


def value(code: int) -> float:
    return float(e2m1.values(torch.tensor([code], dtype=torch.uint8)))


values = st.lists(
    st.tuples(
        st.one_of(
            st.floats(-7, 7, width=32),
            st.sampled_from([float(v) for v in LADDER]),
            st.floats(-(2.0**-20), 2.0**-20, width=32),
        ),
        st.integers(0, 15),
    ),
    min_size=1,
    max_size=40,
)


@given(values)
@settings(deadline=None)
def test_full_guidance_is_the_argmin_over_the_bracket(pairs):
    for (z, code), q in zip(pairs, guided(*map(list, zip(*pairs, strict=True)), bits=4), strict=True):
        z, roll = float(np.clip(z, -6, 6)), value(code)
        low, high = bracket(z)
        assert q in (low, high)
        assert abs(q - roll) == min(abs(low - roll), abs(high - roll))
        nearest = float(e2m1.round_nearest(torch.tensor([z])))
        assert abs(q - roll) <= abs(nearest - roll)


@given(values)
@settings(deadline=None)
def test_one_bit_takes_the_bracket_member_with_that_mantissa_bit(pairs):
    for (z, code), q in zip(pairs, guided(*map(list, zip(*pairs, strict=True)), bits=1), strict=True):
        z = float(np.clip(z, -6, 6))
        low, high = bracket(z)
        if low == high:
            assert q == z
        else:
            parity = {v: int(np.flatnonzero(np.array(e2m1.MAGNITUDES) == abs(v))[0]) & 1 for v in (low, high)}
            assert q in (low, high)
            assert parity[q] == code & 1


@pytest.mark.parametrize("bits", [1, 2, 3])
@given(pairs=values)
@settings(deadline=None)
def test_few_bits_equal_full_guidance_whenever_the_rollout_is_in_the_bracket(bits, pairs):
    z, codes = map(list, zip(*pairs, strict=True))
    for (x, code), few, full in zip(pairs, guided(z, codes, bits), guided(z, codes, 4), strict=True):
        if value(code) in bracket(float(np.clip(x, -6, 6))):
            assert few == full


def test_the_documented_failures_of_few_bits():
    minus_half, minus_one = 9, 10
    assert guided([0.1], [minus_half], bits=4) == [0.0]
    assert guided([0.1], [minus_half], bits=1) == [0.5]
    assert guided([2.4], [7], bits=4) == [3.0]
    assert guided([2.4], [7], bits=2) == [2.0]  # 6 and 1.5 share their low bits; 1.5 is 1.4 ladder steps away, 6 is 2.6
    assert guided([0.2], [minus_one], bits=3) == [0.5]  # the sign is not among three bits


def test_two_bits_fall_back_to_the_nearest_matching_value_in_ladder_steps():
    index_of = {v: i for i, v in enumerate(e2m1.MAGNITUDES)}
    for z in np.arange(0.03, 6, 0.0713):
        low, high = bracket(z)
        position = index_of[low] + (z - low) / (high - low)
        for bits in (2, 3):
            for code in range(1 << bits):
                candidates = [i for i in range(8) if i & ((1 << bits) - 1) == code]
                target = min(candidates, key=lambda i: abs(i - position))
                expected = high if target > position else low
                assert guided([z], [code], bits) == [expected], (z, bits, code)
                assert guided([-z], [code], bits) == [-expected]


def test_motivating_example():
    """Scale 24: a BF16 difference of 0.48 becomes 24; guidance removes it."""
    rollout = torch.zeros(1, 16)
    rollout[0, 0], rollout[0, 1] = 144.0, 60.24
    trainer = rollout.clone()
    trainer[0, 1] = 59.76
    codes, scale, xhat = NVFP4.quantize_codes(rollout, 1.0)
    assert float(NVFP4.scale_values(scale, 1.0)) == 24.0
    assert xhat[0, 1] == 72.0
    assert NVFP4.fake_quant(trainer, 1.0)[0, 1] == 48.0
    for bits in (1, 2, 3, 4):
        assert align(trainer, scale, codes & ((1 << bits) - 1), bits, 1.0)[0, 1] == 72.0


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fouroversix"])
def test_replaying_the_rollouts_own_values_reproduces_it_bitwise(bits, name):
    fmt = formats.get(name)
    generator = torch.Generator().manual_seed(bits)
    x = (torch.randn(64, 128, generator=generator) * torch.logspace(-4, 3, 64)[:, None]).bfloat16()
    x[3] = 0
    for encode_scale in (float(fmt.encode_scale(x.abs().max().float())), 700.0):  # 700: many blocks saturate
        codes, scale, xhat = fmt.quantize_codes(x, encode_scale)
        for gate in (0.5, 0.05):
            guide = codes & ((1 << bits) - 1)
            assert torch.equal(align(x, scale, guide, bits, encode_scale, gate=gate, fmt=fmt), xhat)
            assert torch.equal(align_codes(x, scale, guide, bits, encode_scale, gate=gate, fmt=fmt), codes)


def test_guidance_removes_the_mismatch_of_noisy_values():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 128, generator=generator)
    rollout = x.bfloat16()
    trainer = (x + 0.01 * torch.randn(256, 128, generator=generator)).bfloat16()
    codes, scale, xhat = NVFP4.quantize_codes(rollout, 64.0)
    own = (NVFP4.quantize_codes(trainer, 64.0)[0] != codes).float().mean()
    one_bit = (align_codes(trainer, scale, codes & 1, 1, 64.0) != codes).float().mean()
    full = (align_codes(trainer, scale, codes, 4, 64.0) != codes).float().mean()
    assert own > 0.02
    assert one_bit < own / 10
    assert full <= one_bit
    step = NVFP4.scale_values(scale, 64.0).repeat_interleave(16, -1)
    nearest = e2m1.round_nearest(trainer * (1 / step))
    followed = align(trainer, scale, codes, 4, 64.0) / step
    assert ((followed - xhat / step).abs() <= (nearest - xhat / step).abs() + 1e-6).all()


def test_gate_follows_only_near_the_rounding_boundary():
    z = [2.45, 2.55, 2.2, 2.9, 4.95, 4.1, 0.26, 0.4]
    roll = [5, 4, 5, 4, 7, 7, 0, 0]
    followed = [3.0, 2.0, 3.0, 2.0, 6.0, 6.0, 0.0, 0.0]
    nearest = [2.0, 3.0, 2.0, 3.0, 4.0, 4.0, 0.5, 0.5]
    for bits in (1, 4):
        assert guided(z, roll, bits) == followed
        near = guided(z, roll, bits, gate=0.06)
        distance = [0.05, 0.05, 0.3, 0.4, 0.025, 0.45, 0.02, 0.3]  # from the boundary, in steps
        assert near == [f if d < 0.06 else n for f, n, d in zip(followed, nearest, distance, strict=True)]


def test_zero_scale_gives_exact_zero():
    x = torch.randn(4, 32)
    scale = torch.zeros(4, 2, dtype=torch.uint8)
    for bits in (1, 2, 3, 4):
        guide = torch.randint(0, 1 << bits, (4, 32), dtype=torch.uint8)
        assert torch.equal(align(x, scale, guide, bits, 64.0), torch.zeros(4, 32))


def test_packed_guidance_rollout_codes_and_pieces_give_the_same():
    x = torch.randn(3000, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    noisy = (x.float() * 1.01).bfloat16()
    codes, scale, _ = NVFP4.quantize_codes(x, 64.0)
    expected = align(noisy, scale, codes, 4, 64.0)
    assert torch.equal(expected, align(noisy, scale, None, 4, 64.0, codes))
    assert torch.equal(expected, align(noisy, scale, None, 4, 64.0, formats.pack_codes(codes)))
    assert torch.equal(expected[:7], align(noisy[:7], scale[:7], codes[:7], 4, 64.0))
    for bits in (1, 2, 3):
        packed = pack_bits(codes, bits)
        low = codes & ((1 << bits) - 1)
        assert torch.equal(align(noisy, scale, low, bits, 64.0), align(noisy, scale, packed, bits, 64.0))
    shaped = align(noisy.view(3, 1000, 128), scale.view(3, 1000, 8), codes.view(3, 1000, 128), 4, 64.0)
    assert torch.equal(shaped.view(3000, 128), expected)


def test_mistakes_are_named():
    x = torch.randn(2, 32)
    codes, scale, _ = NVFP4.quantize_codes(x, 1.0)
    with pytest.raises(UserError, match=r"guidance\.bits is 5"):
        align(x, scale, codes, 5, 1.0)
    with pytest.raises(UserError, match=r"guidance\.gate"):
        align(x, scale, codes, 1, 1.0, gate=0.0)
    with pytest.raises(UserError, match="another format"):
        align(x, scale[:, :1], codes, 1, 1.0)
    with pytest.raises(UserError, match=r"guidance\.bits"):
        align(x, scale, codes[:, :5], 1, 1.0)
    with pytest.raises(UserError, match="rollout_codes"):
        align(x, scale, None, 4, 1.0)
