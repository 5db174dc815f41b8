"""The report of the core suite: claims that follow the numbers, disagreement first, one self-contained page."""

import re

import pytest
from report_runs import artifacts, over_seeds, record, steps_of, summary_of

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.load import load_suite
from trace_rl.report.claims import claims
from trace_rl.report.context import Context
from trace_rl.report.document import write
from trace_rl.report.page import build
from trace_rl.report.paper import paper_numbers


@pytest.fixture
def summary() -> dict:
    return summary_of(
        {
            "bf16": {"0": record(fp4=0.60, bf16=0.75, gap=0.003)},
            "fp4_naive": {"0": record(fp4=0.62, bf16=0.70, gap=0.04, step_s=1.5)},
            "qat": {"0": record(fp4=0.60, bf16=0.61, gap=0.03)},
            "trace": {"0": record(fp4=0.74, bf16=0.73, gap=0.003, guidance_bytes=204)},
            "trace_full": {"0": record(fp4=0.75, bf16=0.73, gap=0.001, guidance_bytes=1224)},
            "ptq_nvfp4": {"0": record(fp4=0.60, bf16=0.75, trained=False)},
        }
    )


@pytest.fixture
def paper() -> dict:
    return paper_numbers()


def verdicts(summary: dict, paper: dict) -> dict[str, str]:
    return {claim.statement: claim.verdict for claim in claims(summary, paper)}


def test_claims_follow_the_numbers(summary, paper):
    found = verdicts(summary, paper)
    assert found["Plain FP4 QAT loses accuracy against BF16 RL"] == "same direction"
    assert found["TRACE beats plain QAT"] == "same direction"
    assert found["Compact guidance is a sixth of full guidance (bytes per token)"] == "same direction"
    for statement in (
        "Mismatching codewords lie one step apart (plain QAT)",
        "Corrections to a lower codeword are concentrated in the deeper layers (TRACE)",
    ):
        assert found[statement] == "same direction, error unknown"  # one seed
    step = found["A step of TRACE takes longer than one of naive FP4 (here FP4 is emulated on CPU)"]
    assert step == "not tested: timed beside other jobs"
    summary["methods"]["trace"]["0"]["accuracy"] = record(fp4=0.3, bf16=0.3)["accuracy"]
    turned = verdicts(summary, paper)
    assert turned["TRACE beats plain QAT"] == "opposite direction"
    assert turned["TRACE in FP4 execution is on par with BF16 RL in BF16 execution"] == "opposite direction"


def test_three_seeds_decide_by_their_pairs(summary, paper):
    noisy = over_seeds(fp4=[0.50, 0.62, 0.74], bf16=[0.6] * 3, gap=0.03)
    summary["methods"]["qat"] = noisy
    summary["methods"]["trace"] = over_seeds(fp4=[0.72, 0.60, 0.75], bf16=[0.6] * 3, gap=0.003)
    assert verdicts(summary, paper)["TRACE beats plain QAT"] == "not resolved"
    summary["methods"]["trace"] = over_seeds(fp4=[0.55, 0.675, 0.79], bf16=[0.6] * 3, gap=0.003)
    assert verdicts(summary, paper)["TRACE beats plain QAT"] == "same direction"


def test_a_gap_that_scatters_over_seeds_is_not_resolved(summary, paper):
    statement = "Guidance closes the log-prob gap between trainer and rollout (mean |Δ log p|, qat → trace)"
    for name, gaps in (("qat", (0.02, 0.04, 0.03)), ("trace", (0.03, 0.01, 0.02))):
        summary["methods"][name] = {str(s): record(fp4=0.6, bf16=0.6, gap=gap) for s, gap in enumerate(gaps)}
    assert verdicts(summary, paper)[statement] == "not resolved"


def test_claims_about_absent_methods_are_left_out(summary, paper):
    for name in ("trace", "trace_full"):
        del summary["methods"][name]
    assert not any("TRACE" in claim.statement for claim in claims(summary, paper))


def test_cells_the_paper_does_not_report_say_so(summary, paper):
    rows = {claim.statement: claim for claim in claims(summary, paper)}
    assert "qat not reported" in rows["HMMT25 alone"].paper
    assert rows["HMMT25 alone"].verdict == "not tested"
    transfer = rows["Qwen3.5-35B-A3B, computed from the record layout: one RL step, full, at 300 GB/s"]
    assert (transfer.paper, transfer.here, transfer.verdict) == ("not reported", "186 s", "not tested")


def test_the_papers_bytes_are_reproduced(summary, paper):
    rows = [c for c in claims(summary, paper) if c.statement.startswith("Qwen3.5-35B-A3B, computed")]
    assert [claim.verdict for claim in rows] == ["agrees, computed"] * 5 + ["not tested"]


def rendered(summary: dict, repository, out) -> tuple[str, str]:
    config = ExperimentConfig()
    context = Context(
        summary=summary,
        config=config,
        methods=load_suite(config, root=repository),
        runs={(name, 0): steps_of(seed=index) for index, name in enumerate(("bf16", "trace"))},
        artifacts=artifacts(),
        seconds={"train/trace/seed0": 61.0},
    )
    write(build(context), out)
    return (out / "index.html").read_text(), (out / "report.md").read_text()


def test_the_page_is_self_contained_and_complete(summary, repository, tmp_path):
    html, markdown = rendered(summary, repository, tmp_path)
    assert not re.search(r'(src|href)="(?!#)(?!http://www\.w3\.org)', html.replace('xlink:href="#', 'href="#'))
    assert html.count("<svg") >= 6
    for text in (html, markdown):
        assert "ptq_nvfp4" in text and "Choices the paper does not state" in text
        assert "75.3" in text  # the paper's number
    for name in re.findall(r"\]\((\w+\.svg)\)", markdown):
        assert (tmp_path / name).is_file()


def test_disagreement_and_collapse_come_first(summary, repository, tmp_path):
    summary["methods"]["trace"]["0"]["accuracy"] = record(fp4=0.3, bf16=0.3)["accuracy"]
    summary["methods"]["qat"]["0"]["collapsed"] = True
    _, markdown = rendered(summary, repository, tmp_path)
    opening = markdown[: markdown.index("## ")]
    assert opening.index("disagrees with the paper") < opening.index("Collapsed runs")
    assert "TRACE beats plain QAT" in opening and "qat 1 of 1" in opening


def test_the_same_numbers_give_the_same_bytes(summary, repository, tmp_path):
    assert rendered(summary, repository, tmp_path / "a") == rendered(summary, repository, tmp_path / "b")
