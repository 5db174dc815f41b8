"""How well a trainer's importance ratio tracks the engine's own when the rollout is stale (`trace_rl.stages.ratio`)."""

from typing import Any

from trace_rl.report.context import Context
from trace_rl.report.document import Figure, Table
from trace_rl.report.estimate import Estimate, show
from trace_rl.report.figures.points import point_panels
from trace_rl.report.sections.gaps import COMPARISONS, FORWARDS
from trace_rl.report.sections.gather import Picked, gather, seeds_note


def ratio_blocks(context: Context) -> list[str | Table | Figure]:
    """How well each trainer's log-ratio tracks the engine's, and the gap by number of updates."""
    found = context.analysis.get("ratio") or {}
    if not found:
        return []
    blocks: list[str | Table | Figure] = [ratio_reading(found)]
    for kind, words in (
        (
            "estimates",
            "Trainer's new log-prob minus the rollout's old one, as the truncated weight of old policy current has it",
        ),
        (
            "differences",
            "Trainer's new log-prob minus the trainer's old one, both rounding alike, as the clipped ratio of old "
            "policy sampling has it",
        ),
    ):
        blocks.append(ratio_table(found, kind=kind, words=words))
    figure = tracking_figure(found)
    blocks += [figure] if figure is not None else []
    blocks += [truth_table(found), gap_table(found), *staleness_part(found)]
    return blocks


def updates_of(found: dict[int, dict[str, Any]]) -> list[int]:
    """Numbers of updates that were measured."""
    return sorted({row["updates"] for artifact in found.values() for row in artifact["fp4"]["rows"]})


def ratio_of(
    found: dict[int, dict[str, Any]], *, kind: str, forward: str, updates: int, key: str, precision: str = "fp4"
) -> Estimate | None:
    """One number of the ratio table over seeds; ``smooth.slope`` is that against a BF16 engine's log-ratio."""
    *parents, last = key.split(".")

    def pick(artifact: dict[str, Any]) -> Picked:
        for row in artifact[precision]["rows"]:
            cell = row.get(kind, {}).get(forward) if row["updates"] == updates else None
            if cell is not None:
                cell = cell.get(parents[0], {}) if parents else cell
                return cell.get(last), cell.get(f"{last}_stderr")
        return None

    return gather(found, pick)


def ratio_reading(found: dict[int, dict[str, Any]]) -> str:
    """What one update ahead looks like, in a sentence."""
    update = next((number for number in updates_of(found) if number), 1)
    texts, slopes = [], []
    for forward in ("bf16", "qat", "trace", "trace_all"):
        value = ratio_of(found, kind="estimates", forward=forward, updates=update, key="correlation")
        if value is not None:
            texts.append(f"{FORWARDS[forward]} {show(value, scale=1, digits=2)}")
        value = ratio_of(found, kind="estimates", forward=forward, updates=update, key="smooth.slope")
        if value is not None:
            slopes.append(f"{FORWARDS[forward]} {show(value, scale=1, digits=2)}")
    without_flips = (
        " That correlation is no measure of the update alone: r and the trainer's log-ratio both subtract the log-prob "
        "the rollout sampled with, so whatever FP4 did to it is in both, except where guidance repeats it. A BF16 "
        "engine's log-ratio of the same tokens holds the update and no FP4 flip; slope of each trainer's log-ratio on "
        f"it (1: sees the update, 0: blind to it): {', '.join(slopes)}."
    )
    if not texts:
        return "No correlation of the trainer's log-ratio with the engine's own could be computed."
    return (
        "Correlation of the trainer's log-ratio (its new log-prob minus the rollout's old one) with the engine's own "
        f"after {update} update{'s' if update > 1 else ''}: {', '.join(texts)}."
    ) + (without_flips if slopes else "")


def tracking_figure(found: dict[int, dict[str, Any]]) -> Figure | None:
    """Correlation with r by number of updates, for both log-ratios."""
    groups = {}
    for kind, title in (("estimates", "new trainer − old rollout"), ("differences", "new trainer − old trainer")):
        groups[title] = {
            forward: {
                updates: value
                for updates in updates_of(found)
                if updates
                and (value := ratio_of(found, kind=kind, forward=forward, updates=updates, key="correlation"))
            }
            for forward in FORWARDS
        }
    svg = point_panels(groups, xlabel="updates", ylabel="correlation with r", names=FORWARDS)
    caption = "How well the trainer's log-ratio tracks the engine's own, by number of updates since the rollout."
    return None if svg is None else Figure("ratio_correlation", svg, caption)


