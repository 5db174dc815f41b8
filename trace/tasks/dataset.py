"""Deterministic, disjoint splits of both task families.

`train` feeds the supervised cold start, `rl` the reinforcement learning, `eval` (and `eval_long`) only the
evaluation, `validation` the choice of the cold start's checkpoint. Splits are drawn in a fixed order, each from its
own seed, and a prompt that occurred in an earlier split is never used again; code problems are additionally cut by
function (`trace_rl.tasks.programs`). The same sizes and seed give the same rows on every machine.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from trace_rl.errors import UserError
from trace_rl.tasks.arithmetic import make_math, verify_math
from trace_rl.tasks.problem import Problem, check_problems
from trace_rl.tasks.programs import all_code_problems, split_of_function, verify_code


@dataclass(frozen=True)
class DatasetSizes:
    """Rows per split. Code splits end where the family is exhausted; `train_code` None means every training row."""

    train_math: int = 60_000
    train_code: int | None = None
    validation: int = 128  # per family
    rl_math: int = 2_000
    rl_code: int = 1_000
    eval_math: int = 512
    eval_math_long: int = 512
    eval_code: int = 512


def build_splits(
    sizes: DatasetSizes,
    *,
    seed: int,
    num_ops: int = 3,
    train_ops: tuple[int, ...] = (1, 2, 3, 3),
    long_ops: tuple[int, ...] = (4, 5),
    limit: int = 99,
) -> dict[str, list[Problem]]:
    """Problems by split name: train, validation, rl, eval_math, eval_math_long, eval_code.

    num_ops: operations of rl, validation and eval chains. train_ops: drawn from uniformly for training rows.
    long_ops: the same for `eval_math_long`, which must be longer than anything trained.
    """
    if min(long_ops) <= max(*train_ops, num_ops):
        raise UserError(f"long_ops {long_ops} must all exceed the trained lengths {(*train_ops, num_ops)}")
    seen: set[str] = set()

    def math(name: str, count: int, ops: tuple[int, ...]) -> list[Problem]:
        rng = random.Random(f"{seed}/{name}")
        return _draw(lambda: make_math(rng, num_ops=rng.choice(ops), limit=limit), count=count, seen=seen, name=name)

    code: dict[str, list[Problem]] = {"eval": [], "rl": [], "train": []}
    for problem in all_code_problems():
        code[split_of_function(problem.payload["function"], seed=seed)].append(problem)
    for name, rows in code.items():
        random.Random(f"{seed}/code/{name}").shuffle(rows)

    splits = {
        "eval_math": math("eval_math", sizes.eval_math, (num_ops,)),
        "eval_math_long": math("eval_math_long", sizes.eval_math_long, long_ops),
        "eval_code": code["eval"][: sizes.eval_code],
    }
    rl_code = code["rl"][: sizes.rl_code]
    validation_code = code["rl"][len(rl_code) : len(rl_code) + sizes.validation]
    splits["validation"] = math("validation", sizes.validation, (num_ops,)) + validation_code
    splits["rl"] = _interleave(math("rl", sizes.rl_math, (num_ops,)), rl_code)
    train_code = code["train"] if sizes.train_code is None else code["train"][: sizes.train_code]
    splits["train"] = math("train", sizes.train_math, train_ops) + train_code
    for name, problems in splits.items():
        check_problems(problems, source=name)
    return splits


def score(problem: Problem, response: str) -> float:
    """Reward of a response text: 1.0 or 0.0 (partial credit of wrong answers is never given)."""
    return verify_math(problem, response) if problem.kind == "math" else verify_code(problem, response)


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
    raise UserError(f"split {name}: only {len(problems)} of {count} distinct problems exist; lower its size")


def _interleave(first: list[Problem], second: list[Problem]) -> list[Problem]:
    """Alternate two lists, spreading the shorter one evenly, so that any window holds both kinds."""
    keyed = [((index + 0.5) / len(rows), kind, row) for kind, rows in enumerate((first, second)) for index, row in
             enumerate(rows)]
    return [row for _, _, row in sorted(keyed, key=lambda item: item[:2])]
