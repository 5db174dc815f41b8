"""Where one bit picks what whole codes would not, and rounding to nearest on the recorded scale."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.analysis.forwards import RECORDED_SCALE
from trace_rl.analysis.picks import Picks, count_picks
from trace_rl.formats import e2m1
from trace_rl.formats.mxfp4 import MXFP4
from trace_rl.formats.nvfp4 import NVFP4
from trace_rl.guidance.align import align_codes
from trace_rl.guidance.bits import pack_bits
from trace_rl.kernels import compiled, reference
from trace_rl.qat.collector import ladder

ENCODE_SCALE = 64.0
FORMAT = NVFP4()


def _rollout(x, noise, generator):
    """Codes and block scales of a rollout whose values differ from x by some noise."""
    other = x + noise * x.abs().mean() * torch.randn(x.shape, generator=generator)
    codes, scales, _ = FORMAT.quantize_codes(other, ENCODE_SCALE)
    return codes, scales


def test_counts_by_hand():
    # Rungs: rollout 2, 2, 0, -1; whole codes 2, 1, 1, 1; as rounded 2, 0, 1, 0.
    rollout, whole, codes = (
        torch.tensor([values], dtype=torch.uint8) for values in ([2, 2, 0, 9], [2, 1, 1, 1], [2, 0, 1, 0])
    )
    picks = Picks()
    count_picks(picks, codes=codes, whole=whole, rollout=rollout)
    assert (picks.values, picks.misses, picks.rungs) == (4, 3, [2, 1, 0])
    assert (picks.wrong, picks.wrong_at_zero) == (2, 2)


@given(st.integers(0, 10_000), st.sampled_from([0.01, 0.1, 1.0]))
def test_one_bit_is_wrong_exactly_an_odd_number_of_rungs_outside_the_bracket(seed, noise):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 64, generator=generator)
    rollout, scales = _rollout(x, noise, generator)
    whole = align_codes(x, scales, rollout, 4, ENCODE_SCALE)
    one_bit = align_codes(x, scales, rollout & 1, 1, ENCODE_SCALE)
    beyond = (ladder(whole) - ladder(rollout)).abs()
    wrong = ladder(one_bit) != ladder(whole)
    # A value on the grid is its own bracket: there is nothing to pick.
    step = FORMAT.scale_values(scales, ENCODE_SCALE).repeat_interleave(16, dim=1)
    on_grid = (x / step).clamp(-6, 6) == e2m1.values(whole)
    assert torch.equal(wrong[~on_grid], (beyond % 2 == 1)[~on_grid])


@given(st.integers(0, 10_000))
def test_the_closed_gate_rounds_to_nearest_on_the_recorded_scale(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 64, generator=generator)
    rollout, scales = _rollout(x, 0.3, generator)
    codes = align_codes(x, scales, rollout, 4, ENCODE_SCALE, gate=RECORDED_SCALE.gate)
    step = FORMAT.scale_values(scales, ENCODE_SCALE).double().repeat_interleave(16, dim=1)
    z = (x.double() / step).clamp(-6, 6)
    distances = (z.unsqueeze(-1) - e2m1.values(torch.arange(16, dtype=torch.uint8)).double()).abs()
    chosen = distances.gather(-1, codes.long().unsqueeze(-1)).squeeze(-1)
    # 1e-5: the quantizer multiplies by a rounded reciprocal.
    assert bool((chosen - distances.min(-1).values <= 1e-5).all())


BOUNDARIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
"""Rounding boundary of E2M1 -> the neighbour with an even index."""


def _boundaries():
    """(x, nearest to even on the recorded scale: bfloat16 [14*16, 32]; codes and block scales of an unrelated rollout).

    A block for each boundary, sign and rollout code, its scale another power of two.
    """
    z = torch.tensor([*BOUNDARIES, *(-value for value in BOUNDARIES)])
    nearest = torch.tensor([*BOUNDARIES.values(), *(-value for value in BOUNDARIES.values())])
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(z))[:, None].expand(-1, 32).contiguous()
    scales = (120 + torch.arange(len(codes)) % 7).to(torch.uint8)[:, None]
    step = MXFP4().scale_values(scales, 1.0)
    x, expected = ((values.repeat_interleave(16)[:, None] * step).expand(-1, 32) for values in (z, nearest))
    return x.bfloat16().contiguous(), expected.bfloat16().contiguous(), codes, scales


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_values_on_a_boundary_round_to_even_under_the_closed_gate_and_follow_under_the_smallest_other(bits):
    x, nearest, codes, scales = _boundaries()
    low = codes & ((1 << bits) - 1)

    def rounded(gate):
        found = align_codes(x, scales, low, bits, 1.0, gate=gate, fmt=MXFP4())
        return (e2m1.values(found) * MXFP4().scale_values(scales, 1.0)).bfloat16()

    assert torch.equal(rounded(RECORDED_SCALE.gate), nearest)
    assert float((rounded(1e-6) != nearest).float().mean()) > 0.2


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("kernels", [reference, compiled], ids=["reference", "compiled"])
def test_every_backend_closes_the_gate(kernels, bits):
    if kernels is compiled and (reason := compiled.why_not()):
        pytest.skip(f"no compiled kernels here: {reason}")
    x, nearest, codes, scales = _boundaries()
    planes = pack_bits(codes, bits)
    options = {"fmt": MXFP4(), "bits": bits, "gate": RECORDED_SCALE.gate}
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(kernels.guided_fake_quant(x.to(dtype), planes, scales, 1.0, **options), nearest.to(dtype))
