"""How every benchmark measures: what is compared runs in turns, in one process, on memory that no cache still holds.

- **Rotation.** A call works on the next of several equal sets of buffers whose sum exceeds the last-level cache, and
  its outputs are kept until their set comes round again, so that the allocator cannot hand the same warm memory to
  every call. Where memory does not allow so many sets, the result says so.
- **Turns.** In each round every candidate is timed once, in one order and the next round in the reverse; a ratio is
  formed within the round, so a machine that slows down slows both sides. What is reported of the rounds is the median
  with smallest and largest.
- **Fresh processes.** The number of threads is fixed when a process starts: OpenMP, compiled code and vLLM each read it
  once. So every thread count, and every rollout engine, gets a process of its own.

Easy to break: a copy moves its bytes twice, once read and once written, and every GB/s here counts both.
"""

import contextlib
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from trace_rl.environment import commit, machine, versions

T = TypeVar("T")
Spread = dict[str, float]
"""``median``, ``min``, ``max`` and the number ``n`` of values."""

BEYOND_CACHE = 1.25  # sum of the rotated sets over the cache's size
MEMORY_SHARE = 0.25  # of the free memory, for one rotation
MIN_SAMPLE_S = 0.02  # a sample is as many calls as take this long
WARM_UP_S = 1.0  # of a candidate that is too slow for a whole rotation
WARM_UP_CALLS = 3
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Rotation:
    """How many equal sets of buffers a benchmark goes round."""

    num_sets: int
    set_bytes: int
    """Bytes that one call reads and writes."""
    cache_bytes: int | None
    """Last-level cache; None where the system does not say."""

    @property
    def beyond_cache(self) -> bool:
        """Whether a set has left the cache when its turn comes again; False also for a cache of unknown size."""
        return self.cache_bytes is not None and self.num_sets * self.set_bytes > self.cache_bytes

    def as_json(self) -> dict[str, Any]:
        """What the result says about it."""
        return {
            "sets": self.num_sets,
            "bytes": self.num_sets * self.set_bytes,
            "cache_bytes": self.cache_bytes,
            "beyond_cache": self.beyond_cache,
        }


def rotation(set_bytes: int, *, device: str = "cpu") -> Rotation:
    """As many sets as exceed the last-level cache by a quarter, within a quarter of the free memory."""
    cache = last_level_cache_bytes(device)
    wanted = 2 if cache is None else int(BEYOND_CACHE * cache) // set_bytes + 1
    affordable = int(MEMORY_SHARE * free_bytes(device)) // set_bytes
    return Rotation(num_sets=max(1, min(wanted, affordable)), set_bytes=set_bytes, cache_bytes=cache)


def resident(set_bytes: int, *, device: str = "cpu") -> Rotation:
    """One set: the caches hold it, as they hold an activation that was just computed."""
    return Rotation(num_sets=1, set_bytes=set_bytes, cache_bytes=last_level_cache_bytes(device))


def last_level_cache_bytes(device: str = "cpu") -> int | None:
    """Size of the largest cache between a core (or a GPU) and memory, shared ones included."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).L2_cache_size
    sizes = [_size(file.read_text()) for file in CACHES.glob("index*/size")]
    return max(sizes) if sizes else None


def _size(text: str) -> int:
    """Bytes of a size as Linux writes it: 32K, 300M."""
    text = text.strip()
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * unit


def free_bytes(device: str = "cpu") -> int:
    """Memory that is free now."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available


def alternate(
    candidates: Mapping[str, Callable[[int], object]], *, num_sets: int, rounds: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Seconds per call of every candidate in every round; a candidate takes the number of a buffer set.

    Warm-up (compilation, allocation, one rotation or a second of it) is not counted.
    """
    turn = itertools.cycle(range(num_sets))
    kept: list[object] = [None] * num_sets

    def sample(call: Callable[[int], object], calls: int) -> float:
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            index = next(turn)
            kept[index] = call(index)
        _synchronize(device)
        return (time.perf_counter() - started) / calls

    calls = {name: _warm_up(call, sample, num_sets=num_sets) for name, call in candidates.items()}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(rounds):
        for name in list(candidates) if index % 2 == 0 else reversed(candidates):
            seconds[name].append(sample(candidates[name], calls[name]))
    return seconds


def _warm_up(
    call: Callable[[int], object], sample: Callable[[Callable[[int], object], int], float], *, num_sets: int
) -> int:
    """Run a candidate until it is warm; returns the calls of one sample."""
    started = time.perf_counter()
    fastest = float("inf")
    for done in range(1, max(WARM_UP_CALLS, num_sets) + 1):
        fastest = min(fastest, sample(call, 1))
        if done >= WARM_UP_CALLS and time.perf_counter() - started > WARM_UP_S:
            break
    return max(1, round(MIN_SAMPLE_S / fastest))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest, largest and number of some values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Spread of the ratios of values measured in the same round."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


def in_fresh_process(function: Callable[..., T], *arguments: object, threads: int, **options: object) -> T:
    """The value of ``function`` in a new interpreter with this many threads; what it raises is raised here.

    Function, arguments and value are pickled.
    """
    with fresh_process(threads=threads) as process:
        return process.submit(function, *arguments, **options).result()


@contextlib.contextmanager
def fresh_process(*, threads: int) -> Iterator[ProcessPoolExecutor]:
    """A new interpreter with this many threads that calls functions one after the other until the block ends."""
    with (
        _variable("OMP_NUM_THREADS", str(threads)),
        ProcessPoolExecutor(
            max_workers=1, mp_context=multiprocessing.get_context("spawn"), initializer=_start, initargs=(threads,)
        ) as process,
    ):
        yield process


def _start(threads: int) -> None:
    torch.set_num_threads(threads)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """An environment variable that the processes started inside see."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def environment() -> dict[str, Any]:
    """Processor, threads, versions, commit and load that the numbers belong to."""
    processor, source = machine(), commit()
    return {
        "cpu": processor["cpu"],
        "cores": processor["cores"],
        "threads": torch.get_num_threads(),
        "cache_bytes": last_level_cache_bytes(),
        "memory_bytes": psutil.virtual_memory().total,
        "load": os.getloadavg()[0],
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "versions": versions(),
        "commit": source["id"],
        "dirty": source["dirty"],
    }


def environment_line(found: Mapping[str, Any]) -> str:
    """The environment in one line, for tables."""
    cache = "unknown" if found["cache_bytes"] is None else f"{found['cache_bytes'] / 2**20:.0f} MiB"
    installed = " ".join(f"{name} {version}" for name, version in found["versions"].items())
    state = " with uncommitted changes" if found["dirty"] else ""
    accelerator = f", {found['accelerator']}" if found["accelerator"] else ""
    return (
        f"{found['cpu']}, {found['cores']} cores, last-level cache {cache}{accelerator}, load {found['load']:.1f}; "
        f"{installed}; commit {(found['commit'] or 'unknown')[:7]}{state}"
    )
