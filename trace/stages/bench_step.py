"""Stage ``bench step``: one RL step split by phase, for each method of ``bench.step_methods``.

Engine, trainer and refit are those of ``train``, on the run's own policy, calibration and prompts. So that methods are
compared on the same work,

- every response is forced to ``sampling.max_new_tokens`` (its reward is that of the text up to the first end token):
  methods sample different lengths, and the difference would be larger than what guidance costs;
- the learning rate is 0: the optimizer and the refit do all their work and the policy stays the one before RL;
- step i of a round trains the same prompts in every method, and ratios are formed between such steps.

A process holds one rollout engine, so every method gets a process of its own. They are all open and take turns step
by step, in one order and the next time in the reverse, the others waiting: a machine that slows down slows them alike.
Without the memory for that (``bench.step_together: false``) one is open at a time, and what another program takes in
those minutes is counted as the method's. ``bench.step_rounds`` opens everything again; the medians of the rounds stand
beside each other in the result, and the CPU time of the process beside its wall time, which other programs lengthen.

FP4 is emulated here: quantization costs time that FP4 hardware would not spend, in both ``qat`` and ``trace``. What
guidance adds to it (recording, gathering, transfer, following) is real.
"""

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_rl import tracking
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.guidance import GuidanceSpec
from trace_rl.config.load import load_method
from trace_rl.config.method import RlMethod, TrainingOverrides
from trace_rl.config.paths import RunPaths
from trace_rl.errors import UserError
from trace_rl.models.checkpoint_io import validate_checkpoint, write_json
from trace_rl.rl.trainer import Trainer
from trace_rl.rollout.engine import RolloutEngine, Sampling, open_engine
from trace_rl.stages.bench import median_interval
from trace_rl.stages.calibrated_scales import calibrated_scales
from trace_rl.stages.measure import Spread, environment, environment_line, fresh_process, spread
from trace_rl.stages.train import TrainRun, build_trainer
from trace_rl.tasks.problem import read_jsonl
from trace_rl.trajectory import RolloutBatch

BASELINE = "qat"
"""The method that guidance is counted over: the same rollout and the same rounding, nothing recorded."""
ROLLOUT = ("generate", "record")
TRAINING = ("transfer", "old_logprobs", "train_forward", "train_backward", "optimizer")
PHASES = ("generate", "record", "reward", *TRAINING, "refit")
QUANTIZE = ("quantize_s/activations", "quantize_s/weights")
"""Inside ``train_forward``. Without the FC2 inputs where the experts' operator rounds them, in no method guided."""
OTHER = "other"
CPU = "step, CPU time"

LARGEST_STEP_RATIO = 1.05
LARGEST_SHARE = 3.0  # percent

StepRow = dict[str, float]
"""Seconds of one step: by phase, whole, rest and CPU time; and its ``tokens`` and ``response_tokens``."""
Rounds = dict[str, list[list[StepRow]]]
"""Steps by method and round."""


def run(config: ExperimentConfig, paths: RunPaths) -> dict[str, Any]:
    """Measure and write ``step.json``; returns its content."""
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    started = time.perf_counter()
    methods = step_methods(config)
    read_jsonl(paths.data / "rl.jsonl")  # what is missing is said before a process starts
    with tracking.stage_run(config, stage="bench_step", paths=paths) as tracker:
        found = environment()
        rounds: Rounds = {name: [] for name in methods}
        for index in range(config.bench.step_rounds):
            print(f"bench step: round {index + 1} of {config.bench.step_rounds}", flush=True)
            order = list(methods) if index % 2 == 0 else list(reversed(methods))
            for group in [order] if config.bench.step_together else [[name] for name in order]:
                chosen = {name: methods[name] for name in group}
                for name, rows in measure_round(config, paths, methods=chosen, threads=threads).items():
                    rounds[name].append(rows)
        rows = method_rows(rounds)
        costs = guidance_costs(rounds, guidance={name: method.guidance for name, method in methods.items()})
        result = {
            "methods": rows,
            "guidance": costs,
            "targets": targets(costs),
            "learning_rate": 0.0,
            "forced_response_tokens": config.sampling.max_new_tokens,
            "sequences": config.training.prompts_per_step * config.training.samples_per_prompt,
            "rounds": config.bench.step_rounds,
            "together": config.bench.step_together,
            "warm_up_steps": config.bench.step_warmup,
            "format": str(config.format),
            "emulated": True,
            "engine": config.engine.name,
            "environment": found | {"threads": threads},
            "seconds": time.perf_counter() - started,
        }
        write_json(paths.bench_step, result)
        tracker.log_artifact(paths.bench_step)
        tracker.log_metrics({f"{name}/step": row["seconds"]["step"]["median"] for name, row in rows.items()})
    print(step_table(result))
    return result


