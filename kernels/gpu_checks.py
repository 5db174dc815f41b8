"""The checks of kernels/bench_gpu.py: every Triton kernel on a device, its twin on the CPU, and all bits must agree.

The rounding of xhat to BF16 is included, which is one instruction on a device and integer arithmetic in the
interpreter. Inputs: every finite BF16 number, every rounding boundary of E2M1 with its neighbours, results halfway
between two BF16 numbers, outliers, zeros, subnormals. Each check draws a new record, weight or batch of its own.

The two matrix products are compared with float64. A FP32 sum of n terms in any order is off by at most n+1 units in
the last place of the sum of magnitudes, and tensor cores, which cut off instead of rounding, by no more; the bounds
below carry this through both products. A bound that would let any number pass fails the check as well.

Shapes: T tokens, K experts per token, E experts, H hidden, I expert width, R rows, C columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trace_rl import formats
from trace_rl.errors import UserError
from trace_rl.formats import Format, e2m1
from trace_rl.guidance.bits import packed_bytes
from trace_rl.kernels import (
    fake_quant,
    guided_fake_quant,
    kv_cache,
    quantize_record,
    reference,
    repack,
    w4a4_moe,
    w4a16_moe,
)
from trace_rl.kernels.moe_routing import block_pairs, route
from trace_rl.kernels.reference import PackedExperts, RecordTarget

Case = tuple[str, Callable[[], None]]
"""A name, and a function that raises unless the kernel does what its twin does."""

COLS = 576  # no multiple of the tile
MOE_HIDDEN, MOE_WIDTH = 160, 64  # 160: whole tiles and part of one
LARGE_HIDDEN, LARGE_WIDTH = 2048, 768  # Qwen3-30B-A3B
HALFWAY_SCALE = 256 / 257  # its reciprocal has 9 significant bits: 1, 2 and 4 steps lie between two BF16 numbers

BF16_HALF_ULP = 2.0**-8  # relative
FP32_ULP = 2.0**-23
_UNITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.uint8: torch.uint8}


@dataclass(frozen=True)
class Scope:
    """Where and how much."""

    device: str
    """cpu, interpreted, or cuda."""
    few: bool = False
    """Leave out what differs little from something that is checked."""

    @property
    def rows(self) -> int:
        """Rows of a check: more than 64 take the larger tiles on a device, 9 hold every kind of difficult row."""
        return 9 if self.device == "cpu" else 73

    @property
    def formats(self) -> dict[str, Format]:
        """NVFP4 and rules of MXFP4."""
        rules = ("rceil",) if self.few else ("rceil", "floor", "even")
        return {"nvfp4": formats.get("nvfp4")} | {f"mxfp4 {rule}": formats.get("mxfp4", rule=rule) for rule in rules}


def checks(scope: Scope, *, fp4_tensor_cores: bool) -> dict[str, Iterator[Case]]:
    """The cases of each kernel."""
    found = {
        "fake_quant": _fake_quant_cases(scope),
        "quantize_record": _record_cases(scope),
        "guided_fake_quant": _guided_cases(scope),
        "kv_quantize_record, kv_dequantize": _kv_cases(scope),
        "repack, fake_quant_experts": _expert_cases(scope),
        "w4a16_moe": _w4a16_cases(scope),
    }
    return found | ({"w4a4_moe": _w4a4_cases(scope)} if fp4_tensor_cores else {})


def difficult_rows(num_rows: int, cols: int) -> Tensor:
    """float32 [num_rows, cols]: ordinary rows, x512 outliers, zeros, -0, subnormals, decades in a row, large values."""
    x = torch.randn(num_rows, cols)
    x[1::8, cols // 3] *= 512
    x[2::8] = 0
    x[3::8] *= torch.logspace(-3, 3, cols)
    x[4::8] *= 1e-39
    x[5::8] *= 1e30
    x[6::8, : cols // 2] = -0.0
    return x


def every_bfloat16() -> Tensor:
    """bfloat16 [255, 256]: each finite number once, in order of its bits."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return x[torch.isfinite(x)].view(255, 256)


