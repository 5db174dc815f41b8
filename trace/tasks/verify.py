"""Judge what a model wrote: expressions in x by the whitelist evaluator, programs in the sandbox.

Two ways, one meaning of "passed":

- `judge_expression`: the reward of the miniature coding task, thousands per second, nothing is executed.
- `verify_program`: `solution(x)` for every test input, in the sandbox (trace_rl.tasks.sandbox). The expected outputs
  never enter it: it returns plain values as text, and they are compared here, by exact type and value. So an object
  that claims to be equal to everything, a printed "passed" and an early exit all fail: the only way to pass is to
  return the expected values.

Equality (`same_value`): int, float, bool, str and None are equal only to the same type and value (True is not 1, 2.0
is not 2, floats are compared exactly). Test files are JSON, which has no tuple: a tuple is accepted where a list is
expected, at every depth.

Where no sandbox is permitted, a program that is one `def solution(x): return EXPRESSION` or
`solution = lambda x: EXPRESSION` is judged by the evaluator, and any other is refused with the remedy.
"""

import ast
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from trace_rl.errors import UserError
from trace_rl.tasks.expressions import ExpressionError, check_tree, evaluate_expression, parse_expression
from trace_rl.tasks.sandbox import Answer, BackendName, Limits, Sandbox, SandboxUnavailableError, Verdict

ENTRY_POINT = "solution"
BackendChoice = BackendName | Literal["auto", "expression"]


def judge_expression(expr: str, cases: Sequence[tuple[int, int]]) -> tuple[bool, str]:
    """Whether `expr` gives the expected value for every (x, expected); the reason names the first that fails."""
    if not cases:
        raise ValueError("judge_expression needs at least one (x, expected) case")
    try:
        tree = parse_expression(expr)
    except ExpressionError as error:
        return False, f"not allowed: {error}"
    for x, expected in cases:
        try:
            value = evaluate_expression(tree, x)
        except ExpressionError as error:
            return False, f"x={x}: {error}"
        if value != expected:
            return False, f"x={x}: got {value}, expected {expected}"
    return True, "passed"


def read_tests(path: Path) -> list[dict[str, Any]]:
    """The tests of a JSON file, `[{"input": ..., "expected": ...}, ...]`; UserError names the file and the fault."""
    if not path.is_file():
        raise UserError(f"tests {path} does not exist; give a JSON file")
    try:
        tests = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"tests {path} is not JSON ({error})") from error
    wanted = 'a list of {"input": ..., "expected": ...}'
    if not isinstance(tests, list) or not tests:
        raise UserError(f"tests {path} must be a non-empty list; write {wanted}")
    for index, test in enumerate(tests):
        if not isinstance(test, dict) or set(test) != {"input", "expected"}:
            raise UserError(f"tests {path}, item {index}: needs exactly input and expected; write {wanted}")
    return tests


def verify_program(
    source: str,
    *,
    tests: Sequence[dict[str, Any]],
    backend: BackendChoice = "auto",
    limits: Limits | None = None,
    sandbox: Sandbox | None = None,
) -> Verdict:
    """Whether `solution(input)` of the program returns `expected` for every test.

    `sandbox` reuses a running one; otherwise `backend` is started for this program: `auto` takes the first that works
    and, where none is permitted, the expression evaluator for one-expression programs (`expression` asks for just
    that). UserError when a larger program meets a host without a sandbox.
    """
    if not tests:
        raise UserError("verify needs at least one test")
    started = time.monotonic()
    if sandbox is None and backend != "expression":
        try:
            with Sandbox(backend=backend, limits=limits) as opened:
                return verify_program(source, tests=tests, limits=limits, sandbox=opened)
        except SandboxUnavailableError as error:
            if backend != "auto":
                raise
            return _verify_expression_program(source, tests=tests, started=started, why=str(error))
    if sandbox is None:
        why = "the expression backend runs nothing; use backend auto for other programs"
        return _verify_expression_program(source, tests=tests, started=started, why=why)
    inputs = [test["input"] for test in tests]
    answers = sandbox.run_calls(source, entry_point=ENTRY_POINT, inputs=inputs, limits=limits)
    passed, reason = compare_answers(answers, tests=tests)
    return Verdict(passed=passed, reason=reason, seconds=time.monotonic() - started)


def compare_answers(answers: Sequence[Answer], *, tests: Sequence[dict[str, Any]]) -> tuple[bool, str]:
    """Compare in order; passed only when every test has an answer with the expected value."""
    for index, test in enumerate(tests):
        given = _brief(test["input"])
        if index >= len(answers):
            return False, f"test {index}, input {given}: no answer"
        answer = answers[index]
        if answer.error is not None:
            return False, f"test {index}, input {given}: {answer.error}"
        if not same_value(answer.value, test["expected"]):
            got, expected = _brief(answer.value), _brief(test["expected"])
            return False, f"test {index}, input {given}: got {got}, expected {expected}"
    return True, "passed"


def same_value(value: Any, expected: Any) -> bool:
    """Equality by exact type and value; a tuple may stand for a list, which is all that JSON can write."""
    if isinstance(expected, (list, tuple)):
        return (
            type(value) in (list, tuple)
            and len(value) == len(expected)
            and all(same_value(left, right) for left, right in zip(value, expected, strict=True))
        )
    if type(value) is not type(expected):
        return False
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same_value(value[key], expected[key]) for key in expected)
    return bool(value == expected)


def _verify_expression_program(source: str, *, tests: Sequence[dict[str, Any]], started: float, why: str) -> Verdict:
    """Judge a one-expression program by the evaluator; UserError for any other."""
    tree = _single_expression(source, why=why)
    answers = []
    for test in tests:
        try:
            answers.append(Answer(value=evaluate_expression(tree, test["input"]), error=None))
        except ExpressionError as error:
            answers.append(Answer(value=None, error=str(error)))
    passed, reason = compare_answers(answers, tests=tests)
    return Verdict(passed=passed, reason=reason, seconds=time.monotonic() - started)


def _single_expression(source: str, *, why: str) -> ast.expr:
    """The expression of `def solution(x): return E` or `solution = lambda x: E`; UserError for anything else."""
    refused = f"only a program that is one integer expression in its argument can be judged without a sandbox: {why}"
    try:
        (statement,) = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(refused) from None
    body: ast.expr | None = None
    if isinstance(statement, ast.FunctionDef) and statement.name == ENTRY_POINT and not statement.decorator_list:
        signature, last = statement.args, statement.body[-1]
        if len(statement.body) == 1 and isinstance(last, ast.Return):
            body = last.value
    elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Lambda):
        signature = statement.value.args
        if [ast.unparse(target) for target in statement.targets] == [ENTRY_POINT]:
            body = statement.value.body
    if body is None or ast.unparse(signature) not in [argument.arg for argument in signature.args]:
        raise UserError(refused)
    try:
        check_tree(body, argument=signature.args[0].arg)
    except ExpressionError as error:
        raise UserError(f"{refused} (this one: {error})") from None
    return body


def _brief(value: Any) -> str:
    """repr, shortened; some integers have no decimal text within Python's digit limit."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= 80 else text[:77] + "..."
