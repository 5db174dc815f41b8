"""The staleness page: every verdict about methods alone, which pi_old each arm has, and how often clipping acted."""

import re

import pytest
from report_runs import SEEDS, a_context, over_seeds, ratio, record, section_text, steps_of, with_methods

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.load import parse_experiment
from trace_rl.config.targets import target_names
from trace_rl.report.context import Context
from trace_rl.report.document import Table
from trace_rl.report.labels import base, label
from trace_rl.report.sections.gaps import FORWARDS
from trace_rl.report.sections.ratios import staleness_part
from trace_rl.report.sections.staleness import (
    Comparison,
    comparison_table,
    comparisons,
    findings,
    staleness,
    staleness_grid,
)

CONTROLS = ("qat@ratio.old_policy=current", "trace@ratio.old_policy=current")
ARMS = ("bf16", "qat", "trace", "trace_anchored", *CONTROLS)


@pytest.fixture(scope="module")
def config() -> ExperimentConfig:
    return parse_experiment({"suite": {"seeds": list(SEEDS)}}, source="test")


def at_staleness(name: str, age: int) -> str:
    return f"{name}{'+' if '@' in name else '@'}training.staleness={age}"


@pytest.fixture
def stale(config) -> Context:
    """The arms at staleness 3, with their method files."""
    return with_methods(a_context(config, tuple(at_staleness(name, 3) for name in ARMS), num_steps=12))


@pytest.fixture
def grid() -> dict:
    return {(3e-4, 3): {label(name): at_staleness(name, 3) for name in ARMS}}


def test_one_method_alone_is_compared_with_nothing():
    tables = {"staleness": ["trace"], "staleness_only": [], "staleness_learning_rates": [3e-4]}
    config = parse_experiment({"suite": {"seeds": list(SEEDS)}, "tables": tables}, source="test")
    context = a_context(config, target_names(config, "staleness"), num_steps=12)
    shown = [block for block in staleness(context).blocks if isinstance(block, Table)]
    assert "resolved?" not in {name for table in shown for name in table.header}
    assert ["0", "1", "3"] in [[row[1] for row in table.rows] for table in shown]


def test_staleness_says_what_came_out_whichever_way(config):
    names = target_names(config, "staleness")
    context = a_context(config, names, num_steps=12)
    for name in names:
        if base(name) == "trace" and "staleness=3" in name:
            context.summary["methods"][name] = over_seeds(fp4=[0.30, 0.31, 0.32], bf16=[0.3] * 3)
            for seed in SEEDS:
                context.runs[name, seed] = steps_of(seed=seed, num=12, level=0.1)
    text = section_text(context, "staleness", "Staleness")
    worse = next(line for line in text.splitlines() if line.startswith("TRACE is worse than QAT"))
    assert "staleness 3" in worse and "staleness 0" not in worse
    assert "above trace at staleness 3" in text


def test_one_seed_decides_nothing_about_rewards(config):
    names = target_names(config, "staleness")
    context = a_context(config, names, num_steps=12)
    for name in names:
        context.summary["methods"][name] = {"0": record(fp4=0.5, bf16=0.5)}
        for seed in SEEDS[1:]:
            del context.runs[name, seed]
    text = section_text(context, "staleness", "Staleness")
    assert "TRACE is worse" not in text and "TRACE is better" not in text
    assert "are not told apart" in text


def pairs_of(found: list[Comparison]) -> dict[tuple[str, str], Comparison]:
    return {(pair.method, pair.reference): pair for pair in found if pair.measure == "reward area"}


def test_current_old_policies_are_compared_with_their_like(stale, grid):
    found = pairs_of(comparisons(stale, grid))
    assert len(found) == 5 + 4 + 1
    assert ("trace, old policy current", "qat, old policy current") in found
    assert ("trace, old policy current", "trace") in found
    for method in ("bf16", "trace_anchored"):  # their ratio is against the version that sampled
        assert {reference for name, reference in found if name == method} == {"qat", "trace"}


def test_a_method_file_with_the_current_old_policy_is_like_the_controls(stale, grid):
    name = at_staleness("trace_anchored", 3)
    method = stale.methods[name]
    stale.methods[name] = method.model_copy(update={"ratio": method.ratio.model_copy(update={"old_policy": "current"})})
    references = {reference for method, reference in pairs_of(comparisons(stale, grid)) if method == "trace_anchored"}
    assert references == {"qat", "trace", "qat, old policy current", "trace, old policy current"}


def ahead(context: Context, name: str) -> None:
    """Rewards of a method half a point above the others', in every seed and step."""
    for seed in SEEDS:
        context.runs[name, seed] = steps_of(seed=seed, num=12, level=0.9)


