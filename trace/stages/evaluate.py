"""Stage ``evaluate``: accuracy of a policy on held-out problems in BF16 and in FP4 execution, through lm-eval.

Both executions run on the rollout engine, greedily. BF16 quantizes nothing. FP4 is the execution that the method rolled
out in: its own formats, scopes and residual compensation. A policy whose rollouts were BF16, and the one before RL, run
with weights, activations and KV in the experiment's format. Scales are the calibrated static ones in every case. So
what is compared is how finished policies stand deployment in FP4, each in the FP4 it was made for.

A PTQ method's policy is its base method's; its FP4 execution is that of the packed export, in the method's own formats.

The standard error is sqrt(p (1 - p) / (n - 1)), the sample's; n is reported with it.
"""

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from trace_rl import tracking
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.models.checkpoint_io import validate_checkpoint, write_json
from trace_rl.models.export import quantization_of
from trace_rl.rollout.lm_eval_model import TraceLM
from trace_rl.stages.calibrated_scales import calibrated_scales
from trace_rl.tasks.lm_eval_tasks import bind_tasks, local_tasks

SAMPLES_KEPT = 4
"""Answers of each task kept in the result."""
FEWSHOT_SEED = 1234
METRIC = "acc,none"


@dataclass(frozen=True)
class Execution:
    """One way to run a policy."""

    checkpoint: Path
    quant: QuantSpec
    scales: StaticScales | None


