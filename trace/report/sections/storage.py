"""Bytes of guidance: as recorded here, and the paper's model by the same accounting."""

import json
from collections.abc import Sequence

from trace_rl.config.targets import target_names
from trace_rl.guidance.accounting import plan
from trace_rl.report.context import Context
from trace_rl.report.document import Section, Table
from trace_rl.report.estimate import seed_mean
from trace_rl.report.labels import label
from trace_rl.report.paper import PAPER_MODEL
from trace_rl.report.sections.opening import opening


def storage(context: Context) -> Section:
    """The paper's six figures and what this run recorded."""
    names = context.run_of(target_names(context.config, "storage"))
    return Section("Storage", [*opening(context.about("storage")), recorded_table(context, names), *computed_tables()])


def bytes_section(context: Context) -> Section:
    """The same tables for the core suite, whose claims stand together at the top of the page."""
    names = list(context.summary["methods"])
    return Section("Guidance bytes", [recorded_table(context, names), *computed_tables()])


def recorded_table(context: Context, names: Sequence[str]) -> Table:
    """Bytes of a token, and of a step with this run's tokens."""
    rows = []
    for name in context.run_of(list(names)):
        size = seed_mean(context.summary, name, "guidance_bytes_per_token")
        if not size:
            continue
        tokens = [
            row["tokens_per_s"] * row["seconds/step"]
            for (method, _), steps in context.runs.items()
            if method == name
            for row in steps
            if {"tokens_per_s", "seconds/step"} <= row.keys()
        ]
        step = f"{size * sum(tokens) / len(tokens) / 2**20:.2f}" if tokens else "–"
        rows.append((label(name), f"{size:.0f}", step))
    header = ("method", "bytes per token, here", "MiB per step, here")
    return Table(header, tuple(rows), "Length of one token's guidance row as recorded; exact, so without error.")


def computed_tables() -> list[Table]:
    """Every figure of the accounting, with its formula."""
    rows = tuple((row.name, row.formula, row.text) for row in plan(json.loads(PAPER_MODEL.read_text())))
    return [
        Table(
            ("Qwen3.5-35B-A3B, computed", "formula", "value"),
            rows,
            "The same accounting for the paper's model; the paper's own figures are in the claims.",
        )
    ]
