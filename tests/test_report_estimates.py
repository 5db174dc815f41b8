"""Means, paired differences and verdicts: what is resolved with one seed and with three."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import over_seeds, record, score, summary_of
from scipy import stats

from trace_rl.report.collect import by_task
from trace_rl.report.estimate import (
    Estimate,
    Value,
    accuracies,
    average,
    difference,
    estimate,
    parity,
    resolution_rule,
    show,
    t_quantile,
    verdict,
)


def test_verdicts_know_their_error_bars():
    assert verdict(Estimate(0.05, 0.03, 1), expected=1) == "not resolved"
    assert verdict(Estimate(0.07, 0.03, 1), expected=1) == "same direction"
    assert verdict(Estimate(-0.07, 0.03, 1), expected=1) == "opposite direction"


def test_a_bare_number_neither_agrees_nor_disagrees():
    assert verdict(Estimate(0.5, 0.0, 1, "none"), expected=1) == "same direction, error unknown"
    assert verdict(Estimate(-0.5, 0.0, 1, "none"), expected=1) == "opposite direction, error unknown"
    assert verdict(Estimate(0.0, 0.0, 1, "none"), expected=1) == "not resolved"
    assert not Estimate(0.5, 0.0, 1, "none").resolved
    assert "beyond 4.3 standard errors" in resolution_rule(3) and "n = 3" in resolution_rule(3)
    assert "two standard errors of the evaluation" in resolution_rule(1)


def test_three_seeds_need_more_than_two_standard_errors():
    assert verdict(Estimate(0.07, 0.03, 3, "seeds"), expected=1) == "not resolved"
    assert verdict(Estimate(0.14, 0.03, 3, "seeds"), expected=1) == "same direction"


def test_on_par_needs_a_small_error_bar():
    assert parity(Estimate(0.0, 0.01, 1)) == "same direction"
    assert parity(Estimate(0.0, 0.04, 1)) == "not resolved"
    assert parity(Estimate(-0.03, 0.01, 1)) == "opposite direction"
    assert parity(Estimate(0.0, 0.0, 1)) == "not resolved"
    assert parity(Estimate(0.0, 0.02, 3, "seeds")) == "not resolved"  # 4.3 errors reach below the margin


@pytest.mark.parametrize("degrees", range(1, 41))
def test_the_t_quantile_is_students(degrees):
    exact = stats.t.ppf(0.975, degrees)
    assert t_quantile(degrees) == pytest.approx(exact, rel=0.01)
    assert t_quantile(degrees) >= exact - 5e-4  # never an easier test than the exact one


def test_the_error_of_one_seed_is_the_evaluations():
    one = average(summary_of({"qat": {"0": record(fp4=0.60, bf16=0.61)}}), "qat", "fp4")
    assert one.mean == pytest.approx(0.60)
    assert one.stderr == pytest.approx(score(0.6)["stderr"] / 2**0.5)
    assert (one.n, one.source) == (1, "evaluation")


def test_the_error_of_several_seeds_is_theirs():
    scores = [0.60, 0.80, 0.64]
    found = average(summary_of({"qat": over_seeds(fp4=scores, bf16=scores)}), "qat", "fp4")
    assert found.mean == pytest.approx(statistics.fmean(scores))
    assert found.stderr == pytest.approx(statistics.stdev(scores) / 3**0.5)
    assert (found.n, found.source) == (3, "seeds")
    assert average(summary_of({}), "absent", "fp4") is None


def test_pairing_removes_what_the_seeds_share():
    hard, easy = [0.40, 0.55, 0.70], [0.43, 0.581, 0.732]  # the spread of seeds is ten times the difference
    summary = summary_of({"qat": over_seeds(fp4=hard, bf16=hard), "trace": over_seeds(fp4=easy, bf16=easy)})
    gap = difference(accuracies(summary, "trace", "fp4"), accuracies(summary, "qat", "fp4"))
    assert gap.mean == pytest.approx(0.031)
    assert verdict(gap, expected=1) == "same direction"
    separate = [average(summary, name, "fp4") for name in ("trace", "qat")]
    assert separate[0].mean - separate[1].mean < separate[0].stderr


def test_only_common_seeds_are_paired():
    first = {"0": Value(0.5, 0.1), "2": Value(0.9, 0.1)}
    second = {"0": Value(0.4, 0.1), "1": Value(0.1, 0.1)}
    gap = difference(first, second)
    assert (gap.n, gap.source) == (1, "evaluation")
    assert gap.mean == pytest.approx(0.1)
    assert difference(first, {"7": Value(0.0)}) is None


def test_seeds_that_agree_exactly_keep_the_evaluations_error():
    levels = (0.6, 0.7, 0.8)  # differences of 0.1 up to rounding
    first, second = ({str(s): Value(x - shift, 0.02) for s, x in enumerate(levels)} for shift in (0.0, 0.1))
    gap = difference(first, second)
    assert gap.source == "evaluation"
    assert gap.stderr == pytest.approx(0.02 * 2**0.5)  # the problems are the same: more seeds do not average it out


def test_a_training_number_of_one_seed_has_no_error():
    one = estimate({"0": Value(0.0097)})
    assert one.source == "none"
    assert show(one, scale=1, digits=4) == "0.0097"
    assert show(estimate({"0": Value(0.5), "1": Value(0.7)})) == "60.0 ± 10.0"


def test_a_single_problem_resolves_nothing():
    single = {"mean": 1.0, "stderr": None, "n": 1}
    tasks = by_task({"executions": {"fp4": {"mini_math": single}, "bf16": {"mini_math": single | {"mean": 0.0}}}})
    summary = {"methods": {"bf16": {"0": {"accuracy": tasks}}}}
    gap = difference(accuracies(summary, "bf16", "fp4"), accuracies(summary, "bf16", "bf16"))
    assert gap.mean == 1.0
    assert verdict(gap, expected=1) == parity(gap) == "not resolved"


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=6))
def test_a_difference_turns_its_sign_with_its_terms(pairs):
    first, second = ({str(i): Value(pair[side]) for i, pair in enumerate(pairs)} for side in (0, 1))
    forward, backward = difference(first, second), difference(second, first)
    assert forward.mean == pytest.approx(-backward.mean, abs=1e-12)
    assert forward.stderr == pytest.approx(backward.stderr, abs=1e-12)
    assert forward.mean == pytest.approx(estimate(first).mean - estimate(second).mean, abs=1e-9)
