"""Judging expressions, and programs on hosts without a sandbox, and the verify stage's files and output."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.errors import UserError
from trace_rl.stages import verify
from trace_rl.tasks.sandbox import SandboxUnavailableError
from trace_rl.tasks.verify import judge_expression, verify_program

NO_SANDBOX = "expression"

LEAVES = st.one_of(st.integers(0, 99).map(str), st.just("x"))
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({parts[0]}{parts[1]}{parts[2]})"),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.integers(1, 9)).map(lambda p: f"({p[0]}{p[1]}{p[2]})"),
        inner.map(lambda part: f"(-{part})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda p: f"{p[0]}({p[1]}, {p[2]})"),
        inner.map(lambda part: f"abs({part})"),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS, st.integers(-50, 50))
def test_agrees_with_python(expression: str, x: int):
    expected = eval(expression, {"x": x})
    assert judge_expression(expression, [(x, expected)]) == (True, "passed")
    assert not judge_expression(expression, [(x, expected + 1)])[0]


REFUSED = """
y|x.real|x()|abs|abs(x|min(x)|max(*x)|max(x, key=x)|__import__('os')|x if x else 1|[x]|x[0]|lambda: x|x:=1|1if x|0x10
1_000|1e3|1.5|x/2|x<3|x and 1|'a'*9|٣|ｘ|9**9**9|x**x**x|10**16*10**16|99999999999999999999|x//0|x%0|2**-1|abs(x,x)
abs()|007|x x"""
REFUSED = [text for line in REFUSED.strip().splitlines() for text in line.split("|")]
REFUSED += ["", " ", "x\n+1", "x\x00", "(" * 300, "-" * 250 + "x", "*" * 250]


@pytest.mark.parametrize("expression", REFUSED, ids=repr)
def test_refuses(expression: str):
    passed, reason = judge_expression(expression, [(5, 5), (20, 20)])
    assert not passed
    assert reason


@given(st.text(alphabet="x+-*/%() 0189,.absminmax'\\n\\x00é", max_size=60))
def test_any_text_is_judged_without_an_exception(text: str):
    judge_expression(text, [(3, 10**20)])


def test_is_fast_enough_to_be_a_reward():
    cases = [(x, (x * 3 + 2) - max(x, 4) % 7) for x in range(6)]
    started = time.process_time()
    for _ in range(1000):
        assert judge_expression("(x*3+2)-max(x,4)%7", cases)[0]
    assert time.process_time() - started < 1.0


def test_needs_a_case():
    with pytest.raises(ValueError, match="at least one"):
        judge_expression("x", [])


@pytest.mark.parametrize(
    "program", ["def solution(x): return 2*x+1", "def solution(n):\n    return 2*n+1\n", "solution = lambda y: y+y+1"]
)
def test_one_expression_needs_no_sandbox(program: str):
    tests = [{"input": 3, "expected": 7}, {"input": -1, "expected": -1}]
    assert verify_program(program, tests=tests, backend=NO_SANDBOX).passed
    wrong = verify_program(program, tests=[{"input": 3, "expected": 8}], backend=NO_SANDBOX)
    assert not wrong.passed
    assert "got 7, expected 8" in wrong.reason
    assert not verify_program(program, tests=[{"input": "a", "expected": 8}], backend=NO_SANDBOX).passed
    assert not verify_program(program, tests=[{"input": 3, "expected": 7.0}], backend=NO_SANDBOX).passed


LARGER = (
    "import os\ndef solution(x): return x",
    "def solution(x):\n    y = x\n    return y",
    "def other(x): return x",
    "def solution(x, y): return x",
    "def solution(x=1): return x",
    "def solution(*x): return x",
    "def solution(x): pass",
    "@print\ndef solution(x): return x",
    "def solution(x): return x.real",
    "solution = other = lambda x: x",
    "def solution(",
    "def solution(): return 1",
    "def solution(abs): return abs",
    "async def solution(x): return x",
)


@pytest.mark.parametrize("program", LARGER)
def test_larger_programs_need_one(program: str):
    with pytest.raises(UserError, match="without a sandbox"):
        verify_program(program, tests=[{"input": 1, "expected": 1}], backend=NO_SANDBOX)


def test_where_nothing_is_installed_only_expressions_are_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert verify_program("def solution(x): return x+1", tests=[{"input": 1, "expected": 2}]).passed
    with pytest.raises(UserError, match="Install bubblewrap"):
        verify_program("import math\ndef solution(x): return x+1", tests=[{"input": 1, "expected": 2}])
    with pytest.raises(SandboxUnavailableError, match="bubblewrap is not installed"):
        verify_program("def solution(x): return x", tests=[{"input": 1, "expected": 1}], backend="bubblewrap")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_stage_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    program = write(tmp_path / "p.py", "def solution(x): return x*x\n")
    tests = write(tmp_path / "t.json", json.dumps([{"input": 3, "expected": 9}, {"input": 2, "expected": 5}]))
    verify.run(program, tests=tests)
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"passed", "reason", "seconds"}
    assert printed["passed"] is False
    assert "input 2: got 4, expected 5" in printed["reason"]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "[1]", '[{"input": 1}]', '[{"input": 1, "expected": 1, "extra": 0}]', "not json"]
)
def test_stage_names_a_bad_tests_file(tmp_path: Path, text: str):
    program = write(tmp_path / "p.py", "def solution(x): return x\n")
    with pytest.raises(UserError, match=r"t\.json"):
        verify.run(program, tests=write(tmp_path / "t.json", text))


def test_stage_names_a_missing_program(tmp_path: Path):
    with pytest.raises(UserError, match=r"absent\.py"):
        verify.run(tmp_path / "absent.py", tests=tmp_path / "t.json")
