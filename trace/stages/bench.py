"""Stage ``bench rollout``: tokens per second and bytes of the engine, by precision, recording, batch and output length.

Modes: ``bf16``; ``fp4`` (weights, activations, KV); ``fp4 + compact`` (1 bit, deeper half); ``fp4 + full`` (whole
codes, all layers). Every sequence is forced to its length. One engine is open at a time, so BF16 is measured before
*and* after FP4, and the FP4 modes take turns within each repetition, forwards and backwards, so a machine that slows
down shows in the spread. The first generation of each mode, batch and length is a warm-up and not counted.

The cost of recording is smaller than that spread. It is measured in more repetitions, as

    percent = 100 * (seconds with recording / seconds without, in the same repetition - 1)

and stated as the median with its 95 % interval (order statistics, no distribution assumed), beside the ratio of the
fastest repetitions, once for decoding (the longest output) and once for prefilling (long prompts, one new token); in
wall time and in the process's CPU time, which does not see other programs take the core. On a machine that does other
work the interval is wider than any target; ``environment.load`` says whether it did.

Easy to get wrong: switching the recording empties the prefix cache and allocates a new record. In training that
happens once, here before every generation: it is done outside of the timed call, by an untimed one.

FP4 is emulated: operands are rounded to FP4 and multiplied in BF16. So speed shows what emulation and recording cost
here, never what FP4 hardware gains; the byte columns are exact for both.
"""

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trace_rl import formats, tracking
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.guidance import FULL, GuidanceSpec, recordable
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import BF16, FormatChoice, QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.guidance.accounting import bytes_per_token
from trace_rl.guidance.record import ModelDims
from trace_rl.models.checkpoint_io import iterate_tensors, read_json, write_json
from trace_rl.models.scopes import is_expert_weight
from trace_rl.rollout.engine import RolloutEngine, Sampling, open_engine
from trace_rl.stages.measure import environment, spread
from trace_rl.stages.rl_prompts import first_prompts

SEED = 1 << 42
RECORDINGS: dict[str, GuidanceSpec | None] = {
    "bf16": None,
    "fp4": None,
    "fp4 + compact": GuidanceSpec(),
    "fp4 + full": FULL,
}

PREFILL_TOKENS = 256
"""Longest prompt of the prefill workload, as far as ``engine.max_model_len`` allows it."""
CONFIDENCE = 0.95

Timings = dict[tuple[str, int], list[float]]
"""Seconds of every repetition by (mode, output length)."""


class Elapsed(NamedTuple):
    """One generate() call."""

    wall_s: float
    cpu_s: float
    """Of the whole process, all threads."""


@dataclass(frozen=True)
class Workload:
    """Prompts generated together, each to ``output_length`` new tokens."""

    name: str
    prompts: list[list[int]]
    output_length: int


@dataclass
class Measured:
    """What the engines are timed for."""

    timings: dict[int, Timings] = field(default_factory=dict)
    """By number of sequences."""
    costs: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the recording's cost."""


