"""Stage ``bench model``: what FP4 decoding gains by the analytic model, where, and how far the model is off.

For each model and hardware line: tokens/s and the speed-up over BF16 by context and batch, what the step's time
consists of, what fits, where the gain ends, and what that says of the paper's decode speed-up at 128K. Then the model
beside every measured point this host can give. The arithmetic and its limits are in `decode_model`; predictions are
marked as such everywhere and never mixed with measurements.

Two numbers are easy to confuse. At *equal batch* FP4 can gain 16/4.5 = 3.56 at most (4 where a step is bound by FP4
units). At the *largest batch that fits*, FP4 also serves more sequences at once, so its tokens/s can grow by more.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from trace_rl.config.guidance import GuidanceSpec
from trace_rl.guidance.accounting import bytes_per_token
from trace_rl.guidance.record import ModelDims
from trace_rl.models.checkpoint_io import read_json, write_json
from trace_rl.report.paper import PAPER
from trace_rl.stages import measure
from trace_rl.stages.decode_architecture import packaged_hardware, packaged_models, read_architecture
from trace_rl.stages.decode_limits import (
    at_capacity,
    batch_for_ratio,
    compute_bound_batch,
    devices_to_fit,
    fading_batch,
    kv_bound_batch,
    largest_batch,
    speedup_range,
)
from trace_rl.stages.decode_model import (
    BF16,
    FP4_PRECISIONS,
    W4A4_KV4,
    Architecture,
    Hardware,
    Precision,
    decode_step,
)
from trace_rl.stages.decode_validation import Point, file_points, host_hardware, host_points, points_table
from trace_rl.stages.host_speed import HostSpeed, measure_host, measure_host_with

CONTEXTS = (1024, 4096, 16384, 65536, 131072, 262144)
BATCHES = (1, 4, 16, 64, 256, 1024)
CPU = "CPU"
HARDWARE = ("B200", "H200", CPU)
PAPER_CONTEXT = 131072
SHARES_BATCH = 16
MOST = 65536
"""Largest batch that crossovers are looked for at."""
MOST_EQUAL = 1024
"""Largest batch of the powers of two that speed-ups are compared at."""
MOST_FITTED = 512
"""Largest BF16 batch of which the memory that reaches the paper's figure is looked for."""
FADES_BELOW = 2.0
GB = 1e9


@dataclass(frozen=True)
class Model:
    """A model to predict for."""

    arch: Architecture
    source: str
    recording_bytes: int
    """Compact guidance of one token."""


def run(
    models: list[Path] | None, hardware: list[str] | None, json_file: Path | None, measured: list[Path]
) -> dict[str, Any]:
    """Predict, validate, print; write `json_file` where one is given; returns its content.

    `models`: config.json files (None: the paper's four). `hardware`: lines such as `B200`, `B200x8`, `CPU` (None: B200,
    H200, CPU); without a number, as few devices (a power of two) as hold the BF16 model with one sequence of 256K.
    `measured`: results of `bench moe` or `bench rollout` of this host. The host is measured only where it is needed.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    names = hardware or list(HARDWARE)
    packaged = {name: packaged_hardware(name) for name in names if name != CPU}
    chosen = load_models(models)
    hosts = HostSpeeds()
    lines = {name: host_hardware(hosts.own) if name == CPU else packaged[name] for name in names}
    paper = paper_speedup()
    predictions = [predict(model, line, name=name, paper=paper) for model in chosen for name, line in lines.items()]
    points = host_points(hosts.own) if CPU in names else []
    for path in measured:
        points += file_points(path, hosts.with_threads)
    result = {
        "kind": "prediction",
        "models": [model_facts(model) for model in chosen],
        "hardware": [asdict(line) for line in lines.values()],
        "predictions": predictions,
        "paper_decode_speedup_128k": paper,
        "host": {threads: asdict(host) for threads, host in hosts.measured.items()},
        "validation": [point.as_json() for point in points],
        "environment": measure.environment(),
    }
    if json_file is not None:
        write_json(json_file, result)
    print(report(result, points=points))
    return result


class HostSpeeds:
    """This host's speed by number of threads, each measured once and only when asked for."""

    def __init__(self) -> None:
        self.measured: dict[int, HostSpeed] = {}

    @property
    def own(self) -> HostSpeed:
        """With this process's threads; experts are timed too."""
        return self._once(torch.get_num_threads(), measure_host)

    def with_threads(self, threads: int) -> HostSpeed:
        if threads == torch.get_num_threads():
            return self.own
        return self._once(threads, lambda: measure_host_with(threads))

    def _once(self, threads: int, work: Callable[[], HostSpeed]) -> HostSpeed:
        if threads not in self.measured:
            self.measured[threads] = work()
        return self.measured[threads]


