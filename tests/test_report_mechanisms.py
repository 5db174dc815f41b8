"""Codewords, routing, seconds and bytes: what the claims decide on, and tables whose means say error and seeds."""

import re
from typing import get_args

import pytest
from report_runs import SEEDS, a_context, gap_sources, over_seeds, record, section_text, summary_of

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.guidance import LayerSet
from trace_rl.config.load import parse_experiment
from trace_rl.report.claim import Claim
from trace_rl.report.context import Context
from trace_rl.report.document import Document, Section, Table, write
from trace_rl.report.estimate import UNTIMED, Estimate
from trace_rl.report.mechanism_claims import adjacency_verdict, mechanism_claims
from trace_rl.report.paper import paper_numbers
from trace_rl.report.sections.factorial import whole_table
from trace_rl.report.sections.gaps import gap_sources as gap_sources_section
from trace_rl.report.sections.mismatch import apart_table, mismatch_table
from trace_rl.report.sections.opening import paragraphs
from trace_rl.report.sections.storage import recorded_table
from trace_rl.report.sections.time import quantization_table

LOWER = "Corrections to a lower codeword are concentrated in the deeper layers (TRACE)"
STEP = "A step of TRACE takes longer than one of naive FP4 (here FP4 is emulated on CPU)"
GAP = "Guidance closes the log-prob gap between trainer and rollout (mean |Δ log p|, qat → trace)"
JITTER = (-0.01, 0.0, 0.012)
"""Of the seeds."""


@pytest.fixture(scope="module")
def config() -> ExperimentConfig:
    return parse_experiment({"suite": {"seeds": list(SEEDS)}}, source="test")


def claim_of(summary: dict, statement: str) -> Claim:
    return next(claim for claim in mechanism_claims(summary, paper_numbers()) if claim.statement == statement)


def three_seeds(**settings) -> dict:
    return over_seeds(fp4=[0.5] * 3, bf16=[0.5] * 3, **settings)


def column(table: Table, title: str) -> list[str]:
    return [row[table.header.index(title)] for row in table.rows]


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (Estimate(0.995, 0.0, 1, "none"), "same direction, error unknown"),
        (Estimate(0.95, 0.0, 1, "none"), "weaker, error unknown"),
        (Estimate(0.5, 0.0, 1, "none"), "opposite direction, error unknown"),
        (Estimate(0.999, 0.001, 3, "seeds"), "same direction"),
        (Estimate(0.992, 0.001, 3, "seeds"), "not resolved"),
        (Estimate(0.95, 0.001, 3, "seeds"), "weaker"),
        (Estimate(0.5, 0.001, 3, "seeds"), "opposite direction"),
    ],
)
def test_adjacency_of_one_seed_has_no_known_error(share, verdict):
    assert adjacency_verdict(share) == verdict


def test_a_bare_shortfall_is_no_disagreement():
    (text, count) = paragraphs([Claim("mismatch", "One step apart", ">99 %", "95.0 %, n = 1", "weaker, error unknown")])
    assert text.startswith("Short of the paper's number in one seed, error unknown: One step apart")
    assert "disagreeing 0" in count and "one seed without an error 1" in count


def corrections(*, lower: tuple[float, ...], upper: tuple[float, ...]) -> Claim:
    """The claim for these shares of the corrections to lower and to higher codewords in the deeper half, by seed."""
    trace = three_seeds()
    for found, deep_lower, deep_upper in zip(trace.values(), lower, upper, strict=True):
        found["diagnostics"] |= {"diag/rtn/higher": 0.01, "diag/rtn/higher/deeper_half": 0.02 * deep_lower}
        found["diagnostics"] |= {"diag/rtn/lower": 0.01, "diag/rtn/lower/deeper_half": 0.02 * deep_upper}
    return claim_of(summary_of({"trace": trace}), LOWER)


def test_growth_of_both_directions_with_depth_is_no_concentration_of_one():
    found = corrections(lower=(0.70, 0.72, 0.71), upper=(0.71, 0.70, 0.72))
    assert found.verdict == "not resolved"
    assert found.here == (
        "71.0 ± 0.6 % of them in the deeper half, of corrections to a higher codeword 71.0 ± 0.6 % "
        "(difference +0.0 ± 1.0, n = 3)"
    )


