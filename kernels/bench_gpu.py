"""Every Triton kernel on the CUDA device that is present: checked bit for bit, then timed, in less than five minutes.

    python kernels/bench_gpu.py [--json FILE] [--quick] [--interpret]

Needs this checkout, torch and triton (with the C compiler that triton builds its launchers with), nothing else: started
as a file, it names the folders trace/ and kernels/ as the package `trace_rl` itself. The checks are those of
trace_rl.kernels.gpu_checks; `--interpret` makes them on the CPU in Triton's interpreter, smaller, and times nothing.

*Times.* CUDA events around CUDA graphs, so that launches by the host are no part of them. A graph holds one call for
each of several sets of buffers, which together exceed the last-level cache twice, so no call finds its input there. In
each round every candidate is timed once, in an order that the next round reverses, behind untimed copies that keep the
device busy while the host queues the rest. Ratios are formed within a round; reported are medians, smallest and
largest. Bytes are those an ideal kernel moves, read and written (a repack looks for its largest value first, so it
reads its weights twice, and is charged once); a share is that of the copy of the same rounds. The search for NaN and
Inf is off, because its answer makes the host wait.

*MoE.* One Qwen3-30B-A3B layer, random routing, cold weights. The speed-up is over the fastest of three BF16 versions:
a loop over the experts with ready-made indices, PyTorch's `grouped_mm`, and `bmm`. For `bmm` the experts that a batch
reaches are neighbours, so that it reads them where they lie, which is the same to the other kernels. Beside it stands
the prediction of trace_rl.kernels.roofline at this device's measured bandwidth and its highest clock.

Exit code: 0 every check passed, 1 something failed or found no time, 2 the benchmark cannot run here. A missed target
is printed and no failure.
"""

import argparse
import functools
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # the imports below need all of this
    for _name in ("torch", "triton"):
        if importlib.util.find_spec(_name) is None:
            print(f"error: {_name} is not installed: `pip install torch` (CUDA builds bring triton)", file=sys.stderr)
            sys.exit(2)
    if "--interpret" in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"
    for _name, _folder in (("trace_rl", "trace"), ("trace_rl.kernels", "kernels")):
        _path = Path(__file__).resolve().parents[1] / _folder
        _spec = importlib.util.spec_from_file_location(
            _name, _path / "__init__.py", submodule_search_locations=[str(_path)]
        )
        assert _spec is not None and _spec.loader is not None
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])

import torch
import triton
from torch import Tensor

from trace_rl import formats
from trace_rl.guidance.bits import packed_bytes
from trace_rl.kernels import bf16_moe, fp4_device, gpu_checks, reference, roofline
from trace_rl.kernels.bf16_moe import Batch
from trace_rl.kernels.fake_quant import fake_quant
from trace_rl.kernels.guided_fake_quant import guided_fake_quant
from trace_rl.kernels.kv_cache import kv_dequantize, kv_quantize_record
from trace_rl.kernels.quantize_record import quantize_record
from trace_rl.kernels.reference import PackedExperts, RecordTarget
from trace_rl.kernels.repack import repack
from trace_rl.kernels.w4a4_moe import MIN_CAPABILITY as FP4_CAPABILITY
from trace_rl.kernels.w4a4_moe import w4a4_moe
from trace_rl.kernels.w4a16_moe import w4a16_moe

BUDGET_S = {"checks": 120.0, "streaming": 65.0, "moe": 75.0}
"""A section begins nothing new after this time (a fresh cache of Triton's fills most of the first)."""
QUICK_BUDGET_S = {"checks": 50.0, "streaming": 40.0, "moe": 30.0}

SHARE_OF_COPY = 0.75
SPEED_UP, SPEED_UP_BATCH = 2.5, 16

NVFP4, MXFP4 = formats.get("nvfp4"), formats.get("mxfp4")
ROWS, COLS = 16384, 4096
MEMORY_SHARE = 1 / 96  # of the free memory, for one [ROWS, COLS]: about fifty of them are alive at once
KV_COLS = 512  # 4 heads of 128
REPACKED_EXPERTS = 16
ENCODE_SCALE = 2688 / 6.0
COPY = "copy"
RECORDINGS = {"1-bit record": 1, "full record": 4}
TARGET_ROWS = ("quantize_record", "guided_fake_quant")

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8  # Qwen3-30B-A3B
BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16, 32, 64), (1, 4, 16, 64)
W4A16, W4A4 = "w4a16_moe", "w4a4_moe"
FC1_SCALE, FC2_SCALE = 2688 / 5.0, 2688 / 8.0
LARGEST_DIFFERENCE = {"bf16": 0.03, "w4": 0.5}
"""Of a timed layer from the BF16 loop, relative to its norm: the checks are exact, this shows a wrong argument."""

