"""Benchmarks of rollouts and of FP4 experts: arithmetic, the sweep, and that what is timed computes the right thing.

Timings themselves are not asserted.
"""

import itertools
import json
import platform
import random

import pytest
import torch
from tiny import tiny_config, tiny_run

from trace_rl.config.experiment import BenchConfig
from trace_rl.errors import UserError
from trace_rl.stages import bench, bench_moe
from trace_rl.stages.bench_moe import MoEShape
from trace_rl.stages.failure import StageFailure

SWEEP = BenchConfig(batch_sizes=(2, 4), output_lengths=(2, 5), repeats=2, num_sequences=4, cost_repeats=6)
SHAPE = MoEShape(num_experts=8, hidden=128, inter=64, top_k=2)
EXPERT_VALUES = 3 * SHAPE.hidden * SHAPE.inter


@pytest.fixture
def amx() -> None:
    """Skip on a host that cannot run the FP4 experts."""
    reason = bench_moe.unsupported()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Configuration, paths and result of a swept benchmark on the PyTorch engine."""
    config = tiny_config().model_copy(update={"bench": SWEEP})
    paths = tiny_run(tmp_path_factory.mktemp("bench"), config=config)
    return config, paths, bench.run(config, paths)


def test_every_batch_length_and_mode_has_a_row(run):
    _, paths, result = run
    assert result == json.loads(paths.bench_rollout.read_text())
    found = [(row["num_sequences"], row["output_length"], row["mode"]) for row in result["rows"]]
    assert found == list(itertools.product((2, 4), (2, 5), bench.RECORDINGS))
    for row in result["rows"]:
        # BF16 runs before and after FP4.
        assert row["tokens_per_s"]["n"] == (4 if row["mode"] == "bf16" else 2)
        assert (row["recording_percent"] is None) is (row["mode"] in ("bf16", "fp4"))
    tokens = {row["num_sequences"]: row["prompt_tokens"] for row in result["rows"]}
    assert 0 < tokens[2] < tokens[4] == result["prompt_tokens"]


def test_the_cost_of_recording_is_stated_for_decoding_and_prefilling(run):
    config, _, result = run
    rows = {(row["workload"], row["mode"]): row for row in result["recording_cost"]}
    assert set(rows) == set(itertools.product(("decode", "prefill"), ("fp4 + compact", "fp4 + full")))
    for (workload, _), row in rows.items():
        assert (row["num_sequences"], row["output_length"]) == (4, 5 if workload == "decode" else 1)
        for clock in ("wall_percent", "cpu_percent"):
            cost = row[clock]
            assert cost["n"] == 6
            assert cost["min"] <= cost["low"] <= cost["median"] <= cost["high"] <= cost["max"]
    assert rows["prefill", "fp4 + full"]["prompt_tokens"] == 4 * (config.engine.max_model_len - 1)


def test_prefill_prompts_are_long_and_share_no_beginning():
    prompts = [[1, 2, 3], [4], [5, 6]]
    config = tiny_config(
        bench={"num_sequences": 3, "output_lengths": (4, 7)},
        engine={"max_model_len": 9},
        sampling={"max_new_tokens": 1},
    )
    decode, prefill = bench.cost_workloads(config, [*prompts, [7, 8]])
    assert (decode.prompts, decode.output_length) == (prompts, 7)
    assert prefill.prompts == [[1, 2, 3, 4, 5, 6, 1, 2], [4, 5, 6, 1, 2, 3, 4, 5], [5, 6, 1, 2, 3, 4, 5, 6]]
    assert prefill.output_length == 1


def test_a_batch_that_is_not_decoded_together_is_refused(run):
    config, paths, _ = run
    large = config.model_copy(update={"bench": SWEEP.model_copy(update={"batch_sizes": (2, 33)})})
    with pytest.raises(UserError, match=r"33 sequences together.*max_num_seqs 32"):
        bench.bench_prompts(large, paths)


def test_cost_is_the_median_of_ratios_within_repetitions():
    # The machine slows down four times while the first pays 10 %, the second nothing, the third 5 %.
    cost = bench.paired_cost([1.0, 2.0, 4.0], [1.1, 2.0, 4.2])
    assert [cost[name] for name in ("median", "min", "max")] == pytest.approx([5.0, 0.0, 10.0])
    assert cost["fastest"] == pytest.approx(10.0)
    assert (cost["n"], cost["low"], cost["high"]) == (3, None, None)


def test_rows_state_the_cost_of_their_own_batch_and_length():
    timings = {
        ("bf16", 10): [1.0, 1.0],
        ("fp4", 10): [2.0, 4.0],
        ("fp4 + compact", 10): [2.2, 4.4],
        ("fp4 + full", 10): [3.0, 6.0],
    }
    sizes = dict.fromkeys(("kv_per_token_bf16", "kv_per_token_fp4", "expert_weights_bf16", "expert_weights_fp4"), 0)
    sizes |= {f"guidance_per_token_{mode}": 0 for mode in bench.RECORDINGS}
    rows = {row["mode"]: row for row in bench.throughput_rows(timings, num_sequences=3, sizes=sizes)}
    assert rows["bf16"]["tokens_per_s"] == {"median": 30.0, "min": 30.0, "max": 30.0, "n": 2}
    assert rows["fp4"]["tokens_per_s"] == {"median": 11.25, "min": 7.5, "max": 15.0, "n": 2}
    assert rows["fp4"]["ratio_to_bf16"] == 11.25 / 30
    assert rows["fp4 + compact"]["recording_percent"]["median"] == pytest.approx(10.0)
    assert rows["fp4 + full"]["recording_percent"]["median"] == pytest.approx(50.0)


def test_interval_takes_the_order_statistics_of_the_sign_test():
    # Tables of the sign test at 5 %: critical values 0 (n = 6), 2 (n = 12), 5 (n = 20).
    assert bench.median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    assert bench.median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)
    assert bench.median_interval([float(i) for i in range(12)]) == (2.0, 9.0)
    assert bench.median_interval([float(i) for i in range(20)]) == (5.0, 14.0)


def test_interval_holds_the_median_as_often_as_it_says():
    draw = random.Random(0)
    intervals = [bench.median_interval([draw.expovariate(1.0) for _ in range(14)]) for _ in range(4000)]
    share = sum(low <= 0.6931 <= high for low, high in intervals) / len(intervals)
    assert 0.95 <= share < 0.99


@pytest.mark.usefixtures("amx")
def test_fp4_experts_and_their_opponents_compute_what_the_reference_says():
    result = bench_moe.measure_all(SHAPE, tokens=(1, 5), repeats=2, cache_bytes=2**16)
    names = ["vllm mxfp4 w4a16", "vllm bf16", "own bf16, fused operator", "own bf16, padded bmm"]
    assert list(result["relative_errors"]) == names
    assert all(error <= bench_moe.TOLERANCE for error in result["relative_errors"].values())
    assert [(row["tokens"], row["implementation"]) for row in result["rows"]] == list(itertools.product((1, 5), names))
    for row in result["rows"]:
        assert row["GB_per_s"] == pytest.approx(row["weight_bytes_read"] / row["seconds"]["median"] / 1e9)
    read = {(row["tokens"], row["implementation"]): row["weight_bytes_read"] for row in result["rows"]}
    assert [read[1, name] for name in names] == [
        2 * EXPERT_VALUES * 4.25 / 8,
        2 * EXPERT_VALUES * 2,
        2 * EXPERT_VALUES * 2,
        8 * EXPERT_VALUES * 2,
    ]
    assert [read[5, name] for name in names] == [8 * EXPERT_VALUES * 4.25 / 8, *[8 * EXPERT_VALUES * 2] * 3]
    assert [(row["tokens"], row["opponent"]) for row in result["ratios"]] == list(itertools.product((1, 5), names[1:]))
    # Three times the cache, in whole layers.
    assert result["layers"] == {names[0]: 2} | dict.fromkeys(names[1:], 1)


@pytest.mark.usefixtures("amx")
def test_experts_in_the_wrong_place_are_not_timed():
    gate_up = bench_moe.random_experts(8, rows=128, cols=128, seed=0)
    down = bench_moe.random_experts(8, rows=128, cols=64, seed=1)
    experts = bench_moe.vllm_mxfp4_experts(gate_up, down, shape=SHAPE, cache_bytes=1)
    assert bench_moe.checked_error(experts, gate_up, down) <= bench_moe.TOLERANCE
    moved = type(down)(*(part.roll(1, 0) for part in down))
    with pytest.raises(StageFailure, match="differs from the reference"):
        bench_moe.checked_error(experts, gate_up, moved)


def test_every_expert_is_dealt_once_before_any_returns():
    shape = MoEShape(num_experts=64, top_k=8)
    hands = [bench_moe.dealt_experts(shape, first=first, num_tokens=4) for first in range(0, 16, 4)]
    assert all(hand.shape == (4, 8) and hand.dtype == torch.int32 for hand in hands)
    for both in (hands[:2], hands[2:]):
        assert sorted(torch.cat(both).flatten().tolist()) == list(range(64))


def test_layers_fill_the_cache_three_times_or_are_refused():
    layer = (torch.zeros(1000, dtype=torch.uint8), torch.ones(24, dtype=torch.uint8))
    layers = bench_moe.cold_layers(layer, cache_bytes=1024)
    assert len(layers) == 3
    assert len({tensor.data_ptr() for each in layers for tensor in each}) == 6
    with pytest.raises(UserError, match=r"need .* GiB, over half"):
        bench_moe.cold_layers(layer, cache_bytes=2**44)


@pytest.mark.parametrize(
    ("machine", "capabilities", "reason"),
    [
        ("aarch64", {}, "x86 code, this processor is aarch64"),
        ("x86_64", {"avx512_bf16": True}, "no amx_tile, amx_bf16"),
    ],
)
def test_a_processor_without_the_instructions_is_refused_with_the_reason(monkeypatch, machine, capabilities, reason):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    with pytest.raises(UserError, match=reason):
        bench_moe.run(None)


def test_shapes_that_the_kernels_cannot_take_are_refused():
    with pytest.raises(UserError, match="divide by top_k"):
        MoEShape(num_experts=60)