def test_the_directions_of_correction_are_paired_by_seed():
    spread = (0.60, 0.70, 0.80)  # ten times the difference
    assert corrections(lower=tuple(s + 0.01 + 0.001 * i for i, s in enumerate(spread)), upper=spread).verdict == (
        "same direction"
    )
    assert corrections(lower=(0.60, 0.61, 0.62), upper=(0.70, 0.712, 0.719)).verdict == "opposite direction"


def test_one_seeds_directions_have_no_known_error():
    assert claim_of(summary_of({"trace": {"0": record(fp4=0.5, bf16=0.5)}}), LOWER).verdict == (
        "same direction, error unknown"
    )


def test_seconds_of_trainings_side_by_side_get_no_verdict():
    naive, trace = ({str(s): record(fp4=0.5, bf16=0.5, step_s=t + j) for s, j in enumerate(JITTER)} for t in (1.5, 2.5))
    found = claim_of(summary_of({"fp4_naive": naive, "trace": trace}), STEP)
    assert found.verdict == UNTIMED
    assert found.here == "1.50 ± 0.01 → 2.50 ± 0.01 s, +66.6 ± 0.3 %, n = 3"
    (text,) = paragraphs([found])
    assert text.startswith("Seconds without a verdict, because the trainings were timed beside other jobs")
    counted = next(line for line in paragraphs([found, claim_of(summary_of({"trace": trace}), LOWER)]) if "Of " in line)
    assert counted.startswith("Of 1 claims measured here")


def test_every_mean_of_a_claim_has_its_error_and_its_seeds():
    gaps = {"bf16": 0.003, "qat": 0.03, "trace": 0.004}
    methods = {
        name: {str(s): record(fp4=0.5, bf16=0.5, gap=gap * (1 + j)) for s, j in enumerate(JITTER)}
        for name, gap in gaps.items()
    }
    here = claim_of(summary_of(methods), GAP).here
    assert re.fullmatch(r"0.0300 ± \S+ → 0.0040 ± \S+, BF16 control 0.0030 ± 0.0000, n = 3", here)


def test_table_4_judges_and_shows_the_gap_of_each_format(config):
    gaps = {
        "qat@format=mxfp4": 0.012,
        "trace@format=mxfp4": 0.003,
        "qat@format=mxfp4_w4a8": 0.003,
        "trace@format=mxfp4_w4a8+guidance.tensors=k,v": 0.008,
    }
    context = a_context(config, tuple(gaps), num_steps=12)
    for name, gap in gaps.items():
        for found, jitter in zip(context.summary["methods"][name].values(), JITTER, strict=True):
            found["logprob_gap_mean"] = gap * (1 + jitter)
    statement = "Guidance closes the log-prob gap in MXFP4 {} (mean |Δ log p|, qat → trace)"
    closed, opened = (claim_of(context.summary, statement.format(words)) for words in ("W4A4 KV4", "W4A8 KV4"))
    assert closed.verdict == "same direction" and re.fullmatch(r"0.0120 ± \S+ → 0.0030 ± \S+, n = 3", closed.here)
    assert opened.verdict == "opposite direction"
    text = section_text(context, "table4", "Table 4")
    assert closed.here in text and "0.01201" in text and "0.00801" in text


def test_router_disagreement_is_the_methods_own_and_a_bf16_forwards_beside_it(config):
    context = a_context(config, ("qat", "trace"), num_steps=12)
    for name, share in (("qat", 0.01), ("trace", 0.001)):
        for found in context.summary["methods"][name].values():
            found["diagnostics"] |= {"diag/own/router_disagreement": share, "diag/off/router_disagreement": 0.02}
    table = mismatch_table(context, ["qat", "trace"])
    assert column(table, "router disagreement, method (%)") == ["1.000", "0.100"]
    assert column(table, "router disagreement, BF16 forward (%)") == ["2.000", "2.000"]
    text = section_text(context, "mismatch", "Codeword")
    assert "before replay overrides it, chooses other experts than the rollout did: in the method's own forward" in text