ROUNDS, QUICK_ROUNDS = 15, 7
BUSY_COPIES = 200  # of at least 128 MB: longer than the launch of a graph of thousands of nodes

Calls = list[Callable[[], Any]]
"""One call for each set of buffers."""


@dataclass
class Bench:
    """What is being run, and what was found so far."""

    device: str
    quick: bool
    found: dict[str, Any] = field(
        default_factory=lambda: {"checks": [], "streaming": [], "moe": [], "targets": [], "not_run": {}}
    )
    failures: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    deadline: float = 0.0

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)

    def begin(self, section: str) -> None:
        """Start a section's time. The interpreter has no limit."""
        budget = QUICK_BUDGET_S if self.quick else BUDGET_S
        self.deadline = float("inf") if self.device == "cpu" else time.monotonic() + budget[section]

    def attempt(self, name: str, function: Callable[[], Any], *, ours: bool = True) -> Any:
        """The function's value, or None, reported, if it raises or the section has no time left.

        Every exception of a kernel ends here, so that the other kernels are seen, but not that of a device which then
        no longer answers. What is not `ours` is a comparison that may be missing.
        """
        reason = "no time was left in its section"
        if time.monotonic() < self.deadline:
            try:
                value = function()
                self.wait()
                return value
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                reason = f"{type(error).__name__}: {lines[0][:300]}"
            self.wait()  # raises after an illegal access
        if ours:
            self.fail(name, reason)
        else:
            self.found["not_run"][name] = reason
            self.say(f"not compared: {name}: {reason}")
        return None

    def fail(self, name: str, reason: str) -> None:
        """Remember and print a failure."""
        self.failures.append(f"{name}: {reason}")
        self.say(f"FAILED {name}: {reason}")

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels.", allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    parser.add_argument("--quick", action="store_true", help="fewer inputs, batches and rounds, in two minutes")
    parser.add_argument("--interpret", action="store_true", help="only checks, on the CPU in Triton's interpreter")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.resolve().parent}; make it first")
    reason = refusal(interpret=options.interpret)
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2

    torch.manual_seed(0)
    bench = Bench("cpu" if options.interpret else "cuda", options.quick)
    bench.found["environment"] = environment(bench)
    for name, value in bench.found["environment"].items():
        print(f"{name}: {'unknown' if value is None else value}", flush=True)
    sections = (check_kernels,) if bench.device == "cpu" else (check_kernels, time_streaming, time_moe)
    try:
        for section in sections:
            bench.deadline = float("inf")
            bench.attempt(section.__name__, functools.partial(section, bench))
    except RuntimeError as error:  # see Bench.attempt
        bench.fail("device", f"it no longer answers, the rest was not run: {str(error).splitlines()[0]}")
    bench.found["targets"] = targets(bench.found)
    seconds = round(time.monotonic() - bench.started, 1)
    bench.found |= {"quick": bench.quick, "failures": bench.failures, "seconds": seconds}
    if options.json is not None:
        options.json.write_text(json.dumps(bench.found, indent=1) + "\n")
    print(report(bench.found))
    return 1 if bench.failures else 0


def refusal(*, interpret: bool) -> str | None:
    """Why the benchmark cannot run here, and what to do."""
    if interpret:
        late = "--interpret comes too late, triton was imported without it: start this file as a program"
        return None if fp4_device.INTERPRETED else late
    if fp4_device.INTERPRETED:
        return "TRITON_INTERPRET is set, and times of the interpreter mean nothing: unset it, or pass --interpret"
    if not torch.cuda.is_available():
        built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        return (
            f"no CUDA device: torch {torch.__version__}, built {built}, finds none. Run this where there is one, with "
            "a CUDA build of torch, or pass --interpret to make the checks on the CPU"
        )
    if triton.knobs.build.impl is None and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler, with which triton builds its launchers: install gcc or clang, or set CC"
    return None


