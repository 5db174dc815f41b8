"""Statistics of tokens in trajectories, against hand-made numbers and against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.analysis.clusters import association, binned_means, clustered_mean
from trace_rl.analysis.ratios import describe_estimate, describe_weight, staleness_part
from trace_rl.analysis.sources import decompose


def test_mean_and_error_of_clusters_by_hand():
    found = clustered_mean(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([7, 7, 9]))
    # Mean 3; residual sums -2 and 2; variance 2/1 * 8 / 9.
    assert found == {"mean": 3.0, "stderr": pytest.approx((16 / 9) ** 0.5)}
    assert clustered_mean(torch.tensor([1.0, 2.0]), torch.tensor([4, 4]))["stderr"] is None


def test_one_value_per_cluster_is_the_ordinary_error():
    values = torch.randn(50, generator=torch.Generator().manual_seed(0))
    found = clustered_mean(values, torch.arange(50))
    assert found["stderr"] == pytest.approx(float(values.double().std()) / 50**0.5)


def test_copies_within_a_cluster_add_no_certainty():
    values = torch.randn(20, generator=torch.Generator().manual_seed(1))
    once = clustered_mean(values, torch.arange(20))
    copied = clustered_mean(values.repeat_interleave(10), torch.arange(20).repeat_interleave(10))
    assert copied["stderr"] == pytest.approx(once["stderr"], rel=1e-6)


@given(st.integers(0, 1000), st.floats(-2, 2), st.floats(0.01, 1))
def test_correlation_and_slope_are_numpys(seed, slope, noise):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, generator=generator)
    y = slope * x + noise * torch.randn(200, generator=generator) + 5
    found = association(x, y, torch.arange(200) // 4, resamples=20, seed=0)
    assert found["correlation"] == pytest.approx(np.corrcoef(x.double(), y.double())[0, 1], abs=1e-9)
    assert found["slope"] == pytest.approx(np.polyfit(x.double(), y.double(), 1)[0], abs=1e-9)
    # The bootstrap of independent pairs comes near the textbook error of a slope.
    assert 0.4 < found["slope_stderr"] / (noise / 200**0.5) < 2.5


def test_a_constant_has_no_correlation():
    found = association(torch.zeros(8), torch.randn(8), torch.arange(8), resamples=5, seed=0)
    assert set(found.values()) == {None}


def test_bins_share_the_total():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rows = binned_means(values, torch.tensor([0, 0, 2, 2]), torch.tensor([0, 1, 0, 1]), num_bins=3)
    assert [row["tokens"] for row in rows] == [2, 0, 2]
    assert [rows[0]["share"], rows[2]["share"]] == [pytest.approx(0.3), pytest.approx(0.7)]
    assert (rows[2]["mean"], rows[2]["stderr"]) == (3.5, pytest.approx(0.5))


def test_weights_by_hand():
    found = describe_weight(torch.tensor([0.0, 0.0, 6.0]).log1p(), torch.tensor([0, 1, 2]))
    # Weights 1, 1, 7: ESS (1+1+7)^2 / (3 * 51), one of three above the cap of 5.
    assert found["ess"] == pytest.approx(81 / 153)
    assert found["truncated"] == pytest.approx(1 / 3)


def test_an_exact_estimate_and_a_blind_one():
    generator = torch.Generator().manual_seed(2)
    truth = torch.randn(400, generator=generator)
    clusters = torch.arange(400) // 8
    exact = describe_estimate(truth, truth, clusters, resamples=50, seed=0)
    blind = describe_estimate(0.001 * torch.randn(400, generator=generator), truth, clusters, resamples=50, seed=0)
    assert (exact["correlation"], exact["slope"], exact["mean_abs_error"]) == (pytest.approx(1), pytest.approx(1), 0)
    assert abs(blind["slope"]) < 1e-3
    assert blind["mean_abs_error"] == pytest.approx(float(truth.abs().mean()), rel=1e-2)


def test_what_staleness_adds_is_paired():
    generator = torch.Generator().manual_seed(4)
    rollout, old = torch.randn(2, 60, generator=generator)
    clusters = torch.arange(60) // 5
    farther = old + 0.25 * (old - rollout).sign()  # every token a quarter farther off, however far it was
    assert staleness_part(farther, old, rollout, clusters) == {
        "mean": pytest.approx(0.25),
        "mean_stderr": pytest.approx(0, abs=1e-6),
    }
    # Nearer by 1, 1 in one trajectory and by 2 in another: mean -4/3, residual sums 2/3 and -2/3.
    values = (torch.tensor(v) for v in ([1.0, -1.0, 1.0], [2.0, -2.0, 3.0], [0.0, 0.0, 0.0]))
    found = staleness_part(*values, torch.tensor([0, 0, 1]))
    assert found == {"mean": pytest.approx(-4 / 3), "mean_stderr": pytest.approx((16 / 81) ** 0.5)}


def test_the_parts_of_the_gap_add_up():
    generator = torch.Generator().manual_seed(3)
    names = ("bf16", "qat", "recorded_scale", "trace", "full")
    names += ("bf16_no_r3", "qat_no_r3", "trace_no_r3", "full_no_r3")
    gaps = {name: torch.rand(60, generator=generator) for name in names}
    parts = decompose(gaps, torch.arange(60) // 5)
    assert parts["rounding"]["mean"] + parts["engine"]["mean"] == pytest.approx(float(gaps["qat"].double().mean()))
    assert parts["scales"]["mean"] + parts["codes"]["mean"] == pytest.approx(parts["rounding"]["mean"])
    assert parts["rounding"]["share_of_qat"] + parts["engine"]["share_of_qat"] == pytest.approx(1)
