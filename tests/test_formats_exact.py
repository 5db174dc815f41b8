"""4over6, HiF4, H-Scale and MXFP8 against second implementations in exact or float64 arithmetic, value by value.

The references share nothing with the package: E2M1, E4M3 and E6M2 are lists of numbers here, nearest is a search in the
list with ties to the even position, and numbers are fractions. They round to FP32 only where the definition says so (a
block scale, a reciprocal), because that rounding is part of the format.
"""

import math
from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest
import torch

from trace_rl import formats

E2M1 = [Fraction(m) for m in (0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6)]
E4M3 = [Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)]
E4M3 += [(1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)][:119]
BASES = [(1 + Fraction(m, 4)) * Fraction(2) ** (e - 48) for e in range(64) for m in range(4)][:255]


def nearest(ladder: list[Fraction], value: Fraction) -> int:
    """Position of the nearest number of an ascending ladder, saturating; ties to the even position."""
    right = bisect_left(ladder, value)
    if right == 0 or right == len(ladder):
        return min(right, len(ladder) - 1)
    low, high = value - ladder[right - 1], ladder[right] - value
    return right - 1 if low < high or (low == high and right % 2 == 1) else right


def signed(ladder: list[Fraction], value: Fraction) -> Fraction:
    return math.copysign(1, value) * ladder[nearest(ladder, abs(value))] if value else Fraction(0)


def f32(value: float | Fraction) -> Fraction:
    """Rounded to FP32, from a float64 or an exact number with few bits."""
    return Fraction(float(np.float32(float(value))))