def environment(bench: Bench) -> dict[str, Any]:
    """Device and versions that the numbers belong to."""
    found = {
        "device": "CPU, kernels interpreted",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": _first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
    }
    if bench.device == "cpu":
        return found
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ("nvidia-smi", f"--id=GPU-{properties.uuid}", "--format=csv,noheader,nounits")
    clock = _first_line(*query, "--query-gpu=clocks.max.sm")
    return found | {
        "device": properties.name,
        "capability": f"sm_{capability()}",
        "driver": _first_line(*query, "--query-gpu=driver_version"),
        "cuda": torch.version.cuda,
        "multiprocessors": properties.multi_processor_count,
        "max_clock_mhz": int(clock) if clock is not None and clock.isdigit() else None,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
    }


def capability() -> int:
    """90 for sm_90."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _first_line(*command: str) -> str | None:
    """What a program prints; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = finished.stdout.splitlines()
    return lines[0].strip() if finished.returncode == 0 and lines else None


# Checks -----------------------------------------------------------------------------------------------------------


def check_kernels(bench: Bench) -> None:
    """Every kernel against its twin, one line each."""
    bench.begin("checks")
    interpreted = bench.device == "cpu"
    scope = gpu_checks.Scope(bench.device, few=bench.quick or interpreted)
    has_fp4 = interpreted or capability() >= FP4_CAPABILITY
    if not has_fp4:
        reason = f"sm_{capability()} has no FP4 tensor cores; sm_{FP4_CAPABILITY} and later do"
        bench.found["not_run"][W4A4] = reason
        bench.say(f"not run: {W4A4}: {reason}")
    for kernel, cases in gpu_checks.checks(scope, fp4_tensor_cores=has_fp4).items():
        started, before, count = time.monotonic(), len(bench.failures), 0
        for name, case in cases:
            count += 1
            if time.monotonic() > bench.deadline:
                bench.fail(f"check {kernel}", f"no time was left for `{name}` and what follows")
                break
            bench.attempt(f"check {kernel}, {name}", case)
        failed = len(bench.failures) - before
        seconds = round(time.monotonic() - started, 1)
        bench.found["checks"].append({"kernel": kernel, "cases": count, "failed": failed, "seconds": seconds})
        bench.say(f"check {kernel}: {count} cases, {f'{failed} FAILED' if failed else 'all passed'}")


# Clock ------------------------------------------------------------------------------------------------------------


def measure(bench: Bench, candidates: Mapping[str, Calls], *, others: Sequence[str] = ()) -> dict[str, list[float]]:
    """Seconds per call of each candidate that runs, one number per round; COPY is always among the candidates.

    others: candidates that are not ours.
    """
    replays = {}
    for name, calls in candidates.items():
        replay = bench.attempt(f"time {name}", functools.partial(captured, calls), ours=name not in others)
        if replay is not None:
            replays[name] = replay
    seconds: dict[str, list[float]] = {name: [] for name in replays}
    for number in range(1 + (QUICK_ROUNDS if bench.quick else ROUNDS)):  # the first warms up
        for _ in range(BUSY_COPIES):
            candidates[COPY][0]()
        events = {}
        for name in list(replays)[:: 1 if number % 2 else -1]:
            events[name] = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[name][0].record()
            replays[name]()
            events[name][1].record()
        bench.wait()
        if number:
            for name, (start, end) in events.items():
                seconds[name].append(start.elapsed_time(end) / 1000 / len(candidates[name]))
    return seconds


def captured(calls: Calls) -> Callable[[], None]:
    """All calls as one CUDA graph. Compiles first."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]  # alive together: each call writes to memory of its own
    del outputs
    return graph.replay


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest, largest and number."""
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


# Quantization kernels ---------------------------------------------------------------------------------------------


def time_streaming(bench: Bench) -> None:
    """GB/s of the kernels that read and write each value once, beside a copy."""
    bench.begin("streaming")
    free, _ = torch.cuda.mem_get_info()
    rows = ROWS
    while rows > 1024 and 2 * rows * COLS > free * MEMORY_SHARE:
        rows //= 2
    num_sets = 2 + 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size // (4 * rows * COLS)
    bench.say(f"time quantization kernels on {num_sets} sets of [{rows}, {COLS}] BF16")
    num_bytes, candidates = streaming_candidates(rows, COLS, num_sets=num_sets, device=bench.device)
    compiled = next(name for name in candidates if "torch.compile" in name)
    seconds = measure(bench, candidates, others=[compiled])
    for name, values in seconds.items():
        gb_per_s = [num_bytes[name] / value / 1e9 for value in values]
        copied = [num_bytes[COPY] / value / 1e9 for value in seconds[COPY]]
        share = [ours / copy for ours, copy in zip(gb_per_s, copied, strict=True)]
        bench.found["streaming"].append(
            {
                "operation": name,
                "shape": [rows, COLS],
                "bytes": num_bytes[name],
                "seconds": spread(values),
                "gb_per_s": spread(gb_per_s),
                "share_of_copy": spread(share),
            }
        )
        bench.say(f"{name}: {median(gb_per_s):.0f} GB/s, {median(share):.0%} of the copy")


