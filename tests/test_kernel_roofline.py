"""The prediction for the packed MoE kernel: counts checked by simulation and by hand."""

import pytest
import torch

from trace_rl.kernels.roofline import BITS_PER_VALUE, H200, expected_distinct_experts, layer_bytes, predict


def test_distinct_experts_against_random_routing():
    generator = torch.Generator().manual_seed(0)
    num_experts, top_k, tokens, trials = 32, 4, 6, 4000
    ids = torch.rand(trials, tokens, num_experts, generator=generator).argsort(-1)[..., :top_k].reshape(trials, -1)
    used = torch.zeros(trials, num_experts).scatter_(1, ids, 1.0).sum(1)
    standard_error = float(used.std()) / trials**0.5
    assert float(used.mean()) == pytest.approx(
        expected_distinct_experts(tokens, num_experts, top_k), abs=4 * standard_error
    )


def test_distinct_experts_at_the_ends():
    assert expected_distinct_experts(0, 128, 8) == 0
    assert expected_distinct_experts(1, 128, 8) == pytest.approx(8)
    assert expected_distinct_experts(10_000, 128, 8) == pytest.approx(128)
    assert expected_distinct_experts(3, 8, 8) == 8


def test_bytes_of_one_token_by_hand():
    """Qwen3-30B-A3B: eight experts of 3 * 2048 * 768 values; x, 8 hidden vectors and 8 outputs twice, the sum."""
    values = 8 * 3 * 2048 * 768
    activations = 2048 * 2 + 8 * 768 * 2 * 2 + 8 * 2048 * 4 * 2 + 2048 * 2
    shape = {"hidden": 2048, "width": 768, "num_experts": 128, "top_k": 8}
    assert layer_bytes(1, **shape, bits_per_value=16) == pytest.approx(values * 2 + activations)
    assert layer_bytes(1, **shape, bits_per_value=4.5) == pytest.approx(values * 9 / 16 + activations)


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64])
def test_prediction_keeps_both_bounds(tokens: int, weights: str):
    prediction = predict(tokens, weights=weights)
    assert prediction.bf16_s == prediction.bf16_bytes / (0.85 * H200.bandwidth)
    assert prediction.w4a16_s >= prediction.w4a16_bytes / (0.85 * H200.bandwidth)
    assert 1 < prediction.speedup < 16 / BITS_PER_VALUE[weights]
    # Faster memory cannot help a kernel that is bound by decoding, and BF16 gains all of it.
    assert predict(tokens, weights=weights, achieved=1.0).speedup <= prediction.speedup
