"""Gather a run's artifacts into ``summary.json``, the file other tools read.

    methods: {name: {seed: {accuracy: {task: {bf16: {mean, stderr, n}, fp4: ...}}, logprob_gap_mean, logprob_gap_p99,
              codeword_mismatch, adjacent_share, guidance_bytes_per_token, step_s: {phase: s}, collapsed, ...}}}

plus the evaluation before RL, hardware, versions and commit. A PTQ method has no training numbers; its keys are null.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trace_rl import environment
from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.config.paths import RunPaths
from trace_rl.errors import UserError

UNKNOWN_STDERR = 0.5
"""Stands for the standard error of a task with a single problem, which has none: no proportion's can be larger."""
TRAIN_KEYS = (
    "logprob_gap_mean",
    "logprob_gap_p99",
    "logprob_gap_max",
    "codeword_mismatch",
    "adjacent_share",
    "response_length",
    "truncated_responses",
    "guidance_bytes_per_token",
    "guidance_scales_uncertain",
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
    "made_by",
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
        "hardware": environment.machine(),
        "versions": environment.versions(),
        "commit": environment.commit(),
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
