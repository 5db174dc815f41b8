"""The Triton kernels, run by Triton's interpreter in processes of their own (tests/triton_interpret).

The interpreter must be chosen before triton is imported, hence the processes. What ran is read from pytest's report: a
process that collects nothing proves nothing.
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from trace_rl import formats
from trace_rl.errors import UserError
from trace_rl.kernels import fake_quant

PROCESSES = {("test_quantize.py", "test_guided.py"): 132, ("test_moe.py",): 28}
"""Files that share a process, and how many tests they hold."""


@pytest.mark.slow
@pytest.mark.parametrize(("files", "num_tests"), PROCESSES.items(), ids=["quantization", "moe"])
def test_kernels_equal_their_twins_in_the_interpreter(
    files: tuple[str, ...], num_tests: int, repository: Path, tmp_path: Path
) -> None:
    folder = repository / "tests" / "triton_interpret"
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", *(folder / file for file in files)]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-q", f"--junit-xml={report}"],
        cwd=repository,
        env=os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-5000:]
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": num_tests, "failures": 0, "errors": 0, "skipped": 0}, run.stdout[-20000:]


def test_every_file_has_a_process(repository: Path) -> None:
    files = {path.name for path in (repository / "tests" / "triton_interpret").glob("test_*.py")}
    assert files == {file for files in PROCESSES for file in files}


def test_a_run_without_the_interpreter_does_not_collect_them(repository: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, repository / "tests" / "triton_interpret"],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, run.stdout + run.stderr


def test_a_tensor_that_triton_cannot_reach_is_refused() -> None:
    with pytest.raises(UserError, match="TRITON_INTERPRET"):
        fake_quant.fake_quant(torch.zeros(1, 16), 1.0, fmt=formats.get("nvfp4"))
