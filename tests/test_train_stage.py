"""The training stage: killed and continued, it ends with the same bits; finished, it only writes its outputs again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from tiny import tiny_config, tiny_run

from trace_rl.config.load import load_method
from trace_rl.config.paths import RunPaths
from trace_rl.report.sections.tables import failures
from trace_rl.stages import train

METHODS = Path(__file__).resolve().parents[1] / "config" / "methods"


def policy(paths: RunPaths, name: str):
    return load_file(paths.train(name, 0) / "policy" / "model.safetensors")


def identical(first, second) -> bool:
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def test_every_shipped_rl_method_trains_a_step(tmp_path):
    config = tiny_config(training={"steps": 1, "diagnose_every": 1, "checkpoint_every": 1})
    paths = tiny_run(tmp_path, config=config)
    for file in sorted(METHODS.glob("*.yaml")):
        method = load_method(file)
        if method.kind != "rl":
            continue
        train.run(config, paths, method=method, seed=0)
        row = json.loads((paths.train(method.name, 0) / "metrics.jsonl").read_text().splitlines()[0])
        assert row["replayed_fraction"] == (1.0 if method.router_replay == "r3" else 0.0)
        assert (row.get("guidance_bytes_per_token", 0) > 0) == (method.guidance is not None)


def test_guidance_closes_the_gap_that_nearest_rounding_leaves(tmp_path):
    config = tiny_config(training={"steps": 1, "diagnose_every": 1})
    paths = tiny_run(tmp_path, config=config)
    train.run(config, paths, method=load_method(METHODS / "trace_full.yaml"), seed=0)
    row = json.loads((paths.train("trace_full", 0) / "metrics.jsonl").read_text().splitlines()[0])
    assert row["diag/own/mismatch"] == 0.0
    assert row["diag/own/gap_mean"] <= row["diag/rtn/gap_mean"] < row["diag/off/gap_mean"]


@pytest.mark.parametrize("name", ["trace", "trace@ratio.old_policy=current", "trace_unpinned", "trace_anchored"])
def test_several_updates_of_one_fresh_batch_move_away_from_the_old_policy(tmp_path, name):
    """pi_old is the same whoever keeps it: the weights that sampled are those before the first update."""
    config = tiny_config(training={"steps": 1, "updates_per_rollout": 3, "weight_decay": 1.0, "learning_rate": 0.02})
    paths = tiny_run(tmp_path, config=config)
    train.run(config, paths, method=load_method(METHODS / f"{name}.yaml"), seed=0)
    row = json.loads((paths.train(name, 0) / "metrics.jsonl").read_text().splitlines()[0])
    assert row["log_ratio_abs"] > 0
    if "@" in name:
        train.run(config, paths, method=load_method(METHODS / "trace.yaml"), seed=0)
        assert identical(policy(paths, name), policy(paths, "trace"))


def test_scales_from_two_bits_are_counted_in_every_step(tmp_path):
    config = tiny_config(training={"steps": 2})
    paths = tiny_run(tmp_path, config=config)
    for name, counted in (("trace@guidance.scale_bits=2", True), ("trace", False)):
        method = load_method(METHODS / f"{name}.yaml")
        train.run(config, paths, method=method, seed=0)
        rows = [json.loads(line) for line in (paths.train(name, 0) / "metrics.jsonl").read_text().splitlines()]
        assert all(("guidance_scales_uncertain" in row) == counted for row in rows)
        assert all(0 <= row.get("guidance_scales_uncertain", 0) < 0.01 for row in rows)
        metrics = json.loads((paths.train(name, 0) / "metrics.json").read_text())
        context = SimpleNamespace(summary={"methods": {name: {"0": metrics}}}, methods={name: method})
        shown = r"\d\.\d{3} / \d\.\d{3}" if counted else "–"
        assert re.fullmatch(shown, failures(context, name))  # the table finds both counts under their names


def test_a_run_is_identified_by_the_scales_it_uses(tmp_path):
    """In a format of its own they follow from calibrated magnitudes, which the file of MXFP4's scales (1) hides."""
    config = tiny_config(format="mxfp4")
    paths = tiny_run(tmp_path, config=config)
    amax = {tensor: dict.fromkeys(range(3), 2.0) for tensor in ("fc1", "fc2", "k", "v")}

    def identities(margin: float) -> dict[str, str]:
        paths.calibration_metrics.write_text(json.dumps({"amax": amax, "margin": margin}))
        methods = {name: load_method(METHODS / f"{name}.yaml") for name in ("bf16", "qat", "qat@format=nvfp4")}
        return {name: train.run_identity(config, paths, method=m, seed=0) for name, m in methods.items()}

    before, after = identities(1.25), identities(2.0)
    assert len(set(before.values())) == 3
    assert {name for name in before if before[name] != after[name]} == {"qat@format=nvfp4"}