def inputs(cols: int) -> torch.Tensor:
    """Rows that formats get wrong: random at many magnitudes, zero, denormal, huge, ties and neighbours of ties."""
    generator = torch.Generator().manual_seed(11)
    random = torch.randn(24, cols, generator=generator) * torch.logspace(-12, 12, 24)[:, None]
    heavy = torch.randn(8, cols, generator=generator) ** 5
    grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.5, 1.0, 4.0, 0.0, 448.0, 464.0, 480.0, 7.0])
    ties = grid.repeat(cols // 16 + 1)[:cols] * torch.tensor([1.0, -1.0]).repeat(cols)[:cols]
    ties = torch.stack([ties, ties.flip(0), ties * 2.0**-5, ties * 2.0**20, ties * 1.0078125])
    tiny = torch.full((1, cols), 2.0**-133)
    denormal = torch.randn(3, cols, generator=generator) * torch.tensor([[2.0**-126], [2.0**-128], [2.0**-131]])
    huge = torch.randn(2, cols, generator=generator).sign() * torch.rand(2, cols, generator=generator) * 3.3e38
    zeros = torch.zeros(1, cols)
    partly = torch.cat([torch.zeros(1, cols // 2), torch.randn(1, cols - cols // 2, generator=generator)], dim=1)
    return torch.cat([random, heavy, ties, tiny, denormal, huge, zeros, partly]).bfloat16()


def blocks(x: torch.Tensor, size: int) -> list[list[Fraction]]:
    return [[Fraction(value) for value in block] for block in x.double().reshape(-1, size).tolist()]


def assert_equal(ours: torch.Tensor, theirs: list[list[Fraction]], *, size: int) -> None:
    """Equal as FP32 numbers, which the references' exact results are rounded to."""
    expected = torch.tensor([[float(value) for value in block] for block in theirs], dtype=torch.float64)
    torch.testing.assert_close(ours.reshape(-1, size), expected.float(), rtol=0, atol=0)


def mxfp8(block: list[Fraction]) -> list[Fraction]:
    amax = max(map(abs, block))
    exponent = -127
    if amax:
        exponent = math.frexp(float(amax))[1] - 1 - 8  # floor(log2) - emax, exact for any FP32
    scale = Fraction(2) ** min(max(exponent, -127), 127)
    return [signed(E4M3, value / scale) * scale for value in block]


def test_mxfp8_is_exact():
    x = inputs(64)
    for dtype in (torch.bfloat16, torch.float32):
        ours = formats.get("mxfp8").fake_quant(x.to(dtype))
        assert_equal(ours, [mxfp8(block) for block in blocks(x, 32)], size=32)
        assert torch.isfinite(ours).all()
        assert torch.equal(formats.get("mxfp8").fake_quant(ours), ours)  # its own values come back


def hif4(block: list[Fraction]) -> list[Fraction]:
    base = BASES[nearest(BASES, f32(float(max(map(abs, block))) / 7))]
    out = []
    for eight in range(0, 64, 8):
        e8 = int(max(map(abs, block[eight : eight + 8])) >= 4 * base)
        for four in range(eight, eight + 8, 4):
            e16 = int(max(map(abs, block[four : four + 4])) / 2**e8 >= 2 * base)
            step = base * 2 ** (e8 + e16)
            for value in block[four : four + 4]:
                quarters = min(7, math.floor(f32(float(abs(value) / step)) * 4 + Fraction(1, 2)))
                out.append(math.copysign(1, value) * Fraction(quarters, 4) * step if quarters else Fraction(0))
    return out


def test_hif4_is_exact():
    x = inputs(128)
    assert_equal(formats.get("hif4").fake_quant(x), [hif4(block) for block in blocks(x, 64)], size=64)


def nvfp4_step(scale: Fraction, encode_scale: Fraction) -> tuple[Fraction, Fraction]:
    """(step, reciprocal) as FP32 computes them from an E4M3 scale."""
    step = f32(scale * f32(1 / float(encode_scale)))
    return step, f32(1 / float(step)) if step else Fraction(0)


def on_scale(block: list[Fraction], scale: Fraction, encode_scale: Fraction) -> list[Fraction]:
    """Codeword values of a block on one scale: the product with the FP32 reciprocal is an FP32 number, too."""
    _, inverse = nvfp4_step(scale, encode_scale)
    return [signed(E2M1, f32(float(value) * float(inverse))) for value in block]


def rounded(block: list[Fraction], scale: Fraction, encode_scale: Fraction) -> list[Fraction]:
    step, _ = nvfp4_step(scale, encode_scale)
    return [f32(q * step) for q in on_scale(block, scale, encode_scale)]


def ideal_scale(block: list[Fraction], encode_scale: Fraction) -> Fraction:
    return f32(float(f32(float(max(map(abs, block))) * float(np.float32(1 / 6)))) * float(encode_scale))


@pytest.mark.parametrize("rule", ["mse", "mae"])
def test_fouroversix_takes_the_better_of_two(rule):
    """Against exact errors: where the two are nearly equal, the FP32 sums may choose either."""
    x = inputs(64)[:32]  # magnitudes at which an error is a normal number, in FP32
    fmt = formats.get("fouroversix" if rule == "mse" else "fouroversix_mae")
    differing = 0
    for row in x:
        encode_scale = float(fmt.encode_scale(row.abs().max().float()))
        ours = fmt.fake_quant(row[None], encode_scale).reshape(-1, 16).double().tolist()
        for block, got in zip(blocks(row, 16), ours, strict=True):
            exact = Fraction(encode_scale)
            ideal = ideal_scale(block, exact)
            candidates = [E4M3[nearest(E4M3, ideal)], E4M3[nearest(E4M3, f32(float(ideal) * 1.5))]]
            values = [rounded(block, scale, exact) for scale in candidates]
            power = 2 if rule == "mse" else 1
            errors = [sum(abs(v - b) ** power for v, b in zip(each, block, strict=True)) for each in values]
            chosen = values[1] if errors[1] < errors[0] else values[0]
            if [Fraction(value) for value in got] != chosen:
                assert [Fraction(value) for value in got] in values
                assert abs(errors[0] - errors[1]) <= Fraction(1, 10**5) * max(errors)
                differing += 1
    assert differing <= 3


@pytest.mark.parametrize("weighted", [False, True])
def test_hscale_takes_the_best_of_sixteen(weighted):
    x = inputs(64)[9:16]
    x = torch.cat([x, x.roll(3, dims=1) * 3.0, torch.zeros(1, 64).bfloat16()])
    h = torch.rand(64, generator=torch.Generator().manual_seed(5)) ** 6 if weighted else torch.ones(64)
    # A large value in a column that hardly counts wants a much smaller scale, which clips it.
    lone = h.reshape(4, 16).argmin(1) + torch.arange(0, 64, 16)
    x = torch.cat([x, x[:5].index_copy(1, lone, 2.5 * x[:5].abs().amax(1, keepdim=True).expand(5, 4).contiguous())])
    fmt = formats.get("hscale", importance=h) if weighted else formats.get("hscale")
    weights = [[Fraction(w) for w in part] for part in h.double().reshape(4, 16).tolist()]
    for row in x:
        encode_scale = float(fmt.encode_scale(row.abs().max().float()))
        exact = Fraction(encode_scale)
        ours = fmt.fake_quant(row[None], encode_scale).reshape(4, 16).double().tolist()
        for block, weight, got in zip(blocks(row, 16), weights, ours, strict=True):
            usual = nearest(E4M3, ideal_scale(block, exact))
            codes = {usual} | {min(126, max(1, usual + offset)) for offset in range(-9, 7)}

            def error(values: list[Fraction], block=block, weight=weight) -> Fraction:
                return sum(w * (v - b) ** 2 for v, b, w in zip(values, block, weight, strict=True))

            least = min(error(rounded(block, E4M3[code], exact)) for code in codes)
            tolerance = Fraction(1, 10**5)
            assert abs(error([Fraction(value) for value in got]) - least) <= tolerance * least


def test_names_stand_for_rules():
    rules = {"mxfp4": "rceil", "mxfp4_floor": "floor", "mxfp4_even": "even"}
    rules |= {"fouroversix": "mse", "fouroversix_mae": "mae"}
    assert {name: formats.get(name).rule for name in rules} == rules
