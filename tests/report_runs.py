"""Made-up runs for the tests of the report: summaries, step metrics, gates, analysis artifacts, and pages of them."""

import dataclasses
import math
import random
from pathlib import Path

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.load import load_method
from trace_rl.config.targets import evaluated_names
from trace_rl.report.context import Context
from trace_rl.report.document import Figure
from trace_rl.report.labels import base
from trace_rl.report.target_page import build_target

METHODS = Path(__file__).resolve().parents[1] / "config/methods"
SEEDS = (0, 1, 2)
TASKS = ("mini_math", "mini_code")
TENSORS = ("fc1", "k", "v")


def score(mean: float, *, n: int = 400) -> dict:
    return {"mean": mean, "stderr": (mean * (1 - mean) / n) ** 0.5, "n": n}


def diagnostics(*, gap: float, layers: int = 2) -> dict:
    """Codeword statistics that grow with depth; the trainer lies higher in the deeper layers."""
    found = {}
    for mode in ("own", "rtn"):
        for tensor in TENSORS:
            for layer in range(layers):
                depth = (layer + 1) / layers
                found[f"diag/{mode}/mismatch/{tensor}/{layer}"] = 0.1 * depth
                found[f"diag/{mode}/lower/{tensor}/{layer}"] = 0.04 * depth
                found[f"diag/{mode}/higher/{tensor}/{layer}"] = 0.06 * depth
                found[f"diag/{mode}/bracket_miss/{tensor}/{layer}"] = 0.001 * depth
            for metric, value in (("mismatch", 0.06), ("adjacent", 0.99), ("lower", 0.03), ("higher", 0.03)):
                found[f"diag/{mode}/{metric}/{tensor}"] = value
    return found | {
        "diag/own/adjacent": 0.995,
        "diag/rtn/adjacent": 0.992,
        "diag/own/mismatch": gap,
        "diag/own/mismatch/deeper_half": gap,
        "diag/own/mismatch/guided": gap / 2,
        "diag/rtn/mismatch": 0.2,
        "diag/rtn/higher": 0.03,
        "diag/rtn/higher/deeper_half": 0.045,
        "diag/rtn/lower": 0.03,
        "diag/rtn/lower/deeper_half": 0.03,
        "diag/own/router_disagreement": gap,
        "diag/off/router_disagreement": 0.02,
    }


def record(
    *,
    fp4: float,
    bf16: float,
    trained: bool = True,
    gap: float = 0.01,
    guidance_bytes: float = 0.0,
    step_s: float = 1.6,
    layers: int = 2,
) -> dict:
    """One method and seed as `collect` gathers it."""
    accuracy = {task: {"fp4": score(fp4), "bf16": score(bf16)} for task in TASKS}
    if not trained:
        keys = (
            "logprob_gap_mean",
            "logprob_gap_p99",
            "logprob_gap_max",
            "codeword_mismatch",
            "guidance_bytes_per_token",
            "step_s",
            "steps",
            "reward_start",
            "reward_end",
            "reward_gain",
        )
        return {"accuracy": accuracy, "collapsed": None, "diagnostics": None} | dict.fromkeys(keys)
    return {
        "accuracy": accuracy,
        "logprob_gap_mean": gap,
        "logprob_gap_p99": 10 * gap,
        "logprob_gap_max": 100 * gap,
        "codeword_mismatch": gap,
        "guidance_bytes_per_token": guidance_bytes,
        "step_s": {"generate": 1.0, "train_forward": 0.5, "step": step_s},
        "quantize_s": {"activations": 0.05, "weights": 0.01},
        "reward_start": 0.5,
        "reward_end": 0.7,
        "reward_gain": 0.2,
        "reward_window_steps": 10,
        "steps": 100,
        "collapsed": False,
        "diagnostics": diagnostics(gap=gap, layers=layers),
    }


def summary_of(methods: dict) -> dict:
    """A run's summary around its methods."""
    return {
        "run": "made-up",
        "methods": methods,
        "start": {"accuracy": {task: {"fp4": score(0.4), "bf16": score(0.5)} for task in TASKS}},
        "hardware": {"cpu": "a processor", "cores": 2, "accelerators": [], "platform": "linux"},
        "versions": {"python": "3.11"},
        "commit": {"id": "abc", "dirty": True},
    }


