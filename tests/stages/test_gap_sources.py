"""The stage of the gap's sources on the tiny policy: every table is there and the parts are consistent."""

import json
import shutil

import pytest

from trace_rl.stages import gap_sources


@pytest.fixture(scope="module")
def result(tiny_run, tracked, tmp_path_factory):
    """One run, with the policy before RL standing in for a trained one too."""
    folder = tmp_path_factory.mktemp("tracking")
    config = tiny_run.config.model_copy(
        update={"analysis": tiny_run.config.analysis.model_copy(update={"num_prompts": 8})}
    )
    trained = tiny_run.paths.train("trace", 3) / "policy"
    shutil.copytree(tiny_run.paths.checkpoint, trained)
    found = gap_sources.run(tracked(config, folder), tiny_run.paths, seed=3)
    shutil.rmtree(tiny_run.paths.base / "train")
    written = tiny_run.paths.gap_sources(3).read_text()
    assert json.loads(written) == json.loads(json.dumps(found))
    assert tracked.artifact(folder, name="gap_sources seed3") == written
    return found


def test_the_trained_policy_is_measured_where_there_is_one(result):
    assert set(result["policies"]) == {"start", "trace"}
    rows = [policy["sources"]["qat"] for policy in result["policies"].values()]
    assert rows[0] == rows[1]  # the same weights


def test_sources_are_ordered_as_the_method_says(result):
    rows = result["policies"]["start"]["sources"]
    gap = {name: row["gap_mean"] for name, row in rows.items()}
    # This engine runs the trainer's own kernels, so hardly any code differs; a trainer in other numbers is far away.
    assert gap["full"] <= gap["qat"] < 0.02 < gap["bf16"]
    assert gap["bf16_both"] < 0.02
    assert min(gap[name] for name in gap_sources.PARTIAL) > gap["qat"]
    assert gap["engine_bf16_on_fp4_tokens"] > 0.02 > gap["engine_fp4_rescored"]
    assert {row["tokens"] for name, row in rows.items() if not name.startswith("bf16_both")} == {rows["qat"]["tokens"]}


def test_the_decomposition_is_that_of_the_table(result):
    policy = result["policies"]["start"]
    gap = {name: row["gap_mean"] for name, row in policy["sources"].items()}
    parts = policy["decomposition"]
    assert parts["rounding"]["mean"] == pytest.approx(gap["qat"] - gap["full"], abs=1e-6)
    assert parts["routing_qat"]["mean"] == pytest.approx(gap["qat_no_r3"] - gap["qat"], abs=1e-6)


def test_the_factorial_is_complete_and_full_guidance_is_in_it(result):
    policy = result["policies"]["start"]
    keys = {(row["bits"], row["layers"], row["scale_bits"], row["tensors"]) for row in policy["factorial"]}
    assert len(keys) == len(policy["factorial"]) == 4 * 5 * 2 * 3
    rows = {(row["bits"], row["layers"], row["scale_bits"], row["tensors"]): row for row in policy["factorial"]}
    assert rows[4, "all", 8, "both"]["gap_mean"] == policy["sources"]["full"]["gap_mean"]
    assert rows[1, "deeper_half", 8, "both"]["gap_mean"] == policy["sources"]["trace"]["gap_mean"]
    cheap = rows[1, "all", 2, "both"]
    assert cheap["scale_blocks"] > 0
    assert cheap["bytes_per_token"] < rows[1, "all", 8, "both"]["bytes_per_token"]


def test_where_the_gap_sits_adds_up(result):
    policy = result["policies"]["start"]
    for table in policy["where"].values():
        for name, rows in table.items():
            source = policy["sources"][name]
            assert sum(row["tokens"] for row in rows) == source["tokens"]
            # This engine runs the trainer's own kernels: under full guidance no gap may be left to share.
            whole = 1 if source["gap_mean"] else 0
            assert sum(row.get("share", 0) for row in rows) == pytest.approx(whole)


def test_layers_are_measured_alone_and_left_out(result):
    policy = result["policies"]["start"]
    assert [row["layer"] for row in policy["layers"]] == [0, 1, 2]
    for row in policy["layers"]:
        assert set(row["alone"]) == set(row["without"]) == {"mean", "stderr"}
        assert row["alone"]["mean"] <= policy["sources"]["qat"]["gap_mean"]
        assert row["without"]["mean"] >= -policy["sources"]["full"]["gap_mean"]


def test_codes_are_told_by_layer_and_tensor(result):
    codes = result["policies"]["start"]["codes"]
    assert {(row["layer"], row["tensor"]) for row in codes["trace"]} == {
        (n, t) for n in range(3) for t in ("fc1", "k", "v")
    }
    for row in codes["trace"]:
        if row["layer"] == 2:  # guided: what mismatches missed the bracket
            assert row["mismatch"] == row["bracket_miss"]
