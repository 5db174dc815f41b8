"""What every test process shares: one thread each, no network, and the standard library's `trace`."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Before torch and vLLM are imported: tests run side by side, and threads that wait for each other cost far more than
# they bring on models this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# `python -m pytest` puts the repository root first on sys.path, where the folder trace/ would be found by whoever
# imports the standard library's `trace`.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`: one worker runs the engine tests, one the workflow tests."""
    for item in items:
        for marker in ("engine", "smoke"):
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.xdist_group(marker))
                break


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return ROOT
