"""Seconds: by phase of a step, by rule and run of the workflow, and what rounding and recording add."""

import statistics
from typing import Any

from trace_rl.report.context import Context
from trace_rl.report.document import Figure, Section, Table
from trace_rl.report.estimate import Value, estimate, quotient, show, trained
from trace_rl.report.figures import bars
from trace_rl.report.labels import label
from trace_rl.report.sections.opening import opening

BARS = 14
"""Methods that the figure by phase still shows."""


def time_section(context: Context, *, with_claims: bool = False) -> Section:
    """What the run took."""
    blocks: list[str | Table | Figure] = list(opening(context.about("time"))) if with_claims else []
    svg = bars.step_time(context.summary) if len(context.summary["methods"]) <= BARS else None
    if svg is not None:
        caption = (
            "Median seconds per step by phase, mean over seeds; the table of the trainings has their errors. Runs may "
            "share the machine side by side."
        )
        blocks.append(Figure("step_time", svg, caption))
    blocks.append(quantization_table(context))
    bench = context.artifacts.get("bench")
    if bench is not None:
        blocks += [bench_table(bench), recording_table(bench)]
    blocks.append(training_time_table(context))
    if seconds := own_seconds(context):
        blocks.append(duration_table(seconds))
    return Section("Time", blocks)


def own_seconds(context: Context) -> dict[str, float]:
    """Seconds of the jobs behind this page: those of its methods and seeds, and those that belong to no method."""
    methods = {f"{name}/seed{seed}" for name, seeds in context.summary["methods"].items() for seed in seeds}
    per_method = ("train", "evaluate", "quantize")
    return {
        job: value
        for job, value in context.seconds.items()
        if job.partition("/")[0] not in per_method
        or job.partition("/")[2] in methods
        or job.partition("/")[2] == "start"
    }


def training_time_table(context: Context) -> Table:
    """Seconds of the steps of each training, which a resumed run counts whole."""
    rows = []
    for name, seeds in context.summary["methods"].items():
        whole = estimate(
            {
                str(seed): Value(sum(row["seconds/step"] for row in steps))
                for (method, seed), steps in context.runs.items()
                if method == name and all("seconds/step" in row for row in steps)
            }
        )
        step = estimate(trained(context.summary, name, "step_s", "step"))
        if whole is not None and step is not None:
            rows.append((label(name), show(step, scale=1, digits=2), show(whole, scale=1, digits=0), str(len(seeds))))
    return Table(
        ("training run", "median step, s", "all steps, s", "n"),
        tuple(rows),
        "One thread a run; without start-up and diagnostics. Other work on the machine is in these numbers.",
    )


def duration_table(seconds: dict[str, float]) -> Table:
    """Wall time by rule: runs, median, total."""
    by_rule: dict[str, list[float]] = {}
    for job, value in seconds.items():
        by_rule.setdefault(job.partition("/")[0], []).append(value)
    rows = [
        (rule, str(len(values)), f"{statistics.median(values):.0f}", f"{sum(values):.0f}")
        for rule, values in sorted(by_rule.items(), key=lambda item: -sum(item[1]))
    ]
    rows.append(("all", str(len(seconds)), "", f"{sum(seconds.values()):.0f}"))
    note = (
        "Of the jobs behind this page, from the workflow's benchmark files; a job that was resumed counts from its "
        "last start. Jobs go side by side, so the total is not the duration."
    )
    return Table(("rule", "jobs", "median, s", "total, s"), tuple(rows), note)


def quantization_table(context: Context) -> Table:
    """How much of a training step goes into rounding."""
    rows = []
    for name in context.summary["methods"]:
        activations, weights, step = (
            trained(context.summary, name, *keys)
            for keys in (("quantize_s", "activations"), ("quantize_s", "weights"), ("step_s", "step"))
        )
        both = {s: Value(activations[s].mean + weights[s].mean) for s in activations.keys() & weights.keys()}
        share = estimate(quotient(both, step))
        if share is not None:
            parts = (show(estimate(part), scale=1000) for part in (activations, weights, step))
            rows.append((label(name), *parts, show(share), str(share.n)))
    return Table(
        ("method", "activations and KV, ms", "weights, ms", "whole step, ms", "share of the step (%)", "n"),
        tuple(rows),
        "Fake quantization in the trainer's forwards, guided or not; medians over steps, ± over seeds, none with one. "
        "FC2 inputs are not counted where the experts are one operator, which rounds them inside.",
    )


def bench_table(bench: dict[str, Any]) -> Table:
    """Rollout throughput."""
    rows = tuple(
        (
            row["mode"],
            str(row["num_sequences"]),
            str(row["output_length"]),
            f"{row['tokens_per_s']['median']:.0f} ({row['tokens_per_s']['min']:.0f}–{row['tokens_per_s']['max']:.0f})",
            f"{row['ratio_to_bf16']:.2f}",
            f"{row['guidance_bytes_per_token']:.0f}",
        )
        for row in bench["rows"]
    )
    return Table(
        (
            "rollout",
            "sequences",
            "output tokens",
            "tokens/s, median (min–max)",
            "ratio to BF16",
            "guidance bytes per token",
        ),
        rows,
        "Rollout engine, one thread; FP4 is emulated, so it costs time here and saves it on FP4 hardware. BF16 is the "
        "same engine with quantization off; stock vLLM prepacks its weights, which is faster, and cannot be refitted.",
    )


def recording_table(bench: dict[str, Any]) -> Table:
    """What recording adds to a rollout, from repetitions side by side."""
    rows = tuple(
        (
            row["workload"],
            row["mode"],
            str(row["num_sequences"]),
            *(percent_with_interval(row[clock]) for clock in ("wall_percent", "cpu_percent")),
        )
        for row in bench["recording_cost"]
    )
    return Table(
        ("rollout", "recording", "sequences", "added time (%)", "added CPU time (%)"),
        rows,
        f"Over FP4 without recording, medians of paired repetitions with 95 % interval, or smallest and largest of "
        f"fewer than 6; the paper's whole guidance costs 7.4 % of a step. Load of the machine: "
        f"{bench['environment']['load']:.1f}.",
    )


def percent_with_interval(cost: dict[str, Any]) -> str:
    """Median and interval of a paired cost."""
    low, high = (cost["min"], cost["max"]) if cost["low"] is None else (cost["low"], cost["high"])
    return f"{cost['median']:+.1f} ({low:+.1f} to {high:+.1f}, n {cost['n']})"