def boundaries() -> Tensor:
    """float32 [R, 256]: values of E2M1, the middles between them and the neighbours of both; blocks begin with 6."""
    values = torch.tensor(e2m1.MAGNITUDES)
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    infinity = torch.full_like(points, float("inf"))
    points = torch.cat((points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)))
    points = torch.cat((points, -points)).clamp(-e2m1.MAX, e2m1.MAX)
    points = torch.nn.functional.pad(points, (0, -len(points) % 15)).view(-1, 15)
    blocks = torch.nn.functional.pad(points, (1, 0), value=e2m1.MAX).reshape(-1)
    return torch.cat([torch.nn.functional.pad(blocks, (0, -len(blocks) % 256)) * unit for unit in (0.125, 1.0)]).view(
        -1, 256
    )


def halfway_rows() -> Tensor:
    """bfloat16 [16, 256] whose results on HALFWAY_SCALE are ties of the rounding to BF16."""
    x = torch.tensor(e2m1.MAGNITUDES * 2) * torch.tensor([1.0, -1.0]).repeat_interleave(8)
    return (x.repeat(256) * 257 / 256).view(16, 256).to(torch.bfloat16)


def assert_same(found: Any, expected: Any, what: str) -> None:
    """AssertionError unless shape, dtype and all bits agree (tuples: of each part)."""
    if not isinstance(expected, Tensor):
        for index, (left, right) in enumerate(zip(found, expected, strict=True)):
            if right is not None or left is not None:
                assert_same(left, right, f"{what}, part {index}")
        return
    found = found.cpu()
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise AssertionError(
            f"{what} is {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        )
    differs = found.contiguous().view(_UNITS[found.dtype]) != expected.contiguous().view(_UNITS[expected.dtype])
    if bool(differs.any()):
        at = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} differ, at {at} {found[at]} instead of {expected[at]}"
        )


def assert_refused(call: Callable[[], object]) -> None:
    """AssertionError unless the call raises UserError."""
    try:
        call()
    except UserError:
        return
    raise AssertionError("NaN was accepted")


def _fake_quant_cases(scope: Scope) -> Iterator[Case]:
    def case(x: Tensor, encode_scale: float | Tensor, fmt: Format, *, ties: bool = False, every: int = 1) -> None:
        expected = reference.fake_quant(x[::every], encode_scale, fmt=fmt)
        exact = reference.fake_quant(x.float(), encode_scale, fmt=fmt)
        if ties and not bool(((exact.view(torch.int32) & 0xFFFF) == 0x8000).any()):
            raise AssertionError("the inputs of this check have no ties")
        on_device = encode_scale.to(scope.device) if isinstance(encode_scale, Tensor) else encode_scale
        found = fake_quant.fake_quant(x.to(scope.device)[::every], on_device, fmt=fmt)  # a copy would be dense
        assert_same(found, expected, "xhat")

    def refuses(fmt: Format) -> None:
        x = torch.ones(2, 64, dtype=torch.bfloat16, device=scope.device)
        x[1, 63] = float("nan")
        assert_refused(lambda: fake_quant.fake_quant(x, 1.0, fmt=fmt))

    nvfp4 = formats.get("nvfp4")
    rows = difficult_rows(scope.rows, COLS)
    yield "ties of BF16", lambda: case(halfway_rows(), HALFWAY_SCALE, nvfp4, ties=True)
    for name, fmt in scope.formats.items():
        every = every_bfloat16()[:: 16 if scope.device == "cpu" else 1]
        yield f"{name}, every BF16 number", lambda fmt=fmt, x=every: case(x, 1.0, fmt)
        yield f"{name}, every BF16 number, G 777", lambda fmt=fmt, x=every: case(x, 777.0, fmt)
        yield f"{name}, boundaries", lambda fmt=fmt: case(boundaries(), 1.0, fmt)
        yield f"{name}, difficult rows", lambda fmt=fmt: case(rows.to(torch.bfloat16), 2688 / 3.7, fmt)
        yield f"{name}, difficult rows, FP32", lambda fmt=fmt: case(rows, 2688 / 3.7, fmt)
    per_row = torch.logspace(-2, 3, len(rows))
    yield "a scale per row", lambda: case(rows.to(torch.bfloat16), per_row, nvfp4)
    yield "one row", lambda: case(rows[3:4].to(torch.bfloat16), 5.0, nvfp4)
    yield "no rows", lambda: case(rows[:0].to(torch.bfloat16), 5.0, nvfp4)
    yield "every other row", lambda: case(rows.to(torch.bfloat16), 5.0, nvfp4, every=2)
    yield "NaN is refused", lambda: refuses(nvfp4)


