"""The paper's accuracy tables, each with the paper's numbers beside this run's."""

from collections.abc import Mapping

from trace_rl.config.targets import target_names
from trace_rl.report.accuracy_claims import TABLE5_ROWS, table4_cells
from trace_rl.report.claim import accuracy_difference, show_difference
from trace_rl.report.context import Context
from trace_rl.report.document import Figure, Section, Table
from trace_rl.report.estimate import Estimate, difference, estimate, resolution_rule, show, trained
from trace_rl.report.labels import base, label
from trace_rl.report.sections.accuracy import accuracy_figures, accuracy_table
from trace_rl.report.sections.losses import loss_activity, mean_over_steps
from trace_rl.report.sections.opening import opening

COMPARABLE = (
    "The paper's numbers are for Qwen3.5-35B-A3B on LiveCodeBench v6, AIME24, AIME25 and HMMT25; here the mean over "
    "this run's tasks stands in their place. Directions compare, values do not."
)


def accuracy_page(
    context: Context, *, target: str, title: str, reported: Mapping[str, object], topics: tuple[str, ...] = ()
) -> Section:
    """Opening, claims, and the table of one target's methods."""
    names = context.run_of(target_names(context.config, target))
    return Section(
        title,
        [
            *opening(context.about(target, *topics), collapsed=context.collapsed(names)),
            f"{COMPARABLE} {resolution_rule(context.num_seeds)}",
            accuracy_table(context, names, reported=reported),
        ],
    )


def table1(context: Context) -> Section:
    """The main comparison."""
    section = accuracy_page(
        context,
        target="table1",
        title="Table 1: every method",
        reported=context.paper["table1"]["average"],
        topics=("table2",),
    )
    names = context.run_of(target_names(context.config, "table1"))
    section.blocks += accuracy_figures(context, names, prefix="table1") if names else []
    section.blocks += loss_activity(context, names)
    return section


def table4(context: Context) -> Section:
    """MXFP4, with what guidance leaves of the gap in each format."""
    cells, numbers = table4_cells(context.summary), context.paper["table4"]
    reported = {name: numbers[column][method] for column, found in cells.items() for method, name in found.items()}
    section = accuracy_page(context, target="table4", title="Table 4: MXFP4", reported=reported)
    section.blocks.append(guidance_table(context, context.run_of(target_names(context.config, "table4"))))
    return section


def table5(context: Context) -> Section:
    """Bits and layers of guidance, with what each costs in bytes and leaves of the gap."""
    numbers = context.paper["table5"]
    reported = {name: numbers[row] for name, row in TABLE5_ROWS.items()}
    section = accuracy_page(context, target="table5", title="Table 5: how much guidance", reported=reported)
    names = context.run_of(target_names(context.config, "table5"))
    section.blocks += [
        "Trained here: bits and layers varied one at a time from one bit in the deeper half. The gap of every "
        "combination of bits, layers, tensors and scale bits, on fixed trajectories, is in the target `mismatch`.",
        guidance_table(context, names),
        against_base(context, names),
    ]
    return section


def guidance_table(context: Context, names: list[str]) -> Table:
    """Bytes, gap and mismatch of each kind of guidance."""
    rows = []
    for name in names:
        gap, nearest, guided, whole = (
            estimate(trained(context.summary, name, *keys))
            for keys in (
                ("logprob_gap_mean",),
                ("diagnostics", "diag/rtn/gap_mean"),
                ("diagnostics", "diag/own/mismatch/guided"),
                ("diagnostics", "diag/own/mismatch"),
            )
        )
        size = estimate(trained(context.summary, name, "guidance_bytes_per_token"))
        rows.append(
            (
                label(name),
                show(size, scale=1, digits=0) if size else "–",
                show(gap, scale=1, digits=5),
                show(nearest, scale=1, digits=5),
                show(guided, digits=3),
                show(whole, digits=3),
                failures(context, name),
                str(len(context.summary["methods"][name])),
            )
        )
    header = (
        "method",
        "bytes per token",
        "mean abs Δ log p",
        "the same, rounding to nearest",
        "mismatch, guided tensors (%)",
        "mismatch, all (%)",
        "block scales not recovered, diagnostic batches / noticed in training (%)",
        "n",
    )
    caption = (
        "Gap over all steps, as the method rounds, and with the same policies rounding to nearest on the diagnostic "
        "batches: guidance repeats the rollout's rounding, so a small guided gap says that it was followed, not that "
        "the policy rounds well by itself. Codewords on diagnostic batches, as the method rounds."
    )
    return Table(header, tuple(rows), caption)


