"""Stage ``gap_sources``: what the train-rollout gap is made of, where it sits, and what each kind of guidance leaves.

One set of FP4 rollouts with whole codes of all layers and the routing, one of BF16 rollouts, for the policy before RL
and, where it has been trained, for the `trace` policy of this seed. Then only trainer forwards, each over all tokens:

- *sources*: BF16, QAT, RTN on the recorded scale, one bit and whole codes, with and without routing replay (R3); QAT
  of weights alone, and of weights with one more scope. Beside them two comparisons of engines: the FP4 engine scoring
  its own tokens as a prefill (what it differs from itself by batching), and the BF16 engine scoring the FP4 tokens.
- *factorial*: guidance at bits x layers x scale bits x tensors.
- *decomposition*: `trace_rl.analysis.sources`. *where*: by token entropy and by position. *codes*: by layer and tensor.
- *layers*: whole codes followed in one layer alone, and in all but one. Layers do not add up: a code that flips early
  moves every value behind it.

Nothing is trained: both engines run the policy the trainer runs (staleness 0); `trace_rl.stages.ratio` has the rest.
"""

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_rl import tracking
from trace_rl.analysis.clusters import clustered_mean
from trace_rl.analysis.forwards import (
    BF16_FORWARD,
    FOLLOW_SCALE,
    QAT,
    TRACE,
    TRACE_ALL,
    TRACE_FULL,
    Forward,
    Recorded,
    SomeLayers,
    Tokens,
)
from trace_rl.analysis.picks import PickCollector, describe_counts
from trace_rl.analysis.sources import decompose, describe_gap, where
from trace_rl.config.analysis import AnalysisConfig
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.guidance import GuidanceSpec, LayerSet, full_recording
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.formats.static_scales import StaticScales
from trace_rl.models.checkpoint_io import write_json
from trace_rl.qat.attach import attach
from trace_rl.qat.collector import Collector
from trace_rl.rollout.engine import RolloutEngine, Sampling, open_engine
from trace_rl.stages.rl_prompts import pad_id, rl_prompts

SEED_BASE = 1 << 42
"""Sampling seeds apart from those of training, calibration and parity."""
TRAINED = "trace"
"""The method whose trained policy is measured beside the one before RL."""
SOURCES = {
    "bf16": BF16_FORWARD,
    "qat": QAT,
    "recorded_scale": FOLLOW_SCALE,
    "trace": TRACE,
    "trace_all": TRACE_ALL,
    "full": TRACE_FULL,
    "bf16_no_r3": BF16_FORWARD.without_replay(),
    "qat_no_r3": QAT.without_replay(),
    "trace_no_r3": TRACE.without_replay(),
    "full_no_r3": TRACE_FULL.without_replay(),
}
PARTIAL = {
    "qat_weights": {"activations": False, "kv": False},
    "qat_weights_activations": {"kv": False},
    "qat_weights_kv": {"activations": False},
    "qat_activations_kv": {"weights": False},
}
"""QAT of some scopes only."""
LOCATED = ("bf16", "qat", "trace", "full")
"""Forwards whose gap is shown by entropy and position."""
BITS = (1, 2, 3, 4)
SCALE_BITS = (8, 2)
TENSORS = {"fc1": ("fc1",), "kv": ("k", "v"), "both": ("fc1", "k", "v")}


@dataclass
class Rollouts:
    """What the engines gave for one policy."""

    fp4: Recorded
    bf16: Recorded
    fp4_rescored: Tensor
    """The FP4 engine on its own tokens, as a prefill."""
    bf16_on_fp4: Tensor
    """The BF16 engine on the FP4 tokens."""


