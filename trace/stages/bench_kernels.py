"""Stage ``bench kernels``: GB/s of the quantization kernels, beside a copy that moves the same bytes.

    trace-rl bench kernels --json kernels.json --threads 1,2

What is timed: one call on BF16 inputs that lie in memory, results in new tensors, as trainer and engine call it; the
look for NaN and Inf included. Precomputed: inputs, encode scales, the rollout's record, compilation. Bytes are those
an ideal kernel moves, every input read once and every output written once (a repack that looks for its largest value
first reads its weights twice and is charged once), so a share of the copy has 1 as its limit. Two copies are measured,
into memory that exists and into new memory; the shares are of the first.

Shapes: [--rows, --cols] on buffers rotated beyond the last-level cache, and the small shapes of an engine step, which
the caches hold because the layer before has just written them.

Compared with: the plain version under ``torch.compile`` (without the pieces that make it fit the cache when eager),
torchao's ``NVFP4Tensor`` and vLLM's reference quantizer. These two know no guidance; `guided_fake_quant` is compared
with their plain quantize-dequantize, which is less work. Where their codes or scales differ from ours the result says
how many.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trace_rl import formats
from trace_rl.errors import UserError
from trace_rl.guidance.bits import packed_bytes
from trace_rl.guidance.scales import packed_scale_bytes
from trace_rl.kernels import dispatch
from trace_rl.kernels.reference import RecordTarget
from trace_rl.models.checkpoint_io import write_json
from trace_rl.stages.measure import (
    Rotation,
    Spread,
    alternate,
    environment,
    environment_line,
    in_fresh_process,
    paired_ratio,
    resident,
    rotation,
    spread,
)
from trace_rl.stages.other_quantizers import FMT, PLAIN, TORCHAO, VLLM, Foreign, agreement, foreign

SMALL_SHAPES = ((128, 128), (64, 2048))
ROUNDS = 9
EXPERTS = 8  # of a repacked weight
RECORDINGS = {"1 bit": 1, "full": 4}
CACHE_ROWS = 2  # rows of the KV cache for each row that is read

COPY, COPY_NEW = "copy", "copy, new memory"
INTERPRETER = "triton-interpret"

TARGET_OPERATIONS = ("fake_quant", *(f"guided_fake_quant, {name}" for name in RECORDINGS))
SPEED_UP, SHARE_OF_COPY, SHARE_THREADS = 8.0, 0.40, 2
GPU_SHARE_OF_COPY = 0.75

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Operation:
    """One kernel at one setting."""

    name: str
    num_bytes: Callable[[int, int], int]
    """Bytes read and written for [rows, cols]."""
    arguments: Callable[[Tensor], Arguments]
    """x -> the arguments of a call, made before the clock starts."""
    call: Callable[..., Any]
    """(*arguments, backend=) -> the result."""

    @property
    def kernel(self) -> str:
        """Name of the kernel in `trace_rl.kernels.dispatch`."""
        return self.name.partition(",")[0]

    @property
    def compared(self) -> bool:
        """Whether torchao and vLLM have something to compare with."""
        return self.name in TARGET_OPERATIONS


def run(
    json_file: Path | None, *, threads: str = "1,2", rows: int = 4096, cols: int = 2048, device: str | None = None
) -> dict[str, Any]:
    """Measure every thread count in a process of its own, print, and write ``json_file`` if given."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    counts = check_arguments(threads=threads, rows=rows, cols=cols, device=device)
    started = time.perf_counter()
    found = environment()
    measured = [in_fresh_process(measure_shapes, rows, cols, device=device, threads=count) for count in counts]
    runs = [part | {"threads": count} for count, part in zip(counts, measured, strict=True)]
    result = {
        "format": FMT.name,
        "dtype": "bfloat16",
        "device": device,
        "shape": [rows, cols],
        "runs": runs,
        "targets": targets(runs, shape=[rows, cols], device=device),
        "environment": found | {"threads": list(counts)},
        "seconds": time.perf_counter() - started,
    }
    if json_file is not None:
        write_json(json_file, result)
    print(kernels_table(result))
    return result


