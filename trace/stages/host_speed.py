"""Speed of this host, measured in seconds: copy bandwidth, BF16 matrix products, and BF16 experts at decode shapes.

The decode model's line for "this host" holds these numbers and no vendor's. Everything is timed in turns
(`trace_rl.stages.measure`), so a machine that slows down slows the yardstick and what it predicts alike.

Easy to get wrong:
- Copy counts bytes read *and* written, on buffers of several last-level caches.
- Experts are drawn anew in every call, from more weights than the cache holds: the same ones would come from it.
- The experts' weights are the *left* operand. As the right one the library first copies them into its own layout,
  so they move three times and the roofline of one pass says nothing.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor
from torch.nn import functional

from trace_rl.stages import measure
from trace_rl.stages.measure import Spread

COPY_CACHES = 1.5
"""Size of a copy's buffer in last-level caches: the two of them hold three."""
COPY_BYTES = 256 * 2**20
"""At least, and where the system does not tell the size of its cache."""
MATMUL_SIZE = 1024
ROUNDS = 5
TOKENS = (1, 4, 16)


@dataclass(frozen=True)
class ExpertShape:
    """A layer of routed experts; the default is Qwen3-30B-A3B's, 1.2 GB in BF16."""

    num_experts: int = 128
    hidden: int = 2048
    inter: int = 768
    top_k: int = 8


@dataclass(frozen=True)
class HostSpeed:
    """What this host reaches with `threads` threads; `experts_s` are seconds of a layer by number of tokens."""

    threads: int
    memory_bytes: int
    copy_bytes_per_s: Spread
    bf16_flops: Spread
    shape: ExpertShape
    experts_s: dict[int, Spread] = field(default_factory=dict)


def measure_host(
    *,
    shape: ExpertShape | None = None,
    tokens: tuple[int, ...] = TOKENS,
    copy_bytes: int | None = None,
    rounds: int = ROUNDS,
) -> HostSpeed:
    """Copy, matmul and experts in turns with PyTorch's threads: some seconds, about 2 GiB of memory."""
    shape = shape or ExpertShape()
    copy_bytes = copy_bytes or _copy_bytes()
    candidates: dict[str, Callable[[int], object]] = {
        "copy": _copy(copy_bytes),
        "matmul": _matmul(MATMUL_SIZE),
        **{f"experts {count}": layer for count, layer in _expert_layers(shape, tokens=tokens).items()},
    }
    seconds = measure.alternate(candidates, num_sets=1, rounds=rounds)
    return HostSpeed(
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        copy_bytes_per_s=measure.spread([2 * copy_bytes / each for each in seconds["copy"]]),
        bf16_flops=measure.spread([2 * MATMUL_SIZE**3 / each for each in seconds["matmul"]]),
        shape=shape,
        experts_s={count: measure.spread(seconds[f"experts {count}"]) for count in tokens},
    )


def measure_host_with(threads: int) -> HostSpeed:
    """The same in a process of its own with this many threads; without experts."""
    return measure.in_fresh_process(measure_host, tokens=(), threads=threads)


def expert_layer(x_TH: Tensor, routes: dict[int, list[int]], gate_up: Tensor, down: Tensor) -> Tensor:
    """x through its experts; routes: expert -> its tokens; gate_up [E, 2I, H], down [E, H, I]. Gate values are 1."""
    out_HT = torch.zeros_like(x_TH.t())
    for expert, rows in routes.items():
        gate, up = (gate_up[expert] @ x_TH[rows].t()).chunk(2)
        out_HT[:, rows] += down[expert] @ (functional.silu(gate) * up)
    return out_HT.t()


def random_routes(draw: random.Random, shape: ExpertShape, *, tokens: int) -> dict[int, list[int]]:
    """`top_k` different experts for every token."""
    routes: dict[int, list[int]] = {}
    for token in range(tokens):
        for expert in draw.sample(range(shape.num_experts), shape.top_k):
            routes.setdefault(expert, []).append(token)
    return routes


def _copy_bytes() -> int:
    cache = measure.last_level_cache_bytes() or 0
    return max(COPY_BYTES, math.ceil(COPY_CACHES * cache))


def _copy(num_bytes: int) -> Callable[[int], object]:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    return lambda _: target.copy_(source)


def _matmul(size: int) -> Callable[[int], object]:
    left, right = (torch.full((size, size), 0.5, dtype=torch.bfloat16) for _ in range(2))
    return lambda _: left @ right


def _expert_layers(shape: ExpertShape, *, tokens: tuple[int, ...]) -> dict[int, Callable[[int], object]]:
    if not tokens:
        return {}
    gate_up = torch.full((shape.num_experts, 2 * shape.inter, shape.hidden), 0.01, dtype=torch.bfloat16)
    down = torch.full((shape.num_experts, shape.hidden, shape.inter), 0.01, dtype=torch.bfloat16)
    draw = random.Random(0)

    def layer(x_TH: Tensor) -> Callable[[int], object]:
        return lambda _: expert_layer(x_TH, random_routes(draw, shape, tokens=len(x_TH)), gate_up, down)

    return {count: layer(torch.full((count, shape.hidden), 0.1, dtype=torch.bfloat16)) for count in tokens}
