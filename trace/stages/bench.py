"""Stage ``bench rollout``: tokens per second and bytes of the engine, by precision, recording and output length.

Modes: ``bf16``; ``fp4`` (weights, activations, KV); ``fp4 + compact`` (1 bit, deeper half); ``fp4 + full`` (whole
codes, all layers). Every sequence is forced to its length. One engine is open at a time, so BF16 is measured before
*and* after FP4, and the FP4 modes alternate within each repetition; a machine that slows down shows in the spread. The
first generation of each mode and length is a warm-up and not counted.

FP4 is emulated: operands are rounded to FP4 and multiplied in BF16. So speed shows what emulation and recording cost
here, never what FP4 hardware gains; the byte columns are exact for both.
"""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from trace_rl import formats, tracking
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.guidance import FULL, GuidanceSpec
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.guidance.accounting import bytes_per_token
from trace_rl.guidance.record import ModelDims
from trace_rl.models.checkpoint_io import iterate_tensors, read_json, write_json
from trace_rl.models.scopes import is_expert_weight
from trace_rl.rollout.engine import RolloutEngine, Sampling, open_engine
from trace_rl.stages.measure import environment
from trace_rl.stages.rl_prompts import first_prompts

SEED = 1 << 42
RECORDINGS: dict[str, GuidanceSpec | None] = {
    "bf16": None,
    "fp4": None,
    "fp4 + compact": GuidanceSpec(),
    "fp4 + full": FULL,
}

Timings = dict[tuple[str, int], list[float]]
"""Seconds of every repetition by (mode, output length)."""