def step_methods(config: ExperimentConfig) -> dict[str, RlMethod]:
    """The methods by name; UserError for one that is not trained."""
    methods = {}
    for name in config.bench.step_methods:
        method = load_method(Path(config.suite.methods_dir) / f"{name}.yaml")
        if not isinstance(method, RlMethod):
            raise UserError(f"bench.step_methods has {name}, which is quantized after training and has no RL step")
        if method.training != TrainingOverrides():
            raise UserError(
                f"bench.step_methods has {name}; steps are timed on one budget, so drop its training settings"
            )
        methods[name] = method
    return methods


# One process ------------------------------------------------------------------------------------------------------


class FixedLength:
    """An engine whose responses all have ``max_new_tokens`` tokens; everything else is the engine's."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        recording: GuidanceSpec | None,
        *,
        record_experts: bool = True,
    ) -> RolloutBatch:
        """As the engine's, past the end token."""
        sampling = dataclasses.replace(sampling, ignore_eos=True)
        return self._engine.generate(prompts, sampling, recording, record_experts=record_experts)


class OpenMethod:
    """One method on the policy before RL, its engine open."""

    def __init__(self, config: ExperimentConfig, paths: RunPaths, *, method: RlMethod) -> None:
        # A rate of 0 is no setting of a training; it is set here, behind the configuration's checks.
        training = config.training.model_copy(update={"learning_rate": 0.0})
        this = TrainRun(
            config=config.model_copy(update={"training": training}),
            paths=paths,
            method=method,
            seed=0,
            identity="bench",
            problems=read_jsonl(paths.data / "rl.jsonl"),
        )
        quant = this.rollout_quant
        validate_checkpoint(paths.checkpoint, quant=quant)
        tokenizer = AutoTokenizer.from_pretrained(paths.checkpoint)
        model = AutoModelForCausalLM.from_pretrained(paths.checkpoint, dtype=torch.bfloat16)
        scales = calibrated_scales(config, paths, quant=quant)
        self.engine = open_engine(paths.checkpoint, quant=quant, scales=scales, config=config.engine)
        self.trainer = build_trainer(this, model=model, engine=FixedLength(self.engine), tokenizer=tokenizer)
        reward_until_end(self.trainer, eos_id=tokenizer.eos_token_id)
        self.engine.load_policy(self.trainer.policy_tensors(), self.trainer.step_index)

    def step(self) -> StepRow:
        """Run and time one step."""
        cpu_s = time.process_time()
        metrics = self.trainer.step()
        return step_row(metrics, cpu_s=time.process_time() - cpu_s)


_open: list[OpenMethod] = []  # what this process holds: none or one


def open_method(config: ExperimentConfig, paths: RunPaths, *, method: RlMethod) -> None:
    """Open a method in this process."""
    _open.append(OpenMethod(config, paths, method=method))


def step_method() -> StepRow:
    """One step of the method that is open in this process."""
    return _open[0].step()


def close_method() -> None:
    """Close the engine of the method that is open in this process."""
    _open.pop().engine.close()


def measure_round(
    config: ExperimentConfig, paths: RunPaths, *, methods: Mapping[str, RlMethod], threads: int
) -> dict[str, list[StepRow]]:
    """Open these methods, each in its process, and time their steps in turns; rows by method, without the warm-up."""
    rows: dict[str, list[StepRow]] = {name: [] for name in methods}
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(fresh_process(threads=threads)) for name in methods}
        for name, method in methods.items():
            processes[name].submit(open_method, config, paths, method=method).result()
        for index in range(config.bench.step_warmup + config.bench.step_repeats):
            for name in list(methods) if index % 2 == 0 else reversed(methods):
                rows[name].append(processes[name].submit(step_method).result())
        for process in processes.values():
            process.submit(close_method).result()
    return {name: steps[config.bench.step_warmup :] for name, steps in rows.items()}


