"""The decode model against measured points, with the error printed: nothing is fitted, so a large error stays large.

Points come from three places: experts timed beside the yardstick (`host_speed`), the rows of `trace-rl bench moe`, and
the BF16 rows of `trace-rl bench rollout` (its FP4 is emulated, so those rows say nothing about FP4 hardware).

Each is predicted from the speed of this host *with as many threads as the point had*, measured now: a file from
another host, or from another load of this one, is predicted wrongly in seconds. Ratios of two rows of one file do not
depend on the bandwidth, as long as both are memory-bound.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trace_rl.errors import UserError
from trace_rl.models.checkpoint_io import read_json
from trace_rl.stages.decode_architecture import read_architecture
from trace_rl.stages.decode_model import (
    BF16,
    MXFP4_W4A16,
    W4A16,
    Component,
    Hardware,
    Precision,
    decode_step,
    expert_part,
)
from trace_rl.stages.host_speed import HostSpeed

HostOf = Callable[[int], HostSpeed]
"""The host's speed with so many threads."""
PRECISIONS: dict[str, Precision] = {"bf16": BF16, "mxfp4": MXFP4_W4A16, "nvfp4": W4A16}
"""What a row of experts may say of its weights; all multiply in BF16."""
USABLE_HOST_MEMORY = 0.9


@dataclass(frozen=True)
class Point:
    """One prediction beside its measurement."""

    source: str
    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error_percent(self) -> float:
        """Of the prediction: positive when it is too high."""
        return 100 * (self.predicted / self.measured - 1)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"error_percent": self.error_percent}


def host_hardware(host: HostSpeed) -> Hardware:
    """This host as a hardware line: measured, so with efficiencies of 1, and without FP4 or FP8 units."""
    return Hardware(
        name="CPU",
        bandwidth=host.copy_bytes_per_s["median"],
        bf16_flops=host.bf16_flops["median"],
        fp8_flops=None,
        fp4_flops=None,
        memory_bytes=host.memory_bytes,
        memory_efficiency=1.0,
        compute_efficiency=1.0,
        usable_memory=USABLE_HOST_MEMORY,
    )


def host_points(host: HostSpeed) -> list[Point]:
    """Experts in BF16 that were timed in turns with the copy."""
    shape, hardware = host.shape, host_hardware(host)
    points = []
    for tokens, seconds in host.experts_s.items():
        part = expert_part(
            layers=1, num_experts=shape.num_experts, top_k=shape.top_k, hidden=shape.hidden, inter=shape.inter,
            batch=tokens, precision=BF16,
        )  # fmt: skip
        what = f"BF16 experts, {tokens} tokens, {host.threads} threads"
        points.append(Point("this run", what, "ms", 1e3 * part.seconds(hardware), 1e3 * seconds["median"]))
    return points


def file_points(path: Path, host_of: HostOf) -> list[Point]:
    """Points of a result of `bench moe` or `bench rollout`; UserError for another file."""
    result = read_json(path)
    rows = result.get("rows")
    if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
        if all({"tokens", "precision", "seconds"} <= row.keys() for row in rows):
            return _expert_points(path, rows, host_of)
        if all({"mode", "tokens_per_s", "output_length"} <= row.keys() for row in rows):
            return _rollout_points(path, result, host_of)
    raise UserError(
        f"{path}: not a result of `trace-rl bench moe` or `trace-rl bench rollout`; give one of these files"
    )


def _expert_points(path: Path, rows: list[dict[str, Any]], host_of: HostOf) -> list[Point]:
    """Seconds of every row, and for FP4 rows the ratio to each BF16 row of the same shape, tokens and threads."""
    points = []
    for row in rows:
        predicted = _predicted_seconds(path, row, host_of)
        points.append(Point(path.name, _label(row), "ms", 1e3 * predicted, 1e3 * _seconds(path, row)))
    keys = ("tokens", "num_experts", "hidden", "inter", "top_k", "threads")
    for fp4 in rows:
        for plain in rows:
            same = all(fp4.get(key) == plain.get(key) for key in keys)
            if same and fp4["precision"] != "bf16" and plain["precision"] == "bf16":
                predicted = _predicted_seconds(path, plain, host_of) / _predicted_seconds(path, fp4, host_of)
                measured = _seconds(path, plain) / _seconds(path, fp4)
                points.append(Point(path.name, f"{_label(fp4)} over {_name(plain)}", "x", predicted, measured))
    return points


def _predicted_seconds(path: Path, row: dict[str, Any], host_of: HostOf) -> float:
    """Roofline of a row; the bytes that it says it read count, else those of random routing."""
    precision = PRECISIONS.get(row["precision"])
    if precision is None:
        raise UserError(f"{path}: precision {row['precision']!r} is not known; known: {', '.join(PRECISIONS)}")
    try:
        part = expert_part(
            layers=1, num_experts=row["num_experts"], top_k=row["top_k"], hidden=row["hidden"], inter=row["inter"],
            batch=row["tokens"], precision=precision,
        )  # fmt: skip
    except KeyError as error:
        raise UserError(f"{path}: a row has no {error}; run `trace-rl bench moe` again") from error
    part = Component(part.name, row.get("weight_bytes_read", part.num_bytes), part.flops, part.math)
    return part.seconds(host_hardware(host_of(row.get("threads", 1))))


def _seconds(path: Path, row: dict[str, Any]) -> float:
    seconds = row["seconds"]["median"] if isinstance(row["seconds"], dict) else row["seconds"]
    if not seconds > 0:
        raise UserError(f"{path}: a row has {seconds} seconds; expected more than 0")
    return seconds


def _name(row: dict[str, Any]) -> str:
    return str(row.get("implementation", row["precision"]))


def _label(row: dict[str, Any]) -> str:
    return f"{_name(row)}, {row['tokens']} tokens, {row.get('threads', 1)} threads"


def _rollout_points(path: Path, result: dict[str, Any], host_of: HostOf) -> list[Point]:
    """Tokens/s of the BF16 rows; the model is the run's own checkpoint, beside the folder of the file."""
    config = path.resolve().parent.parent / "checkpoint" / "config.json"
    if not config.is_file():
        raise UserError(f"{path}: the measured model is not there ({config}); keep the file inside its run's folder")
    arch = read_architecture(str(config), read_json(config))
    hardware = host_hardware(host_of(result["environment"]["threads"]))
    points = []
    for row in result["rows"]:
        if row["mode"] != "bf16":
            continue
        batch, length = row["num_sequences"], row["output_length"]
        context = round(row["prompt_tokens"] / batch + length / 2)  # the mean over the answer
        predicted = decode_step(arch, BF16, batch=batch, context=context).tokens_per_s(hardware)
        what = f"BF16 rollout, {batch} sequences of {length} tokens"
        points.append(Point(path.name, what, "tokens/s", predicted, row["tokens_per_s"]["median"]))
    return points


def points_table(points: list[Point]) -> str:
    """Predictions beside measurements, with the error in percent."""
    width = max(len(point.what) for point in points)
    lines = [f"{'point':{width}}{'predicted':>12}{'measured':>12}  {'unit':10}{'error':>8}  source"]
    for point in points:
        lines.append(
            f"{point.what:{width}}{point.predicted:12,.4g}{point.measured:12,.4g}  {point.unit:10}"
            f"{point.error_percent:+7.0f}%  {point.source}"
        )
    return "\n".join(lines)