def test_rewards_of_different_executions_get_no_verdict(stale, grid):
    ahead(stale, at_staleness("bf16", 3))
    found = pairs_of(comparisons(stale, grid))
    assert found["bf16", "qat"].gap.resolved and found["bf16", "trace"].gap.resolved
    table = comparison_table(stale, grid)
    verdicts = {row[2]: row[-1] for row in table.rows}
    assert verdicts["bf16 − qat"] == verdicts["bf16 − trace"] == "other execution"
    assert "other execution" not in {verdicts[pair] for pair in verdicts if not pair.startswith("bf16")}
    assert "no effect of the method alone" in table.caption
    text = "\n".join(findings(stale, grid))
    assert "bf16" not in text
    assert len(table.rows) == 20  # of ten pairs, eight in the same execution; the last reward scatters in none
    assert "of the 8 comparisons of the table below whose rewards were sampled in the same execution" in text


def test_an_fp4_method_ahead_of_trace_is_still_a_finding(stale, grid):
    ahead(stale, at_staleness("trace_anchored", 3))
    text = "\n".join(findings(stale, grid))
    assert "trace_anchored above trace at staleness 3" in text


def test_rewards_in_another_format_are_another_execution(config):
    names = ("qat", "trace@format=mxfp4", "quads")
    context = with_methods(a_context(config, names, num_steps=12))
    grid = {(3e-4, 0): {label(name): name for name in names}}
    found = pairs_of(comparisons(context, grid))
    assert not found["trace, MXFP4 W4A4", "qat"].same_execution
    assert found["quads", "qat"].same_execution  # compensating residuals is what the method does


def test_one_seed_of_another_execution_is_labelled_too(stale, grid):
    for seed in SEEDS[1:]:
        for name in list(stale.summary["methods"]):
            del stale.runs[name, seed]
    verdicts = {row[2]: row[-1] for row in comparison_table(stale, grid).rows}
    assert verdicts["bf16 − qat"] == "other execution" and verdicts["trace − qat"] == "not resolved"


def test_the_opening_says_which_old_policy_each_arm_has(config):
    context = with_methods(a_context(config, target_names(config, "staleness"), num_steps=12))
    lines = section_text(context, "staleness", "Staleness").splitlines()
    sampling = next(line for line in lines if line.startswith("Old policy of the clipped ratio"))
    assert "the version that sampled the batch, as in GRPO, for bf16; qat; trace; trace_unpinned" in sampling
    assert "trace_anchored" in sampling and "current" not in sampling
    current = next(line for line in lines if line.startswith("Controls"))
    assert "qat, old policy current; trace, old policy current." in current
    assert "their clipped ratio is 1" in current and "truncated mismatch weight" in current
    assert lines.index(sampling) < lines.index(current)


def test_the_page_says_what_share_of_tokens_was_clipped(config):
    context = with_methods(a_context(config, target_names(config, "staleness"), num_steps=12))
    for (name, _), rows in context.runs.items():
        current = "old_policy=current" in name
        for row in rows:
            row |= {"is_truncated": 0.001 if current else 0.0, "clip_fraction": 0.0 if current else 0.0125}
    blocks = staleness(context).blocks
    (line,) = [block for block in blocks if isinstance(block, str) and block.startswith("Clipped tokens")]
    assert "old policy current" not in line and "staleness 0" not in line
    assert line.count("trace_anchored 1.25") == line.count("staleness") == 4
    tables = [block for block in blocks if isinstance(block, Table)]
    table = next(table for table in tables if "clipped or outside the band (%)" in table.header)
    column = table.header.index("clipped or outside the band (%)")
    clipped = {row[0]: row[column] for row in table.rows}
    assert len(clipped) == len(context.summary["methods"])
    for methods in staleness_grid(context).values():
        for name in methods.values():
            assert clipped[label(name)] == ("0.0000" if "old_policy=current" in name else "1.2500")


def test_the_page_counts_its_comparisons(config):
    names = target_names(config, "staleness")
    context = with_methods(a_context(config, names, num_steps=12))
    text = section_text(context, "staleness", "Staleness")
    resolved, compared, chance = map(int, re.search(r"(\d+) of the (\d+) comp.*? about (\d+) would", text).groups())
    assert resolved <= compared and chance == round(compared / 20) > 0
    shown = comparisons(context, staleness_grid(context))
    assert compared == sum(pair.same_execution for pair in shown if pair.measure == "reward area") < len(shown) / 2


def test_staleness_stands_as_a_source_of_the_gap():
    (table,) = staleness_part({seed: ratio() for seed in SEEDS})
    rows = {row[0]: row[1:] for row in table.rows}
    assert table.header == ("trainer", "1 update", "3 updates")
    assert all(row[0].startswith("+0.0011 ±") and row[1].startswith("+0.0033 ±") for row in rows.values())
    assert {"BF16 engine and trainer", FORWARDS["trace"], FORWARDS["qat"]} <= rows.keys()


def test_artifacts_without_updates_have_no_such_part():
    fresh = ratio()
    for precision in ("fp4", "bf16"):
        fresh[precision]["rows"] = fresh[precision]["rows"][:1]
    assert staleness_part({0: fresh}) == []
