"""The C++ operator against the plain PyTorch definition, bit for bit, wherever a rounding could go the other way."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpret.cases import FORMATS, boundary_grid, golden, hard_rows, same

from trace_rl.config.guidance import GuidanceSpec
from trace_rl.errors import UserError
from trace_rl.formats import e2m1, unpack_codes
from trace_rl.formats.nvfp4 import MAX_ENCODE_SCALE
from trace_rl.guidance.align import CLOSED
from trace_rl.guidance.record import ModelDims, RecordLayout
from trace_rl.kernels import compiled, reference
from trace_rl.kernels.reference import PackedExperts, Quantized, RecordTarget

if reason := compiled.why_not():
    pytest.skip(f"no compiled kernels here: {reason}", allow_module_level=True)

DTYPES = [torch.bfloat16, torch.float32]
BITS = [1, 2, 3, 4]
NVFP4 = FORMATS["nvfp4"]
UNTOUCHED = 0xA5
LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def field_bytes(fmt, cols, bits, scale_bits):
    return RecordTarget(torch.empty(0), torch.empty(0), 0, bits, scale_bits).num_bytes(cols, fmt.block_size)


def agree(x, encode_scale, fmt, *, bits=1, scale_bits=8, start=3, slots=None):
    """Every output, alone and together, the record and what surrounds it against the twin's, which are returned."""
    rows = x.shape[0]
    if slots is None:
        slots = torch.randperm(rows + 3, generator=torch.Generator().manual_seed(rows))[:rows]
    row_bytes = start + field_bytes(fmt, x.shape[1], bits, scale_bits) + 5
    buffers = [torch.full((rows + 3, row_bytes), UNTOUCHED, dtype=torch.uint8) for _ in range(2)]
    results = [
        module.quantize_record(
            x, encode_scale, fmt=fmt, target=RecordTarget(buffer, slots, start, bits, scale_bits), want_codes=True
        )
        for module, buffer in zip((reference, compiled), buffers, strict=True)
    ]
    for name, twin, ours in zip(Quantized._fields, *results, strict=True):
        assert same(twin, ours), name
    assert same(*buffers)
    twin = results[0]
    assert same(twin.xhat, compiled.fake_quant(x, encode_scale, fmt=fmt))
    packed = compiled.quantize_record(x, encode_scale, fmt=fmt, want_xhat=False, want_codes=True)
    assert packed.xhat is None and same(packed.codes, twin.codes) and same(packed.block_scale, twin.block_scale)
    return twin


def agree_guided(x, guidance, block_scale, encode_scale, fmt, bits, **options):
    arguments = (x, guidance, block_scale, encode_scale)
    twin = reference.guided_fake_quant(*arguments, fmt=fmt, bits=bits, **options)
    ours = compiled.guided_fake_quant(*arguments, fmt=fmt, bits=bits, **options)
    assert same(twin, ours)
    return ours