def run(config: ExperimentConfig, paths: RunPaths) -> dict[str, Any]:
    """Measure and write ``rollout.json``; returns its content."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    started = time.perf_counter()
    with tracking.stage_run(config, stage="bench", paths=paths) as tracker:
        prompts = bench_prompts(config, paths)
        measured = Measured()
        for quant in (BF16, QuantSpec(format=config.format), BF16):
            measure(config, paths, quant=quant, prompts=prompts, measured=measured)
        sizes = byte_sizes(paths.checkpoint, choice=config.format)
        result = {
            "rows": [
                row | {"prompt_tokens": num_tokens(prompts[:batch])}
                for batch, timings in measured.timings.items()
                for row in throughput_rows(timings, num_sequences=batch, sizes=sizes)
            ],
            "recording_cost": measured.costs,
            "bytes": sizes,
            "num_sequences": config.bench.num_sequences,
            "prompt_tokens": num_tokens(prompts[: config.bench.num_sequences]),
            "format": str(config.format),
            "engine": config.engine.name,
            "environment": environment(),
            "seconds": time.perf_counter() - started,
        }
        write_json(paths.bench_rollout, result)
        tracker.log_artifact(paths.bench_rollout)
        tracker.log_metrics(metrics(result))
    print(throughput_table(result))
    return result


def bench_prompts(config: ExperimentConfig, paths: RunPaths) -> list[list[int]]:
    """Prompts of the largest batch, repeated from the RL set when it is smaller; UserError for what does not fit."""
    longest = max(config.bench.output_lengths)
    most = max(*config.bench.batch_sizes, config.bench.num_sequences)
    if most > config.engine.max_num_seqs:
        raise UserError(
            f"bench generates {most} sequences together, the engine decodes at most engine.max_num_seqs "
            f"{config.engine.max_num_seqs}; lower the number in bench or raise max_num_seqs"
        )
    prompts = first_prompts(paths.checkpoint, data=paths.data, most=most)
    room = config.engine.max_model_len - max(map(len, prompts))
    if longest > room:
        raise UserError(
            f"bench.output_lengths has {longest}, but a prompt of {max(map(len, prompts))} tokens leaves {room} in "
            f"engine.max_model_len {config.engine.max_model_len}; lower the length or raise max_model_len"
        )
    return [prompts[index % len(prompts)] for index in range(most)]


def cost_workloads(config: ExperimentConfig, prompts: Sequence[list[int]]) -> list[Workload]:
    """``bench.num_sequences`` prompts with the longest output, and as many long prompts with one new token."""
    prompts = list(prompts[: config.bench.num_sequences])
    length = min(PREFILL_TOKENS, config.engine.max_model_len - 1)
    text = [token for prompt in prompts for token in prompt]
    # Each starts with another prompt, so that none finds the beginning of another one in the prefix cache.
    starts = [num_tokens(prompts[:index]) for index in range(len(prompts))]
    long_prompts = [[text[(start + offset) % len(text)] for offset in range(length)] for start in starts]
    return [
        Workload("decode", prompts, max(config.bench.output_lengths)),
        Workload("prefill", long_prompts, 1),
    ]


def num_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of all prompts."""
    return sum(map(len, prompts))


def measure(
    config: ExperimentConfig,
    paths: RunPaths,
    *,
    quant: QuantSpec,
    prompts: Sequence[list[int]],
    measured: Measured,
) -> None:
    """Open one engine and time every batch and length, and with FP4 the cost of recording."""
    scales = StaticScales.load(paths.scales) if quant.enabled else None
    modes = [mode for mode in RECORDINGS if (mode != "bf16") == quant.enabled]
    engine = open_engine(paths.checkpoint, quant=quant, scales=scales, config=config.engine)
    try:
        for batch in config.bench.batch_sizes:
            timings = measured.timings.setdefault(batch, {})
            for length in config.bench.output_lengths:
                workload = Workload("decode", list(prompts[:batch]), length)
                for mode, elapsed in take_turns(engine, workload, modes=modes, repeats=config.bench.repeats).items():
                    timings.setdefault((mode, length), []).extend(each.wall_s for each in elapsed)
        if quant.enabled and config.bench.cost_repeats:
            for workload in cost_workloads(config, prompts):
                by_mode = take_turns(engine, workload, modes=modes, repeats=config.bench.cost_repeats)
                measured.costs += cost_rows(workload, by_mode)
    finally:
        engine.close()


def take_turns(
    engine: RolloutEngine, workload: Workload, *, modes: Sequence[str], repeats: int
) -> dict[str, list[Elapsed]]:
    """Every mode once in each repetition, in one order and the next time in the reverse; after a warm-up of each."""
    for mode in modes:
        timed_generate(engine, workload, mode=mode)
    elapsed: dict[str, list[Elapsed]] = {mode: [] for mode in modes}
    for index in range(repeats):
        for mode in modes if index % 2 == 0 else reversed(modes):
            elapsed[mode].append(timed_generate(engine, workload, mode=mode))
    return elapsed


def recording_of(mode: str, *, quant: QuantSpec) -> GuidanceSpec | None:
    """What a mode records of an engine's formats: those without codewords leave nothing to record."""
    spec = RECORDINGS[mode]
    return None if spec is None else recordable(spec, quant=quant)


