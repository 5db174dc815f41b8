"""The rollout benchmark's arithmetic and record; timings themselves are not asserted."""

import json

import pytest

from trace_rl.config.guidance import FULL, GuidanceSpec
from trace_rl.errors import UserError
from trace_rl.guidance.record import ModelDims, RecordLayout
from trace_rl.stages import bench


def test_every_mode_and_length_is_measured_with_exact_bytes(tiny_run):
    result = bench.run(tiny_run.config, tiny_run.paths)
    assert result == json.loads(tiny_run.paths.bench_rollout.read_text())
    assert [(row["output_length"], row["mode"]) for row in result["rows"]] == [
        (length, mode) for length in (4, 8) for mode in bench.RECORDINGS
    ]
    dims = ModelDims.from_config(json.loads((tiny_run.paths.checkpoint / "config.json").read_text()))
    for row in result["rows"]:
        rate = row["tokens_per_s"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
        # BF16 runs before and after FP4.
        assert rate["n"] == (4 if row["mode"] == "bf16" else 2)
        assert row["emulated"] is (row["mode"] != "bf16")
    guidance = {row["mode"]: row["guidance_bytes_per_token"] for row in result["rows"]}
    compact, full = (RecordLayout.build(spec, dims).row_bytes for spec in (GuidanceSpec(), FULL))
    assert guidance == {"bf16": 0, "fp4": 0, "fp4 + compact": compact, "fp4 + full": full}
    sizes = result["bytes"]
    assert sizes["kv_per_token_bf16"] == 3 * 2 * 32 * 2
    assert sizes["kv_per_token_fp4"] == 3 * 2 * 32 * 4.5 / 8
    values = 3 * 4 * 3 * 64 * 32  # layers, experts, gate + up + down
    assert sizes["expert_weights_bf16"] == 2 * values
    assert sizes["expert_weights_fp4"] == values * 4.5 / 8 + 3 * 4 * 2 * 4
    assert {"cpu", "threads", "versions"} <= set(result["environment"])


def test_rates_are_medians_and_ratios_are_to_bf16():
    timings = {("bf16", 10): [1.0, 2.0, 4.0], ("fp4", 10): [4.0, 8.0, 4.0]}
    sizes = dict.fromkeys(("kv_per_token_bf16", "kv_per_token_fp4", "expert_weights_bf16", "expert_weights_fp4",
                           "guidance_per_token_bf16", "guidance_per_token_fp4"), 0)  # fmt: skip
    bf16, fp4 = bench.throughput_rows(timings, num_sequences=8, sizes=sizes)
    assert bf16["tokens_per_s"] == {"median": 40.0, "min": 20.0, "max": 80.0, "n": 3}
    assert (bf16["ratio_to_bf16"], fp4["ratio_to_bf16"]) == (1.0, 0.5)


def test_an_output_that_does_not_fit_is_refused(tiny_run):
    long = tiny_run.config.bench.model_copy(update={"output_lengths": (60,)})
    with pytest.raises(UserError, match=r"bench\.output_lengths has 60"):
        bench.run(tiny_run.config.model_copy(update={"bench": long}), tiny_run.paths)