def reward_until_end(trainer: Trainer, *, eos_id: int) -> None:
    """Judge a response by its tokens up to the first end token, as if it had stopped there."""
    reward = trainer.reward

    def judge(problem: int, response: list[int]) -> float:
        stop = response.index(eos_id) + 1 if eos_id in response else len(response)
        return reward(problem, response[:stop])

    trainer.reward = judge


def step_row(metrics: Mapping[str, float], *, cpu_s: float) -> StepRow:
    """Phases, tokens and the rest of one step from the trainer's metrics; ``cpu_s`` of the whole process."""
    row = {phase: metrics.get(f"seconds/{phase}", 0.0) for phase in PHASES}
    row["step"] = metrics["seconds/step"]
    row[CPU] = cpu_s
    row[OTHER] = row["step"] - sum(row[phase] for phase in PHASES)
    row |= {part: metrics[part] for part in QUANTIZE}
    row["tokens"] = float(round(metrics["tokens_per_s"] * metrics["seconds/step"]))
    row["response_tokens"] = float(metrics["response_tokens"])
    return row


# Arithmetic -------------------------------------------------------------------------------------------------------


def total(row: StepRow, phases: Sequence[str]) -> float:
    """Seconds of several phases of one step."""
    return sum(row[phase] for phase in phases)


def method_rows(rounds: Rounds) -> dict[str, dict[str, Any]]:
    """By method: spread of the seconds of every phase, per token too, rates, and the medians of the rounds."""
    rows = {}
    for name, by_round in rounds.items():
        steps = [row for round_rows in by_round for row in round_rows]
        phases = ("step", CPU, *PHASES, OTHER, *QUANTIZE)
        rows[name] = {
            "seconds": {phase: spread([row[phase] for row in steps]) for phase in phases},
            "us_per_token": {
                phase: statistics.median(row[phase] / row["tokens"] for row in steps) * 1e6 for phase in phases
            },
            "tokens_per_s": {
                "rollout": spread([row["response_tokens"] / total(row, ROLLOUT) for row in steps]),
                "trainer": spread([row["tokens"] / total(row, TRAINING) for row in steps]),
            },
            "tokens": statistics.median(row["tokens"] for row in steps),
            "response_tokens": statistics.median(row["response_tokens"] for row in steps),
            "step_by_round": [statistics.median(row["step"] for row in round_rows) for round_rows in by_round],
        }
    return rows


def guidance_costs(rounds: Rounds, *, guidance: Mapping[str, GuidanceSpec | None]) -> dict[str, dict[str, Any]]:
    """What each guided method costs over ``qat``, in percent, between steps of the same round and prompts.

    ``step`` and ``step_cpu``: of the whole step, in wall and in CPU time. ``recording``: of generating and gathering.
    ``training``: of the trainer's part of the step. ``guided_quantization``: the additional seconds of quantizing
    activations, K and V, in percent of the trainer's part of qat's step. Empty without ``qat``.
    """
    if BASELINE not in rounds:
        return {}
    baseline = [row for round_rows in rounds[BASELINE] for row in round_rows]
    costs = {}
    for name, spec in guidance.items():
        if spec is None:
            continue
        guided = [row for round_rows in rounds[name] for row in round_rows]
        pairs = list(zip(guided, baseline, strict=True))
        assert all(a["tokens"] == b["tokens"] for a, b in pairs), "the methods trained different tokens"
        percents = {
            "step": [100 * (a["step"] / b["step"] - 1) for a, b in pairs],
            "step_cpu": [100 * (a[CPU] / b[CPU] - 1) for a, b in pairs],
            "recording": [100 * (total(a, ROLLOUT) / total(b, ROLLOUT) - 1) for a, b in pairs],
            "training": [100 * (total(a, TRAINING) / total(b, TRAINING) - 1) for a, b in pairs],
            "guided_quantization": [100 * (a[QUANTIZE[0]] - b[QUANTIZE[0]]) / total(b, TRAINING) for a, b in pairs],
        }
        costs[name] = {"bits": spec.bits, "layers": spec.layers}
        costs[name] |= {share: percent_spread(values) for share, values in percents.items()}
    return costs