def kill_after_first_checkpoint(argv: list[str], *, state: Path, timeout_s: float = 240.0) -> None:
    """Start a training process and kill -9 it once a checkpoint stands."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + timeout_s
    while not list(state.rglob("checkpoint.pt")):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline, "no checkpoint appeared"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(
    ("engine", "staleness", "method"),
    [
        pytest.param("torch", 1, "trace", marks=pytest.mark.slow),
        pytest.param("torch", 2, "trace_anchored", marks=pytest.mark.slow),
        pytest.param("vllm", 0, "trace", marks=[pytest.mark.slow, pytest.mark.engine]),
    ],
)
def test_killed_and_continued_equals_uninterrupted(tmp_path, engine, staleness, method):
    # A random policy earns nothing, so that advantages are zero: weight decay is what moves it here.
    moving = {"weight_decay": 1.0, "learning_rate": 0.02}
    schedule = {"steps": 8, "checkpoint_every": 2, "staleness": staleness}
    config = tiny_config(engine={"name": engine}, training=schedule | moving)
    killed, whole = (tiny_run(tmp_path / name, config=config) for name in ("killed", "whole"))

    def argv(root: str) -> list[str]:
        return [
            *(sys.executable, "-m", "trace_rl", "train", "--method", method, "--seed", "0"),
            *("--config", config.model_dump_json(), "--results", str(tmp_path / root)),
        ]

    kill_after_first_checkpoint(argv("killed"), state=killed.base / "state")
    assert not (killed.train(method, 0) / "policy").exists()
    continued = subprocess.run(argv("killed"), check=True, capture_output=True, text=True)
    assert "continuing after step" in continued.stdout
    subprocess.run(argv("whole"), check=True, capture_output=True)
    assert identical(policy(killed, method), policy(whole, method))

    def rows(paths: RunPaths) -> list[dict]:
        lines = (paths.train(method, 0) / "metrics.jsonl").read_text().splitlines()
        timed = ("seconds/", "quantize_s/", "tokens_per_s")
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(timed)} for line in lines]

    def made_by(paths: RunPaths) -> list[dict]:
        return json.loads((paths.train(method, 0) / "metrics.json").read_text())["made_by"]

    assert rows(killed) == rows(whole)
    assert not identical(policy(whole, method), load_file(whole.checkpoint / "model.safetensors"))
    assert (rows(whole)[-1]["log_ratio_abs"] > 0) == (staleness > 0)  # log-probs that waited in the queue
    assert [made["from_step"] > 0 for made in made_by(killed)] == [False, True]
    first = made_by(whole)
    again = subprocess.run(argv("whole"), check=True, capture_output=True, text=True)
    assert "all 8 steps are done" in again.stdout
    assert made_by(whole) == first  # written again is not trained again
    assert identical(policy(killed, method), policy(whole, method))


def test_how_a_batch_is_cut_does_not_change_what_it_teaches(tmp_path):
    """Old log-probs come back in the order of the trajectories, whatever order the micro-batches had."""
    moving = {"steps": 3, "staleness": 1, "weight_decay": 1.0, "learning_rate": 0.02}
    ratios = []
    for size in (3, 64):
        config = tiny_config(training=moving | {"micro_batch_sequences": size})
        paths = tiny_run(tmp_path / str(size), config=config)
        train.run(config, paths, method=load_method(METHODS / "trace_anchored.yaml"), seed=0)
        rows = [
            json.loads(line)
            for line in (paths.train("trace_anchored", 0) / "metrics.jsonl").read_text().split("\n")[:3]
        ]
        ratios.append([row["log_ratio_abs"] for row in rows])
    assert ratios[0] == pytest.approx(ratios[1], rel=0.05, abs=1e-6) and ratios[0][-1] > 0


def test_a_run_may_train_on_problems_of_one_kind(tmp_path):
    config = tiny_config(training={"steps": 1, "problems": "code"})
    paths = tiny_run(tmp_path, config=config)
    problems = train.rl_problems(paths, kind="code")
    assert {problem.kind for problem in problems} == {"code"}
    assert len(problems) + len(train.rl_problems(paths, kind="math")) == len(train.rl_problems(paths, kind=None))
    method = load_method(METHODS / "bf16.yaml")
    whole = config.model_copy(update={"training": config.training.model_copy(update={"problems": None})})
    assert train.run_identity(config, paths, method=method, seed=0) != train.run_identity(
        whole, paths, method=method, seed=0
    )