def load_models(paths: list[Path] | None) -> list[Model]:
    """The models of these config.json files, or the packaged ones."""
    if paths:
        return [_model(str(path), read_json(path), source=str(path)) for path in paths]
    return [_model(item.name, item.config, source=item.source) for item in packaged_models()]


def _model(name: str, config: Mapping[str, Any], *, source: str) -> Model:
    arch = read_architecture(name, config)
    return Model(arch, source, bytes_per_token(GuidanceSpec(), ModelDims.from_config(config)))


def paper_speedup() -> float:
    """The paper's decode speed-up at 128K; it states neither batch nor hardware."""
    return yaml.safe_load(PAPER.read_text())["efficiency"]["decode_speedup_128k"]


def model_facts(model: Model) -> dict[str, Any]:
    """Sizes that do not depend on hardware."""
    arch = model.arch
    return {
        "name": arch.name,
        "source": model.source,
        "total_weights": arch.total_weights,
        "active_weights": arch.active_weights,
        "dense_weights": arch.dense_weights,
        "routed_weights": arch.routed_weights,
        "lookup_weights_on_host": arch.lookup_weights,
        "attention_layers": arch.attention_layers,
        "attention_budget": arch.sparse.budget if arch.sparse is not None else None,
        "weight_bytes": {p.name: arch.weight_bytes(p) for p in (BF16, *FP4_PRECISIONS)},
        "kv_bytes_per_token": {p.name: arch.kv_bytes_per_token(p) for p in (BF16, *FP4_PRECISIONS)},
        "state_bytes_per_sequence": arch.state_bytes,
        "recording_bytes_per_token": model.recording_bytes,
    }


def predict(model: Model, hardware: Hardware, *, name: str, paper: float) -> dict[str, Any]:
    """Everything about one model on one hardware line; `paper` is the speed-up at 128K to look for."""
    arch = model.arch
    if name != CPU and "x" not in name:
        hardware = hardware.times(devices_to_fit(arch, hardware, BF16, context=max(CONTEXTS)))
    precisions = [_predict_precision(arch, hardware, precision) for precision in FP4_PRECISIONS]
    reached = batch_for_ratio(arch, hardware, W4A4_KV4, context=PAPER_CONTEXT, target=paper, most=MOST_FITTED)
    plain, fp4, recorded = (
        decode_step(arch, p, batch=SHARES_BATCH, context=PAPER_CONTEXT, recording_bytes=extra)
        for p, extra in ((BF16, 0), (W4A4_KV4, 0), (W4A4_KV4, model.recording_bytes))
    )
    return {
        "model": arch.name,
        "hardware": hardware.name,
        "devices": hardware.devices,
        "capacity_bytes": hardware.capacity,
        "fp4_units": hardware.fp4_flops is not None,
        "precisions": precisions,
        "shares": {"batch": SHARES_BATCH, "context": PAPER_CONTEXT, "bf16": plain.shares(hardware),
                   W4A4_KV4.name: fp4.shares(hardware)},
        "paper_ratio_needs": reached and {"batch_bf16_at_most": reached[0], "memory_bytes_at_most": reached[1]},
        "recording_percent": 100 * (recorded.seconds(hardware) / fp4.seconds(hardware) - 1),
        "experts_compute_bound_from": {
            p.name: compute_bound_batch(arch, hardware, p, most=MOST) for p in (BF16, *FP4_PRECISIONS)
        },
    }  # fmt: skip