def run(config: ExperimentConfig, paths: RunPaths) -> dict[str, object]:
    """Measure and write ``rollout.json``; returns its content."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    started = time.perf_counter()
    bench = config.bench
    with tracking.stage_run(config, stage="bench", paths=paths) as tracker:
        prompts = bench_prompts(config, paths)
        timings: Timings = {}
        for quant in (BF16, QuantSpec(format=config.format), BF16):
            measure(config, paths, quant=quant, prompts=prompts, timings=timings)
        sizes = byte_sizes(paths.checkpoint, format_name=config.format)
        result = {
            "rows": throughput_rows(timings, num_sequences=bench.num_sequences, sizes=sizes),
            "bytes": sizes,
            "num_sequences": bench.num_sequences,
            "prompt_tokens": sum(map(len, prompts)),
            "format": config.format,
            "engine": config.engine.name,
            "environment": environment(),
            "seconds": time.perf_counter() - started,
        }
        write_json(paths.bench_rollout, result)
        tracker.log_artifact(paths.bench_rollout)
        tracker.log_metrics(
            {f"{row['mode']}/{row['output_length']}": row["tokens_per_s"]["median"] for row in result["rows"]}
        )
    print(throughput_table(result))
    return result


def bench_prompts(config: ExperimentConfig, paths: RunPaths) -> list[list[int]]:
    """``bench.num_sequences`` prompts, repeated from the RL set when it is smaller; UserError for too long outputs."""
    longest = max(config.bench.output_lengths)
    prompts = first_prompts(paths.checkpoint, data=paths.data, most=config.bench.num_sequences)
    room = config.engine.max_model_len - max(map(len, prompts))
    if longest > room:
        raise UserError(
            f"bench.output_lengths has {longest}, but a prompt of {max(map(len, prompts))} tokens leaves {room} in "
            f"engine.max_model_len {config.engine.max_model_len}; lower the length or raise max_model_len"
        )
    return [prompts[index % len(prompts)] for index in range(config.bench.num_sequences)]


def measure(
    config: ExperimentConfig,
    paths: RunPaths,
    *,
    quant: QuantSpec,
    prompts: Sequence[Sequence[int]],
    timings: Timings,
) -> None:
    """Open one engine, warm every mode and length up, then time the repetitions, modes alternating."""
    scales = StaticScales.load(paths.scales) if quant.enabled else None
    modes = [mode for mode in RECORDINGS if (mode != "bf16") == quant.enabled]
    engine = open_engine(paths.checkpoint, quant=quant, scales=scales, config=config.engine)
    try:
        for length in config.bench.output_lengths:
            for mode in modes:
                timed_generate(engine, prompts, mode=mode, length=length)
            for _ in range(config.bench.repeats):
                for mode in modes:
                    seconds = timed_generate(engine, prompts, mode=mode, length=length)
                    timings.setdefault((mode, length), []).append(seconds)
    finally:
        engine.close()


def timed_generate(engine: RolloutEngine, prompts: Sequence[Sequence[int]], *, mode: str, length: int) -> float:
    """Wall seconds of one generate() call, gathering of the record included; routing is recorded in every mode."""
    sampling = Sampling(temperature=1.0, max_new_tokens=length, seed=SEED, ignore_eos=True)
    started = time.perf_counter()
    batch = engine.generate(prompts, sampling, RECORDINGS[mode])
    seconds = time.perf_counter() - started
    assert all(t.num_tokens - t.prompt_len == length for t in batch.trajectories), "a sequence stopped early"
    return seconds


def throughput_rows(timings: Timings, *, num_sequences: int, sizes: dict[str, float]) -> list[dict[str, object]]:
    """One row per mode and length: median, smallest and largest rate of new tokens, ratio to BF16, bytes."""
    rates = {key: sorted(num_sequences * key[1] / seconds for seconds in measured) for key, measured in timings.items()}
    rows = []
    for (mode, length), values in sorted(
        rates.items(), key=lambda item: (item[0][1], list(RECORDINGS).index(item[0][0]))
    ):
        median = statistics.median(values)
        fp4 = mode != "bf16"
        rows.append(
            {
                "mode": mode,
                "output_length": length,
                "tokens_per_s": {"median": median, "min": values[0], "max": values[-1], "n": len(values)},
                "ratio_to_bf16": median / statistics.median(rates["bf16", length]),
                "guidance_bytes_per_token": sizes[f"guidance_per_token_{mode}"],
                "kv_bytes_per_token": sizes["kv_per_token_fp4" if fp4 else "kv_per_token_bf16"],
                "expert_weight_bytes": sizes["expert_weights_fp4" if fp4 else "expert_weights_bf16"],
                "emulated": fp4,
            }
        )
    return rows


def byte_sizes(checkpoint: Path, *, format_name: str) -> dict[str, float]:
    """Exact bytes of guidance and KV per token and of the experts, in BF16 and in the format's packed form."""
    dims = ModelDims.from_config(read_json(checkpoint / "config.json"))
    block = formats.get(format_name).block_size
    kv_values = 2 * dims.num_kv_heads * dims.head_dim * len(dims.attention_layers)
    expert_values = sum(tensor.numel() for name, tensor in iterate_tensors(checkpoint) if is_expert_weight(name))
    global_scales = 4 * 2 * dims.num_experts * len(dims.moe_layers)
    sizes = {
        "kv_per_token_bf16": 2.0 * kv_values,
        "kv_per_token_fp4": kv_values * (0.5 + 1 / block),
        "expert_weights_bf16": 2.0 * expert_values,
        "expert_weights_fp4": expert_values * (0.5 + 1 / block) + global_scales,
    }
    for mode, recording in RECORDINGS.items():
        sizes[f"guidance_per_token_{mode}"] = (
            0 if recording is None else bytes_per_token(recording, dims, block_size=block)
        )
    return sizes


def throughput_table(result: dict[str, object]) -> str:
    """What the stage prints."""
    lines = [f"{'mode':15}{'length':>7}{'tokens/s':>10}{'min - max':>17}{'ratio':>7}{'guidance B/token':>18}"]
    for row in result["rows"]:
        rate = row["tokens_per_s"]
        spread = f"{rate['min']:.0f} - {rate['max']:.0f}"
        lines.append(
            f"{row['mode']:15}{row['output_length']:7}{rate['median']:10.0f}{spread:>17}"
            f"{row['ratio_to_bf16']:7.2f}{row['guidance_bytes_per_token']:18}"
        )
    sizes = result["bytes"]
    kv = f"KV {sizes['kv_per_token_bf16']:.0f} -> {sizes['kv_per_token_fp4']:.0f} bytes per token"
    experts = f"{sizes['expert_weights_bf16'] / 2**20:.2f} -> {sizes['expert_weights_fp4'] / 2**20:.2f} MiB"
    lines.append(f"FP4 is emulated. Stored as FP4: {kv}, experts {experts}")
    return "\n".join(lines)