def timed_generate(engine: RolloutEngine, workload: Workload, *, mode: str) -> Elapsed:
    """One generate() call, gathering of the record included; routing is recorded in every mode."""
    recording, length = recording_of(mode, quant=engine.quant), workload.output_length
    switch_recording(engine, recording, token=workload.prompts[0][0])
    sampling = Sampling(temperature=1.0, max_new_tokens=length, seed=SEED, ignore_eos=True)
    started, started_cpu = time.perf_counter(), time.process_time()
    batch = engine.generate(workload.prompts, sampling, recording)
    elapsed = Elapsed(time.perf_counter() - started, time.process_time() - started_cpu)
    assert all(t.num_tokens - t.prompt_len == length for t in batch.trajectories), "a sequence stopped early"
    if batch.stats.get("preemptions"):
        raise UserError(
            f"bench: {len(workload.prompts)} sequences do not fit into the KV cache together; raise "
            "engine.kv_cache_gib or generate fewer"
        )
    return elapsed


def switch_recording(engine: RolloutEngine, recording: GuidanceSpec | None, *, token: int) -> None:
    """Let the engine record as asked; in every mode it switches, and so starts with an empty prefix cache."""
    one = Sampling(temperature=1.0, max_new_tokens=1, seed=SEED, ignore_eos=True)
    engine.generate([[token]], one, None, record_experts=False)
    engine.generate([[token]], one, recording)


def throughput_rows(timings: Timings, *, num_sequences: int, sizes: dict[str, float]) -> list[dict[str, Any]]:
    """One row per mode and length: rate of new tokens, ratio to BF16, cost of recording, bytes."""
    rows = []
    for mode, length in sorted(timings, key=lambda key: (key[1], list(RECORDINGS).index(key[0]))):
        seconds, fp4 = timings[mode, length], mode != "bf16"
        rate = spread([num_sequences * length / value for value in seconds])
        bf16 = statistics.median(num_sequences * length / value for value in timings["bf16", length])
        recorded = RECORDINGS[mode] is not None
        rows.append(
            {
                "mode": mode,
                "num_sequences": num_sequences,
                "output_length": length,
                "tokens_per_s": rate,
                "ratio_to_bf16": rate["median"] / bf16,
                "recording_percent": paired_cost(timings["fp4", length], seconds) if recorded else None,
                "guidance_bytes_per_token": sizes[f"guidance_per_token_{mode}"],
                "kv_bytes_per_token": sizes["kv_per_token_fp4" if fp4 else "kv_per_token_bf16"],
                "expert_weight_bytes": sizes["expert_weights_fp4" if fp4 else "expert_weights_bf16"],
                "emulated": fp4,
            }
        )
    return rows


def cost_rows(workload: Workload, by_mode: dict[str, list[Elapsed]]) -> list[dict[str, Any]]:
    """One row per recording: what it adds to the time of ``fp4``, in percent."""
    plain = by_mode["fp4"]
    return [
        {
            "workload": workload.name,
            "mode": mode,
            "num_sequences": len(workload.prompts),
            "prompt_tokens": num_tokens(workload.prompts),
            "output_length": workload.output_length,
            "wall_percent": paired_cost([a.wall_s for a in plain], [b.wall_s for b in elapsed]),
            "cpu_percent": paired_cost([a.cpu_s for a in plain], [b.cpu_s for b in elapsed]),
        }
        for mode, elapsed in by_mode.items()
        if RECORDINGS[mode] is not None
    ]