def over_seeds(*, fp4: list[float], bf16: list[float], **settings) -> dict:
    """A method with one record per accuracy."""
    return {str(seed): record(fp4=a, bf16=b, **settings) for seed, (a, b) in enumerate(zip(fp4, bf16, strict=True))}


def steps_of(*, seed: int, num: int = 20, level: float = 0.5) -> list[dict]:
    """Rows of metrics.jsonl, noisy so that nothing simplifies away."""
    noise = random.Random(seed)
    return [
        {
            "step": step,
            "reward": level + 0.2 * step / num + noise.uniform(-0.05, 0.05),
            "gap_mean": 0.01 * math.exp(noise.uniform(-0.3, 0.3)),
            "gap_max": 1.0 + noise.random(),
            "entropy": 0.4 + noise.uniform(-0.02, 0.02),
            "response_length": 20.0 + noise.random(),
            "tokens_per_s": 3000.0,
            "seconds/step": 1.2,
        }
        for step in range(num)
    ]


def artifacts() -> dict:
    """Calibration, gates and the rollout benchmark."""
    row = {"phase": "start", "mode": "bf16", "gap_mean": 0.003, "threshold": 0.02, "verdict": "ok"}
    return {
        "calibration": {
            "num_tokens": 100,
            "num_idle_experts": 1,
            "format_relative_mse": {"gate_up": {"nvfp4": 0.009, "mxfp4": None}},
        },
        "audit": {"nvfp4": {"num_checked": 30, "differences": []}},
        "parity": {"nvfp4": {"rows": [row]}},
        "bench": {
            "rows": [
                {
                    "mode": "bf16",
                    "num_sequences": 64,
                    "output_length": 16,
                    "tokens_per_s": {"median": 3000.0, "min": 2900.0, "max": 3100.0},
                    "ratio_to_bf16": 1.0,
                    "guidance_bytes_per_token": 0,
                }
            ],
            "recording_cost": [
                {
                    "workload": "decode",
                    "mode": "fp4 + compact",
                    "num_sequences": 64,
                    "wall_percent": {"median": 2.0, "low": 1.0, "high": 3.0, "min": 0.5, "max": 4.0, "n": 10},
                    "cpu_percent": {"median": 2.5, "low": None, "high": None, "min": 1.5, "max": 4.5, "n": 3},
                }
            ],
            "environment": {"load": 0.3},
        },
    }


def gap_sources(*, layers: int = 6) -> dict:
    """The artifact of stage gap_sources."""
    forwards = ("bf16", "qat", "recorded_scale", "trace", "trace_all", "full")
    part = {"mean": 0.01, "stderr": 0.001, "share_of_qat": 0.7}
    gap = {"tokens": 900, "gap_mean": 0.01, "gap_stderr": 0.001, "gap_p99": 0.1, "gap_max": 1.0, "kl_k3": 0.001}
    bins = [
        {"bin": 0, "tokens": 800, "mean": 0.001, "stderr": 0.0001, "share": 0.1, "from": 0.0, "below": 0.05},
        {"bin": 1, "tokens": 100, "mean": 0.1, "stderr": 0.01, "share": 0.9, "from": 0.05, "below": None},
        {"bin": 2, "tokens": 0, "from": 9.0, "below": None},
    ]
    codes = [
        {"layer": layer, "tensor": tensor, "mismatch": 0.1, "bracket_miss": 0.001, "wrong_pick": 0.0007}
        for layer in range(layers)
        for tensor in TENSORS
    ]
    factorial = [
        gap
        | {"bits": bits, "layers": chosen, "scale_bits": scale_bits, "tensors": tensors}
        | {"bytes_per_token": 24 * bits, "mismatch": {"fc1": 0.04, "all": 0.05}}
        | ({"scale_recovery_failures": 3, "scale_blocks": 1000} if scale_bits == 2 else {})
        for bits in (1, 2, 3, 4)
        for chosen in ("all", "deeper_half", "first_half", "last_quarter", "last_eighth")
        for scale_bits in (8, 2)
        for tensors in ("fc1", "kv", "both")
    ]
    policy = {
        "sources": {name: gap | {"mismatch": {"all": 0.1}} for name in forwards} | {"engine_fp4_rescored": gap},
        "decomposition": dict.fromkeys(("format", "scales", "codes", "rounding", "engine", "routing_qat"), part),
        "where": {kind: dict.fromkeys(("bf16", "qat", "trace", "full"), bins) for kind in ("entropy", "position")},
        "codes": dict.fromkeys(("qat", "trace", "trace_all"), codes),
        "factorial": factorial,
        "layers": [{"layer": n, "alone": part, "without": part} for n in range(layers)],
    }
    return {"policies": {"start": policy, "trace": policy}}


