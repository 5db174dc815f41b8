"""Tracking: one MLflow run per job however often it starts, two jobs side by side, and no failure of a job."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from trace_rl import tracking
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.load import parse_experiment
from trace_rl.config.paths import RunPaths

WRITER = """
import sys
from pathlib import Path
from trace_rl import tracking
from trace_rl.config.load import parse_experiment
from trace_rl.config.paths import RunPaths

seed = int(sys.argv[2])
config = parse_experiment({"run": "pair"}, source="test")
with tracking.stage_run(
    config, paths=RunPaths("pair", Path(sys.argv[1])), stage="train", wildcards={"method": "trace", "seed": seed}
) as run:
    for batch in range(8):
        run.log_step_metrics([{"step": 10 * batch + step, "reward": 0.5, "gap": 0.01} for step in range(10)])
        run.log_text("sample", f"samples/{batch}.txt")
    assert run.enabled
"""


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return RunPaths("r", tmp_path / "results")


def experiment(**tracking_settings: object) -> ExperimentConfig:
    return parse_experiment({"run": "r", "tracking": tracking_settings}, source="test")


def stored(paths: RunPaths) -> tuple[MlflowClient, list]:
    client = MlflowClient(tracking_uri=f"sqlite:///{paths.root / 'mlflow.db'}")
    (found,) = [e for e in client.search_experiments() if e.name == "trace-fp4-rl"]
    return client, client.search_runs([found.experiment_id])


def job(paths: RunPaths, *, steps: range, method: str = "trace", seed: int = 0, learning_rate: float = 1e-4) -> None:
    wildcards = {"method": method, "seed": seed}
    with tracking.stage_run(experiment(), paths=paths, stage="train", wildcards=wildcards) as run:
        run.log_params({"optimizer": {"learning_rate": learning_rate}})
        run.log_step_metrics([{"step": step, "reward": step / 10} for step in steps])
        run.log_metrics({"final": {"accuracy": 0.75}})


def test_a_resumed_job_continues_its_run_without_duplicates(paths, caplog):
    assert tracking.setup(experiment(), paths=paths)
    job(paths, steps=range(1, 6))
    job(paths, steps=range(3, 9))
    with caplog.at_level(logging.WARNING):
        job(paths, steps=range(3, 9), learning_rate=3e-4)
    client, runs = stored(paths)
    assert len(runs) == 2
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    (child,) = [run for run in runs if run is not parent]
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert {parent.info.status, child.info.status} == {"FINISHED"}
    assert [point.step for point in client.get_metric_history(child.info.run_id, "reward")] == list(range(1, 9))
    assert len(client.get_metric_history(child.info.run_id, "final.accuracy")) == 1
    assert child.data.params["optimizer.learning_rate"] == "0.0001"
    assert child.data.tags["trace.params_changed"] == "optimizer.learning_rate"
    assert "optimizer.learning_rate was '0.0001' in this MLflow run and is now '0.0003'" in caplog.text


def test_a_run_says_what_made_it(paths):
    job(paths, steps=range(2))
    job(paths, steps=range(2), seed=1)
    _, runs = stored(paths)
    assert len(runs) == 3
    tags = next(run.data.tags for run in runs if run.data.tags.get("wildcard.seed") == "0")
    expected = {"rule", "wildcard.method", "digest.config", "digest.code", "digest.method", "hardware", "git.dirty"}
    assert expected <= set(tags)
    assert {"mlflow.source.git.commit", "quant_hash.rollout", "torch", "python"} <= set(tags)


def test_curves_of_methods_variants_and_seeds_lie_in_one_chart_and_can_be_filtered(paths):
    names = ("qat", "trace", "trace@guidance.layers=last_quarter", "trace@guidance.tensors=k,v+training.staleness=3")
    for method in names:
        for seed in (0, 1):
            job(paths, steps=range(3), method=method, seed=seed)
    client, runs = stored(paths)
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]

    def found(where: str) -> list[str]:
        where = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}' and {where}"
        return sorted(run.info.run_name for run in client.search_runs([parent.info.experiment_id], where))

    assert found("tags.rule = 'train'") == sorted(f"train {method} seed{seed}" for method in names for seed in (0, 1))
    assert found("tags.method = 'trace@guidance.layers=last_quarter' and tags.seed = '1'") == [
        "train trace@guidance.layers=last_quarter seed1"
    ]
    assert len(found("tags.base_method = 'trace' and tags.seed = '0'")) == 3
    assert found("tags.base_method = 'trace' and tags.variant = ''") == ["train trace seed0", "train trace seed1"]
    children = [run for run in runs if run is not parent]
    assert {tuple(sorted(run.data.metrics)) for run in children} == {("final.accuracy", "reward")}
    digests = {run.data.tags["digest.method"] for run in children}
    assert len(digests) == len(names)
    assert all("quant_hash.rollout" in run.data.tags for run in children)


@pytest.mark.slow
def test_two_jobs_write_side_by_side(tmp_path):
    command = [sys.executable, "-P", "-c", WRITER, str(tmp_path)]
    jobs = [subprocess.Popen([*command, str(seed)], stderr=subprocess.PIPE, text=True) for seed in (0, 1)]
    for process in jobs:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert "tracking:" not in errors
    client, runs = stored(RunPaths("pair", tmp_path))
    assert len(runs) == 3
    for run in runs:
        if run.data.tags.get("rule") == "train":
            assert len(client.get_metric_history(run.info.run_id, "reward")) == 80


def test_data_and_checkpoint_are_logged_once(paths, tmp_path):
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    for _ in range(2):
        with tracking.stage_run(experiment(), paths=paths, stage="evaluate") as run:
            run.log_input("rl", digest="0123", source="results/r/data/rl.jsonl", context="train")
            run.log_model(policy, name="policy", params={"steps": 3})
            run.log_artifact(policy / "config.json")
            assert run.enabled
    client, runs = stored(paths)
    (child,) = [run for run in runs if run.data.tags.get("rule") == "evaluate"]
    assert len(child.inputs.dataset_inputs) == 1
    (model,) = client.search_logged_models([child.info.experiment_id])
    assert model.name == "policy"
    assert model.source_run_id == child.info.run_id
    assert [item.path for item in client.list_artifacts(child.info.run_id)] == ["config.json"]


def test_a_failed_job_is_marked_and_its_error_is_not_hidden(paths):
    with pytest.raises(ZeroDivisionError), tracking.stage_run(experiment(), paths=paths, stage="evaluate"):
        raise ZeroDivisionError
    _, runs = stored(paths)
    assert [run.info.status for run in runs if run.data.tags.get("rule") == "evaluate"] == ["FAILED"]


def test_tracking_that_is_off_writes_nothing_and_imports_nothing(paths):
    assert not tracking.setup(experiment(enabled=False), paths=paths)
    with tracking.stage_run(parse_experiment({"run": "r"}, source="test"), paths=paths, stage="evaluate") as run:
        run.log_params({"a": 1})
        run.log_metrics({"b": 2.0})
        run.log_step_metrics([{"step": 1, "c": 3.0}])
        run.log_text("d", "d.txt")
        assert not run.enabled
    assert [file.name for file in paths.root.rglob("*") if file.is_file()] == ["tracking.json"]


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "sqlite:////proc/no/mlflow.db", "nonsense://x"])
def test_a_broken_server_is_one_warning_and_the_job_goes_on(paths, caplog, uri):
    with (
        caplog.at_level(logging.WARNING),
        tracking.stage_run(experiment(uri=uri), paths=paths, stage="evaluate") as run,
    ):
        run.log_metrics({"b": 2.0})
        finished = True
    assert finished
    assert sum("the job goes on without it" in record.message for record in caplog.records) == 1


def test_the_workflow_leaves_its_settings_for_jobs_that_are_not_given_any(paths):
    tracking.setup(experiment(experiment="mine"), paths=paths)
    assert json.loads((paths.base / "tracking.json").read_text())["experiment"] == "mine"
    with tracking.stage_run(parse_experiment({"run": "r"}, source="test"), paths=paths, stage="evaluate") as run:
        assert run.enabled
    client = MlflowClient(tracking_uri=f"sqlite:///{paths.root / 'mlflow.db'}")
    assert client.get_experiment_by_name("mine") is not None
    assert client.get_experiment_by_name("trace-fp4-rl") is None