def run(config: ExperimentConfig, paths: RunPaths, *, seed: int) -> dict[str, Any]:
    """Measure and write ``paths.gap_sources(seed)``."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    started = time.perf_counter()
    with tracking.stage_run(config, stage="gap_sources", paths=paths, wildcards={"seed": seed}) as tracker:
        policies = {"start": paths.checkpoint}
        trained = paths.train(TRAINED, seed) / "policy"
        if (trained / "config.json").is_file():
            policies[TRAINED] = trained
        quant = QuantSpec(format=config.format)
        scales = StaticScales.load(paths.scales)
        rollouts = roll_out(config, paths, policies=policies, quant=quant, scales=scales, seed=seed)
        result: dict[str, Any] = {
            "seed": seed,
            "engine": config.engine.name,
            "quant": quant.model_dump(mode="json"),
            "num_prompts": config.analysis.num_prompts,
            "temperature": config.sampling.temperature,
            "policies": {
                name: measure(path, rollouts[name], quant=quant, scales=scales, settings=config.analysis)
                for name, path in policies.items()
            },
        }
        result["seconds"] = time.perf_counter() - started
        write_json(paths.gap_sources(seed), result)
        tracker.log_metrics({name: policy["decomposition"] for name, policy in result["policies"].items()})
        tracker.log_artifact(paths.gap_sources(seed))
    for name, policy in result["policies"].items():
        print(f"policy {name}\n{sources_table(policy['sources'])}")
    return result


def roll_out(
    config: ExperimentConfig,
    paths: RunPaths,
    *,
    policies: dict[str, Path],
    quant: QuantSpec,
    scales: StaticScales,
    seed: int,
) -> dict[str, Rollouts]:
    """Both engines, one after the other, on every policy."""
    count = config.analysis.num_prompts
    prompts = rl_prompts(paths.checkpoint, data=paths.data, count=count, setting="analysis.num_prompts")
    temperature = config.sampling.temperature
    sampling = Sampling(
        temperature=temperature, max_new_tokens=config.sampling.max_new_tokens, seed=SEED_BASE + (seed << 32)
    )
    pad = pad_id(AutoTokenizer.from_pretrained(paths.checkpoint, local_files_only=True))
    found: dict[str, dict[str, Any]] = {name: {} for name in policies}
    for precision, spec in (("fp4", quant), ("bf16", BF16)):
        engine = open_engine(
            paths.checkpoint, quant=spec, scales=scales if spec.enabled else None, config=config.engine
        )
        try:
            for version, (name, path) in enumerate(policies.items()):
                load_policy(engine, path, version=version)
                batch = engine.generate(prompts, sampling, full_recording(spec))
                recorded = found[name][precision] = Recorded(batch, temperature=temperature, pad_id=pad)
                tokens = recorded if spec.enabled else found[name]["fp4"]
                scored = tokens.response_scores(engine.score(tokens.sequences, temperature))
                found[name]["fp4_rescored" if spec.enabled else "bf16_on_fp4"] = scored
        finally:
            engine.close()
    return {name: Rollouts(**values) for name, values in found.items()}


def load_policy(engine: RolloutEngine, path: Path, *, version: int) -> None:
    """Refit the engine with the weights in ``path``."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True)
    engine.load_policy(model.state_dict().items(), version)


def measure(
    path: Path, rollouts: Rollouts, *, quant: QuantSpec, scales: StaticScales, settings: AnalysisConfig
) -> dict[str, Any]:
    """Everything that one policy's rollouts say."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True).eval()
    fp4, bf16 = rollouts.fp4, rollouts.bf16
    rows: dict[str, dict[str, Any]] = {}
    tokens: dict[str, Tokens] = {}
    codes: dict[str, list[dict[str, Any]]] = {}

    for name, changes in PARTIAL.items():
        partial = attach(model, quant=quant.model_copy(update=changes), scales=scales)
        tokens[name] = fp4.run(QAT, model=model, qat=partial)
        rows[name] = describe_gap(tokens[name].logprobs, fp4.rollout_logprobs, fp4.clusters)
    qat = attach(model, quant=quant, scales=scales)
    for name, forward in SOURCES.items():
        collector = PickCollector()
        tokens[name] = fp4.run(forward, model=model, qat=qat, collector=collector)
        rows[name] = describe_gap(tokens[name].logprobs, fp4.rollout_logprobs, fp4.clusters)
        rows[name]["mismatch"] = mismatch_by_tensor(collector)
        if forward.replay:
            rows[name]["router_disagreement"] = collector.router_disagreement()
        codes[name] = collector.rows()
    for name, forward in (("bf16_both", BF16_FORWARD), ("bf16_both_no_r3", BF16_FORWARD.without_replay())):
        train = bf16.run(forward, model=model, qat=qat).logprobs
        rows[name] = describe_gap(train, bf16.rollout_logprobs, bf16.clusters)
    off = tokens["bf16_no_r3"].logprobs
    rows["bf16_both_on_fp4_tokens_no_r3"] = describe_gap(off, rollouts.bf16_on_fp4, fp4.clusters)
    rows["engine_fp4_rescored"] = describe_gap(rollouts.fp4_rescored, fp4.rollout_logprobs, fp4.clusters)
    rows["engine_bf16_on_fp4_tokens"] = describe_gap(rollouts.bf16_on_fp4, fp4.rollout_logprobs, fp4.clusters)

    gaps = {name: (value.logprobs - fp4.rollout_logprobs).abs() for name, value in tokens.items()}
    return {
        "trajectories": len(fp4.batch.trajectories),
        "sources": rows,
        "decomposition": decompose(gaps, fp4.clusters),
        "where": where(
            {name: gaps[name] for name in LOCATED},
            fp4,
            entropy=tokens["full"].entropy,
            entropy_edges=settings.entropy_edges,
            width=settings.position_width,
        ),
        "codes": codes,
        "layers": [
            layer_row(layer, gaps=gaps, fp4=fp4, model=model, qat=qat)
            for layer in range(qat.dims.num_layers if quant.recordable() else 0)
        ],
        "factorial": [
            factorial_row(spec, tensors, fp4=fp4, model=model, qat=qat)
            for spec, tensors in (every_guidance(quant) if settings.factorial else ())
        ],
    }


def layer_row(layer: int, *, gaps: dict[str, Tensor], fp4: Recorded, model: Any, qat: Any) -> dict[str, Any]:
    """What following whole codes in one layer alone takes off QAT's gap; what following all others leaves over all."""
    others = tuple(other for other in range(qat.dims.num_layers) if other != layer)
    found = {}
    for name, chosen in (("alone", (layer,)), ("without", others)):
        forward = Forward("guided", SomeLayers(bits=4, chosen=chosen))
        train = fp4.run(forward, model=model, qat=qat).logprobs
        found[name] = (train - fp4.rollout_logprobs).abs()
    return {
        "layer": layer,
        "alone": clustered_mean(gaps["qat"] - found["alone"], fp4.clusters),
        "without": clustered_mean(found["without"] - gaps["full"], fp4.clusters),
    }


