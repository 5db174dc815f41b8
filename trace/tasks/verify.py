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

from collections.abc import Sequence

from trace_rl.tasks.expressions import ExpressionError, evaluate_expression, parse_expression


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
