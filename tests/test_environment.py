"""What numbers belong to: the machine, versions and commit, found without PyTorch."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from trace_rl import environment


def test_machine_names_processor_cores_and_memory():
    machine = environment.machine()
    assert machine["cpu"] and machine["platform"]
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["memory_gib"] > 0.5


def test_versions_are_those_installed_and_no_others():
    versions = environment.versions()
    assert versions["torch"] == version("torch")
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(versions) <= {"python", *environment.PACKAGES}


def test_commit_is_that_of_the_tree_of_the_package(monkeypatch, tmp_path: Path):
    here = environment.commit()
    monkeypatch.chdir(tmp_path)
    assert environment.commit() == here
    git = ["git", "-C", str(Path(environment.__file__).resolve().parent), "rev-parse", "HEAD"]
    asked = subprocess.run(git, capture_output=True, text=True, check=False)
    assert here["id"] == (asked.stdout.strip() if asked.returncode == 0 else None)


def test_outside_a_checkout_the_commit_is_null(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    assert environment.commit() == {"id": None, "dirty": None}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.commit() == {"id": None, "dirty": None}


def test_needs_no_torch():
    code = "import sys; from trace_rl import environment as e; e.machine(), e.versions(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
