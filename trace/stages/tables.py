"""Stage ``tables``: the page of one of the paper's tables, or of all of them, over several seeds."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trace_rl import tracking
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.config.paths import RunPaths
from trace_rl.config.targets import ANALYSES, evaluated_names, gated_formats
from trace_rl.models.checkpoint_io import write_json
from trace_rl.report.collect import collect, read
from trace_rl.report.context import Analysis, Context
from trace_rl.report.document import write
from trace_rl.report.target_page import build_target
from trace_rl.stages.report import rule_seconds, step_metrics


def run(
    config: ExperimentConfig,
    paths: RunPaths,
    *,
    target: str,
    methods: dict[str, RlMethod | PtqMethod],
    seeds: tuple[int, ...],
) -> None:
    """Write ``index.html``, ``report.md``, ``summary.json`` and the figures of ``target``."""
    out = paths.target_report(target)
    with tracking.stage_run(config, stage="tables", paths=paths, wildcards={"target": target}) as tracker:
        context = Context(
            summary=collect(paths, methods=methods, seeds=seeds, evaluated=evaluated_names(config, target)),
            config=config,
            methods=methods,
            runs=step_metrics(paths, methods=methods, seeds=seeds),
            artifacts=artifacts(paths, formats=gated_formats(config, methods.values())),
            seconds=rule_seconds(paths.base / "benchmarks"),
            analysis=analysis(paths, target=target, seeds=seeds),
        )
        write(build_target(context, target=target), out)
        write_json(out / "summary.json", context.summary, sort_keys=False)  # methods in the table's order
        tracker.log_artifact(out)
    print(f"report: {out / 'index.html'}")


def artifacts(paths: RunPaths, *, formats: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Calibration, gates by format and benchmark, those that exist: a table needs none of them to be written."""
    found = present({"calibration": paths.calibration_metrics, "bench": paths.bench_rollout})
    for name, path in (("audit", paths.audit), ("parity", paths.parity)):
        if by_format := present({slug: path(slug) for slug in formats}):
            found[name] = by_format
    return found


def present(files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """The content of those files that exist."""
    return {name: read(path) for name, path in files.items() if path.is_file()}


def analysis(paths: RunPaths, *, target: str, seeds: tuple[int, ...]) -> Analysis:
    """What the analysis stages measured, by seed, for the targets that show it."""
    found: Analysis = {}
    for kind, path in (("gap_sources", paths.gap_sources), ("ratio", paths.ratio)):
        if target in ANALYSES[kind]:
            found[kind] = {seed: read(path(seed)) for seed in seeds if path(seed).is_file()}
    return found
