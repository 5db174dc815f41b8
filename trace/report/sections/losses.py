"""How often each loss's own mechanism acted: a method whose mechanism never acts is plain QAT under another name."""

from collections.abc import Sequence

from trace_rl.config.method import RlMethod
from trace_rl.report.context import Context
from trace_rl.report.document import Table
from trace_rl.report.estimate import Estimate, Value, estimate, show
from trace_rl.report.labels import label

COLUMNS = (
    ("weights at the cap (%)", "is_truncated"),
    ("clipped or outside the band (%)", "clip_fraction"),
    ("gated (%)", "loss/gated"),
    ("repaired (%)", "loss/repaired"),
    ("centering, per token", "loss/centering"),
)
MECHANISMS = {
    "tbpo": ("trust band", ("loss/dropped_positive", "loss/dropped_negative")),
    "triage": ("gates and repair", ("loss/gated", "loss/repaired")),
    "score_centering": ("centering term", ("loss/centering",)),
}
"""Loss -> its mechanism in words, and the metrics that count it."""


def loss_activity(context: Context, names: Sequence[str]) -> list[str | Table]:
    """Which mechanisms never acted, and how often each did; nothing where no run logged it."""
    idle, rows = [], []
    for name in context.run_of(list(names)):
        cells = {key: mean_over_steps(context, name, key) for _, key in COLUMNS}
        if cells["is_truncated"] is None:
            continue
        method = context.methods.get(name)
        if isinstance(method, RlMethod) and method.loss.kind in MECHANISMS:
            words, keys = MECHANISMS[method.loss.kind]
            counted = [found for key in keys if (found := mean_over_steps(context, name, key)) is not None]
            if counted and not any(found.mean for found in counted):
                idle.append(f"{label(name)} ({words})")
        shares = [show(cells[key], scale=1 if key == "loss/centering" else 100, digits=4) for _, key in COLUMNS]
        rows.append((label(name), *shares, str(cells["is_truncated"].n)))
    if not rows:
        return []
    blocks: list[str | Table] = []
    if idle:
        blocks.append(
            f"A mechanism that never acted in this run, so that the method is QAT but for its cap: {'; '.join(idle)}."
        )
    header = ("method", *(title for title, _ in COLUMNS), "n")
    caption = (
        "Shares of response tokens, means over steps; ± over seeds, none with one. With one update per rollout the "
        "clipped ratio is 1 where nothing is stale or the old policy is the current one, so neither clipping nor a "
        "trust band can act there. Centering: sum of the coefficients' magnitudes."
    )
    return [*blocks, Table(header, tuple(rows), caption)]


def mean_over_steps(context: Context, name: str, key: str) -> Estimate | None:
    """A step metric's mean over the steps that have it, over seeds; None where no step has it."""
    values = {}
    for (method, seed), rows in context.runs.items():
        found = [row[key] for row in rows if key in row] if method == name else []
        if found:
            values[str(seed)] = Value(sum(found) / len(found))
    return estimate(values)
