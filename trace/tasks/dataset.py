"""Deterministic, disjoint splits of both task families.

`train` feeds the supervised cold start, `rl` the reinforcement learning, `eval` (and `eval_long`) only the
evaluation, `validation` the choice of the cold start's checkpoint. Splits are drawn in a fixed order, each from its
own seed, and a prompt that occurred in an earlier split is never used again; code problems are additionally cut by
function (`trace_rl.tasks.programs`). The same sizes and seed give the same rows on every machine.
"""

import logging
import random
from collections.abc import Callable

from trace_rl.errors import UserError
from trace_rl.tasks.arithmetic import make_math, verify_math
from trace_rl.tasks.humaneval import verify_humaneval
from trace_rl.tasks.problem import Problem, check_problems
from trace_rl.tasks.programs import all_code_problems, split_of_function, verify_code
from trace_rl.tasks.word_problems import verify_gsm8k, verify_sum

VALIDATION_PER_KIND = 256
VERIFIERS: dict[str, Callable[[Problem, str], float]] = {
    "math": verify_math,
    "code": verify_code,
    "sum": verify_sum,
    "gsm8k": verify_gsm8k,
    "humaneval": verify_humaneval,
}

_log = logging.getLogger(__name__)


def build_splits(
    *,
    seed: int,
    train_problems: int = 20_000,
    rl_problems: int = 4_096,
    eval_problems: int = 512,
    code_share: float = 0.5,
    operands: int = 4,
    long_operands: int = 5,
    max_operand: int = 99,
) -> dict[str, list[Problem]]:
    """Problems by split name: eval_math, eval_math_long, eval_code, rl, validation, train.

    operands: numbers in a chain of the rl, validation and evaluation splits; training chains are of this length or,
    one in four, shorter. long_operands: numbers in a chain of `eval_math_long`. eval_problems: rows of each evaluation
    split. A code split larger than its family is cut to what exists, with a warning.
    """
    if long_operands <= operands:
        raise UserError(f"data.long_operands {long_operands} must exceed data.operands {operands}: longer than trained")
    seen: set[str] = set()

    def math(name: str, count: int, lengths: tuple[int, ...]) -> list[Problem]:
        rng = random.Random(f"{seed}/{name}")

        def make() -> Problem:
            return make_math(rng, num_ops=rng.choice(lengths) - 1, max_operand=max_operand)

        return _draw(make, count=count, seen=seen, name=name)

    code: dict[str, list[Problem]] = {"eval": [], "rl": [], "validation": [], "train": []}
    for problem in all_code_problems():
        code[split_of_function(problem.payload["function"], seed=seed)].append(problem)

    def programs(name: str, count: int) -> list[Problem]:
        rows = code[name]
        random.Random(f"{seed}/code/{name}").shuffle(rows)
        if count > len(rows):
            _log.warning("code split %s: %d problems asked for, the family has %d", name, count, len(rows))
        return rows[:count]

    rl_code, train_code = round(code_share * rl_problems), round(code_share * train_problems)
    shorter = tuple(range(2, operands))
    splits = {
        "eval_math": math("eval_math", eval_problems, (operands,)),
        "eval_math_long": math("eval_math_long", eval_problems, (long_operands,)),
        "eval_code": programs("eval", eval_problems),
        "rl": _interleave(math("rl", rl_problems - rl_code, (operands,)), programs("rl", rl_code)),
        "validation": _interleave(
            math("validation", VALIDATION_PER_KIND, (operands,)), programs("validation", VALIDATION_PER_KIND)
        ),
        "train": _interleave(
            math("train", train_problems - train_code, shorter + 3 * len(shorter) * (operands,) or (operands,)),
            programs("train", train_code),
        ),
    }
    for name, problems in splits.items():
        check_problems(problems, source=name)
    return splits


def score(problem: Problem, response: str) -> float:
    """Reward of a response text: 1.0 or 0.0 (partial credit of wrong answers is never given)."""
    return VERIFIERS[problem.kind](problem, response)


def _draw(make: Callable[[], Problem], *, count: int, seen: set[str], name: str) -> list[Problem]:
    """`count` problems whose prompts are new; refuses a family too small for the request."""
    problems: list[Problem] = []
    for _ in range(20 * count + 1000):
        if len(problems) == count:
            return problems
        problem = make()
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            problems.append(problem)
    if len(problems) == count:
        return problems
    raise UserError(f"split {name}: found only {len(problems)} of {count} distinct problems; lower its size")


def _interleave(first: list[Problem], second: list[Problem]) -> list[Problem]:
    """Alternate two lists, spreading the shorter one evenly, so that any window holds both kinds."""
    keyed = [
        ((index + 0.5) / len(rows), kind, row)
        for kind, rows in enumerate((first, second))
        for index, row in enumerate(rows)
    ]
    return [row for _, _, row in sorted(keyed, key=lambda item: item[:2])]