def streaming_candidates(
    rows: int, cols: int, *, num_sets: int, device: str
) -> tuple[dict[str, int], dict[str, Calls]]:
    """(bytes of a call, calls) of every operation."""
    values, scales, tokens = rows * cols, rows * cols // NVFP4.block_size, rows * cols // KV_COLS
    num_bytes = {COPY: 4 * values}
    candidates: dict[str, Calls] = {COPY: []}

    def add(name: str, size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        num_bytes[name] = size
        candidates.setdefault(name, []).append(functools.partial(function, *arguments, **options))

    encode_scale = torch.tensor(ENCODE_SCALE, device=device)
    # Without the pieces into which `fake_quant` cuts large tensors for the cache of a CPU.
    compiled = torch.compile(lambda x: NVFP4._fake_quant(x, encode_scale).to(x.dtype), dynamic=False)
    unchecked = {"fmt": NVFP4, "check": False}
    for _ in range(num_sets):
        x = torch.randn(rows, cols, device=device, dtype=torch.bfloat16)
        add(COPY, 4 * values, torch.empty_like(x).copy_, x)
        codes_only = {"want_xhat": False, "want_codes": True}
        add("quantize_record, codes", 2 * values + values // 2 + scales, quantize_record, x, ENCODE_SCALE,
            **codes_only, **unchecked)  # fmt: skip
        add("quantize_record, codes, mxfp4", 2 * values + values // 2 + scales // 2, quantize_record, x, 1.0,
            **codes_only, fmt=MXFP4, check=False)  # fmt: skip
        add("quantize_record, xhat", 4 * values, quantize_record, x, ENCODE_SCALE, **unchecked)
        rollout = x + 0.02 * torch.randn_like(x)
        for name, bits in RECORDINGS.items():
            codes_bytes = packed_bytes(cols, bits)
            record = torch.empty(rows, codes_bytes + cols // NVFP4.block_size, dtype=torch.uint8, device=device)
            target = RecordTarget(record, torch.randperm(rows, device=device), start=0, bits=bits, scale_bits=8)
            size = 4 * values + record.numel()
            add(f"quantize_record, xhat and {name}", size + 8 * rows, quantize_record, x, ENCODE_SCALE, target=target,
                **unchecked)  # fmt: skip
            recorded = RecordTarget(
                torch.empty_like(record), torch.arange(rows, device=device), start=0, bits=bits, scale_bits=8
            )
            reference.quantize_record(rollout, ENCODE_SCALE, target=recorded, want_xhat=False, **unchecked)
            parts = recorded.buffer[:, :codes_bytes], recorded.buffer[:, codes_bytes:]
            add(f"guided_fake_quant, {name}", size, guided_fake_quant, x, *parts, ENCODE_SCALE, bits=bits, **unchecked)
        add("fake_quant", 4 * values, fake_quant, x, ENCODE_SCALE, **unchecked)
        kv = x.view(tokens, KV_COLS)
        slots = torch.randperm(2 * tokens, device=device)[:tokens]
        cache = [
            torch.zeros(2 * tokens, width, dtype=torch.uint8, device=device)
            for width in (KV_COLS // 2, KV_COLS // NVFP4.block_size)
        ]
        record = torch.empty(2 * tokens, KV_COLS // 8 + cache[1].shape[1], dtype=torch.uint8, device=device)
        target = RecordTarget(record, slots, start=0, bits=1, scale_bits=8)
        written = values // 2 + scales + values // 8 + scales
        add("kv_quantize_record, 1-bit record", 2 * values + written + 8 * tokens, kv_quantize_record, kv,
            ENCODE_SCALE, *cache, slots, target=target, **unchecked)  # fmt: skip
        add("kv_dequantize", values // 2 + scales + 8 * tokens + 2 * values, kv_dequantize, *cache, slots,
            ENCODE_SCALE, fmt=NVFP4)  # fmt: skip
        add("repack", 2 * values + values // 2 + scales, repack, x.view(REPACKED_EXPERTS, -1, cols), **unchecked)
        add("fake_quant, torch.compile", 4 * values, compiled, x)
    return num_bytes, candidates


# Expert layers ----------------------------------------------------------------------------------------------------


def time_moe(bench: Bench) -> None:
    """Packed experts against BF16 at every batch size."""
    bench.begin("moe")
    free, _ = torch.cuda.mem_get_info()
    num_layers = 4 if free > 16e9 else 2 if free > 8e9 else 1
    has_fp4 = capability() >= FP4_CAPABILITY
    bench.say(f"time expert layers of Qwen3-30B-A3B, {num_layers} in turns")
    layers = bench.attempt("pack expert layers", lambda: make_layers(num_layers, device=bench.device))
    if layers is None:
        return
    copy = next((row["gb_per_s"]["median"] * 1e9 for row in bench.found["streaming"] if row["operation"] == COPY), None)
    buffers = torch.empty(2, 32 << 20, dtype=torch.bfloat16, device=bench.device)
    shape = {"hidden": HIDDEN, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
    for tokens in QUICK_BATCHES if bench.quick else BATCHES:
        if time.monotonic() > bench.deadline:
            bench.fail(f"time {W4A16}, batch {tokens}", "no time was left in its section")
            continue
        num_calls = max(num_layers, 16 if tokens <= 4 else 8)
        batches = [
            bf16_moe.make_batch(tokens, place=index // num_layers, device=bench.device, **shape)
            for index in range(num_calls)
        ]
        candidates = moe_candidates(batches, layers, fp4_tensor_cores=has_fp4)
        for name in list(candidates):
            ours = name not in bf16_moe.VERSIONS
            limit = LARGEST_DIFFERENCE["w4" if ours else "bf16"]
            check = functools.partial(assert_similar, candidates[name][0], candidates["bf16 loop"][0], limit)
            if bench.attempt(f"{name}, batch {tokens}", check, ours=ours) is None:
                del candidates[name]
        seconds = measure(
            bench, {COPY: [lambda: buffers[1].copy_(buffers[0])]} | candidates, others=[*bf16_moe.VERSIONS]
        )
        row = moe_row(tokens, seconds, experts=sum(batch.count for batch in batches) / num_calls)
        row["predicted_speedup"] = predicted(tokens, copy, bench.found["environment"])
        bench.found["moe"].append(row | {"layers": num_layers})
        if "speedup" in row:
            bench.say(f"batch {tokens}: {row['speedup']['median']:.2f}x of {row['baseline']}")


Layer = tuple[Tensor, Tensor, tuple[PackedExperts, PackedExperts]]


def make_layers(num_layers: int, *, device: str) -> list[Layer]:
    """(gate_up [E, 2I, H], down [E, H, I], both packed) of each layer."""
    layers = []
    for _ in range(num_layers):
        gate_up, down = (
            torch.randn(NUM_EXPERTS, *shape, dtype=torch.bfloat16, device=device) * 0.02
            for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )
        layers.append((gate_up, down, (reference.repack(gate_up, fmt=NVFP4), reference.repack(down, fmt=NVFP4))))
    return layers


def moe_candidates(batches: Sequence[Batch], layers: Sequence[Layer], *, fp4_tensor_cores: bool) -> dict[str, Calls]:
    """Calls of every version: batch i on layer i, i+1 on the next."""
    candidates: dict[str, Calls] = {}
    for index, batch in enumerate(batches):
        gate_up, down, packed = layers[index % len(layers)]
        for name, version in bf16_moe.VERSIONS.items():
            candidates.setdefault(name, []).append(functools.partial(version, batch, gate_up, down))
        arguments = (batch.x_TH, *packed, batch.weights_TK, batch.ids_TK)
        unchecked = {"fmt": NVFP4, "check": False}
        candidates.setdefault(W4A16, []).append(functools.partial(w4a16_moe, *arguments, **unchecked))
        if fp4_tensor_cores:
            candidates.setdefault(W4A4, []).append(
                functools.partial(w4a4_moe, *arguments, fc1_scale=FC1_SCALE, fc2_scale=FC2_SCALE, **unchecked)
            )
    return candidates


def assert_similar(call: Callable[[], Tensor], other: Callable[[], Tensor], limit: float) -> float:
    """The relative difference of two results; AssertionError above the limit."""
    found, expected = call().float(), other().float()
    difference = float((found - expected).norm() / expected.norm())
    if not difference <= limit:
        raise AssertionError(f"differs from the BF16 loop by {difference:.3f} of its norm")
    return difference


def moe_row(tokens: int, seconds: Mapping[str, Sequence[float]], *, experts: float) -> dict[str, Any]:
    """What is reported of a batch size."""
    row: dict[str, Any] = {"batch": tokens, "experts": experts}
    row["seconds"] = {name: spread(values) for name, values in seconds.items() if name != COPY}
    baselines = [name for name in seconds if name in bf16_moe.VERSIONS]
    if baselines and W4A16 in seconds:
        row["baseline"] = min(baselines, key=lambda name: median(seconds[name]))
        ratios = [a / b for a, b in zip(seconds[row["baseline"]], seconds[W4A16], strict=True)]
        row["speedup"] = spread(ratios)
    return row


def predicted(tokens: int, bandwidth: float | None, found: Mapping[str, Any]) -> float | None:
    """The roofline's speed-up on this device; None where its bandwidth or clock is not known."""
    if bandwidth is None or found["max_clock_mhz"] is None:
        return None
    lanes = found["multiprocessors"] * 4 * 32 * found["max_clock_mhz"] * 1e6
    device = roofline.Device(found["device"], bandwidth=bandwidth, lane_instructions=lanes)
    shape = {"hidden": HIDDEN, "width": WIDTH, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
    return roofline.predict(tokens, **shape, device=device, achieved=1.0).speedup


# Report -----------------------------------------------------------------------------------------------------------


def targets(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was to be reached, and what was."""
    result = [
        _target(f"{row['operation']}: share of copy", row["share_of_copy"]["median"], SHARE_OF_COPY)
        for row in found["streaming"]
        if row["operation"].startswith(TARGET_ROWS)
    ]
    return result + [
        _target(f"{W4A16}, batch {row['batch']}: speed-up", row["speedup"]["median"], SPEED_UP)
        for row in found["moe"]
        if row["batch"] <= SPEED_UP_BATCH and "speedup" in row
    ]


def _target(name: str, value: float, least: float) -> dict[str, Any]:
    return {"target": name, "value": value, "least": least, "met": value >= least}


def report(found: Mapping[str, Any]) -> str:
    """The tables."""
    lines = ["", f"{'kernel':<36} cases  failed"]
    lines += [f"{row['kernel']:<36} {row['cases']:5}  {row['failed']:6}" for row in found["checks"]]
    if found["streaming"]:
        lines += ["", f"{'operation':<40} {'us':>8} {'GB/s':>6} {'(min-max)':>13} {'of copy':>8}"]
    for row in found["streaming"]:
        speed, range_ = row["gb_per_s"], "({min:.0f}-{max:.0f})".format(**row["gb_per_s"])
        lines.append(
            f"{row['operation']:<40} {row['seconds']['median'] * 1e6:8.1f} {speed['median']:6.0f} {range_:>13} "
            f"{row['share_of_copy']['median']:8.0%}"
        )
    if found["moe"]:
        names = list(dict.fromkeys(name for row in found["moe"] for name in row["seconds"]))
        columns = " ".join(f"{name:>16}" for name in names)
        lines += ["", f"batch experts {columns}  speed-up (min-max)  predicted  (us, NVFP4 over the fastest BF16)"]
    for row in found["moe"]:
        times = " ".join(
            f"{row['seconds'][name]['median'] * 1e6:16.1f}" if name in row["seconds"] else f"{'-':>16}"
            for name in names
        )
        gain = "{median:.2f} ({min:.2f}-{max:.2f})".format(**row["speedup"]) if "speedup" in row else "-"
        guess = "-" if row["predicted_speedup"] is None else f"{row['predicted_speedup']:.2f}"
        lines.append(f"{row['batch']:5} {row['experts']:7.1f} {times}  {gain:>18}  {guess:>9}")
    if found["targets"]:
        lines.append("")
    lines += [
        f"{'met    ' if row['met'] else 'NOT MET'} {row['target']} {row['value']:.2f} (at least {row['least']})"
        for row in found["targets"]
    ]
    lines += [f"not run: {name}: {reason}" for name, reason in found["not_run"].items()]
    lines += [f"FAILED {failure}" for failure in found["failures"]]
    lines.append(f"{len(found['failures'])} failures, {found['seconds']:.0f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