def check_arguments(*, threads: str, rows: int, cols: int, device: str) -> tuple[int, ...]:
    """The thread counts; UserError for what cannot be measured."""
    parts = [part.strip() for part in threads.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--threads {threads}: expected positive numbers separated by commas, for example 1,2")
    if rows < 1:
        raise UserError(f"--rows {rows}: must be at least 1")
    if cols < FMT.block_size or cols % FMT.block_size:
        raise UserError(f"--cols {cols}: must be a positive multiple of the block size {FMT.block_size}")
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no CUDA device here; choose cpu")
    # A GPU does not care how many threads the host has.
    return tuple(dict.fromkeys(map(int, parts))) if device == "cpu" else (1,)


# What is timed ----------------------------------------------------------------------------------------------------


def operations(encode_scale: float) -> list[Operation]:
    """Every kernel and setting; activations are quantized on this static encode scale."""
    block = FMT.block_size

    def fake_quant(x: Tensor, *, backend: str) -> Tensor:
        return dispatch.fake_quant(x, encode_scale, fmt=FMT, backend=backend)

    def repack(weight_ERC: Tensor, *, backend: str) -> Any:
        return dispatch.repack(weight_ERC, fmt=FMT, backend=backend)

    def kv_dequantize(codes: Tensor, block_scale: Tensor, slots: Tensor, *, backend: str) -> Tensor:
        return dispatch.kv_dequantize(codes, block_scale, slots, encode_scale, fmt=FMT, backend=backend)

    def kv_arguments(x: Tensor) -> Arguments:
        codes, block_scale, _ = FMT.quantize_codes(x, encode_scale)
        slots = torch.randperm(CACHE_ROWS * len(x), device=x.device)[: len(x)]
        return formats.pack_codes(codes).repeat(CACHE_ROWS, 1), block_scale.repeat(CACHE_ROWS, 1), slots

    return [
        Operation("fake_quant", lambda rows, cols: 4 * rows * cols, lambda x: (x,), fake_quant),
        *(guided_operation(name, bits, encode_scale=encode_scale) for name, bits in RECORDINGS.items()),
        *(record_operation(name, bits, encode_scale=encode_scale) for name, bits in RECORDINGS.items()),
        Operation(
            "repack",
            lambda rows, cols: 2 * rows * cols + rows * cols // 2 + rows * cols // block + 4 * num_experts(rows),
            lambda x: (x.view(num_experts(len(x)), -1, x.shape[1]),),
            repack,
        ),
        Operation(
            "kv_dequantize",
            lambda rows, cols: rows * cols // 2 + rows * cols // block + 8 * rows + 2 * rows * cols,
            kv_arguments,
            kv_dequantize,
        ),
    ]


def num_experts(rows: int) -> int:
    """Experts that a [rows, cols] weight is divided into."""
    return EXPERTS if rows % EXPERTS == 0 else 1


def record_bytes(cols: int, bits: int) -> int:
    """Guidance of one token: code bits and block scales."""
    return packed_bytes(cols, bits) + packed_scale_bytes(cols // FMT.block_size, 8)


def record_operation(name: str, bits: int, *, encode_scale: float) -> Operation:
    """`quantize_record` of x into shuffled rows of a record, as the engine calls it."""

    def arguments(x: Tensor) -> Arguments:
        buffer = torch.zeros(len(x), record_bytes(x.shape[1], bits), dtype=torch.uint8, device=x.device)
        slots = torch.randperm(len(x), device=x.device)
        return x, RecordTarget(buffer, slots=slots, start=0, bits=bits, scale_bits=8)

    def call(x: Tensor, target: RecordTarget, *, backend: str) -> Any:
        return dispatch.quantize_record(x, encode_scale, fmt=FMT, target=target, backend=backend)

    return Operation(
        f"quantize_record, {name}",
        lambda rows, cols: rows * (4 * cols + record_bytes(cols, bits) + 8),
        arguments,
        call,
    )


def guided_operation(name: str, bits: int, *, encode_scale: float) -> Operation:
    """`guided_fake_quant` of x on the record of a rollout whose x was a little different."""

    def arguments(x: Tensor) -> Arguments:
        rollout = (x.float() * (1 + 0.01 * torch.randn(x.shape, device=x.device))).to(x.dtype)
        record = torch.zeros(len(x), record_bytes(x.shape[1], bits), dtype=torch.uint8, device=x.device)
        target = RecordTarget(record, slots=torch.arange(len(x), device=x.device), start=0, bits=bits, scale_bits=8)
        dispatch.quantize_record(rollout, encode_scale, fmt=FMT, target=target, want_xhat=False, backend="torch")
        middle = packed_bytes(x.shape[1], bits)
        return x, record[:, :middle], record[:, middle:]

    def call(x: Tensor, guidance: Tensor, block_scale: Tensor, *, backend: str) -> Tensor:
        return dispatch.guided_fake_quant(x, guidance, block_scale, encode_scale, fmt=FMT, bits=bits, backend=backend)

    return Operation(
        f"guided_fake_quant, {name}",
        lambda rows, cols: rows * (4 * cols + record_bytes(cols, bits)),
        arguments,
        call,
    )


def backends(device: str) -> tuple[list[str], dict[str, str]]:
    """Our backends that run on this device, and why the others do not."""
    usable, refused = [], {}
    for name in dispatch.BACKENDS:
        if name == INTERPRETER:
            refused[name] = "it interprets kernels to test them; its time means nothing"
            continue
        try:
            usable.append(dispatch.choose(device, name))
        except UserError as error:
            refused[name] = str(error)
    return usable, refused


# One process ------------------------------------------------------------------------------------------------------


def measure_shapes(rows: int, cols: int, *, device: str) -> dict[str, Any]:
    """Every operation on the large shape and the small ones, in this process's threads."""
    torch.manual_seed(0)
    sample = activations(rows, cols, device=device)
    encode_scale = float(FMT.encode_scale(sample.abs().amax().float()))
    ours, refused = backends(device)
    others, missing = foreign(encode_scale, device=device)
    measured = [
        measure_operation(operation, shape=shape, ours=ours, others=others, device=device, large=shape == (rows, cols))
        for shape in dict.fromkeys(((rows, cols), *SMALL_SHAPES))
        for operation in operations(encode_scale)
    ]
    copies = [row["implementations"][COPY]["gb_per_s"]["median"] for row in measured if row["large"]]
    return {
        "operations": measured,
        "copy_gb_per_s": spread(copies),
        "agreement": {name: agreement(other, sample, encode_scale) for name, other in others.items()},
        "refused": refused | missing,
    }


def activations(rows: int, cols: int, *, device: str) -> Tensor:
    """BF16 [rows, cols] of normal values whose rows differ in size, as activations do."""
    return (torch.randn(rows, cols) * torch.randn(rows, 1).exp()).to(torch.bfloat16).to(device)


def measure_operation(
    operation: Operation,
    *,
    shape: tuple[int, int],
    ours: Sequence[str],
    others: Mapping[str, Foreign],
    device: str,
    large: bool,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Seconds and GB/s of every implementation of an operation."""
    refused = {name: dispatch.refusal(name, operation.kernel, device=device, fmt=FMT) for name in ours}
    ours = [name for name in ours if refused[name] is None]
    num_bytes = operation.num_bytes(*shape)
    plan: Rotation = rotation(num_bytes, device=device) if large else resident(num_bytes, device=device)
    x = activations(*shape, device=device)
    sets = [operation.arguments(x.clone()) for _ in range(plan.num_sets)]
    source, destination = (
        torch.ones(plan.num_sets, num_bytes // 2, dtype=torch.uint8, device=device) for _ in range(2)
    )
    candidates: dict[str, Callable[[int], object]] = {
        COPY: lambda index: destination[index].copy_(source[index]),
        COPY_NEW: lambda index: source[index].clone(),
    }
    for backend in ours:
        candidates[backend] = lambda index, backend=backend: operation.call(*sets[index], backend=backend)
    if operation.compared:
        for name, other in others.items():
            if name != PLAIN or operation.name == "fake_quant":
                candidates[name] = lambda index, other=other: other.fake_quant(sets[index][0])
    seconds = alternate(candidates, num_sets=plan.num_sets, rounds=rounds, device=device)
    return {
        "operation": operation.name,
        "shape": list(shape),
        "large": large,
        "rotation": plan.as_json(),
        "refused": {name: reason for name, reason in refused.items() if reason is not None},
        **summarize(seconds, num_bytes=num_bytes),
        "differing_bytes": {
            backend: differing_bytes(operation, sets[0], backend=backend) for backend in ours if backend != "torch"
        },
    }


def differing_bytes(operation: Operation, arguments: Arguments, *, backend: str) -> int:
    """Bytes of the results, record included, in which a backend differs from the plain version."""

    def result(name: str) -> list[Tensor]:
        outputs = operation.call(*arguments, backend=name)
        written = [part.buffer for part in arguments if isinstance(part, RecordTarget)]
        return [part.contiguous().view(torch.uint8).clone() for part in (*_tensors(outputs), *written)]

    return sum(int((a != b).sum()) for a, b in zip(result("torch"), result(backend), strict=True))


def _tensors(outputs: Any) -> Iterator[Tensor]:
    for part in (outputs,) if isinstance(outputs, Tensor) else outputs:
        if part is not None:
            yield part


# Arithmetic -------------------------------------------------------------------------------------------------------


def summarize(seconds: Mapping[str, Sequence[float]], *, num_bytes: int) -> dict[str, Any]:
    """Per implementation: seconds, GB/s and share of copy; and how much faster ours is than each of the others.

    Ours is the fastest way we have, by the order triton, compiled, torch of what was measured.
    """
    ours = next(name for name in ("triton", "compiled", "torch") if name in seconds)
    return {
        "bytes": num_bytes,
        "implementations": {
            name: {
                "seconds": spread(values),
                "gb_per_s": spread([num_bytes / value / 1e9 for value in values]),
                "of_copy": paired_ratio(seconds[COPY], values),
            }
            for name, values in seconds.items()
        },
        "ours": ours,
        "speed_up": {
            name: paired_ratio(values, seconds[ours])
            for name, values in seconds.items()
            if name not in (ours, COPY, COPY_NEW)
        },
    }


def targets(runs: Sequence[Mapping[str, Any]], *, shape: list[int], device: str) -> list[dict[str, Any]]:
    """What the kernels must reach on the large shape, and whether they do; ``met`` is null for what was not measured.

    CPU: 8 times the speed of torchao and vLLM's reference at every thread count, and 40 % of the copy on 2 threads.
    CUDA: 75 % of the copy for `quantize_record` and `guided_fake_quant`.
    """
    found = []
    for part in runs:
        for row in part["operations"]:
            if row["shape"] != shape:
                continue
            of_copy = row["implementations"][row["ours"]]["of_copy"]["median"]
            base = {"operation": row["operation"], "implementation": row["ours"], "threads": part["threads"]}
            if device == "cuda" and row["operation"].startswith(("quantize_record", "guided_fake_quant")):
                found.append(_target("share of copy", of_copy, at_least=GPU_SHARE_OF_COPY, **base))
            if device == "cpu" and row["operation"] in TARGET_OPERATIONS:
                for other in (TORCHAO, VLLM):
                    ratio = row["speed_up"].get(other, {}).get("median")
                    found.append(_target(f"times faster than {other}", ratio, at_least=SPEED_UP, **base))
                if part["threads"] == SHARE_THREADS:
                    found.append(_target("share of copy", of_copy, at_least=SHARE_OF_COPY, **base))
    if device == "cpu" and SHARE_THREADS not in [part["threads"] for part in runs]:
        base = {"implementation": None, "threads": SHARE_THREADS}
        for operation in TARGET_OPERATIONS:
            found.append(_target("share of copy", None, at_least=SHARE_OF_COPY, operation=operation, **base))
    return found


def _target(name: str, value: float | None, *, at_least: float, **where: Any) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "at_least": at_least,
        "met": None if value is None else value >= at_least,
    } | where


def kernels_table(result: Mapping[str, Any]) -> str:
    """What the stage prints."""
    lines = []
    for part in result["runs"]:
        for shape in dict.fromkeys(tuple(row["shape"]) for row in part["operations"]):
            rows = [row for row in part["operations"] if tuple(row["shape"]) == shape]
            lines += _shape_lines(rows, shape=shape, threads=part["threads"])
        for name, shares in part["agreement"].items():
            differs = ", ".join(f"{100 * share:.3g} % of {what}" for what, share in shares.items())
            lines.append(f"{name} differs from ours in {differs}")
        lines += [f"not timed: {name}: {reason}" for name, reason in part["refused"].items()]
        lines.append("")
    verdicts = {True: "met", False: "NOT MET", None: "not measured"}
    for target in result["targets"]:
        value = "" if target["value"] is None else f"{target['value']:.2f}, "
        where = f"{target['operation']} ({target['implementation'] or 'ours'}, {target['threads']} threads)"
        lines.append(f"target {where}: {target['name']} >= {target['at_least']:g}: {value}{verdicts[target['met']]}")
    lines.append(environment_line(result["environment"]))
    return "\n".join(lines)


def _shape_lines(rows: Sequence[Mapping[str, Any]], *, shape: tuple[int, ...], threads: int) -> list[str]:
    plan = rows[0]["rotation"]
    if not rows[0]["large"]:
        where = "one set, held by the caches"
    elif plan["beyond_cache"]:
        where = f"{plan['sets']} sets of buffers in turn, more than the last-level cache holds"
    elif plan["cache_bytes"] is None:
        where = f"{plan['sets']} sets of buffers in turn; the cache's size is unknown"
    else:
        where = f"{plan['sets']} sets of buffers in turn: the last-level cache HOLDS them, memory does not allow more"
    lines = [
        f"{list(shape)} bfloat16, {threads} threads; {where}",
        f"{'operation':27}{'implementation':18}{'time':>10}{'min - max':>20}{'GB/s':>8}{'of copy':>9}{'ours':>8}",
    ]
    for row in rows:
        for name, found in row["implementations"].items():
            time_text, range_text = _times(found["seconds"])
            faster = f"{row['speed_up'][name]['median']:.1f}x" if name in row["speed_up"] else ""
            lines.append(
                f"{row['operation']:27}{name:18}{time_text:>10}{range_text:>20}"
                f"{found['gb_per_s']['median']:8.2f}{100 * found['of_copy']['median']:7.1f} %{faster:>8}"
            )
        lines += [f"{row['operation']:27}{name:18}not timed: {reason}" for name, reason in row["refused"].items()]
        unequal = {name: count for name, count in row["differing_bytes"].items() if count}
        lines += [f"{row['operation']:27}{name:18}DIFFERS in {count} bytes" for name, count in unequal.items()]
    return lines


def _times(seconds: Spread) -> tuple[str, str]:
    scale, unit = (1e3, "ms") if seconds["median"] >= 1e-3 else (1e6, "us")
    low, high = scale * seconds["min"], scale * seconds["max"]
    return f"{scale * seconds['median']:.2f} {unit}", f"{low:.2f} - {high:.2f} {unit}"
