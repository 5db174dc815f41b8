"""`trace-rl verify --program FILE --tests FILE.json`: judge one program, print one JSON object.

    {"passed": bool, "reason": str, "seconds": float}

Tests are `[{"input": ..., "expected": ...}]`, calls of the program's `solution(x)`. The exit code says whether the
question could be answered (0), not whether the program passed; bad files and a refused program are user errors (2).
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trace_rl.errors import UserError
from trace_rl.tasks.sandbox import Limits
from trace_rl.tasks.verify import BackendChoice, read_tests, verify_program


def run(
    program: Path, *, tests: Path, backend: BackendChoice = "auto", wall_s: float = 10.0, memory_mib: int = 512
) -> dict[str, Any]:
    """Judge the file `program` by the file `tests`, print the verdict as JSON on standard output, and return it."""
    if not program.is_file():
        raise UserError(f"program {program} does not exist; give a Python file that defines solution(x)")
    try:
        source = program.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"program {program} is not UTF-8 text ({error})") from error
    if wall_s <= 0 or memory_mib < 64:
        raise UserError(f"wall_s {wall_s} must be positive and memory_mib {memory_mib} at least 64")
    limits = Limits(wall_s=wall_s, cpu_s=max(1, round(wall_s)), memory_bytes=memory_mib << 20)
    verdict = asdict(verify_program(source, tests=read_tests(tests), backend=backend, limits=limits))
    verdict["seconds"] = round(verdict["seconds"], 3)
    print(json.dumps(verdict))
    return verdict