def run(
    config: ExperimentConfig, paths: RunPaths, *, method: RlMethod | PtqMethod | None = None, seed: int = 0
) -> dict[str, Any]:
    """Evaluate a method's policy, or without a method the one before RL; write and return ``metrics.json``."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    started = time.perf_counter()
    executions = executions_of(config, paths, method=method, seed=seed)
    wildcards = {"method": "start"} if method is None else {"method": method.name, "seed": seed}
    with tracking.stage_run(config, stage="evaluate", paths=paths, wildcards=wildcards) as tracker:
        results = {name: evaluate_execution(config, paths, execution) for name, execution in executions.items()}
        metrics: dict[str, Any] = {
            **wildcards,
            "executions": {name: result["scores"] for name, result in results.items()},
            "samples": {name: result["samples"] for name, result in results.items()},
            "quant": {name: execution.quant.model_dump(mode="json") for name, execution in executions.items()},
            "quant_hash": {name: execution.quant.hash() for name, execution in executions.items()},
            "engine": config.engine.name,
            "lm_eval": version("lm-eval"),
            "execution_s": {name: result["seconds"] for name, result in results.items()},
            "generated_tokens": {name: result["generated_tokens"] for name, result in results.items()},
            "seconds": time.perf_counter() - started,
        }
        out = paths.evaluation_start if method is None else paths.evaluation(method.name, seed)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, metrics)
        tracker.log_metrics({"accuracy": metrics["executions"]})
        tracker.log_text(sample_text(metrics["samples"]), "samples.txt")
    print(score_table(metrics["executions"], title=" ".join(str(value) for value in wildcards.values())))
    return metrics


def executions_of(
    config: ExperimentConfig, paths: RunPaths, *, method: RlMethod | PtqMethod | None, seed: int
) -> dict[str, Execution]:
    """The BF16 and the FP4 execution of a policy; UserError where an earlier stage has not run."""
    if not isinstance(method, PtqMethod):
        policy = paths.checkpoint if method is None else _policy(paths, method.name, seed)
        quant = fp4_quant(config, method)
        fp4 = Execution(policy, quant, calibrated_scales(config, paths, quant=quant))
    else:
        policy, packed = _policy(paths, method.base, seed), paths.quantized(method.name, seed)
        if not (packed / "config.json").is_file():
            raise UserError(f"{packed}: {method.name} with seed {seed} is not exported; run its quantize stage first")
        stored = quantization_of(packed)
        scales = StaticScales.from_json(stored["scales"])
        fp4 = Execution(packed, QuantSpec.model_validate(stored["quant"]), scales)
    validate_checkpoint(policy, quant=fp4.quant)
    return {"bf16": Execution(policy, BF16, None), "fp4": fp4}


def fp4_quant(config: ExperimentConfig, method: RlMethod | None) -> QuantSpec:
    """The method's rollout quantization when that is FP4, else the experiment's format on all scopes."""
    if method is not None and method.rollout.enabled:
        return method.rollout_quant(config.format)
    return QuantSpec(format=config.format)


def evaluate_execution(config: ExperimentConfig, paths: RunPaths, execution: Execution) -> dict[str, Any]:
    """Open the engine, run every task, close it."""
    started = time.perf_counter()
    lm = TraceLM.open(
        execution.checkpoint,
        quant=execution.quant,
        scales=execution.scales,
        config=config.engine,
        max_new_tokens=config.evaluate.max_new_tokens or config.sampling.max_new_tokens,
    )
    try:
        result = run_tasks(lm, tasks=config.evaluate.tasks, data=paths.data, limit=config.evaluate.limit)
    finally:
        lm.close()
    return {**result, "seconds": time.perf_counter() - started, "generated_tokens": lm.num_generated_tokens}


def run_tasks(lm: LM, *, tasks: Sequence[str], data: Path, limit: int | None = None) -> dict[str, Any]:
    """``scores`` {task: {mean, stderr, n}} and ``samples`` {task: a few answers} of any lm-eval model."""
    if not tasks:
        raise UserError("evaluate.tasks is empty; name at least one task")
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.WARNING)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="trace-evaluate-") as folder:
        bind_tasks(tasks, data=data, folder=Path(folder))
        # lm-eval's own index of thousands of files takes half a minute; it is read only for a task that is not ours.
        manager = TaskManager(include_path=folder, include_defaults=not set(tasks) <= set(local_tasks()))
        unknown = sorted(set(tasks) - set(manager.all_tasks))
        if unknown:
            ours = ", ".join(local_tasks())
            raise UserError(f"evaluate.tasks: {', '.join(unknown)} unknown to lm-eval; ours are {ours}")
        loaded = manager.load(list(tasks))
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        output = evaluate(lm, loaded, limit=limit, confirm_run_unsafe_code=True)
    assert output is not None, "one process evaluates, and it has rank 0"
    scores = {name: task_score(output, name) for name in loaded["tasks"]}
    samples = {name: [brief(sample) for sample in output["samples"][name][:SAMPLES_KEPT]] for name in loaded["tasks"]}
    return {"scores": scores, "samples": samples}


def task_score(output: Any, name: str) -> dict[str, Any]:
    """Mean, standard error (null for a single problem) and n of one task."""
    values = output["results"][name]
    stderr = values.get(METRIC.replace(",", "_stderr,"))
    if METRIC not in values:
        raise UserError(f"task {name} has no metric {METRIC.split(',')[0]}; add it to the task's metric_list")
    return {
        "mean": float(values[METRIC]),
        "stderr": float(stderr) if isinstance(stderr, float) else None,
        "n": int(output["n-samples"][name]["effective"]),
    }


def brief(sample: dict[str, Any]) -> dict[str, Any]:
    """What a reader wants to see of one problem."""
    return {
        "prompt": sample["arguments"][0][0],
        "answer": sample["filtered_resps"][0],
        "reference": sample["target"],
        "acc": sample["acc"],
    }


def sample_text(samples: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """The kept answers, one line each."""
    return "".join(
        f"{execution} {task} {sample['acc']:.0f}  {sample['prompt']!r} -> {sample['answer']!r}"
        f"  (reference {sample['reference']!r})\n"
        for execution, tasks in samples.items()
        for task, kept in tasks.items()
        for sample in kept
    )


def score_table(executions: dict[str, dict[str, dict[str, Any]]], *, title: str) -> str:
    """One line per task: accuracy with standard error in each execution, and n."""
    lines = [f"{'accuracy of ' + title:28}" + "".join(f"{name:>18}" for name in executions) + f"{'n':>7}"]
    for task in next(iter(executions.values())):
        row = [scores[task] for scores in executions.values()]
        cells = (f"{s['mean']:.3f} ± {s['stderr']:.3f}" if s["stderr"] is not None else f"{s['mean']:.3f}" for s in row)
        lines.append(f"{task:28}" + "".join(f"{cell:>18}" for cell in cells) + f"{row[0]['n']:>7}")
    return "\n".join(lines)


def _policy(paths: RunPaths, method: str, seed: int) -> Path:
    policy = paths.train(method, seed) / "policy"
    if not policy.is_dir():
        raise UserError(f"{policy}: method {method} with seed {seed} is not trained; run its train stage first")
    return policy
