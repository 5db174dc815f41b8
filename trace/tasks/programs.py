"""Task family `code`: write a Python expression in `x` from input/output examples.

A problem `2:11,3:14,4:17?` shows f(2)=11, f(3)=14, f(4)=17 and is answered by a short derivation and, after the
marker `|`, a Python expression: `14-11=3;17-14=3;2*3=6;11-6=5|3*x+5`. The derivation takes both differences (equal
ones mean a line, differences of 2 a square), then the product at the first input, then the constant.

Reward: 1.0 when the expression reproduces *hidden* inputs that the prompt does not show, else 0.0. The derivation is
not judged. Model-written text never reaches `eval`: `trace_rl.tasks.verify` walks a whitelisted syntax tree.

Families (a 1..9, shown values 0..59): `a*x+b`, `a*x-b`, `b-a*x`, `x*x+b`, `x*x-b`, `b-x*x`. Splits are cut by
*function*, not by prompt, so a test problem's function was never seen in training at any input.
"""

import hashlib
import random
from collections.abc import Iterator

from trace_rl.tasks.problem import Problem
from trace_rl.tasks.verify import judge_expression

MARKER = "|"
_SHOWN_MAX = 59
_NUM_SHOWN = 3
_NUM_HIDDEN = 6
_HIDDEN_RANGE = range(-9, 21)


def _terms(family: str, a: int, b: int) -> tuple[str, int, int, int]:
    """Expression text and the coefficients (square, linear, constant) of one function."""
    product = "x*x" if "square" in family else "x" if a == 1 else f"{a}*x"
    square, linear = (1, 0) if "square" in family else (0, a)
    if family.startswith("minus"):  # b - product
        return f"{b}-{product}", -square, -linear, b
    if b == 0:
        return product, square, linear, 0
    return (f"{product}+{b}" if b > 0 else f"{product}-{-b}"), square, linear, b


def _subtract(left: int, right: int) -> str:
    return f"{left}-{right}={left - right}" if left >= right else f"{right}-{left}={right - left}"


def _derivation(family: str, *, a: int, b: int, start: int, shown: list[int]) -> str:
    """Worked steps; only non-negative numbers occur, the order of each subtraction carries the direction."""
    factor = start if "square" in family else a
    product = start * factor
    steps = [_subtract(shown[1], shown[0]), _subtract(shown[2], shown[1]), f"{start}*{factor}={product}"]
    steps.append(f"{shown[0]}+{product}={b}" if family.startswith("minus") else _subtract(shown[0], product))
    return ";".join(steps)


def all_code_problems() -> Iterator[Problem]:
    """Every problem of the family in a fixed order, each function at several first inputs."""
    functions = [("line", a, b) for a in range(1, 10) for b in range(-45, 100)]
    functions += [("minus_line", a, b) for a in range(1, 10) for b in range(1, 100)]
    functions += [(family, 1, b) for family in ("square", "minus_square") for b in range(-25, 100)]
    for family, a, b in functions:
        text, square, linear, constant = _terms(family, a, b)
        if family.startswith("minus") and b <= 0:
            continue
        for start in range(6):
            inputs = list(range(start, start + _NUM_SHOWN))
            shown = [square * x * x + linear * x + constant for x in inputs]
            if min(shown) < 0 or max(shown) > _SHOWN_MAX:
                continue
            prompt = ",".join(f"{x}:{y}" for x, y in zip(inputs, shown, strict=True)) + "?"
            rng = random.Random(f"hidden/{prompt}")
            hidden = sorted(rng.sample([x for x in _HIDDEN_RANGE if x not in inputs], _NUM_HIDDEN))
            cases = [[x, square * x * x + linear * x + constant] for x in hidden]
            answer = _derivation(family, a=a, b=b, start=start, shown=shown) + MARKER + text
            yield Problem(kind="code", prompt=prompt, answer=answer, payload={"cases": cases, "function": text})


def split_of_function(function: str, *, seed: int) -> str:
    """`eval` (1 in 8), `rl` (1 in 4), `validation` (1 in 16) or `train`, by a stable hash of the function."""
    bucket = hashlib.sha256(f"{seed}/{function}".encode()).digest()[0] % 16
    return "eval" if bucket < 2 else "rl" if bucket < 6 else "validation" if bucket == 6 else "train"


def extract_expression(response: str) -> str | None:
    """The text after the one marker, or None when there is not exactly one marker."""
    parts = response.split(MARKER)
    return parts[1] if len(parts) == 2 and parts[1] else None


def verify_code(problem: Problem, response: str) -> float:
    """1.0 when the response's expression is right on every hidden input, else 0.0."""
    expression = extract_expression(response)
    if expression is None:
        return 0.0
    passed, _ = judge_expression(expression, [(x, y) for x, y in problem.payload["cases"]])
    return 1.0 if passed else 0.0