def ratio() -> dict:
    """The artifact of stage ratio."""
    weight = {"mean_abs": 0.03, "mean_abs_stderr": 0.001, "mean": 0.0, "std": 0.1, "truncated": 0.001, "ess": 0.98}
    cell = weight | {
        "mean_abs_error": 0.02,
        "mean_abs_error_stderr": 0.001,
        "correlation": 0.45,
        "correlation_stderr": 0.02,
        "slope": 0.4,
        "slope_stderr": 0.03,
        "smooth": {"correlation": 0.3, "correlation_stderr": 0.02, "slope": 0.71, "slope_stderr": 0.03},
    }
    forwards = ("bf16", "bf16_no_r3", "qat", "qat_no_r3", "recorded_scale", "trace", "trace_gated", "trace_all", "full")

    def part(names: tuple[str, ...]) -> dict:
        estimates = {name: cell | {"correlation": 0.04 if name == "trace" else 0.45} for name in names}
        rows = [
            {"updates": updates, "truth": weight, "estimates": estimates}
            | ({"differences": dict.fromkeys(names, cell | {"correlation": None})} if updates else {})
            | ({"staleness": dict.fromkeys(names, {"mean": 0.0011 * updates, "mean_stderr": 1e-4})} if updates else {})
            for updates in (0, 1, 3)
        ]
        return {"floor": weight, "shuffled": weight, "rows": rows}

    return {
        "fp4": part(forwards),
        "bf16": part(("bf16",)),
        "gap_by_updates": {name: {"0": 0.01, "1": 0.02, "3": 0.03} for name in ("bf16_both", *forwards)},
    }


def a_method(name: str, *, level: float, layers: int = 8) -> dict:
    scores = [level + shift for shift in (0.0, 0.013, -0.011)]
    size = 0.0 if base(name) in ("bf16", "fp4_naive", "qat") else 144.0
    return over_seeds(
        fp4=scores,
        bf16=[score + 0.02 for score in scores],
        trained=not name.startswith("ptq_"),
        gap=0.01,
        guidance_bytes=size,
        layers=layers,
    )


def a_context(config: ExperimentConfig, names: tuple[str, ...], *, num_steps: int = 270, **settings) -> Context:
    methods = {name: a_method(name, level=0.5 + 0.002 * index) for index, name in enumerate(names)}
    for name in set(names) - set(evaluated_names(config, "paper")):
        methods[name] = {seed: found | {"accuracy": {}} for seed, found in methods[name].items()}
    return Context(
        summary=summary_of(methods),
        config=config,
        methods={},
        runs={
            (name, seed): steps_of(seed=seed + 10 * index, num=num_steps)
            for index, name in enumerate(names)
            if not name.startswith("ptq_")
            for seed in SEEDS
        },
        artifacts=artifacts(),
        seconds={f"train/{name}/seed{seed}": 300.0 + seed for name in names for seed in SEEDS},
        **settings,
    )


def with_methods(context: Context) -> Context:
    """The context with the files of its methods."""
    found = {name: load_method(METHODS / f"{name}.yaml") for name in context.summary["methods"]}
    return dataclasses.replace(context, methods=found)


def section_text(context: Context, target: str, title: str) -> str:
    """What a section says, without its figures."""
    document = build_target(context, target=target)
    found = next(section for section in document.sections if section.title.startswith(title))
    return "\n".join(str(block) for block in found.blocks if not isinstance(block, Figure))
