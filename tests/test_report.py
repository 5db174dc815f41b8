"""The report: verdicts that know their error bars, disagreement first, one self-contained page."""

import re

import pytest
import yaml

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.load import load_suite
from trace_rl.report.claims import Estimate, average, claims, parity, verdict
from trace_rl.report.collect import by_task
from trace_rl.report.document import write
from trace_rl.report.page import PAPER, build

TASKS = ("mini_math", "mini_code")


def score(mean: float, *, n: int = 400) -> dict:
    return {"mean": mean, "stderr": (mean * (1 - mean) / n) ** 0.5, "n": n}


def record(*, fp4: float, bf16: float, trained: bool = True, gap: float = 0.01, guidance_bytes: float = 0.0) -> dict:
    accuracy = {task: {"fp4": score(fp4), "bf16": score(bf16)} for task in TASKS}
    if not trained:
        keys = (
            "logprob_gap_mean",
            "logprob_gap_p99",
            "codeword_mismatch",
            "guidance_bytes_per_token",
            "step_s",
            "steps",
        )
        return {"accuracy": accuracy, "collapsed": None, "diagnostics": None} | dict.fromkeys(keys)
    diagnostics = {
        f"diag/{mode}/mismatch/{t}/{layer}": 0.1
        for mode in ("own", "rtn")
        for t in ("k", "v", "fc1")
        for layer in (0, 1)
    }
    diagnostics |= {"diag/own/adjacent": 0.995, "diag/own/mismatch/deeper_half": gap, "diag/rtn/mismatch": 0.2}
    return {
        "accuracy": accuracy,
        "logprob_gap_mean": gap,
        "logprob_gap_p99": 10 * gap,
        "codeword_mismatch": gap,
        "guidance_bytes_per_token": guidance_bytes,
        "step_s": {"generate": 1.0, "train_forward": 0.5, "step": 1.6},
        "quantize_s": {"activations": 0.05, "weights": 0.01},
        "reward_start": 0.5,
        "reward_end": 0.7,
        "reward_gain": 0.2,
        "reward_window_steps": 10,
        "steps": 100,
        "collapsed": False,
        "diagnostics": diagnostics,
    }


@pytest.fixture
def summary() -> dict:
    start = {task: {"fp4": score(0.4), "bf16": score(0.5)} for task in TASKS}
    return {
        "run": "made-up",
        "methods": {
            "bf16": {"0": record(fp4=0.60, bf16=0.75, gap=0.003)},
            "fp4_naive": {"0": record(fp4=0.62, bf16=0.70, gap=0.04)},
            "qat": {"0": record(fp4=0.60, bf16=0.61, gap=0.03)},
            "trace": {"0": record(fp4=0.74, bf16=0.73, gap=0.003, guidance_bytes=204)},
            "trace_full": {"0": record(fp4=0.75, bf16=0.73, gap=0.001, guidance_bytes=1224)},
            "ptq_nvfp4": {"0": record(fp4=0.60, bf16=0.75, trained=False)},
        },
        "start": {"accuracy": start},
        "hardware": {"cpu": "a processor", "cores": 2, "accelerators": [], "platform": "linux"},
        "versions": {"python": "3.11"},
        "commit": {"id": "abc", "dirty": True},
    }


@pytest.fixture
def paper() -> dict:
    return yaml.safe_load(PAPER.read_text())


def test_verdicts_know_their_error_bars():
    assert verdict(Estimate(0.05, 0.03, 400), expected=1) == "not resolved"
    assert verdict(Estimate(0.07, 0.03, 400), expected=1) == "same direction"
    assert verdict(Estimate(-0.07, 0.03, 400), expected=1) == "opposite direction"


def test_on_par_needs_a_small_error_bar():
    assert parity(Estimate(0.0, 0.01, 800)) == "same direction"
    assert parity(Estimate(0.0, 0.04, 50)) == "not resolved"
    assert parity(Estimate(-0.03, 0.01, 800)) == "opposite direction"
    assert parity(Estimate(0.0, 0.0, 16)) == "not resolved"