def failures(context: Context, name: str) -> str:
    """Share of block scales that two bits did not recover, of the guided tensors: all, and those training noticed."""
    method = context.methods.get(name)
    guidance = getattr(method, "guidance", None)
    if guidance is None or guidance.scale_bits == 8:
        return "–"
    every = trained(context.summary, name, "diagnostics", "diag/own/scale_unrecovered/guided")
    noticed = trained(context.summary, name, "guidance_scales_uncertain")
    return " / ".join(show(estimate(values), digits=3) for values in (every, noticed))


def table6(context: Context) -> Section:
    """Score centering."""
    numbers = context.paper["table6"]
    section = accuracy_page(
        context,
        target="table6",
        title="Table 6: score centering",
        reported={"sc": numbers["score_centering"], "trace": numbers["trace"]},
    )
    names = context.run_of(target_names(context.config, "table6"))
    section.blocks += [largest_gaps(context, names), *loss_activity(context, names)]
    return section


def largest_gaps(context: Context, names: list[str]) -> Table:
    """The largest log-prob difference of a step: its mean over steps, and the largest of all."""
    low, high = context.paper["table6"]["sc_logprob_diff_max"]
    rows = []
    for name in names:
        largest = estimate(trained(context.summary, name, "logprob_gap_max"))
        rows.append(
            (
                label(name),
                f"{low}–{high}" if name == "sc" else "not reported",
                show(mean_over_steps(context, name, "gap_max"), scale=1, digits=2),
                show(largest, scale=1, digits=2),
                str(len(context.summary["methods"][name])),
            )
        )
    header = ("method", "paper, max", "largest of a step, mean over steps", "largest of all steps", "n")
    return Table(header, tuple(rows), "|log pi_train - log pi_rollout| of a token, as the method computes it.")


def table7(context: Context) -> Section:
    """Quantization afterwards."""
    return accuracy_page(
        context,
        target="table7",
        title="Table 7: quantizing the BF16 policy afterwards",
        reported=context.paper["table7"],
    )


def ablations(context: Context) -> Section:
    """One thing switched off at a time; the paper's accounts give no numbers for it."""
    names = context.run_of(target_names(context.config, "ablations"))
    blocks: list[str | Table | Figure] = [
        *opening([], collapsed=context.collapsed(names), silent=True),
        resolution_rule(context.num_seeds),
        against_base(context, names),
        accuracy_table(context, names),
        guidance_table(context, names),
    ]
    return Section("Ablations", blocks)


def resolution(found: Estimate) -> str:
    """Whether a difference is beyond its error."""
    if found.source == "none" and found.mean:
        return "error unknown"
    return "yes" if found.resolved else "no"


def against_base(context: Context, names: list[str]) -> Table:
    """Each variant against its own base: paired differences of accuracy and gap."""
    rows = []
    for name in names:
        if name == base(name) or base(name) not in names:
            continue
        compared = accuracy_difference(context.summary, name, base(name))
        gap = difference(
            trained(context.summary, name, "logprob_gap_mean"), trained(context.summary, base(name), "logprob_gap_mean")
        )
        if compared is None or gap is None:
            continue
        accuracy = compared[1]
        rows.append(
            (
                label(name),
                show_difference(accuracy),
                resolution(accuracy),
                show(gap, scale=1, digits=5, signed=True),
                resolution(gap),
                str(gap.n),
            )
        )
    header = ("variant, against its base", "accuracy (points)", "resolved?", "mean abs Δ log p", "resolved?", "n")
    return Table(header, tuple(rows), "Paired over seeds where there are several.")