def percent_spread(values: Sequence[float]) -> dict[str, float | None]:
    """Spread with ``low`` and ``high``, the 95 % interval of the median; null for fewer values than it needs."""
    low, high = median_interval(values) or (None, None)
    return {**spread(values), "low": low, "high": high}


def targets(costs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the default method ``trace`` must keep to, and whether the medians do; empty when it was not measured."""
    if "trace" not in costs:
        return []
    trace = costs["trace"]
    found = [
        ("trace step / qat step", 1 + trace["step"]["median"] / 100, LARGEST_STEP_RATIO),
        ("recording, % of rollout time", trace["recording"]["median"], LARGEST_SHARE),
        ("guided quantization, % of training step", trace["guided_quantization"]["median"], LARGEST_SHARE),
    ]
    return [{"name": name, "value": value, "at_most": limit, "met": value <= limit} for name, value, limit in found]


def step_table(result: Mapping[str, Any]) -> str:
    """What the stage prints."""
    methods: Mapping[str, Any] = result["methods"]
    first = next(iter(methods.values()))
    lines = [
        f"one RL step: {result['sequences']} responses of {result['forced_response_tokens']} tokens, "
        f"{first['tokens']:.0f} tokens with prompts; {result['format']} emulated, engine {result['engine']}",
        f"milliseconds: median (min - max) of {first['seconds']['step']['n']} steps in {result['rounds']} rounds, "
        + ("methods in turns" if result["together"] else "one method after the other"),
        f"{'':24}" + "".join(f"{name:>22}" for name in methods),
    ]
    for phase in first["seconds"]:
        if all(row["seconds"][phase]["max"] == 0 for row in methods.values()):
            continue
        cells = (_milliseconds(row["seconds"][phase]) for row in methods.values())
        lines.append(f"{phase:24}" + "".join(f"{cell:>22}" for cell in cells))
    medians = (" ".join(f"{1e3 * value:.0f}" for value in row["step_by_round"]) for row in methods.values())
    lines.append(f"{'step, by round':24}" + "".join(f"{cell:>22}" for cell in medians))
    per_token = (f"{row['us_per_token']['step']:.1f}" for row in methods.values())
    lines.append(f"{'step, us per token':24}" + "".join(f"{cell:>22}" for cell in per_token))
    for part in ("rollout", "trainer"):
        cells = (f"{row['tokens_per_s'][part]['median']:.0f}" for row in methods.values())
        lines.append(f"{part + ', tokens/s':24}" + "".join(f"{cell:>22}" for cell in cells))
    costs: Mapping[str, Any] = result["guidance"]
    if not costs:
        lines.append(f"what guidance costs: not measured, needs {BASELINE} and a guided method in bench.step_methods")
    for name, cost in costs.items():
        for share, text in _SHARES.items():
            lines.append(f"{name} over {BASELINE}, {text}: {_percent(cost[share])}")
    for target in result["targets"]:
        verdict = "met" if target["met"] else "NOT MET"
        lines.append(f"target {target['name']} <= {target['at_most']:g}: {target['value']:.3f}, {verdict}")
    lines.append(environment_line(result["environment"]))
    return "\n".join(lines)


_SHARES = {
    "step": "step",
    "step_cpu": "CPU time of the step",
    "recording": "rollout (recording)",
    "training": "training part of the step",
    "guided_quantization": "quantizing, in % of the training part",
}


def _milliseconds(seconds: Spread) -> str:
    return f"{1e3 * seconds['median']:.1f} ({1e3 * seconds['min']:.0f} - {1e3 * seconds['max']:.0f})"


def _percent(share: Mapping[str, float | None]) -> str:
    """Median with its interval, or with smallest and largest when there are too few steps for one."""
    if share["low"] is None:
        between = f"min {share['min']:+.1f}, max {share['max']:+.1f}"
    else:
        between = f"95 %: {share['low']:+.1f} to {share['high']:+.1f}"
    return f"{share['median']:+.1f} % ({between}, n {share['n']})"
