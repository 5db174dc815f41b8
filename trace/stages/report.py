"""Stage ``report``: the page that shows the core suite beside the paper."""

import csv
from pathlib import Path

from trace_rl import tracking
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.config.paths import RunPaths
from trace_rl.config.targets import core_seeds, gated_formats
from trace_rl.report.collect import read
from trace_rl.report.context import Context
from trace_rl.report.document import write
from trace_rl.report.figures.curves import Runs
from trace_rl.report.page import build
from trace_rl.rl.metrics_log import MetricsLog


def run(config: ExperimentConfig, paths: RunPaths, *, methods: dict[str, RlMethod | PtqMethod]) -> None:
    """Write ``index.html``, ``report.md`` and the figures."""
    with tracking.stage_run(config, stage="report", paths=paths) as tracker:
        context = Context(
            summary=read(paths.summary),
            config=config,
            methods=methods,
            runs=step_metrics(paths, methods=methods, seeds=core_seeds(config)),
            artifacts={
                "calibration": read(paths.calibration_metrics),
                "audit": {slug: read(paths.audit(slug)) for slug in gated_formats(config, methods.values())},
                "parity": {slug: read(paths.parity(slug)) for slug in gated_formats(config, methods.values())},
                "bench": read(paths.bench_rollout),
            },
            seconds=rule_seconds(paths.base / "benchmarks"),
        )
        write(build(context), paths.report)
        for path in sorted(paths.report.iterdir()):
            if path.is_file():  # folders are the pages of targets, which log themselves
                tracker.log_artifact(path, "report")
    print(f"report: {paths.report / 'index.html'}")


def step_metrics(paths: RunPaths, *, methods: dict[str, RlMethod | PtqMethod], seeds: tuple[int, ...]) -> Runs:
    """Rows of ``metrics.jsonl`` of every trained run."""
    return {
        (name, seed): MetricsLog(paths.train(name, seed) / "metrics.jsonl").rows()
        for name, method in methods.items()
        if isinstance(method, RlMethod)
        for seed in seeds
    }


def rule_seconds(folder: Path) -> dict[str, float]:
    """Wall seconds of each job, from the workflow's benchmark files."""
    seconds = {}
    for path in sorted(folder.rglob("*.tsv")):
        with path.open() as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        if rows:
            seconds[str(path.relative_to(folder).with_suffix(""))] = float(rows[-1]["s"])
    return seconds
