"""Where trainer and rollout disagree: codewords by layer and tensor, direction by depth, routing, bracket misses."""

from collections.abc import Sequence

from trace_rl.config.targets import target_names
from trace_rl.report.context import Context
from trace_rl.report.document import Figure, Section, Table
from trace_rl.report.estimate import estimate, show, trained
from trace_rl.report.figures.curves import curve
from trace_rl.report.figures.layers import TENSORS, layer_panels
from trace_rl.report.labels import label
from trace_rl.report.sections.opening import opening

EXPLANATION = (
    "Gap is |log pi_train - log pi_rollout| on the sampled tokens of every step. Codewords are compared on diagnostic "
    "batches with whole codes of all layers recorded: once with the trainer rounding to nearest, once as the method "
    "rounds. Router disagreement is the share of tokens and MoE layers at which the router, before replay overrides "
    "it, chooses other experts than the rollout did: in the method's own forward, and in a BF16 one. Either forward "
    "replays the rollout's routing in the layers before, unless the method trains without replay."
)
COLUMNS = (
    ("mismatch, nearest (%)", "diag/rtn/mismatch"),
    ("mismatch, method (%)", "diag/own/mismatch"),
    ("deeper half, nearest (%)", "diag/rtn/mismatch/deeper_half"),
    ("deeper half, method (%)", "diag/own/mismatch/deeper_half"),
    ("one codeword apart (%)", "diag/rtn/adjacent"),
    ("bracket misses, deeper half (%)", "diag/own/bracket_miss/deeper_half"),
    ("router disagreement, method (%)", "diag/own/router_disagreement"),
    ("router disagreement, BF16 forward (%)", "diag/off/router_disagreement"),
)
FIGURES = (
    ("mismatch_layers", "own", "mismatch", "mismatch (%)", "Codeword mismatch by layer, as each method rounds."),
    ("mismatch_nearest", "rtn", "mismatch", "mismatch (%)", "The same with the trainer rounding to nearest."),
    (
        "direction_lower",
        "rtn",
        "lower",
        "trainer lower (%)",
        "Trainer's codeword, rounded to nearest, below the rollout's: guidance corrects it to a higher one.",
    ),
    (
        "direction_higher",
        "rtn",
        "higher",
        "trainer higher (%)",
        "Trainer's codeword, rounded to nearest, above the rollout's: guidance corrects it to a lower one.",
    ),
    (
        "bracket_misses",
        "own",
        "bracket_miss",
        "misses (%)",
        "Rollout codewords that are neither neighbour of the trainer's value on the rollout's scale, by layer: there "
        "few bits may pick wrong.",
    ),
)
READING = "Means over seeds with standard errors; dashed: without routing replay."


def mismatch(context: Context) -> Section:
    """The paper's mismatch figures, with and without routing replay."""
    names = context.run_of(target_names(context.config, "mismatch"))
    return Section(
        "Codeword mismatch",
        [
            *opening(context.about("mismatch"), collapsed=context.collapsed(names)),
            EXPLANATION,
            mismatch_table(context, names),
            apart_table(context, names),
            *layer_figures(context, names),
        ],
    )


def mismatch_section(context: Context) -> Section:
    """The same for the core suite, with the gap by step."""
    names = list(context.summary["methods"])
    blocks: list[str | Table | Figure] = [EXPLANATION, mismatch_table(context, names)]
    gap = curve(context.runs, "gap_mean", names=names, ylabel="mean |Δ log p|", log=True)
    if gap is not None:
        blocks.append(Figure("gap", gap, "Train-rollout gap by step."))
    return Section("Train-rollout mismatch", blocks + layer_figures(context, names))


def mismatch_table(context: Context, names: Sequence[str]) -> Table:
    """One row a method: gap, mismatch in total and in the deeper half, both ways of rounding."""
    rows = []
    for name in context.run_of(list(names)):
        gap = trained(context.summary, name, "logprob_gap_mean")
        if not gap:
            continue
        tail = trained(context.summary, name, "logprob_gap_p99")
        rows.append(
            (
                label(name),
                show(estimate(gap), scale=1, digits=5),
                show(estimate(tail), scale=1, digits=4),
                show(estimate(trained(context.summary, name, "diagnostics", "diag/rtn/gap_mean")), scale=1, digits=5),
                *(show(estimate(trained(context.summary, name, "diagnostics", key)), digits=3) for _, key in COLUMNS),
                str(len(gap)),
            )
        )
    header = ("method", "gap mean", "gap p99", "gap mean, nearest", *(title for title, _ in COLUMNS), "n")
    caption = (
        "± over seeds; none with one seed. Nearest: the same policies with the trainer rounding to nearest; guidance "
        "repeats the rollout's rounding, so a small guided gap says that it was followed."
    )
    return Table(header, tuple(rows), caption)


def apart_table(context: Context, names: Sequence[str]) -> Table:
    """Share of mismatches one codeword apart, and its direction, by tensor, rounding to nearest."""
    rows = []
    for name in context.run_of(list(names)):
        for tensor, words in TENSORS.items():
            cells = [
                estimate(trained(context.summary, name, "diagnostics", f"diag/rtn/{metric}/{tensor}"))
                for metric in ("mismatch", "adjacent", "lower", "higher")
            ]
            if cells[0] is not None:
                rows.append((label(name), words, *(show(cell, digits=2) for cell in cells), str(cells[0].n)))
    header = (
        "method",
        "tensor",
        "mismatch (%)",
        "one codeword apart (%)",
        "trainer lower (%)",
        "trainer higher (%)",
        "n",
    )
    caption = "Trainer rounding to nearest; lower and higher are shares of all values; ± over seeds, none with one."
    return Table(header, tuple(rows), caption)


def layer_figures(context: Context, names: Sequence[str]) -> list[str | Table | Figure]:
    """Every figure by layer that has anything to show."""
    found: list[str | Table | Figure] = []
    for name, mode, metric, ylabel, caption in FIGURES:
        svg = layer_panels(context.summary, context.run_of(list(names)), mode=mode, metric=metric, ylabel=ylabel)
        if svg is not None:
            found.append(Figure(name, svg, f"{caption} {READING}"))
    return found