def record_of(bits: int, scale_bits: int, num_rows: int, cols: int, *, fmt: Format, start: int) -> RecordTarget:
    """A record on the CPU with more slots than rows, whose field begins at byte `start`."""
    empty = RecordTarget(torch.empty(0, 0), torch.randperm(num_rows + 3)[:num_rows], start, bits, scale_bits)
    row_bytes = start + empty.num_bytes(cols, fmt.block_size) + 5
    row_bytes += -row_bytes % 4  # start 0: groups of codes are aligned
    return RecordTarget(
        torch.full((num_rows + 3, row_bytes), 0xA5, dtype=torch.uint8), empty.slots, start, bits, scale_bits
    )


def moved(target: RecordTarget, device: str) -> RecordTarget:
    """A copy of the record on a device."""
    return RecordTarget(
        target.buffer.to(device, copy=True), target.slots.to(device), target.start, target.bits, target.scale_bits
    )


def _record_cases(scope: Scope) -> Iterator[Case]:
    def case(x: Tensor, fmt: Format, bits: int, scale_bits: int, start: int) -> None:
        target = record_of(bits, scale_bits, *x.shape, fmt=fmt, start=start)
        written = moved(target, scope.device)
        found = quantize_record.quantize_record(x.to(scope.device), 30.0, fmt=fmt, target=written, want_codes=True)
        expected = reference.quantize_record(x, 30.0, fmt=fmt, target=target, want_codes=True)
        assert_same(found, expected, "xhat, codes, scales")
        assert_same(written.buffer, target.buffer, "record")

    rows = difficult_rows(scope.rows, COLS).to(torch.bfloat16)
    settings = ((1, 8, 0), (4, 8, 0), (1, 2, 3), (2, 2, 0), (3, 8, 3), (4, 2, 3), (2, 8, 3))
    for name, fmt in scope.formats.items():
        for bits, scale_bits, start in settings[: 3 if name != "nvfp4" else 4 if scope.few else None]:
            yield (
                f"{name}, {bits} bits, {scale_bits}-bit scales, byte {start}",
                lambda fmt=fmt, at=(bits, scale_bits, start): case(rows, fmt, *at),
            )
    yield "one row", lambda: case(rows[:1], formats.get("nvfp4"), 1, 8, 0)


