"""One task row: what the policy is asked, a reference answer, and what a verifier needs.

Rows are stored one per line as JSON (`data/*.jsonl`), so that every stage and lm-eval read the same files.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trace_rl.errors import UserError

KINDS = ("math", "code", "sum", "gsm8k", "humaneval")
"""Each has a verifier in `trace_rl.tasks.dataset.score`."""


@dataclass(frozen=True)
class Problem:
    """A prompt, the full text of a reference response, and the verifier's payload.

    payload: `{"target": int}` for math and sum; `{"cases": [[x, f(x)], ...], "function": str}` for code, where `cases`
    are the hidden inputs, which the prompt does not show; `{"expected": str}` for gsm8k; the source, tests and entry
    point for humaneval.
    """

    kind: str
    prompt: str
    answer: str
    payload: dict[str, Any]


def write_jsonl(path: Path, *, problems: Iterable[Problem]) -> None:
    """Write rows to `path` by a temporary file and a rename."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        for problem in problems:
            stream.write(json.dumps(asdict(problem), separators=(",", ":")) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def read_jsonl(path: Path) -> list[Problem]:
    """Read and check rows: an empty file, a zero-length prompt or a missing field is a user error naming the line."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"data set {path} does not exist; run the data stage or correct the path")
    problems = []
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                problem = Problem(**json.loads(line))
            except (json.JSONDecodeError, TypeError) as error:
                raise UserError(
                    f"{path}:{number}: not a task row ({error}); each line needs kind, prompt, answer and payload"
                ) from error
            problems.append(problem)
    check_problems(problems, source=str(path))
    return problems


def check_problems(problems: list[Problem], *, source: str) -> None:
    """Refuse an empty data set, zero-length prompts and unknown kinds."""
    if not problems:
        raise UserError(f"data set {source} is empty; give at least one problem or raise its size in the config")
    for index, problem in enumerate(problems):
        if not problem.prompt:
            raise UserError(f"data set {source}, row {index}: zero-length prompt; every problem needs a prompt")
        if problem.kind not in KINDS:
            raise UserError(
                f"data set {source}, row {index}: unknown kind {problem.kind!r}; use one of {', '.join(KINDS)}"
            )