def _predict_precision(arch: Architecture, hardware: Hardware, precision: Precision) -> dict[str, Any]:
    cells, capacity = [], []
    for context in CONTEXTS:
        fits = {p.name: largest_batch(arch, hardware, p, context=context) for p in (BF16, precision)}
        both = at_capacity(arch, hardware, precision, context=context)
        capacity.append(
            {"context": context, "batch_bf16": fits["bf16"], "batch": fits[precision.name],
             "tokens_per_s_bf16": both and both.tokens_per_s_bf16, "tokens_per_s": both and both.tokens_per_s,
             "ratio": both and both.ratio}
        )  # fmt: skip
        for batch in BATCHES:
            plain, other = (
                decode_step(arch, p, batch=batch, context=context).tokens_per_s(hardware) for p in (BF16, precision)
            )
            cells.append(
                {"context": context, "batch": batch, "tokens_per_s_bf16": plain, "tokens_per_s": other,
                 "speedup": other / plain, "fits_bf16": batch <= fits["bf16"], "fits": batch <= fits[precision.name]}
            )  # fmt: skip
    low, low_batch, high, high_batch = speedup_range(arch, hardware, precision, context=PAPER_CONTEXT, most=MOST_EQUAL)
    return {
        "precision": precision.name,
        "cells": cells,
        "capacity": capacity,
        "bytes_ratio_ceiling": 16 / precision.weight_bits,
        "equal_batch_128k": {"smallest": low, "at_batch": low_batch, "largest": high, "at_batch_largest": high_batch},
        "kv_over_experts_from": {
            context: kv_bound_batch(arch, precision, context=context, most=MOST) for context in CONTEXTS
        },
        "under_2x_from": {
            context: fading_batch(arch, hardware, precision, context=context, below=FADES_BELOW, most=MOST)
            for context in CONTEXTS
        },
    }


def report(result: dict[str, Any], *, points: list[Point]) -> str:
    """What the stage prints."""
    parts = [
        "PREDICTED by a roofline (trace/stages/decode_model.py), not measured: weights and work split evenly over the "
        "devices,\nexperts chosen uniformly, no communication, no kernel launches, no host code."
    ]
    for model in result["models"]:
        parts.append(_model_lines(model))
        for prediction in result["predictions"]:
            if prediction["model"] == model["name"]:
                parts.append(_prediction_lines(prediction, model))
    parts.append(_paper_lines(result))
    if points:
        parts.append("Validation on this host, fitted to nothing:\n" + points_table(points))
    parts.append(measure.environment_line(result["environment"]))
    return "\n\n".join(parts)


def _model_lines(model: dict[str, Any]) -> str:
    total, active, fp4 = model["total_weights"] / GB, model["active_weights"] / GB, W4A4_KV4.name
    weights, kv = model["weight_bytes"], model["kv_bytes_per_token"]
    lines = [
        f"== {model['name']}: {total:,.1f} B weights, {active:.1f} B read per token, of which "
        f"{model['dense_weights'] / GB:.1f} B stay BF16",
        f"   weights {weights['bf16'] / GB:,.0f} -> {weights[fp4] / GB:,.0f} GB, KV {kv['bf16']:,.0f} -> "
        f"{kv[fp4]:,.0f} bytes per token, state {model['state_bytes_per_sequence'] / 1e6:.0f} MB per sequence",
    ]
    if model["attention_budget"] is not None:
        lines.append(
            f"   sparse attention: reads at most {model['attention_budget']} tokens of KV and one BF16 index key per "
            "block, so long contexts cost memory more than traffic"
        )
    if model["lookup_weights_on_host"]:
        lines.append(
            f"   {model['lookup_weights_on_host'] / GB:.0f} B more weights are a lookup table in host memory: a token "
            "reads a few rows; neither traffic nor device memory counts it"
        )
    return "\n".join(lines)


