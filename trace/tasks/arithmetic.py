"""Task family `math`: chains of additions and subtractions with worked steps.

A problem `34+57-12+8?` is answered `34+57=91;91-12=79;79+8=87`: every step restates the running value, so one
character-level transformer can learn it in minutes and still slips at temperature 1, which leaves room for
reinforcement learning. Running values stay in 0..`max(99, max_operand)`, so no sign and rarely a third digit occurs.

Reward: 1.0 when the response is a well-formed chain whose last value is the answer, else 0.0. The parse is strict
(no leading zeros, no trailing text) and the steps before the last value are *not* judged: the policy may find its
own route, as in outcome-rewarded training (GRPO, arXiv 2402.03300).
"""

import random
import re

from trace_rl.tasks.problem import Problem

_NUMBER = r"(?:0|[1-9][0-9]{0,5})"
_CHAIN = re.compile(rf"{_NUMBER}[+-]{_NUMBER}={_NUMBER}(?:;{_NUMBER}[+-]{_NUMBER}={_NUMBER})*", re.ASCII)


def make_math(rng: random.Random, *, num_ops: int, max_operand: int = 99) -> Problem:
    """Draw one chain of `num_ops` operations with operands in 1..`max_operand`."""
    limit = max(99, max_operand)
    value = rng.randint(1, max_operand)
    prompt, steps = str(value), []
    for _ in range(num_ops):
        # A sign that leaves no room for an operand of at least 1 is not offered.
        room = {"+": min(limit - value, max_operand), "-": min(value, max_operand)}
        sign = rng.choice([sign for sign, largest in room.items() if largest >= 1])
        operand = rng.randint(1, room[sign])
        result = value + operand if sign == "+" else value - operand
        steps.append(f"{value}{sign}{operand}={result}")
        prompt += f"{sign}{operand}"
        value = result
    return Problem(kind="math", prompt=prompt + "?", answer=";".join(steps), payload={"target": value})


def final_value(response: str) -> int | None:
    """The number a well-formed chain ends in, or None when the text is not a chain."""
    if _CHAIN.fullmatch(response) is None:
        return None
    return int(response.rsplit("=", 1)[1])


def verify_math(problem: Problem, response: str) -> float:
    """1.0 when `response` is a well-formed chain that ends in the exact answer, else 0.0."""
    return 1.0 if final_value(response) == problem.payload["target"] else 0.0