def paired_cost(plain_s: Sequence[float], recorded_s: Sequence[float]) -> dict[str, float | None]:
    """Percent that recording adds within a repetition: median, ``low`` and ``high`` of its interval, min, max, n.

    ``fastest`` compares the fastest repetition of each: what other programs do to a repetition only makes it slower.
    """
    percent = [100 * (recorded / plain - 1) for plain, recorded in zip(plain_s, recorded_s, strict=True)]
    low, high = median_interval(percent) or (None, None)
    return {**spread(percent), "low": low, "high": high, "fastest": 100 * (min(recorded_s) / min(plain_s) - 1)}


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest pair of values, equally far from both ends, that holds the median with ``CONFIDENCE``.

    A value is below the true median with probability 1/2, so the k-th smallest of n exceeds it with that of fewer
    than k heads in n throws. Fewer than 6 values hold nothing with 95 %: None.
    """
    ordered, n = sorted(values), len(values)
    best, fewer_heads = None, 0.0
    for k in range((n + 1) // 2):
        fewer_heads += math.comb(n, k) / 2**n
        if 2 * fewer_heads > 1 - CONFIDENCE:
            break
        best = (ordered[k], ordered[n - 1 - k])
    return best


def metrics(result: dict[str, Any]) -> dict[str, float]:
    """Medians by name: rates by mode, batch and length; costs of recording by workload and mode."""
    rates = {
        f"{row['mode']}/{row['num_sequences']}x{row['output_length']}": row["tokens_per_s"]["median"]
        for row in result["rows"]
    }
    costs = {
        f"recording_percent/{row['workload']}/{row['mode']}": row["wall_percent"]["median"]
        for row in result["recording_cost"]
    }
    return rates | costs


def byte_sizes(checkpoint: Path, *, choice: FormatChoice) -> dict[str, float]:
    """Exact bytes of guidance and KV per token and of the experts, in BF16 and in the formats' packed form."""
    dims = ModelDims.from_config(read_json(checkpoint / "config.json"))
    quant = QuantSpec(format=choice)
    kv_bytes, weight_bytes = (formats.packed(name).bits_per_value / 8 for name in (choice.kv, choice.weights))
    kv_values = 2 * dims.num_kv_heads * dims.head_dim * len(dims.attention_layers)
    expert_values = sum(tensor.numel() for name, tensor in iterate_tensors(checkpoint) if is_expert_weight(name))
    global_scales = 4 * 2 * dims.num_experts * len(dims.moe_layers)
    sizes = {
        "kv_per_token_bf16": 2.0 * kv_values,
        "kv_per_token_fp4": kv_values * kv_bytes,
        "expert_weights_bf16": 2.0 * expert_values,
        "expert_weights_fp4": expert_values * weight_bytes + global_scales,
    }
    for mode in RECORDINGS:
        recorded = recording_of(mode, quant=quant)
        sizes[f"guidance_per_token_{mode}"] = (
            0 if recorded is None else bytes_per_token(recorded, dims, block_size=formats.block_sizes(choice))
        )
    return sizes


def throughput_table(result: dict[str, Any]) -> str:
    """What the stage prints."""
    lines = [
        f"{'mode':15}{'batch':>6}{'length':>7}{'tokens/s':>10}{'min - max':>17}{'ratio':>7}{'guidance B/token':>18}"
    ]
    for row in result["rows"]:
        rate = row["tokens_per_s"]
        between = f"{rate['min']:.0f} - {rate['max']:.0f}"
        lines.append(
            f"{row['mode']:15}{row['num_sequences']:6}{row['output_length']:7}{rate['median']:10.0f}{between:>17}"
            f"{row['ratio_to_bf16']:7.2f}{row['guidance_bytes_per_token']:18}"
        )
    for row in result["recording_cost"]:
        what = f"{row['workload']}, {row['num_sequences']} sequences"
        lines.append(
            f"recording, {row['mode']}, {what}: {percent_text(row['wall_percent'])} of the time of fp4, "
            f"{percent_text(row['cpu_percent'])} of its CPU time"
        )
    sizes = result["bytes"]
    kv = f"KV {sizes['kv_per_token_bf16']:.0f} -> {sizes['kv_per_token_fp4']:.0f} bytes per token"
    experts = f"{sizes['expert_weights_bf16'] / 2**20:.2f} -> {sizes['expert_weights_fp4'] / 2**20:.2f} MiB"
    lines.append(f"FP4 is emulated. Stored as FP4: {kv}, experts {experts}")
    return "\n".join(lines)


def percent_text(cost: dict[str, Any]) -> str:
    """Median with its 95 % interval, or with smallest and largest when there are too few repetitions."""
    between = ("min", "max") if cost["low"] is None else ("low", "high")
    low, high = (cost[name] for name in between)
    label = "" if cost["low"] is None else "95 %: "
    return f"{cost['median']:+.1f} % ({label}{low:+.1f} to {high:+.1f}, n {cost['n']}; fastest {cost['fastest']:+.1f})"