def test_average_pools_tasks_and_takes_the_larger_error(summary):
    one = average(summary, "qat", "fp4")
    assert one.mean == pytest.approx(0.60)
    assert one.stderr == pytest.approx(score(0.6)["stderr"] / 2**0.5)
    assert one.n == 800
    summary["methods"]["qat"]["1"] = record(fp4=0.80, bf16=0.61)
    both = average(summary, "qat", "fp4")
    assert both.mean == pytest.approx(0.70)
    assert both.stderr == pytest.approx(0.1)  # seeds differ by far more than the evaluation's own error
    assert average(summary, "absent", "fp4") is None


def test_a_single_problem_resolves_nothing():
    single = {"mean": 1.0, "stderr": None, "n": 1}
    tasks = by_task({"executions": {"fp4": {"mini_math": single}, "bf16": {"mini_math": single | {"mean": 0.0}}}})
    summary = {"methods": {"bf16": {"0": {"accuracy": tasks}}}}
    difference = average(summary, "bf16", "fp4") - average(summary, "bf16", "bf16")
    assert difference.mean == 1.0
    assert verdict(difference, expected=1) == parity(difference) == "not resolved"


def test_claims_follow_the_numbers(summary, paper):
    found = {claim.statement: claim.verdict for claim in claims(summary, paper)}
    assert found["Plain FP4 QAT loses accuracy against BF16 RL"] == "same direction"
    assert found["TRACE beats plain QAT"] == "same direction"
    assert found["Compact guidance is a sixth of full guidance (bytes per token)"] == "same direction"
    assert found["Mismatching codewords lie one step apart"] == "same direction"
    summary["methods"]["trace"]["0"]["accuracy"] = record(fp4=0.3, bf16=0.3)["accuracy"]
    turned = {claim.statement: claim.verdict for claim in claims(summary, paper)}
    assert turned["TRACE beats plain QAT"] == "opposite direction"
    assert turned["TRACE in FP4 execution is on par with BF16 RL in BF16 execution"] == "opposite direction"


def test_claims_about_absent_methods_are_left_out(summary, paper):
    for name in ("trace", "trace_full"):
        del summary["methods"][name]
    assert not any("TRACE" in claim.statement for claim in claims(summary, paper))


def artifacts() -> dict:
    return {
        "calibration": {
            "num_tokens": 100,
            "num_idle_experts": 1,
            "format_relative_mse": {"gate_up": {"nvfp4": 0.009, "mxfp4": None}},
        },
        "audit": {"num_checked": 30, "differences": []},
        "parity": {"rows": [{"phase": "start", "mode": "bf16", "gap_mean": 0.003, "threshold": 0.02, "verdict": "ok"}]},
        "bench": {
            "rows": [
                {
                    "mode": "bf16",
                    "num_sequences": 64,
                    "output_length": 16,
                    "tokens_per_s": {"median": 3000.0, "min": 2900.0, "max": 3100.0},
                    "ratio_to_bf16": 1.0,
                    "guidance_bytes_per_token": 0,
                }
            ],
            "recording_cost": [
                {
                    "workload": "decode",
                    "mode": "fp4 + compact",
                    "num_sequences": 64,
                    "wall_percent": {"median": 2.0, "low": 1.0, "high": 3.0, "min": 0.5, "max": 4.0, "n": 10},
                    "cpu_percent": {"median": 2.5, "low": None, "high": None, "min": 1.5, "max": 4.5, "n": 3},
                }
            ],
            "environment": {"load": 0.3},
        },
    }


def rendered(summary: dict, repository, out) -> tuple[str, str]:
    config = ExperimentConfig()
    runs = {
        (name, 0): [
            {"step": i, "reward": 0.5, "gap_mean": 0.01, "entropy": 0.4, "response_length": 20.0} for i in range(20)
        ]
        for name in ("bf16", "trace")
    }
    methods = load_suite(config, root=repository)
    document = build(
        summary, config=config, methods=methods, runs=runs, artifacts=artifacts(), seconds={"train/trace": 61.0}
    )
    write(document, out)
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
    assert "TRACE beats plain QAT" in opening and "qat seed 0" in opening


def test_the_same_numbers_give_the_same_bytes(summary, repository, tmp_path):
    assert rendered(summary, repository, tmp_path / "a") == rendered(summary, repository, tmp_path / "b")
