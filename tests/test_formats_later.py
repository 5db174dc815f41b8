"""HiF4 and H-Scale against independent float64 implementations."""

import math

import numpy as np
import pytest
import torch

from trace_rl import formats
from trace_rl.errors import UserError
from trace_rl.formats import e2m1
from trace_rl.formats.hscale import DOWN, UP

BASES = np.array([2.0 ** (code // 4 - 48) * (1 + code % 4 / 4) for code in range(255)])


def hif4_block(x: np.ndarray) -> np.ndarray:
    """One block of 64, value by value, in float64."""
    ideal = float(np.float32(np.abs(x).max()) / np.float32(7))
    distance = np.abs(BASES - ideal)
    nearest = np.flatnonzero(distance == distance.min())
    base = BASES[next((c for c in nearest if c % 2 == 0), nearest[0])]
    out = np.zeros(64)
    for eight in range(8):
        group = x[eight * 8 : eight * 8 + 8]
        e8 = 1 if np.abs(group).max() / base >= 4 else 0
        for half in range(2):
            four = group[half * 4 : half * 4 + 4]
            e16 = 1 if np.abs(four).max() / base / 2**e8 >= 2 else 0
            for i, value in enumerate(four):
                quarters = min(7, math.floor(float(np.float32(abs(value) / (base * 2 ** (e8 + e16)))) * 4 + 0.5))
                out[eight * 8 + half * 4 + i] = math.copysign(quarters / 4, value) * base * 2 ** (e8 + e16)
    return out


def test_hif4_agrees_with_a_float64_implementation():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 128, generator=generator) * torch.logspace(-9, 4, 40)[:, None]
    x = (x * torch.exp(torch.randn(40, 128, generator=generator))).bfloat16()
    x[4, :64] = 0
    x[5] = torch.arange(128) - 64
    ours = formats.get("hif4").fake_quant(x).double().numpy()
    blocks = x.double().numpy().reshape(-1, 64)
    theirs = np.stack([hif4_block(block) for block in blocks]).reshape(ours.shape)
    np.testing.assert_array_equal(ours, theirs)


def test_hif4_stored_form_decodes_to_the_same_and_costs_four_and_a_half_bits():
    x = torch.randn(8, 192).bfloat16()
    x[2] = 0
    fmt = formats.get("hif4")
    stored = fmt.quantize(x)
    assert torch.equal(stored.dequantize().view(torch.int32), fmt.fake_quant(x).view(torch.int32))
    assert 8 * (stored.codes.numel() + stored.block_scale.numel()) / x.numel() == 4.5
    assert torch.equal(stored.dequantize()[2], torch.zeros(192))
    assert not fmt.nan_scales(stored.block_scale).any()
    assert fmt.fake_quant(torch.tensor([[7.0] + [0.0] * 63]))[0, 0] == 7.0


@pytest.mark.parametrize("weighted", [False, True])
def test_hscale_finds_the_best_of_its_candidates(weighted):
    generator = torch.Generator().manual_seed(4)
    w = (torch.randn(12, 64, generator=generator) * 0.02).bfloat16()
    w[3, :16] = 0
    h = torch.rand(64, generator=generator) ** 4 * 10
    nvfp4 = formats.get("nvfp4")
    fmt = formats.get("hscale", importance=h) if weighted else formats.get("hscale")
    encode_scale = float(nvfp4.encode_scale(w.abs().max().float()))
    usual = nvfp4.block_scales(w, encode_scale)
    stored = fmt.quantize(w, encode_scale)
    weight = (h if weighted else torch.ones(64)).double().numpy().reshape(4, 16)
    got = ((stored.dequantize().double() - w.double()).numpy().reshape(12, 4, 16) ** 2 * weight).sum(-1)
    grid = np.array(sorted({s * m for m in e2m1.MAGNITUDES for s in (1, -1)}))
    blocks = w.double().numpy().reshape(12, 4, 16)
    for row in range(12):
        for block in range(4):
            errors = []
            for offset in range(-DOWN, UP + 1):
                code = torch.tensor([min(126, max(1, int(usual[row, block]) + offset))], dtype=torch.uint8)
                step = float(nvfp4.scale_values(code, encode_scale))
                rounded = grid[np.abs(blocks[row, block][:, None] - step * grid).argmin(1)] * step
                errors.append(((rounded - blocks[row, block]) ** 2 * weight[block]).sum())
            np.testing.assert_allclose(got[row, block], min(errors), rtol=1e-4)
    offsets = stored.block_scale.int() - usual.int()
    assert offsets.min() >= -DOWN
    assert offsets.max() <= UP
    assert (offsets != 0).any()
    assert torch.equal(fmt.fake_quant(w, encode_scale), stored.dequantize())
    assert torch.equal(
        nvfp4.decode(formats.unpack_codes(stored.codes), stored.block_scale, encode_scale), stored.dequantize()
    )


def test_hscale_refuses_the_wrong_importance():
    with pytest.raises(UserError, match="another matrix"):
        formats.get("hscale", importance=torch.ones(32)).fake_quant(torch.ones(2, 64))
    with pytest.raises(UserError, match="per column"):
        formats.get("hscale", importance=-torch.ones(64))
