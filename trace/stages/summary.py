"""Stage ``summary``: one JSON of the whole run, and one table on the screen."""

import io
import json

from rich.console import Console
from rich.table import Table

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.config.paths import RunPaths
from trace_rl.report.claims import average, seed_mean, show
from trace_rl.report.collect import collect

TABLE_WIDTH = 120


def run(config: ExperimentConfig, paths: RunPaths, *, methods: dict[str, RlMethod | PtqMethod]) -> None:
    """Write ``summary.json`` and ``summary.txt``, and print the latter."""
    summary = collect(paths, methods=methods, seeds=config.suite.seeds)
    text = as_text(summary_table(summary))
    for path, content in ((paths.summary, json.dumps(summary, indent=1) + "\n"), (paths.summary_text, text)):
        temporary = path.with_suffix(".tmp")
        temporary.write_text(content)
        temporary.replace(path)
    print(text)


def as_text(table: Table) -> str:
    """A table as plain text."""
    console = Console(file=io.StringIO(), width=TABLE_WIDTH)
    console.print(table)
    return console.file.getvalue()


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
            f"{collapsed} of {len(seeds)}",
        )
    return table
