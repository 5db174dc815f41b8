"""The whole workflow on config/smoke.yaml: every stage for real, then nothing left to do."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import FileInfo

from trace_rl.config.load import load_experiment
from trace_rl.config.paths import RunPaths
from trace_rl.config.targets import PAPER, STABILITY, target_names

ROOT = Path(__file__).resolve().parents[1]


def snakemake(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    # Options last: --configfile takes every word that follows it.
    command = [sys.executable, "-P", "-m", "snakemake", *arguments, "--cores", "2", "--configfile", "config/smoke.yaml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
    return done.stdout + done.stderr


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_workflow(tmp_path: Path) -> None:
    for name in ("workflow", "config"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "profiles").symlink_to(Path("workflow") / "profiles")
    shutil.copy(ROOT / "Snakefile", tmp_path)
    output = snakemake(tmp_path)

    experiment = load_experiment(ROOT / "config/smoke.yaml")
    paths = RunPaths("smoke", tmp_path / "results")
    summary = json.loads(paths.summary.read_text())
    assert list(summary["methods"]) == list(experiment.suite.methods)
    for task in experiment.evaluate.tasks:
        for execution in ("bf16", "fp4"):
            assert summary["methods"]["trace"]["0"]["accuracy"][task][execution]["n"] == experiment.data.eval_problems
    assert summary["methods"]["trace"]["0"]["guidance_bytes_per_token"] > 0
    assert json.loads(paths.audit("nvfp4").read_text())["passed"]
    assert json.loads(paths.parity("nvfp4").read_text())["passed"]
    assert "run smoke" in output
    assert "report: results/smoke/report/index.html" in output
    page = (paths.report / "index.html").read_text()
    assert all(name in page for name in experiment.suite.methods)
    steps = [json.loads(line) for line in (paths.train("trace", 0) / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == list(range(experiment.training.steps))

    client = MlflowClient(tracking_uri=f"sqlite:///{paths.root / 'mlflow.db'}")
    experiment_ids = [found.experiment_id for found in client.search_experiments()]
    runs = client.search_runs(experiment_ids)
    assert {run.info.status for run in runs if "rule" in run.data.tags} == {"FINISHED"}
    assert {run.data.tags["wildcard.method"] for run in runs if run.data.tags.get("rule") == "train"} == {
        "bf16",
        "qat",
        "trace",
    }
    trained = next(run for run in runs if run.data.tags["mlflow.runName"] == "train trace seed0")
    assert len(client.get_metric_history(trained.info.run_id, "reward")) == experiment.training.steps
    assert "policy" in {model.name for model in client.search_logged_models(experiment_ids)}

    assert "Nothing to be done" in snakemake(tmp_path)
    two_tables_on_top(tmp_path, paths=paths, client=client)
    the_paper_on_top(tmp_path, paths=paths, client=client)


def two_tables_on_top(folder: Path, *, paths: RunPaths, client: MlflowClient) -> None:
    """Two tables at once, with a variant, on the runs of the core suite, which stay; the same curves for all."""
    variant = "trace@guidance.tensors=k,v"
    before = {path: path.stat().st_mtime_ns for path in paths.base.glob("train/*/seed0/metrics.json")}
    output = snakemake(folder, "table1", "storage")
    for target in ("table1", "storage"):
        assert f"report: results/smoke/report/{target}/index.html" in output
    assert {path: path.stat().st_mtime_ns for path in before} == before
    summary = json.loads((paths.target_report("table1") / "summary.json").read_text())
    assert list(summary["methods"]) == ["bf16", "trace"]
    assert "trace" in (paths.target_report("table1") / "index.html").read_text()
    summary = json.loads((paths.target_report("storage") / "summary.json").read_text())
    assert list(summary["methods"]) == ["trace", variant]
    kv, both = (summary["methods"][name]["0"]["guidance_bytes_per_token"] for name in (variant, "trace"))
    assert 0 < kv < both
    assert not paths.evaluation(variant, 0).exists()

    ids = [found.experiment_id for found in client.search_experiments()]
    runs = client.search_runs(ids, "tags.rule = 'train' and tags.seed = '0'")
    assert {run.data.tags["method"] for run in runs} == {"bf16", "qat", "trace", variant}
    assert len({run.data.tags["mlflow.parentRunId"] for run in runs}) == 1
    curves = set.intersection(*(set(run.data.metrics) for run in runs))
    assert {"reward", "gap_mean", "entropy", "tokens_per_s"} <= curves
    assert "Nothing to be done" in snakemake(folder, "table1", "storage")


def the_paper_on_top(folder: Path, *, paths: RunPaths, client: MlflowClient) -> None:
    """Every table, figure and analysis on one page, and the map of stability; then nothing is left to do."""
    before = {path: path.stat().st_mtime_ns for path in paths.base.glob("train/*/seed0/metrics.json")}
    snakemake(folder, PAPER, STABILITY)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    experiment = load_experiment(ROOT / "config/smoke.yaml")
    summary = json.loads((paths.target_report(PAPER) / "summary.json").read_text())
    assert list(summary["methods"]) == list(target_names(experiment, PAPER))
    page = (paths.target_report(PAPER) / "index.html").read_text()
    for title in ("Table 1", "Table 4", "Table 5", "Table 6", "Table 7", "Where the gap comes from", "Staleness"):
        assert title in page
    assert paths.gap_sources(0).is_file() and paths.ratio(0).is_file()
    assert {path.stem for path in paths.parity("nvfp4").parent.glob("*.json")} == {"nvfp4", "mxfp4"}
    assert "Stable cells" in (paths.target_report(STABILITY) / "index.html").read_text()

    ids = [found.experiment_id for found in client.search_experiments()]
    (made,) = client.search_runs(ids, f"tags.rule = 'tables' and tags.`wildcard.target` = '{PAPER}'")
    assert {"index.html", "report.md"} <= {Path(item.path).name for item in listed(client, made.info.run_id)}
    assert "Nothing to be done" in snakemake(folder, PAPER, STABILITY)


def listed(client: MlflowClient, run_id: str, path: str | None = None) -> list[FileInfo]:
    """All artifacts of a run."""
    found = client.list_artifacts(run_id, path)
    return [item for entry in found for item in (listed(client, run_id, entry.path) if entry.is_dir else [entry])]