def every_guidance(quant: QuantSpec) -> Iterator[tuple[GuidanceSpec, str]]:
    """Guidance at every combination that the formats can record, with the name of its tensors."""
    possible = [name for name, tensors in TENSORS.items() if set(tensors) <= set(quant.recordable())]
    for bits, layers, scale_bits, tensors in itertools.product(BITS, get_args(LayerSet), SCALE_BITS, possible):
        yield GuidanceSpec(bits=bits, layers=layers, scale_bits=scale_bits, tensors=TENSORS[tensors]), tensors


def factorial_row(spec: GuidanceSpec, tensors: str, *, fp4: Recorded, model: Any, qat: Any) -> dict[str, Any]:
    """Gap, mismatch and scale recovery under one guidance."""
    collector = Collector()
    train = fp4.run(Forward("guided", spec), model=model, qat=qat, collector=collector).logprobs
    row: dict[str, Any] = {
        "bits": spec.bits,
        "layers": spec.layers,
        "scale_bits": spec.scale_bits,
        "tensors": tensors,
        "bytes_per_token": qat.record_layout(spec).row_bytes,
    }
    row |= describe_gap(train, fp4.rollout_logprobs, fp4.clusters)
    row["mismatch"] = mismatch_by_tensor(collector)
    guided = {(layer, tensor) for layer in spec.layer_ids(qat.dims.num_layers) for tensor in spec.tensors}
    counted = {key: counts for key, counts in collector.tensors.items() if key in guided}
    row["bracket_miss_by_layer"] = [
        {"layer": layer, "tensor": tensor, "bracket_miss": describe_counts(counts)["bracket_miss"]}
        for (layer, tensor), counts in sorted(counted.items())
    ]
    if spec.scale_bits != 8:
        row["scale_recovery_failures"] = sum(counts.scale_recovery_failures for counts in counted.values())
        row["scale_blocks"] = sum(counts.blocks for counts in counted.values())
    return row


def mismatch_by_tensor(collector: Collector) -> dict[str, float]:
    """Codeword mismatch over all layers, and over all tensors under ``all``."""
    names = sorted({tensor for _, tensor in collector.tensors})
    rates = {name: collector.total(name).mismatch_rate for name in names}
    return rates | {"all": collector.total().mismatch_rate}


def sources_table(rows: dict[str, dict[str, Any]]) -> str:
    """Gap and codeword mismatch of every comparison, in the order measured."""
    lines = [f"{'':32}{'mean |d|':>10}{'+-':>9}{'p99':>9}{'max':>8}  mismatch fc1 / k / v (%)"]
    for name, row in rows.items():
        rates = row.get("mismatch", {})
        shown = " / ".join(f"{100 * rates[tensor]:.2f}" for tensor in ("fc1", "k", "v") if tensor in rates)
        numbers = f"{row['gap_mean']:10.5f}{row['gap_stderr']:9.5f}{row['gap_p99']:9.4f}{row['gap_max']:8.3f}"
        lines.append(f"{name:32}{numbers}  {shown}")
    return "\n".join(lines)