def scattered(config: ExperimentConfig) -> Context:
    """`trace` with numbers that scatter over three seeds."""
    context = a_context(config, ("trace",), num_steps=12)
    for found, jitter in zip(context.summary["methods"]["trace"].values(), JITTER, strict=True):
        found["diagnostics"]["diag/rtn/mismatch/k"] += jitter
        found["quantize_s"] = {"activations": 0.05 + jitter, "weights": 0.01}
        found["step_s"]["step"] += 10 * jitter
    return context


def test_what_rounding_takes_of_a_step_has_errors_and_seeds(config):
    table = quantization_table(scattered(config))
    assert table.rows == (("trace", "50.7 ± 6.4", "10.0", "1606.7 ± 63.6", "3.8 ± 0.2", "3"),)
    assert table.header[-1] == "n"


def test_mismatch_by_tensor_says_its_seeds(config):
    table = apart_table(scattered(config), ["trace"])
    assert column(table, "n") == ["3", "3", "3"]
    assert "±" in table.rows[1][2]


def test_bytes_of_seeds_that_differ_would_show(config):
    context = scattered(config)
    assert column(recorded_table(context, ["trace"]), "bytes per token, here") == ["144"]
    context.summary["methods"]["trace"]["0"]["guidance_bytes_per_token"] = 150.0
    assert column(recorded_table(context, ["trace"]), "bytes per token, here") == ["146 ± 2"]


def measured() -> dict:
    """One policy's part of the artifact, by seed, with a gap that tells combinations and seeds apart."""
    found = {seed: gap_sources()["policies"]["start"] for seed in SEEDS}
    for seed, policy in found.items():
        for row in policy["factorial"]:
            row["gap_mean"] = 0.01 / row["bits"] + 0.001 * seed
    return found


def test_every_measured_combination_of_guidance_is_in_one_table():
    before, after = measured(), measured()
    for policy in after.values():
        for row in policy["factorial"]:
            row["gap_mean"] *= 2
    table = whole_table({"policy before RL": before, "after": after})
    assert len(table.rows) == len(before[0]["factorial"]) == 4 * len(get_args(LayerSet)) * 2 * 3
    rows = {row[:4]: row[4:] for row in table.rows}
    assert len(rows) == len(table.rows)
    assert rows["2", "last quarter", "2", "KV"] == (
        "48",
        *("0.00600 ± 0.00058", "5.000", "0.3000", "3"),
        *("0.01200 ± 0.00115", "5.000", "0.3000", "3"),
    )
    assert rows["4", "all", "8", "activations and KV"][3] == "–"  # whole scales need no recovery


def test_a_combination_that_was_not_measured_is_not_there():
    found = measured()
    for policy in found.values():
        policy["factorial"] = policy["factorial"][:7]
    found[0]["factorial"] = found[0]["factorial"][1:]
    table = whole_table({"policy before RL": found})
    assert sorted(column(table, "n, policy before RL")) == ["2", *["3"] * 6]
    assert whole_table({"policy before RL": {0: {"factorial": []}}}) is None


def test_the_whole_table_is_folded_in_both_pages(config, tmp_path):
    context = a_context(config, ("trace",), num_steps=12, analysis={"gap_sources": {s: gap_sources() for s in SEEDS}})
    table = gap_sources_section(context).blocks[-1]
    assert {"n, policy before RL", "n, policy trained by TRACE"} <= set(table.header)
    write(Document("page", [], [Section("Folded", [table, "after"])]), tmp_path)
    html, markdown = ((tmp_path / name).read_text() for name in ("index.html", "report.md"))
    fold = "<details><summary>All 120 combinations of bits, layers, scale bits and tensors</summary>"
    for text in (html, markdown):
        inside = text[text.index(fold) : text.index("</details>")]
        assert inside.count("last quarter") == 24
        assert text.index("</details>") < text.index("after")
    assert f"{fold}\n\n| bits | guided layers |" in markdown and "\n\n</details>\n\nafter" in markdown