def _guided_cases(scope: Scope) -> Iterator[Case]:
    def case(
        x: Tensor,
        fmt: Format,
        bits: int,
        *,
        encode_scale: float = 30.0,
        gate: float = 0.5,
        with_invalid: bool = False,
        start: int = 0,
    ) -> None:
        rollout = (x.float() * (1 + 0.02 * torch.randn(x.shape))).to(x.dtype)
        target = record_of(bits, 8, *x.shape, fmt=fmt, start=start)
        reference.quantize_record(rollout, encode_scale, fmt=fmt, target=target)
        record = target.buffer[target.slots]
        valid = torch.rand(len(x)) < 0.7 if with_invalid else None
        middle = start + packed_bytes(x.shape[1], bits)

        def guided(module: Any, device: str) -> Tensor:
            row = record.to(device)
            parts = row[:, start:middle], row[:, middle : middle + x.shape[1] // fmt.block_size]
            rows_valid = None if valid is None else valid.to(device)
            options = {"fmt": fmt, "bits": bits, "gate": gate, "valid": rows_valid}
            return module.guided_fake_quant(x.to(device), *parts, encode_scale, **options)

        assert_same(guided(guided_fake_quant, scope.device), guided(reference, "cpu"), "xhat")

    nvfp4 = formats.get("nvfp4")
    rows = difficult_rows(scope.rows, COLS).to(torch.bfloat16)
    yield "ties of BF16", lambda: case(halfway_rows(), nvfp4, 1, encode_scale=HALFWAY_SCALE)
    for name, fmt in scope.formats.items():
        yield f"{name}, 1 bit", lambda fmt=fmt: case(rows, fmt, 1)
        yield f"{name}, full codes", lambda fmt=fmt: case(rows, fmt, 4)
    yield "2 bits", lambda: case(rows, nvfp4, 2)
    yield "3 bits, byte 3", lambda: case(rows, nvfp4, 3, start=3)
    yield "gate, rows without a record", lambda: case(rows, nvfp4, 1, gate=0.2, with_invalid=True, start=3)


def _kv_cases(scope: Scope) -> Iterator[Case]:
    def case(fmt: Format, bits: int, cols: int) -> None:
        x = difficult_rows(scope.rows, cols).to(torch.bfloat16)
        target = record_of(bits, 8, *x.shape, fmt=fmt, start=0)
        written = moved(target, scope.device)
        slots = torch.randperm(2 * len(x))[: len(x)]
        codes = torch.full((2 * len(x), cols // 2), 0x77, dtype=torch.uint8)
        scales = torch.full((2 * len(x), cols // fmt.block_size), 0x38, dtype=torch.uint8)
        on_device = [part.to(scope.device, copy=True) for part in (codes, scales, slots)]
        kv_cache.kv_quantize_record(x.to(scope.device), 30.0, *on_device, fmt=fmt, target=written)
        reference.kv_quantize_record(x, 30.0, codes, scales, slots, fmt=fmt, target=target)
        assert_same((*on_device[:2], written.buffer), (codes, scales, target.buffer), "codes, scales, record")
        found = kv_cache.kv_dequantize(*on_device, 30.0, fmt=fmt)
        assert_same(found, reference.kv_dequantize(codes, scales, slots, 30.0, fmt=fmt), "dequantized")

    for name, fmt in scope.formats.items():
        yield f"{name}, 1 bit", lambda fmt=fmt: case(fmt, 1, 256)
        if name == "nvfp4":
            yield f"{name}, 4 bits, odd columns", lambda fmt=fmt: case(fmt, 4, 80)


def _expert_cases(scope: Scope) -> Iterator[Case]:
    def weights(dtype: torch.dtype) -> Tensor:
        weight_ERC = torch.randn(3, 24, 160) * torch.tensor([1.0, 0.01, 0.0])[:, None, None]
        weight_ERC[0, 3, 7] = 300.0
        return weight_ERC.to(dtype)

    def packs(fmt: Format, dtype: torch.dtype) -> None:
        x = weights(dtype)
        found = repack.repack(x.to(scope.device), fmt=fmt)
        assert_same(found, reference.repack(x, fmt=fmt), "codes, scales, encode scales")

    def rounds(fmt: Format) -> None:
        x = weights(torch.bfloat16)
        found = fake_quant.fake_quant_experts(x.to(scope.device), fmt=fmt)
        assert_same(found, reference.fake_quant_experts(x, fmt=fmt), "xhat")

    for name, fmt in scope.formats.items():
        yield f"{name}, repack", lambda fmt=fmt: packs(fmt, torch.bfloat16)
        yield f"{name}, fake_quant_experts", lambda fmt=fmt: rounds(fmt)
    yield "nvfp4, repack FP32", lambda: packs(formats.get("nvfp4"), torch.float32)


# Matrix products against float64 -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A small MoE layer on the CPU and one batch for it."""

    gate_up: PackedExperts
    down: PackedExperts
    x_TH: Tensor
    weights_TK: Tensor
    ids_TK: Tensor

    def on(self, device: str) -> tuple[Any, ...]:
        """Arguments of w4a16_moe."""
        packed = (PackedExperts(*(part.to(device) for part in whole)) for whole in (self.gate_up, self.down))
        return (self.x_TH.to(device), *packed, self.weights_TK.to(device), self.ids_TK.to(device))


def make_layer(tokens: int, top_k: int, *, hidden: int, width: int, fmt: Format, experts: int = 4) -> Layer:
    """Random experts of different sizes, random routing."""
    size = torch.logspace(-1, 1, experts)[:, None, None] * 0.1
    first, second = torch.randn(experts, 2 * width, hidden) * size, torch.randn(experts, hidden, width) * size
    return Layer(
        reference.repack(first.to(torch.bfloat16), fmt=fmt),
        reference.repack(second.to(torch.bfloat16), fmt=fmt),
        torch.randn(tokens, hidden).to(torch.bfloat16),
        torch.rand(tokens, top_k),
        torch.rand(tokens, experts).argsort(dim=1)[:, :top_k],
    )


def hidden64(x: Tensor, matrix: Tensor, *, operand_error: float) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up, what FP32 and one rounding to BF16 may change) of x [n, H], all float64."""
    gate, up = (x @ matrix.T).chunk(2, dim=1)
    error = x.abs() @ matrix.abs().T * ((x.shape[1] + 1) * FP32_ULP + operand_error)
    gate_error, up_error = error.chunk(2, dim=1)
    silu = torch.nn.functional.silu(gate)
    # |silu'| < 1.1; exponential, division and two products in FP32 are good to 16 units.
    error = 1.1 * gate_error * (up.abs() + up_error) + silu.abs() * up_error + 16 * FP32_ULP * (silu * up).abs()
    return silu * up, error + BF16_HALF_ULP * ((silu * up).abs() + error)


def outputs64(hidden: Tensor, error: Tensor, matrix: Tensor, *, operand_error: float) -> tuple[Tensor, Tensor]:
    """(matrix @ hidden, bound) of hidden [n, I] known up to `error`."""
    magnitude = (hidden.abs() + error) @ matrix.abs().T
    bound = error @ matrix.abs().T + magnitude * ((hidden.shape[1] + 1) * FP32_ULP + operand_error)
    return hidden @ matrix.T, bound


def assert_within(found: Tensor, expected: Tensor, bound: Tensor, what: str) -> None:
    """AssertionError unless found is as close to float64 `expected` as arithmetic allows."""
    excess = (found.cpu().double() - expected).abs() - bound
    if not bool((excess <= 0).all()):  # also false for NaN
        raise AssertionError(f"{what}: off by {float(excess.max()):.3g} more than FP32 sums and BF16 rounding explain")
    if not bool((expected.abs() > 4 * bound).any()):
        raise AssertionError(f"{what}: the bound proves nothing for these inputs")


def _w4a16_cases(scope: Scope) -> Iterator[Case]:
    def case(layer: Layer, fmt: Format) -> None:
        first, second = (
            reference.unpack_experts(packed, fmt=fmt).to(torch.bfloat16) for packed in (layer.gate_up, layer.down)
        )
        shape = layer.x_TH.shape
        expected, bound, magnitude = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
        for expert in torch.unique(layer.ids_TK).tolist():
            token, k = (layer.ids_TK == expert).nonzero(as_tuple=True)
            hidden = hidden64(layer.x_TH[token].double(), first[expert].double(), operand_error=0.0)
            out, error = outputs64(*hidden, second[expert].double(), operand_error=0.0)
            weight = layer.weights_TK[token, k, None].double()
            for total, part in ((expected, out), (bound, error), (magnitude, out.abs())):
                total.index_add_(0, token, weight * part)
        bound += (layer.ids_TK.shape[1] + 1) * FP32_ULP * (magnitude + bound)
        found = w4a16_moe.w4a16_moe(*layer.on(scope.device), fmt=fmt)
        assert_within(found, expected, bound + BF16_HALF_ULP * (expected.abs() + bound), "output")

    for name in ("nvfp4", "mxfp4"):
        fmt = formats.get(name)
        for tokens, top_k in ((1, 1), (3, 2)) if scope.device == "cpu" else ((1, 1), (3, 2), (17, 4)):
            layer = make_layer(tokens, top_k, hidden=MOE_HIDDEN, width=MOE_WIDTH, fmt=fmt)
            yield f"{name}, {tokens} tokens, top {top_k}", lambda layer=layer, fmt=fmt: case(layer, fmt)
    if scope.device != "cpu":
        fmt = formats.get("nvfp4")
        layer = make_layer(4, 2, hidden=LARGE_HIDDEN, width=LARGE_WIDTH, fmt=fmt)
        yield "nvfp4, Qwen3-30B-A3B sizes", lambda: case(layer, fmt)


def _w4a4_cases(scope: Scope) -> Iterator[Case]:
    fc1_scale, fc2_scale = 2688 / 4.0, 2688 / 5.0
    operand_error = 8 * FP32_ULP  # steps and encode scales that are not rounded where the twin's are

    def case(layer: Layer, fmt: Format) -> None:
        x, gate_up, down, weights, ids = layer.on(scope.device)
        routing = route(ids, len(down.codes), block_pairs(ids.numel(), len(down.codes)))

        def quantized(values: Tensor, scale: float) -> tuple[reference.Quantized, Tensor]:
            parts = quantize_record.quantize_record(values, scale, fmt=fmt, want_xhat=False, want_codes=True)
            codes, block_scale = parts.codes.cpu(), parts.block_scale.cpu()
            return parts, fmt.decode(formats.unpack_codes(codes), block_scale, scale).double()

        first, second = (reference.unpack_experts(packed, fmt=fmt).double() for packed in (layer.gate_up, layer.down))
        parts, x_hat = quantized(x, fc1_scale)
        hidden = w4a4_moe.hidden_vectors(parts, gate_up, routing, ids.shape, encode_scale=fc1_scale, fmt=fmt)
        hidden_parts, hidden_hat = quantized(hidden, fc2_scale)
        out = w4a4_moe.weighted_outputs(hidden_parts, down, weights, routing, encode_scale=fc2_scale, fmt=fmt)
        weight, top_k = layer.weights_TK.reshape(-1, 1).double(), ids.shape[1]
        for pair, expert in enumerate(layer.ids_TK.reshape(-1).tolist()):
            token = slice(pair // top_k, pair // top_k + 1)
            value = hidden64(x_hat[token], first[expert], operand_error=operand_error)
            assert_within(hidden[pair : pair + 1], *value, f"hidden vector {pair}")
            vector = hidden_hat[pair : pair + 1]
            value, bound = outputs64(vector, torch.zeros_like(vector), second[expert], operand_error=operand_error)
            bound = weight[pair] * (bound + FP32_ULP * value.abs())
            assert_within(out[pair : pair + 1], weight[pair] * value, bound, f"output {pair}")
        whole = w4a4_moe.w4a4_moe(x, gate_up, down, weights, ids, fc1_scale=fc1_scale, fc2_scale=fc2_scale, fmt=fmt)
        assert_same(whole, out.view(*ids.shape, -1).sum(dim=1).to(torch.bfloat16).cpu(), "sum over experts")

    for name in ("nvfp4", "mxfp4"):
        fmt = formats.get(name)
        for tokens, top_k in ((3, 2),) if scope.device == "cpu" else ((3, 2), (17, 4)):
            layer = make_layer(tokens, top_k, hidden=MOE_HIDDEN, width=MOE_WIDTH, fmt=fmt)
            yield f"{name}, {tokens} tokens, top {top_k}", lambda layer=layer, fmt=fmt: case(layer, fmt)
