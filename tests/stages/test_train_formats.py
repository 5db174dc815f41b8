"""Methods of other formats than the experiment's train on one calibration, with their own scales and diagnostics."""

import json
from pathlib import Path

import pytest

from trace_rl.config.load import load_method
from trace_rl.stages import calibrate, train

METHODS = Path(__file__).resolve().parents[2] / "config/methods"


@pytest.mark.parametrize(
    ("name", "guided"),
    [
        ("trace@format=mxfp4", {"fc1", "k", "v"}),
        ("trace@format=mxfp4_w4a8+guidance.tensors=k,v", {"k", "v"}),
        ("trace_full@format=fouroversix", {"fc1", "k", "v"}),
    ],
)
def test_a_method_trains_in_its_own_formats(new_run, name, guided):
    run = new_run()
    changes = {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2, "diagnose_every": 1, "diagnose_prompts": 2}
    config = run.config.model_copy(update={"training": run.config.training.model_copy(update=changes)})
    (run.paths.data / "manifest.json").write_text("{}")
    calibrate.run(config, run.paths)
    method = load_method(METHODS / f"{name}.yaml")
    train.run(config, run.paths, method=method, seed=0)
    rows = [json.loads(line) for line in (run.paths.train(name, 0) / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert {tensor for tensor in ("fc1", "k", "v") if f"diag/own/mismatch/{tensor}" in row} == guided
        # What is pinned leaves less of the gap than rounding to nearest does, and BF16 is far away from both.
        assert row["diag/own/gap_mean"] <= row["diag/rtn/gap_mean"] + 1e-4 < row["diag/off/gap_mean"]