def record(rollout, fmt, bits, encode_scale, *, start=5):
    """(guidance, block scales) of the operator's own record, as column ranges of its rows."""
    rows, cols = rollout.shape
    buffer = torch.zeros((rows, start + field_bytes(fmt, cols, bits, 8) + 3), dtype=torch.uint8)
    target = RecordTarget(buffer, torch.arange(rows), start, bits, 8)
    compiled.quantize_record(rollout, encode_scale, fmt=fmt, target=target)
    middle = start + cols * bits // 8
    return buffer[:, start:middle], buffer[:, middle : middle + cols // fmt.block_size]


def noisy(x, *, seed=0, size=0.3):
    return x * (1 + size * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_golden_vectors(name, dtype):
    stored = "block_scale_e4m3" if name == "nvfp4" else "block_scale_e8m0"
    cases = golden(name)
    assert len(cases) >= 8
    for case in cases.values():
        scale = float(case["encode_scale"]) if name == "nvfp4" else 1.0
        twin = agree(case["x"].to(dtype), scale, FORMATS[name])
        assert same(twin.codes, case["code"])
        assert same(twin.block_scale, case[stored])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_boundary_and_its_float_neighbours(name, dtype):
    agree(boundary_grid(FORMATS[name]).to(dtype), 1.0, FORMATS[name], bits=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_outliers_zeros_subnormals_and_large_values(name, dtype):
    x = hard_rows(96).to(dtype)
    for encode_scale in (1.0, 2688 / 3.5, 1e-3, 1e-30, 2.0**100, MAX_ENCODE_SCALE):
        agree(x, encode_scale, FORMATS[name], scale_bits=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_power_of_two(name, dtype):
    # From the smallest subnormal to the largest binade: every scale byte that exists, and where they end.
    fmt = FORMATS[name]
    exponents = torch.arange(-149, 128, dtype=torch.float64)[:, None]
    mantissas = 1 + torch.linspace(0, 0.9921875, fmt.block_size, dtype=torch.float64)
    x = (torch.exp2(exponents) * mantissas).float().clamp_max(LARGEST_BF16).to(dtype)
    x[:, 1::2] *= -1
    twin = agree(x, 1.0, fmt)
    if name != "nvfp4":
        assert len(twin.block_scale.unique()) > 240
    for encode_scale in (2.0**60, 3e-30, MAX_ENCODE_SCALE):
        agree(x, encode_scale, fmt)


def test_scales_on_the_boundaries_of_e4m3():
    # amax/6 * G halfway between two E4M3 numbers, one float below and above: ties, subnormals, saturation at 448.
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    middles = (codes[1:] + codes[:-1]) / 2
    points = torch.cat((codes, middles, torch.tensor([448.5, 464.0, 480.0, 1e6], dtype=torch.float64)))
    for encode_scale in (1.0, 512.0, 2688 / 3.5, 2.0**-40, 2.0**100):
        amax = (points * 6 / encode_scale).float()
        rows = [amax]
        for direction in (math.inf, -math.inf):
            rows.append(torch.nextafter(amax, torch.tensor(direction)))
            rows.append(torch.nextafter(rows[-1], torch.tensor(direction)))
        amax = torch.cat(rows).abs()
        x = amax[:, None] * torch.linspace(-1, 1, 16)
        x[:, 3] = amax  # exactly
        twin = agree(x, encode_scale, NVFP4)
        assert len(twin.block_scale.unique()) == 127
        agree(x.bfloat16(), encode_scale, NVFP4)


def test_xhat_halfway_between_two_bfloat16_values():
    # Steps k/128 with odd k have 8 significant bits, all that bfloat16 has, and 3/2 of them one more.
    ties = 0
    for k in range(129, 256, 2):
        x = (torch.tensor(e2m1.MAGNITUDES * 2) * (k / 128)).view(1, 16).bfloat16()
        twin = agree(x, 128 / k, NVFP4)
        exact = reference.fake_quant(x.float(), 128 / k, fmt=NVFP4)
        ties += int(((exact.view(torch.int32) & 0xFFFF) == 0x8000).sum())
        assert same(twin.xhat, exact.bfloat16())
    assert ties >= 16


def test_xhat_whose_rounding_to_bfloat16_carries_into_the_exponent():
    # 1/G just below a power of two: 0x3F7FFFFF and its like round up to the next binade, the largest to infinity.
    for power in (-100, -1, 0, 1, 64):
        below = float(torch.nextafter(torch.tensor(2.0**power), torch.tensor(0.0)))
        x = torch.tensor([[6.0, 1.0, -0.5, 3.0] * 4]) * below
        twin = agree(x.bfloat16(), 1 / below, NVFP4)
        agree(x, 1 / below, NVFP4)
        assert twin.xhat.abs().max() == 6 * 2.0**power
    largest = torch.full((1, 16), LARGEST_BF16).bfloat16()
    for amax in (LARGEST_BF16, torch.finfo(torch.float32).max):
        encode_scale = NVFP4.encode_scale(torch.tensor(amax))
        agree(largest, encode_scale, NVFP4)
        agree(torch.full((1, 16), amax), float(encode_scale), NVFP4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_no_minus_zero_comes_out(name, dtype):
    fmt = FORMATS[name]
    x = torch.tensor([-0.0, -1e-9, -0.24, 6.0]).repeat(16).view(1, 64).to(dtype)
    x = torch.cat((x, torch.full_like(x, -0.0)))
    twin = agree(x, 1.0, fmt, bits=4)
    zeros = twin.xhat == 0
    assert int(zeros.sum()) == 64 + 48 and not twin.xhat[zeros].signbit().any()
    assert not (unpack_codes(twin.codes) == 8).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_random_bits_under_random_guidance_and_scales(name, dtype):
    fmt = FORMATS[name]
    generator = torch.Generator().manual_seed(len(name))
    for _ in range(20):
        x = torch.randint(-(2**31), 2**31, (8, 96), generator=generator).int().view(torch.float32).to(dtype)
        x = torch.where(x.isfinite(), x, torch.zeros((), dtype=dtype))
        encode_scale = float(2.0 ** (torch.rand((), generator=generator) * 200 - 90))
        twin = agree(x, encode_scale, fmt)
        near = twin.block_scale.int() + torch.randint(-2, 3, twin.block_scale.shape, generator=generator)
        near = near.clamp(0, fmt.largest_scale).to(torch.uint8)
        for bits in BITS:
            guidance = torch.randint(0, 256, (8, 12 * bits), generator=generator).to(torch.uint8)
            for gate in (0.5, float(torch.rand((), generator=generator)) / 2 + 1e-9):
                agree_guided(x, guidance, near, encode_scale, fmt, bits, gate=gate)


# Shapes, layouts, encode scales ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nvfp4", "rceil"])
def test_shapes_that_are_no_multiple_of_a_strip(name, dtype):
    fmt = FORMATS[name]
    for rows, blocks in ((0, 4), (1, 1), (1, 15), (2, 16), (1, 17), (33, 3), (3, 33), (5, 64)):
        x = torch.randn((rows, blocks * fmt.block_size), generator=torch.Generator().manual_seed(blocks)).to(dtype)
        twin = agree(x, 500.0, fmt)
        guidance, block_scale = record(x, fmt, 1, 500.0)
        assert same(twin.xhat, agree_guided(x, guidance, block_scale, 500.0, fmt, 1))
        agree_guided(noisy(x.float()).to(dtype), guidance, block_scale, 500.0, fmt, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_of_x(dtype):
    wide = hard_rows(160).to(dtype)
    for x in (
        wide[:, 48:112],
        wide[::2],
        wide.flip(0)[:, :32],
        wide[:, :64].T.contiguous().T,
        wide[:, ::2],
        wide[0].expand(4, 160),
        wide[:, :1].expand(9, 16),
    ):
        agree(x, 7.0, NVFP4)
        guidance, block_scale = record(x.flip(0), NVFP4, 2, 7.0)
        agree_guided(x, guidance, block_scale, 7.0, NVFP4, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nvfp4", "even"])
def test_one_to_three_dimensions(name, dtype):
    fmt = FORMATS[name]
    x = hard_rows(64).to(dtype)
    stacked = x.view(3, 3, 64)[:, 1:]
    for values, scales in (
        (x[0], (5.0, torch.tensor(5.0))),
        (stacked, (5.0, torch.tensor(5.0), torch.rand(3, 2) + 1, torch.rand(3, 1) + 1, torch.rand(2) + 1)),
        (stacked.transpose(0, 1), (torch.rand(2, 3) + 1, torch.rand(2, 1) + 1, torch.rand(1, 3) + 1)),
        (torch.empty((0, 8, 64), dtype=dtype), (3.0, torch.rand(0, 8), torch.rand(8) + 1)),
    ):
        for scale in scales:
            twin = reference.fake_quant(values, scale, fmt=fmt)
            assert same(twin, compiled.fake_quant(values, scale, fmt=fmt))
            twin = reference.quantize_record(values, scale, fmt=fmt, want_codes=True)
            ours = compiled.quantize_record(values, scale, fmt=fmt, want_codes=True)
            assert all(same(*pair) for pair in zip(twin, ours, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_scales(dtype):
    x = hard_rows(64).to(dtype)
    per_row = torch.logspace(-2, 5, 9)
    for scale in (3.7, 3, torch.tensor(3.7), torch.tensor([3.7]), per_row, per_row.double(), per_row.bfloat16()):
        agree(x, scale, NVFP4)
    agree(x, per_row.repeat_interleave(2)[::2], NVFP4)
    agree(x, per_row.clone().requires_grad_(), NVFP4)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UserError, match="encode scale"):
            compiled.fake_quant(x, wrong, fmt=NVFP4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_experts_with_a_scale_each(name, dtype):
    fmt = FORMATS[name]
    weight = torch.stack([hard_rows(96, seed=seed) * scale for seed, scale in enumerate((1.0, 1e-4, 0.0))]).to(dtype)
    for experts in (weight, weight.transpose(0, 1), weight[:, :1], weight[:1], weight[1:, ::2, 32:]):
        assert same(reference.fake_quant_experts(experts, fmt=fmt), compiled.fake_quant_experts(experts, fmt=fmt))
        pair = reference.repack(experts, fmt=fmt), compiled.repack(experts, fmt=fmt)
        for field, twin, ours in zip(PackedExperts._fields, *pair, strict=True):
            assert same(twin, ours), field


def test_more_values_than_one_task_has_and_any_number_of_threads():
    x = torch.randn((70, 4096), generator=torch.Generator().manual_seed(0)).bfloat16()
    scales = torch.rand(70) * 100 + 1
    valid = torch.arange(70) % 3 > 0
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            guidance, block_scale = record(x, NVFP4, 1, scales)
            mine = noisy(x.float()).bfloat16()
            guided = agree_guided(mine, guidance, block_scale, 30.0, NVFP4, 1, valid=valid)
            results.append((*agree(x, scales, NVFP4), guidance, block_scale, guided))
    finally:
        torch.set_num_threads(before)
    assert all(same(*pair) for pair in zip(*results, strict=True))


# Records --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_bits", [8, 2])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["nvfp4", "rceil"])
def test_record_bits_and_scale_bits(name, bits, scale_bits):
    fmt = FORMATS[name]
    for blocks in (1, 4, 5, 18):  # 5 scales of two bits take 2 bytes
        for start in (0, 3):
            x = hard_rows(blocks * fmt.block_size, seed=bits)
            agree(x, 30.0, fmt, bits=bits, scale_bits=scale_bits, start=start)


def test_neighbouring_fields_of_one_record_row():
    dims = ModelDims.from_config(
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        }
    )
    for bits, scale_bits in ((1, 8), (3, 2), (4, 8)):
        layout = RecordLayout.build(GuidanceSpec(bits=bits, scale_bits=scale_bits, layers="all"), dims)
        assert len(layout.fields) > 2
        twin, ours = (torch.full((4, layout.row_bytes), UNTOUCHED, dtype=torch.uint8) for _ in range(2))
        slots = torch.tensor([3, 1])
        for seed, field in enumerate(layout.fields):
            x = hard_rows(field.cols, seed=seed).bfloat16()[:2]
            codes, block_scale, _ = NVFP4.quantize_codes(x, 3.0)
            layout.write(twin, slots, field.layer, field.tensor, codes, block_scale)
            compiled.quantize_record(x, 3.0, fmt=NVFP4, target=RecordTarget(ours, slots, field.start, bits, scale_bits))
        assert same(twin, ours)
        assert (ours[[0, 2]] == UNTOUCHED).all()


def test_a_buffer_that_is_a_column_range_of_a_wider_one():
    x = hard_rows(32)
    pages = [torch.full((12, 64), UNTOUCHED, dtype=torch.uint8) for _ in range(2)]
    for module, page in zip((reference, compiled), pages, strict=True):
        target = RecordTarget(page[1:, 8:40], torch.arange(9).flip(0), 2, 3, 2)
        module.quantize_record(x, 9.0, fmt=NVFP4, target=target)
    assert same(*pages)
    assert (pages[1][:, :10] == UNTOUCHED).all() and (pages[1][0] == UNTOUCHED).all()


@pytest.mark.parametrize("wrong", [[0, 12, 1], [0, -1, 1]])
def test_slots_outside_the_buffer_are_refused_and_nothing_is_written(wrong):
    x, slots, good = torch.randn((3, 32)), torch.tensor(wrong), torch.arange(3)
    buffer, codes, block_scale = (torch.full((4, n), UNTOUCHED, dtype=torch.uint8) for n in (6, 16, 2))
    with pytest.raises((UserError, RuntimeError), match="slot"):
        compiled.quantize_record(x, 1.0, fmt=NVFP4, target=RecordTarget(buffer, slots, 0, 1, 8))
    for cache, of_record in ((slots, good), (good, slots)):
        target = RecordTarget(buffer, of_record, 0, 1, 8)
        with pytest.raises((UserError, RuntimeError), match="slot"):
            compiled.kv_quantize_record(x, 1.0, codes, block_scale, cache, fmt=NVFP4, target=target)
    for tensor in (buffer, codes, block_scale):
        assert (tensor == UNTOUCHED).all()


def test_a_target_that_does_not_fit_is_refused():
    x, slots = torch.randn((3, 32)), torch.arange(3)
    buffer = torch.full((4, 6), UNTOUCHED, dtype=torch.uint8)
    for target, message in (
        (RecordTarget(buffer, slots, 1, 1, 8), "another layout"),
        (RecordTarget(buffer, slots, -1, 1, 8), "another layout"),
        (RecordTarget(buffer.to(torch.int16), slots, 0, 1, 8), "another layout"),
        (RecordTarget(buffer.repeat(1, 2)[:, ::2], slots, 0, 1, 8), "another layout"),
        (RecordTarget(buffer, slots[:2], 0, 1, 8), "slots must be"),
        (RecordTarget(buffer, slots.int(), 0, 1, 8), "slots must be"),
        (RecordTarget(buffer, slots, 0, 0, 8), "guidance.bits"),
        (RecordTarget(buffer, slots, 0, 5, 8), "guidance.bits"),
        (RecordTarget(buffer, slots, 0, 1, 4), "guidance.scale_bits"),
    ):
        with pytest.raises(UserError, match=message):
            compiled.quantize_record(x, 1.0, fmt=NVFP4, target=target)
        assert (target.buffer == UNTOUCHED).all()


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("name", ["nvfp4", "rceil"])
def test_cache_and_its_record(name, bits):
    fmt, cols = FORMATS[name], 64
    x = hard_rows(cols).bfloat16()[:7]
    slots = torch.tensor([11, 0, 5, 2, 9, 3, 7])
    results = []
    for module in (reference, compiled):
        page = torch.full((12, cols), UNTOUCHED, dtype=torch.uint8)
        codes, block_scale = page[:, 4 : 4 + cols // 2], page[:, 41 : 41 + cols // fmt.block_size]
        buffer = torch.full((12, 100), UNTOUCHED, dtype=torch.uint8)
        target = RecordTarget(buffer, slots.flip(0), 7, bits, 8)
        module.kv_quantize_record(x, 40.0, codes, block_scale, slots, fmt=fmt, target=target)
        results.append((page, buffer, reference.kv_dequantize(codes, block_scale, slots, 40.0, fmt=fmt)))
    for twin, ours in zip(*results, strict=True):
        assert same(twin, ours)
    assert same(results[1][2], compiled.fake_quant(x, 40.0, fmt=fmt))


# Guidance -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [0.5, 0.4999999, 0.2, 1e-3])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", FORMATS)
def test_guidance_of_near_and_unrelated_rollouts(name, bits, gate):
    fmt = FORMATS[name]
    rollout = hard_rows(96, seed=bits)
    guidance, block_scale = record(rollout, fmt, bits, 30.0)
    for x in (noisy(rollout), -rollout, hard_rows(96, seed=9)):
        for dtype in DTYPES:
            agree_guided(x.to(dtype), guidance, block_scale, 30.0, fmt, bits, gate=gate)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", FORMATS)
def test_boundaries_under_every_guidance(name, bits):
    fmt = FORMATS[name]
    x = boundary_grid(fmt)
    _, block_scale = record(x, fmt, bits, 1.0)
    for code in range(1 << bits):
        guidance = constant_guidance(code, bits, x.shape)
        for dtype in DTYPES:
            for gate in (0.5, 0.25):
                agree_guided(x.to(dtype), guidance, block_scale, 1.0, fmt, bits, gate=gate)


def constant_guidance(code, bits, shape):
    """Guidance [rows, cols*bits/8] that holds the same code everywhere."""
    word = sum(code << (bits * j) for j in range(8))
    group = torch.tensor([(word >> (8 * i)) & 0xFF for i in range(bits)], dtype=torch.uint8)
    return group.repeat(shape[0], shape[1] // 8)


@pytest.mark.parametrize("bits", BITS)
def test_values_on_the_edge_of_the_gate(bits):
    x = torch.nn.functional.pad(torch.arange(-48, 49) / 8, (0, 15)).view(-1, 16)
    guidance = torch.randint(0, 256, (len(x), 2 * bits), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    one = torch.full((len(x), 1), 0x38, dtype=torch.uint8)  # 1.0 in E4M3
    moved = [agree_guided(x, guidance, one, 1.0, NVFP4, bits, gate=gate) for gate in (0.25, 0.2499)]
    assert not torch.equal(*moved)
    # Eighths are exactly on the boundaries: the closed gate follows none, the smallest of the others does.
    closed, smallest = (agree_guided(x, guidance, one, 1.0, NVFP4, bits, gate=gate) for gate in (CLOSED, 1e-6))
    assert torch.equal(closed, e2m1.round_nearest(x))
    assert not torch.equal(closed, smallest)


def test_every_block_scale_byte():
    generator = torch.Generator().manual_seed(0)
    for name, largest in (("nvfp4", 126), ("rceil", 254)):
        fmt = FORMATS[name]
        block_scale = torch.arange(largest + 1, dtype=torch.uint8)[:, None]
        step = fmt.scale_values(block_scale, 1.0).clamp_max(LARGEST_BF16 / 8)
        x = (torch.rand((largest + 1, fmt.block_size), generator=generator) * 16 - 8) * step
        for bits in BITS:
            guidance = torch.randint(0, 256, (len(x), fmt.block_size * bits // 8), generator=generator)
            for dtype in DTYPES:
                agree_guided(x.to(dtype), guidance.to(torch.uint8), block_scale, 1.0, fmt, bits)


def test_a_scale_byte_that_is_no_number_gives_nan():
    guidance = torch.zeros((1, 4), dtype=torch.uint8)
    for byte in (127, 255):
        block_scale = torch.tensor([[byte, 0x38]], dtype=torch.uint8)
        for dtype in DTYPES:
            arguments = (torch.ones((1, 32), dtype=dtype), guidance, block_scale, 1.0)
            for module in (reference, compiled):
                xhat = module.guided_fake_quant(*arguments, fmt=NVFP4, bits=1)
                assert xhat[:, :16].isnan().all() and (xhat[:, 16:] == 1).all(), module.__name__


@pytest.mark.parametrize("bits", BITS)
def test_block_scale_zero_gives_zeros(bits):
    guidance = torch.full((2, 4 * bits), 0xFF, dtype=torch.uint8)
    block_scale = torch.zeros((2, 2), dtype=torch.uint8)
    xhat = agree_guided(torch.randn(2, 32), guidance, block_scale, 30.0, NVFP4, bits)
    assert same(xhat, torch.zeros(2, 32))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["nvfp4", "floor"])
def test_rows_without_a_record(name, bits):
    fmt = FORMATS[name]
    rollout = hard_rows(64)
    guidance, block_scale = record(rollout, fmt, bits, 30.0)
    guidance[::2], block_scale[::2] = 0xFF, 0x7F  # what an unwritten row may hold: NaN for nvfp4
    per_row = torch.logspace(0, 3, 9)
    for valid in (torch.arange(9) % 2 == 1, torch.zeros(9, dtype=torch.bool), torch.arange(18)[::2] % 4 == 2):
        for gate in (0.5, 0.1):
            x = noisy(rollout, seed=1).bfloat16()
            ours = agree_guided(x, guidance, block_scale, 30.0, fmt, bits, valid=valid, gate=gate)
            assert same(ours[~valid], reference.fake_quant(x[~valid], 30.0, fmt=fmt))
    ours = compiled.guided_fake_quant(x, guidance, block_scale, per_row, fmt=fmt, bits=bits, valid=valid)
    assert same(ours[~valid], reference.fake_quant(x[~valid], per_row[~valid], fmt=fmt))
    agree_guided(x, *record(rollout, fmt, bits, 30.0), 30.0, fmt, bits, valid=torch.ones(9, dtype=torch.bool))


def test_guided_encode_scales_and_strides():
    rollout = hard_rows(64)
    for bits in BITS:
        for scale in (30.0, torch.tensor(30.0), torch.linspace(1, 50, 9)):
            guidance, block_scale = record(rollout, NVFP4, bits, scale)
            agree_guided(noisy(rollout), guidance, block_scale, scale, NVFP4, bits)
            agree_guided(noisy(rollout), guidance.T.contiguous().T, block_scale.clone(), scale, NVFP4, bits)
        guidance, block_scale = record(rollout, NVFP4, bits, 30.0)
        agree_guided(noisy(rollout)[::2], guidance[::2], block_scale[::2], 30.0, NVFP4, bits)
        agree_guided(noisy(rollout)[:, :16], guidance[:, : 2 * bits], block_scale[:, :1], 30.0, NVFP4, bits)


def test_what_does_not_belong_together_is_refused():
    x = torch.randn(4, 32)
    guidance, block_scale = record(x, NVFP4, 1, 30.0)

    def call(x=x, guidance=guidance, block_scale=block_scale, **options):
        options = {"bits": 1, "fmt": NVFP4} | options
        return compiled.guided_fake_quant(x, guidance, block_scale, 30.0, **options)

    for options, message in (
        ({"bits": 5}, "guidance.bits"),
        ({"bits": 2}, "guidance of shape"),
        ({"guidance": guidance[:3]}, "guidance of shape"),
        ({"gate": 0.0}, "guidance.gate"),
        ({"gate": 0.6}, "guidance.gate"),
        ({"block_scale": block_scale[:, :1]}, "block scales of shape"),
        ({"fmt": FORMATS["rceil"]}, "block scales of shape"),
        ({"valid": torch.ones(3, dtype=torch.bool)}, "valid must"),
        ({"valid": torch.ones(4, dtype=torch.uint8)}, "valid must"),
    ):
        with pytest.raises(UserError, match=message):
            call(**options)
    for wrong, message in ((x[:, :24], "multiple of 16"), (x.half(), "cast it first")):
        with pytest.raises(UserError, match=message):
            compiled.fake_quant(wrong, 1.0, fmt=NVFP4)


# NaN and Inf ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nvfp4", "rceil", "floor", "even"])
def test_nan_and_inf_are_refused_where_asked(name, dtype, bad):
    fmt = FORMATS[name]
    good = torch.randn((4, 64), generator=torch.Generator().manual_seed(0)).to(dtype)
    guidance, block_scale = record(good, fmt, 1, 1.0)
    valid = torch.tensor([True, True, False, True])
    slots = torch.arange(4)
    cache = torch.zeros((4, 32), dtype=torch.uint8), torch.zeros((4, 64 // fmt.block_size), dtype=torch.uint8)
    for row, col in ((2, 5), (0, 0), (3, 63)):
        x = good.clone()
        x[row, col] = bad
        weight = x.view(2, 2, 64)
        record_arguments = (x, guidance, block_scale, 1.0)
        for tensor, function, arguments, options in (
            ("x", compiled.fake_quant, (x, 1.0), {}),
            ("x", compiled.quantize_record, (x, 1.0), {}),
            ("x", compiled.kv_quantize_record, (x, 1.0, *cache, slots), {}),
            ("x", compiled.guided_fake_quant, record_arguments, {"bits": 1}),
            ("x", compiled.guided_fake_quant, record_arguments, {"bits": 1, "valid": valid}),
            ("expert weights", compiled.fake_quant_experts, (weight,), {}),
            ("expert weights", compiled.repack, (weight,), {}),
        ):
            with pytest.raises(UserError, match=f"tensor '{tensor}' .* has 1 NaN/Inf values"):
                function(*arguments, fmt=fmt, **options)
            function(*arguments, fmt=fmt, check=False, **options)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_unchecked_nan_and_inf_become_what_the_definition_makes_of_them(name, dtype, bad):
    fmt = FORMATS[name]
    good = hard_rows(64).to(dtype)
    guidance, block_scale = record(good, fmt, 2, 30.0)
    x = good.clone()
    x[[0, 4, 8], [3, 40, 63]] = bad
    results = []
    for module in (reference, compiled):
        buffer = torch.zeros((9, 60), dtype=torch.uint8)
        target = RecordTarget(buffer, torch.arange(9), 1, 4, 8)
        quantized = module.quantize_record(x, 30.0, fmt=fmt, target=target, want_codes=True, check=False)
        options = {"fmt": fmt, "bits": 2, "valid": torch.arange(9) != 4, "check": False}
        guided = module.guided_fake_quant(x, guidance, block_scale, 30.0, **options)
        experts = module.fake_quant_experts(x.view(3, 3, 64), fmt=fmt, check=False)
        results.append((*quantized, buffer, guided, module.fake_quant(x, 30.0, fmt=fmt, check=False), experts))
    assert all(same(*pair) for pair in zip(*results, strict=True))
    if math.isnan(bad):
        for xhat in (results[1][0], results[1][4], results[1][5], results[1][6].view(9, 64)):
            assert xhat[[0, 4, 8], [3, 40, 63]].isnan().all()


# Properties -----------------------------------------------------------------------------------------------------------

FLOATS = st.floats(min_value=-1e4, max_value=1e4, width=32)
ROWS = st.lists(FLOATS, min_size=32, max_size=32)
ENCODE_SCALES = st.floats(min_value=2.0**-20, max_value=2.0**60, width=32)


@settings(max_examples=150, deadline=None)
@given(values=ROWS, encode_scale=ENCODE_SCALES, name=st.sampled_from(sorted(FORMATS)), bits=st.sampled_from(BITS))
def test_own_record_reproduces_the_rollout(values, encode_scale, name, bits):
    for dtype in DTYPES:
        x = torch.tensor([values]).to(dtype)
        guidance, block_scale = record(x, FORMATS[name], bits, encode_scale)
        xhat = compiled.guided_fake_quant(x, guidance, block_scale, encode_scale, fmt=FORMATS[name], bits=bits)
        assert same(xhat, compiled.fake_quant(x, encode_scale, fmt=FORMATS[name]))


@settings(max_examples=150, deadline=None)
@given(
    values=ROWS,
    noise=st.lists(st.floats(min_value=-2, max_value=2, width=32), min_size=32, max_size=32),
    encode_scale=ENCODE_SCALES,
    name=st.sampled_from(sorted(FORMATS)),
)
def test_full_guidance_is_never_farther_from_the_rollout_than_rounding_to_nearest(values, noise, encode_scale, name):
    fmt = FORMATS[name]
    rollout = torch.tensor([values])
    x = rollout * (1 + torch.tensor([noise]))
    guidance, block_scale = record(rollout, fmt, 4, encode_scale)
    guided = compiled.guided_fake_quant(x, guidance, block_scale, encode_scale, fmt=fmt, bits=4)
    rolled = compiled.fake_quant(rollout, encode_scale, fmt=fmt)
    nearest = _nearest_on(x, block_scale, encode_scale, fmt)
    assert ((guided - rolled).abs() <= (nearest - rolled).abs()).all()


def _nearest_on(x, block_scale, encode_scale, fmt):
    """x rounded to nearest on given scales, in the plain definition."""
    step = fmt.scale_values(block_scale, encode_scale).repeat_interleave(fmt.block_size, dim=-1)
    return e2m1.round_nearest(x * torch.where(step == 0, 0.0, 1 / step)) * step


@settings(max_examples=200, deadline=None)
@given(
    values=ROWS,
    encode_scale=st.floats(min_value=2.0**-40, max_value=MAX_ENCODE_SCALE, width=32),
    exponent=st.integers(min_value=-120, max_value=60),
    name=st.sampled_from(sorted(FORMATS)),
)
def test_any_values_at_any_scale(values, encode_scale, exponent, name):
    x = torch.tensor([values]) * 2.0**exponent
    for dtype in DTYPES:
        agree(x.to(dtype), encode_scale, FORMATS[name], bits=3, scale_bits=2)