def _prediction_lines(prediction: dict[str, Any], model: dict[str, Any]) -> str:
    head = f"{prediction['model']} on {prediction['devices']} x {prediction['hardware']}"
    fp4 = prediction["precisions"][0]
    if not any(row["batch"] for row in fp4["capacity"]):
        need, have = model["weight_bytes"][W4A4_KV4.name] / GB, prediction["capacity_bytes"] / GB
        w4a16 = prediction["precisions"][-1]
        cell = w4a16["cells"][0]
        return (
            f"{head}: does not fit, FP4 weights alone take {need:,.1f} GB of {have:,.1f} GB. With the memory, batch "
            f"{cell['batch']} at {_kilo(cell['context'])}:\nBF16 {cell['tokens_per_s_bf16']:.2f} tokens/s, "
            f"{w4a16['precision']} {cell['tokens_per_s']:.2f} ({cell['speedup']:.2f}x)"
        )
    units = "" if prediction["fp4_units"] else " (no FP4 units: FP4 saves bytes, computes in BF16)"
    lines = [
        f"{head}{units}: speed-up of {fp4['precision']} at equal batch, its tokens/s; * only FP4 fits, - neither",
        "context" + "".join(f"{f'batch {batch}':>16}" for batch in BATCHES) + "   largest batch, ratio of tokens/s",
    ]
    for row in fp4["capacity"]:
        cells = [_cell(cell) for cell in fp4["cells"] if cell["context"] == row["context"]]
        ratio = "" if row["ratio"] is None else f" {row['ratio']:6.2f}x"
        lines.append(
            f"{_kilo(row['context']):>7}" + "".join(f"{cell:>14}" for cell in cells)
            + f"   {row['batch_bf16']:6,} -> {row['batch']:6,}{ratio}"
        )  # fmt: skip
    shares = prediction["shares"]
    for name in ("bf16", fp4["precision"]):
        of_time = ", ".join(f"{part} {100 * share:.0f} %" for part, share in shares[name].items())
        lines.append(f"time of a {name} step at {_kilo(shares['context'])}, batch {shares['batch']}: {of_time}")
    bound = prediction["experts_compute_bound_from"]
    lines += [
        f"crossover: experts compute-bound from batch {_shown(bound[fp4['precision']])} ({fp4['precision']}), "
        f"{_shown(bound['bf16'])} (bf16); recording compact guidance adds {prediction['recording_percent']:.3f} %",
        f"crossover: KV moves more bytes than experts from batch {_by_context(fp4['kv_over_experts_from'])}",
        f"crossover: past its best batch, under {FADES_BELOW:g}x from batch {_by_context(fp4['under_2x_from'])}",
    ]
    for other in prediction["precisions"][1:]:
        equal = other["equal_batch_128k"]
        lines.append(
            f"{other['precision']} at {_kilo(PAPER_CONTEXT)}, equal batch: {equal['smallest']:.2f}x to "
            f"{equal['largest']:.2f}x; largest batch: {_at_capacity(other)}"
        )
    return "\n".join(lines)


def _paper_lines(result: dict[str, Any]) -> str:
    paper = result["paper_decode_speedup_128k"]
    lines = [
        f"The paper's {paper:g}x at 128K (model, batch and hardware not stated) against {W4A4_KV4.name}:",
        f"equal batch has a ceiling of 16/4.5 = {16 / 4.5:.2f}x while bound by memory, so {paper:g}x is out of reach "
        "there.\nAt the largest batch each fits, tokens/s grow by more, the tighter BF16's memory the more: that ratio "
        "is as much a choice\nof how many devices serve one copy of the weights as it is a property of FP4.",
    ]
    for prediction in result["predictions"]:
        fp4 = prediction["precisions"][0]
        if not any(row["batch"] for row in fp4["capacity"]):
            continue
        equal = fp4["equal_batch_128k"]
        needs = prediction["paper_ratio_needs"]
        reach = f"no memory that fits up to {MOST_FITTED} BF16 sequences reaches {paper:g}x"
        if needs is not None:
            reach = (
                f"{paper:g}x where BF16 fits at most {needs['batch_bf16_at_most']} sequences "
                f"({needs['memory_bytes_at_most'] / GB:,.0f} GB for weights and KV)"
            )
        lines.append(
            f"- {prediction['model']}, {prediction['devices']} x {prediction['hardware']}: equal batch at most "
            f"{equal['largest']:.2f}x (batch {equal['at_batch_largest']}); largest batch {_at_capacity(fp4)}; {reach}"
        )
    return "\n".join(lines)


def _at_capacity(precision: dict[str, Any]) -> str:
    row = next(row for row in precision["capacity"] if row["context"] == PAPER_CONTEXT)
    if row["ratio"] is None:
        return f"BF16 does not fit, FP4 fits {row['batch']}"
    return f"{row['batch_bf16']} -> {row['batch']}, {row['ratio']:.2f}x"


def _cell(cell: dict[str, Any]) -> str:
    if not cell["fits"]:
        return "-"
    return f"{cell['speedup']:.2f}{' ' if cell['fits_bf16'] else '*'}{cell['tokens_per_s']:8,.0f}"


def _by_context(batches: dict[int, int | None]) -> str:
    return ", ".join(f"{_shown(batch)} at {_kilo(context)}" for context, batch in batches.items())


def _shown(batch: int | None) -> str:
    return f"over {MOST:,}" if batch is None else f"{batch:,}"


def _kilo(tokens: int) -> str:
    return f"{tokens // 1024}K"
