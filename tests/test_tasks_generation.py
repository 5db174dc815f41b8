"""Task families: reference answers earn the reward, wrong ones do not, splits are disjoint and deterministic."""

import random

import pytest

from trace_rl.config.experiment import DataConfig
from trace_rl.errors import UserError
from trace_rl.stages import data
from trace_rl.tasks.arithmetic import final_value, make_math, verify_math
from trace_rl.tasks.dataset import build_splits, score
from trace_rl.tasks.problem import Problem, check_problems, read_jsonl, write_jsonl
from trace_rl.tasks.programs import all_code_problems, extract_expression, verify_code

SMALL = {"train_problems": 400, "rl_problems": 200, "eval_problems": 64}


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Problem]]:
    return build_splits(seed=3, **SMALL)


def test_every_reference_answer_earns_the_reward(splits):
    for problems in splits.values():
        assert all(score(problem, problem.answer) == 1.0 for problem in problems)


def test_chain_steps_are_true_and_lead_to_the_target():
    rng = random.Random(0)
    for _ in range(500):
        problem = make_math(rng, num_ops=3)
        value = None
        for step in problem.answer.split(";"):
            left, right = step.split("=")
            assert eval(left) == int(right)  # our own text
            value = int(right)
        assert value == problem.payload["target"] == eval(problem.prompt[:-1])
        assert 0 <= value <= 99


def test_math_reward_is_strict():
    problem = Problem(kind="math", prompt="3+4?", answer="3+4=7", payload={"target": 7})
    assert verify_math(problem, "3+4=7") == 1.0
    assert verify_math(problem, "9+9=9;3+4=7") == 1.0  # only the last value is judged
    for response in ("7", "3+4=8", "3+4=07", "3+4=7 ", " 3+4=7", "3+4=7;", "3+4=7\n", "", "=7", "3+4=", "3+4=٧"):
        assert verify_math(problem, response) == 0.0, response
    assert final_value("1+1=2;2-2=0") == 0


def test_code_reward_needs_hidden_inputs_right():
    problem = next(p for p in all_code_problems() if p.payload["function"] == "3*x+5")
    shown = {int(pair.split(":")[0]) for pair in problem.prompt[:-1].split(",")}
    assert not shown & {x for x, _ in problem.payload["cases"]}
    assert verify_code(problem, problem.answer) == 1.0
    assert verify_code(problem, "|5+x*3") == 1.0  # any right expression, whatever the derivation
    first = min(shown)
    for response in (f"|{3 * first + 5}", "|3*x+6", "3*x+5", "|3*x+5|3*x+5", "|", "", "|__import__('os')", "|x**x**x"):
        assert verify_code(problem, response) == 0.0, response
    assert extract_expression("1|2|3") is None


def test_code_prompts_are_distinct():
    prompts = [problem.prompt for problem in all_code_problems()]
    assert len(prompts) == len(set(prompts)) > 5000


def test_splits_are_disjoint_and_functions_unseen(splits):
    names = list(splits)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            shared = {p.prompt for p in splits[first]} & {p.prompt for p in splits[second]}
            assert not shared, (first, second)

    def functions(name):
        return {p.payload["function"] for p in splits[name] if p.kind == "code"}

    assert not functions("eval_code") & (functions("train") | functions("rl"))
    assert not functions("rl") & functions("train")


def test_splits_are_deterministic_by_seed(splits):
    assert build_splits(seed=3, **SMALL) == splits
    assert build_splits(seed=4, **SMALL)["rl"] != splits["rl"]


def test_long_chains_are_longer_than_anything_trained(splits):
    longest = max(p.prompt.count("+") + p.prompt.count("-") for p in splits["train"] if p.kind == "math")
    assert all(p.prompt.count("+") + p.prompt.count("-") > longest for p in splits["eval_math_long"])
    with pytest.raises(UserError, match="long_operands"):
        build_splits(seed=0, operands=4, long_operands=4)


def test_rl_windows_hold_both_kinds(splits):
    rows = splits["rl"]
    for start in range(0, len(rows) - 16, 16):
        assert {p.kind for p in rows[start : start + 16]} == {"math", "code"}


def test_data_stage_writes_what_it_generates(tmp_path):
    config = DataConfig(seed=3, **SMALL)
    manifest = data.run(config, tmp_path / "data")
    assert manifest["files"]["mini_math.jsonl"]["rows"] == 64
    assert read_jsonl(tmp_path / "data" / "rl.jsonl") == build_splits(**config.model_dump(exclude={"source"}))["rl"]
    assert data.run(config, tmp_path / "again") == manifest


def test_bad_data_is_a_user_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("")
    with pytest.raises(UserError, match="empty"):
        read_jsonl(path)
    with pytest.raises(UserError, match="does not exist"):
        read_jsonl(tmp_path / "missing.jsonl")
    path.write_text("{\n")
    with pytest.raises(UserError, match="rows.jsonl:1"):
        read_jsonl(path)
    blank = Problem(kind="math", prompt="", answer="1", payload={"target": 1})
    write_jsonl(path, problems=[blank])
    with pytest.raises(UserError, match="zero-length prompt"):
        read_jsonl(path)
    with pytest.raises(UserError, match="empty"):
        check_problems([], source="rows")
    with pytest.raises(UserError, match="distinct problems"):
        build_splits(seed=0, train_problems=3000, code_share=0.0, operands=2, long_operands=3, max_operand=9)
