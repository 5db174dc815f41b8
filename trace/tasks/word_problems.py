"""Short sums asked in plain words, and the verifiers that read a number from free text.

A problem is a chain of additions and subtractions (`trace_rl.tasks.arithmetic`), written out as an expression or told
as a story; the reference answer works it out step by step: `7 + 12 = 19. 19 - 5 = 14.`

Verdicts are about the *last number* of a response, as GSM8K is usually judged (after the mark `####`, where there is
one). Model-written text is cut down to that one number before anything parses it: math-verify's parsers evaluate what
they read, so they must never see more.
"""

import random
import re

from math_verify import parse, verify

from trace_rl.tasks.arithmetic import make_math
from trace_rl.tasks.problem import Problem

KIND = "sum"
GSM8K_KIND = "gsm8k"
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?", re.ASCII)
_MARK = "####"
_LONGEST_NUMBER = 24
_SUBJECTS = (("Mia", "She"), ("Tom", "He"), ("Sara", "She"), ("Ben", "He"))
_THINGS = ("apples", "books", "marbles", "coins", "stickers")


def make_word_problem(rng: random.Random, *, num_ops: int, max_operand: int) -> Problem:
    """One chain of `num_ops` operations as a question in words; values stay in 0..`max(99, max_operand)`."""
    chain = make_math(rng, num_ops=num_ops, max_operand=max_operand)
    expression = _spaced(chain.prompt.removesuffix("?"))
    question = rng.choice((f"What is {expression}?", f"Compute {expression}.", _story(rng, expression)))
    steps = ". ".join(_spaced(step) for step in chain.answer.split(";"))
    return Problem(kind=KIND, prompt=question, answer=f"{steps}.", payload=chain.payload)


def last_number(response: str) -> str | None:
    """The last number in the text (behind the last `####`, if that is there) without thousands separators."""
    found = _NUMBER.findall(response.rpartition(_MARK)[2]) or _NUMBER.findall(response)
    if not found or len(found[-1]) > _LONGEST_NUMBER:
        return None
    return found[-1].replace(",", "")


def verify_sum(problem: Problem, response: str) -> float:
    """1.0 when the response's last number is the target, else 0.0."""
    number = last_number(response)
    return 1.0 if number is not None and number == str(problem.payload["target"]) else 0.0


def verify_gsm8k(problem: Problem, response: str) -> float:
    """1.0 when math-verify holds the response's last number equal to the expected one (18 = 18.0), else 0.0."""
    number = last_number(response)
    return 1.0 if number is not None and verify(parse(problem.payload["expected"]), parse(number)) else 0.0


def _spaced(expression: str) -> str:
    """`7+12=19` -> `7 + 12 = 19`."""
    return re.sub(r"([+\-=])", r" \1 ", expression)


def _story(rng: random.Random, expression: str) -> str:
    """The chain as a story; subtraction gives away, addition gets more."""
    (name, pronoun), things = rng.choice(_SUBJECTS), rng.choice(_THINGS)
    first, *rest = expression.split()
    sentences = [f"{name} has {first} {things}."]
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        sentences.append(f"{pronoun} gets {number} more." if sign == "+" else f"{pronoun} gives away {number}.")
    return " ".join([*sentences, f"How many {things} does {name} have now?"])