def ratio_table(found: dict[int, dict[str, Any]], *, kind: str, words: str) -> Table:
    """Error, correlation, slope and effective sample size by forward and number of updates."""
    rows = []
    unreplayed = {name: words for name, words in COMPARISONS.items() if name in ("bf16_no_r3", "qat_no_r3")}
    for precision, forwards in (("fp4", FORWARDS | unreplayed), ("bf16", {"bf16": "BF16 engine and trainer"})):
        for forward, text in forwards.items():
            for updates in updates_of(found):
                cells = {
                    key: ratio_of(found, kind=kind, forward=forward, updates=updates, key=key, precision=precision)
                    for key in (
                        "mean_abs",
                        "mean_abs_error",
                        "correlation",
                        "slope",
                        "smooth.slope",
                        "ess",
                        "truncated",
                    )
                }
                if cells["mean_abs"] is None:
                    continue
                rows.append(
                    (
                        text,
                        str(updates),
                        show(cells["mean_abs"], scale=1, digits=4),
                        show(cells["mean_abs_error"], scale=1, digits=4),
                        show(cells["correlation"], scale=1, digits=2),
                        show(cells["slope"], scale=1, digits=3),
                        show(cells["smooth.slope"], scale=1, digits=3),
                        show(cells["ess"], scale=1, digits=3),
                        show(cells["truncated"], digits=2),
                    )
                )
    header = (
        "trainer",
        "updates",
        "mean |log ratio|",
        "mean abs error",
        "correlation",
        "slope",
        "slope on a BF16 engine's",
        "effective sample size",
        "truncated (%)",
    )
    caption = f"{words}, against r, the engine's own log-ratio on the old tokens; {seeds_note(found)}."
    return Table(header, tuple(rows), caption)


def truth_table(found: dict[int, dict[str, Any]]) -> Table:
    """How large r is, beside the engine's own noise and a shuffled update of the same size."""
    rows = []
    for precision in ("fp4", "bf16"):
        for name, words in (("floor", "no update: decoding against prefill"), ("shuffled", "update shuffled")):
            value = gather(found, lambda a, p=precision, n=name: (a[p][n]["mean_abs"], a[p][n]["mean_abs_stderr"]))
            rows.append((precision.upper(), words, show(value, scale=1, digits=5)))
        for updates in updates_of(found):

            def pick(artifact: dict[str, Any], precision: str = precision, updates: int = updates) -> Picked:
                for row in artifact[precision]["rows"]:
                    if row["updates"] == updates:
                        return row["truth"]["mean_abs"], row["truth"]["mean_abs_stderr"]
                return None

            value = gather(found, pick)
            if updates and value is not None:
                rows.append((precision.upper(), f"{updates} updates", show(value, scale=1, digits=5)))
    caption = f"Size of the true log-ratio; {seeds_note(found)}."
    return Table(("engine", "old tokens, old to new policy", "mean |r|"), tuple(rows), caption)


def gap_table(found: dict[int, dict[str, Any]]) -> Table:
    """Mean |log pi_train,new - log pi_rollout,old| by number of updates."""
    updates = [str(number) for number in updates_of(found)]
    names = list(dict.fromkeys(name for artifact in found.values() for name in artifact["gap_by_updates"]))
    rows = tuple(
        (
            FORWARDS.get(name) or COMPARISONS.get(name, name),
            *(
                show(
                    gather(found, lambda a, n=name, u=number: (a["gap_by_updates"].get(n, {}).get(u), None)),
                    scale=1,
                    digits=4,
                )
                for number in updates
            ),
        )
        for name in names
    )
    header = ("trainer", *(f"{number} updates" for number in updates))
    return Table(header, rows, f"Gap to a rollout of an older policy; {seeds_note(found)}.")


def staleness_part(found: dict[int, dict[str, Any]]) -> list[Table]:
    """What staleness adds to the gap, by forward and number of updates: the source that fresh trajectories have not."""
    later = [number for number in updates_of(found) if number]
    rows = []
    for precision, forwards in (("fp4", FORWARDS), ("bf16", {"bf16": "BF16 engine and trainer"})):
        for forward, text in forwards.items():
            parts = [
                ratio_of(found, kind="staleness", forward=forward, updates=updates, key="mean", precision=precision)
                for updates in later
            ]
            if any(part is not None for part in parts):
                rows.append((text, *(show(part, scale=1, digits=4, signed=True) for part in parts)))
    if not rows:
        return []
    caption = (
        "Staleness as a source of the gap, beside those of the decomposition on fresh trajectories: gap of the newer "
        "trainer minus gap of the trainer that sampled, token by token on the same rollout. Below 0: the newer policy "
        f"agrees better with what the older one sampled; {seeds_note(found)}."
    )
    header = ("trainer", *(f"{number} update{'s' if number > 1 else ''}" for number in later))
    return [Table(header, tuple(rows), caption)]
