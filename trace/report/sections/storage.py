"""Bytes of guidance: as recorded here, and the paper's model by the same accounting."""

import json
from collections.abc import Sequence

from trace_rl.config.targets import target_names
from trace_rl.guidance.accounting import plan
from trace_rl.report.context import Context
from trace_rl.report.document import Section, Table
from trace_rl.report.estimate import Value, estimate, show, show_n, trained
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
        sizes = trained(context.summary, name, "guidance_bytes_per_token")
        size, tokens = estimate(sizes), step_tokens(context, name)
        if size is None or not size.mean:
            continue
        common = sizes.keys() & tokens.keys()
        step = estimate({seed: Value(sizes[seed].mean * tokens[seed] / 2**20) for seed in sorted(common)})
        rows.append((label(name), show(size, scale=1, digits=0), show(step, scale=1, digits=3), show_n(step)))
    header = ("method", "bytes per token, here", "MiB per step, here", "n")
    caption = (
        "Length of one token's guidance row as recorded, exact and the same for every seed; a step's bytes follow its "
        "tokens, prompts included, ± over seeds."
    )
    return Table(header, tuple(rows), caption)


def step_tokens(context: Context, name: str) -> dict[str, float]:
    """Mean tokens of a step, by seed."""
    found = {}
    for (method, seed), steps in context.runs.items():
        tokens = [
            row["tokens_per_s"] * row["seconds/step"]
            for row in steps
            if method == name and {"tokens_per_s", "seconds/step"} <= row.keys()
        ]
        if tokens:
            found[str(seed)] = sum(tokens) / len(tokens)
    return found


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
