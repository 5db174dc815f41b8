"""Final accuracy: the table every accuracy section shows, and the whole-suite section with its figures."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.config.quant import SCOPES, FormatChoice, QuantSpec
from trace_rl.report.claim import NOT_REPORTED
from trace_rl.report.context import Context
from trace_rl.report.document import Figure, Section, Table
from trace_rl.report.estimate import Estimate, accuracies, error_note, estimate, show
from trace_rl.report.figures import bars
from trace_rl.report.labels import label

EXECUTION_NAMES = {"fp4": "FP4 (emulated)", "bf16": "BF16"}
FIGURE_METHODS = 12
"""Bars of one task that can still be told apart."""


def accuracy_table(
    context: Context, names: Sequence[str], *, reported: Mapping[str, object] | None = None, paper_column: str = "paper"
) -> Table:
    """One row a method: the paper's number, means over tasks in both executions, every task, seeds, collapsed.

    ``reported`` maps methods to the paper's numbers; None leaves the column out.
    """
    summary = context.summary
    tasks = list(summary["start"]["accuracy"])
    header = (
        "policy",
        *((paper_column,) if reported is not None else ()),
        *(f"mean, {EXECUTION_NAMES[execution]}" for execution in ("fp4", "bf16")),
        *(f"{task}, {execution.upper()}" for execution in ("fp4", "bf16") for task in tasks),
        "n",
        "collapsed",
    )
    rows = [
        (
            "before RL",
            *(("–",) if reported is not None else ()),
            *(show(start_mean(summary, execution)) for execution in ("fp4", "bf16")),
            *(
                show(Estimate(scores[execution]["mean"], scores[execution]["stderr"], 1))
                for execution in ("fp4", "bf16")
                for scores in summary["start"]["accuracy"].values()
            ),
            "–",
            "–",
        )
    ]
    for name in context.run_of(list(names)):
        seeds = summary["methods"][name]
        collapsed = [record["collapsed"] for record in seeds.values() if record["collapsed"] is not None]
        rows.append(
            (
                label(name),
                *((str(reported.get(name, NOT_REPORTED)),) if reported is not None else ()),
                *(show(estimate(accuracies(summary, name, execution))) for execution in ("fp4", "bf16")),
                *(
                    show(estimate(accuracies(summary, name, execution, task=task)))
                    for execution in ("fp4", "bf16")
                    for task in tasks
                ),
                str(len(seeds)),
                f"{sum(collapsed)} of {len(collapsed)}" if collapsed else "–",
            )
        )
    counts = ", ".join(f"{task} {scores['fp4']['n']}" for task, scores in summary["start"]["accuracy"].items())
    caption = (
        f"Greedy decoding through lm-eval, percent. {error_note(context.num_seeds)} Problems per task, the same for "
        f"every method: {counts}; the row before RL has the evaluation's binomial error. "
        f"{executions_note(context, names)}"
    )
    return Table(header, tuple(rows), caption)


def fp4_execution(method: RlMethod | PtqMethod, *, default: FormatChoice) -> QuantSpec:
    """What a method's FP4 column was evaluated in; ``default`` are the run's formats."""
    if isinstance(method, RlMethod) and method.rollout.enabled:
        return method.rollout_quant(default)
    return QuantSpec(format=method.format if isinstance(method, PtqMethod) else default)


def executions_note(context: Context, names: Sequence[str]) -> str:
    """Which FP4 executions the column compares: a method's own may have another format, or compensate residuals."""
    usual, others = QuantSpec(format=context.config.format), []
    for name in context.run_of(list(names)):
        quant = fp4_execution(context.methods[name], default=usual.format) if name in context.methods else usual
        if quant.hash() == usual.hash():
            continue
        off = [scope for scope in SCOPES if not getattr(quant, scope)]
        words = str(quant.format)
        words += f", {' and '.join(off)} in BF16" if off else ""
        words += f", with {quant.residual} residual compensation" if quant.residual != "none" else ""
        others.append(f"{label(name)} ({words})")
    text = f"FP4 is each method's own execution: weights, activations and KV in {usual.format}"
    return f"{text}; different for {'; '.join(others)}." if others else f"{text}."


def accuracy_section(context: Context) -> Section:
    """Final accuracy of every method of the page."""
    names = list(context.summary["methods"])
    blocks: list[str | Table | Figure] = [accuracy_table(context, names)]
    if len(names) <= FIGURE_METHODS:
        blocks += accuracy_figures(context, names, prefix="accuracy")
    return Section("Final accuracy", blocks)


def start_mean(summary: dict[str, Any], execution: str) -> Estimate:
    """Mean over tasks of the policy before RL, with the evaluation's error."""
    scores = [by_execution[execution] for by_execution in summary["start"]["accuracy"].values()]
    stderr = math.hypot(*(score["stderr"] for score in scores)) / len(scores)
    return Estimate(statistics.fmean(score["mean"] for score in scores), stderr, 1)


def accuracy_figures(context: Context, names: Sequence[str], *, prefix: str) -> list[Figure]:
    """One figure per execution."""
    return [
        Figure(
            f"{prefix}_{execution}",
            bars.accuracy(context.summary, execution=execution, names=context.run_of(list(names))),
            f"{words} execution, with the standard errors of the table; dashed: before RL.",
        )
        for execution, words in (("fp4", "FP4"), ("bf16", "BF16"))
    ]
