"""Stage ``summary``: one JSON of the core suite, and one table on the screen."""

from rich.console import Console
from rich.table import Table

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.config.paths import RunPaths
from trace_rl.models.checkpoint_io import write_json
from trace_rl.report.collect import collect
from trace_rl.report.estimate import average, seed_mean, show

TABLE_WIDTH = 120


def run(
    config: ExperimentConfig, paths: RunPaths, *, methods: dict[str, RlMethod | PtqMethod], seeds: tuple[int, ...]
) -> None:
    """Write ``summary.json`` of ``methods`` and ``seeds`` and print the table."""
    summary = collect(paths, methods=methods, seeds=seeds)
    write_json(paths.summary, summary, sort_keys=False)  # methods in the suite's order
    Console(width=TABLE_WIDTH).print(summary_table(summary))


def summary_table(summary: dict) -> Table:
    """One row per method, means over seeds."""
    table = Table(title=f"run {summary['run']}: FP4 is emulated; accuracy in percent ± standard error")
    for column in ("method", "FP4", "BF16", "reward", "gap", "mismatch %", "bytes/token", "s/step", "collapsed"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, seeds in summary["methods"].items():
        fp4, bf16 = (average(summary, name, execution) for execution in ("fp4", "bf16"))
        start, end = (seed_mean(summary, name, key) for key in ("reward_start", "reward_end"))
        gap = seed_mean(summary, name, "logprob_gap_mean")
        mismatch = seed_mean(summary, name, "codeword_mismatch")
        collapsed = sum(bool(record["collapsed"]) for record in seeds.values())
        table.add_row(
            name,
            show(fp4),
            show(bf16),
            "–" if start is None else f"{start:.2f} → {end:.2f}",
            "–" if gap is None else f"{gap:.4f}",
            "–" if mismatch is None else f"{100 * mismatch:.2f}",
            f"{seed_mean(summary, name, 'guidance_bytes_per_token') or 0:.0f}",
            f"{seed_mean(summary, name, 'step_s', 'step') or 0:.2f}",
            "–" if start is None else f"{collapsed} of {len(seeds)}",
        )
    return table
