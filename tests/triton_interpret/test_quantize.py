"""quantize_record, fake_quant and their expert and cache variants against the twins, bit for bit."""

import pytest
import torch
from triton_interpret.cases import FORMATS, boundary_grid, golden, hard_rows, row_bytes, same

from trace_rl import formats
from trace_rl.errors import UserError
from trace_rl.formats import e2m1
from trace_rl.kernels import fake_quant, kv_cache, quantize_record, reference, repack
from trace_rl.kernels.reference import RecordTarget

DTYPES = [torch.bfloat16, torch.float32]


def agree(x, encode_scale, fmt, *, bits=1, scale_bits=8, start=3):
    """Every output of one launch, the record included, against the twin's, which are returned."""
    rows, cols = x.shape
    num_slots = rows + 3
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(rows))[:rows]
    size = RecordTarget(torch.empty(0), slots, 0, bits, scale_bits).num_bytes(cols, fmt.block_size)
    buffers = [torch.full((num_slots, row_bytes(start, size)), 0xA5, dtype=torch.uint8) for _ in range(2)]
    results = []
    for module, buffer in zip((reference, quantize_record), buffers, strict=True):
        target = RecordTarget(buffer, slots, start, bits, scale_bits)
        results.append(module.quantize_record(x, encode_scale, fmt=fmt, target=target, want_codes=True))
    for name, twin, ours in zip(reference.Quantized._fields, *results, strict=True):
        assert same(twin, ours), name
    assert same(*buffers)
    assert same(results[0].xhat, fake_quant.fake_quant(x, encode_scale, fmt=fmt))
    return results[0]


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


@pytest.mark.parametrize("name", FORMATS)
def test_boundary_grid(name):
    x = boundary_grid(FORMATS[name])
    for dtype in DTYPES:
        agree(x.to(dtype), 1.0, FORMATS[name], bits=4)


def test_xhat_halfway_between_two_bfloat16_values():
    # Steps k/128 with odd k have 8 significant bits, all that bfloat16 has, and 3/2 of them one more.
    ties = 0
    for k in range(129, 160, 2):
        x = (torch.tensor(e2m1.MAGNITUDES * 2) * (k / 128)).view(1, 16).bfloat16()
        twin = agree(x, 128 / k, FORMATS["nvfp4"])
        exact = reference.fake_quant(x.float(), 128 / k, fmt=FORMATS["nvfp4"])
        ties += int(((exact.view(torch.int32) & 0xFFFF) == 0x8000).sum())
        assert same(twin.xhat, exact.bfloat16())
    assert ties >= 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_hard_rows(name, dtype):
    x = hard_rows(96).to(dtype)
    for encode_scale in (1.0, 2688 / 3.5, 1e-3, 2.0**100):
        agree(x, encode_scale, FORMATS[name], scale_bits=2)


@pytest.mark.parametrize("scale_bits", [8, 2])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_records(bits, scale_bits):
    for name, cols in (("nvfp4", 16), ("nvfp4", 80), ("rceil", 96)):  # 80 columns: 5 scales, padded to 2 bytes
        for start in (0, 3):  # aligned and not
            agree(hard_rows(cols, seed=bits), 30.0, FORMATS[name], bits=bits, scale_bits=scale_bits, start=start)


@pytest.mark.parametrize("shape", [(1, 16), (1, 1040), (65, 48), (70, 1056), (3, 2048)])
def test_shapes_that_are_no_multiple_of_the_tile(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    agree(x.bfloat16(), 500.0, FORMATS["nvfp4"])
    if shape[1] % 32 == 0:
        agree(x.bfloat16(), 1.0, FORMATS["rceil"])


def test_no_rows():
    fmt = FORMATS["nvfp4"]
    for dtype in DTYPES:
        agree(torch.empty((0, 64), dtype=dtype), 3.0, fmt)
    empty = torch.empty((0, 8, 32))
    assert same(fake_quant.fake_quant(empty, 3.0, fmt=fmt), empty)


def test_row_strides_and_other_layouts():
    wide = hard_rows(160)
    fmt = FORMATS["nvfp4"]
    for x in (wide[:, 48:112], wide[::2], wide[:8, :64].T.contiguous().T, wide[:, ::2], wide[:, :16].expand(9, 16)):
        agree(x, 7.0, fmt)
        agree(x.bfloat16(), 7.0, fmt)


def test_more_than_two_dimensions():
    x = hard_rows(64).view(3, 3, 64)[:, 1:]
    for scale in (5.0, torch.tensor(5.0), torch.rand(3, 2) + 1, torch.rand(3, 1) + 1):
        twin = reference.fake_quant(x, scale, fmt=FORMATS["nvfp4"])
        assert same(twin, fake_quant.fake_quant(x, scale, fmt=FORMATS["nvfp4"]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_scales(dtype):
    x = hard_rows(64).to(dtype)
    per_row = torch.logspace(-2, 5, 9)
    for scale in (3.7, torch.tensor(3.7), torch.tensor([3.7]), per_row, per_row.double(), per_row[::2].repeat(2)[:9]):
        agree(x, scale, FORMATS["nvfp4"])
    with pytest.raises(UserError, match="encode scale"):
        fake_quant.fake_quant(x, 0.0, fmt=FORMATS["nvfp4"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_are_refused_where_asked(dtype, bad):
    x = torch.randn((4, 64)).to(dtype)
    x[2, 5] = bad
    weight = x.view(2, 2, 64)
    fmt = FORMATS["nvfp4"]
    cache = torch.zeros((4, 32), dtype=torch.uint8), torch.zeros((4, 4), dtype=torch.uint8)
    calls = {
        "quantize_record": lambda check: quantize_record.quantize_record(x, 1.0, fmt=fmt, check=check),
        "fake_quant": lambda check: fake_quant.fake_quant(x, 1.0, fmt=fmt, check=check),
        "fake_quant_experts": lambda check: fake_quant.fake_quant_experts(weight, fmt=fmt, check=check),
        "repack": lambda check: repack.repack(weight, fmt=fmt, check=check),
        "kv": lambda check: kv_cache.kv_quantize_record(x, 1.0, *cache, torch.arange(4), fmt=fmt, check=check),
    }
    for call in calls.values():
        with pytest.raises(UserError, match="1 NaN/Inf values"):
            call(True)
        call(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_experts(name, dtype):
    fmt = FORMATS[name]
    weight = torch.stack([hard_rows(96, seed=seed) * scale for seed, scale in enumerate((1.0, 1e-4, 0.0))]).to(dtype)
    assert same(reference.fake_quant_experts(weight, fmt=fmt), fake_quant.fake_quant_experts(weight, fmt=fmt))
    for field, twin, ours in zip(
        reference.PackedExperts._fields, reference.repack(weight, fmt=fmt), repack.repack(weight, fmt=fmt), strict=True
    ):
        assert same(twin, ours), field
    view = weight.transpose(0, 1)
    assert same(reference.fake_quant_experts(view, fmt=fmt), fake_quant.fake_quant_experts(view, fmt=fmt))


def test_expert_amax_of_many_tiles():
    weight = torch.randn((2, 33, 1024), generator=torch.Generator().manual_seed(3)).bfloat16()
    weight[1, 32, 1023] = -77
    fmt = FORMATS["nvfp4"]
    _, _, scale = fake_quant.expert_rows(weight, fmt=fmt, check=True)
    assert same(scale, reference.expert_encode_scale(weight, fmt=fmt))


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("name", ["nvfp4", "rceil"])
def test_kv_cache(name, bits):
    fmt, cols, num_slots = FORMATS[name], 64, 12
    x = hard_rows(cols).bfloat16()[:7]
    slots = torch.tensor([11, 0, 5, 2, 9, 3, 7])
    record_slots = slots.flip(0).clone()
    results = []
    for module in (reference, kv_cache):
        # Codes and scales as column ranges of one page row, as an engine's cache may lay them out.
        page = torch.full((num_slots, cols), 0x5A, dtype=torch.uint8)
        codes, block_scale = page[:, 4 : 4 + cols // 2], page[:, 41 : 41 + cols // fmt.block_size]
        record = torch.zeros((num_slots, 100), dtype=torch.uint8)
        target = RecordTarget(record, record_slots, 7, bits, 8)
        module.kv_quantize_record(x, 40.0, codes, block_scale, slots, fmt=fmt, target=target)
        gather = torch.cat((slots, slots[:3]))
        read = [
            module.kv_dequantize(codes, block_scale, gather, scale, fmt=fmt)
            for scale in (40.0, torch.tensor(40.0), torch.linspace(1, 9, 10))
        ]
        results.append((page, record, *read))
    for twin, ours in zip(*results, strict=True):
        assert same(twin, ours)


def test_every_code_and_scale_is_read_alike():
    for name, largest in (("nvfp4", 127), ("rceil", 255)):
        fmt = FORMATS[name]
        codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, fmt.block_size // 2)
        scale = torch.arange(256, dtype=torch.uint8)[:, None]
        keep = scale.squeeze(1) < largest
        pairs = codes[torch.arange(256).flip(0)][keep], scale[keep]
        slots = torch.arange(int(keep.sum()))
        assert same(
            reference.kv_dequantize(*pairs, slots, 1.0, fmt=fmt), kv_cache.kv_dequantize(*pairs, slots, 1.0, fmt=fmt)
        )
    pairs = codes[:1, :8], torch.tensor([[127]], dtype=torch.uint8)
    assert kv_cache.kv_dequantize(*pairs, slots[:1], 1.0, fmt=FORMATS["nvfp4"]).isnan().all()


def test_slots_outside_the_buffer_are_refused_and_not_written():
    fmt = FORMATS["nvfp4"]
    x = torch.randn((3, 32))
    for slots in (torch.tensor([0, 4, 1]), torch.tensor([0, -1, 1])):
        codes, block_scale = torch.zeros((4, 16), dtype=torch.uint8), torch.zeros((4, 2), dtype=torch.uint8)
        with pytest.raises(UserError, match="slot lies outside"):
            kv_cache.kv_quantize_record(x, 1.0, codes, block_scale, slots, fmt=fmt)
        assert codes[:2].any(1).all() and not codes[2:].any()
        buffer = torch.zeros((4, 6), dtype=torch.uint8)
        with pytest.raises(UserError, match="slot lies outside"):
            quantize_record.quantize_record(x, 1.0, fmt=fmt, target=RecordTarget(buffer, slots, 0, 1, 8))
        read = kv_cache.kv_dequantize(codes, block_scale, slots, 1.0, fmt=fmt)
        assert read[1].isnan().all() and read[[0, 2]].isfinite().all()


def test_what_a_kernel_cannot_take_is_refused():
    x = torch.randn((3, 32))
    fmt = FORMATS["nvfp4"]
    buffer, slots = torch.zeros((4, 6), dtype=torch.uint8), torch.arange(3)

    def recorded(start, slots, bits):
        quantize_record.quantize_record(x, 1.0, fmt=fmt, target=RecordTarget(buffer, slots, start, bits, 8))

    for call, message in (
        (lambda: fake_quant.fake_quant(x[:, :24], 1.0, fmt=fmt), "multiple of 16"),
        (lambda: fake_quant.fake_quant(x.half(), 1.0, fmt=fmt), "cast it first"),
        (lambda: fake_quant.fake_quant(x, 1.0, fmt=formats.get("fouroversix")), "no Triton kernel"),
        (lambda: recorded(1, slots, 1), "another layout"),
        (lambda: recorded(0, slots[:2], 1), "slots must be"),
        (lambda: recorded(0, slots.repeat(2)[::2], 1), "slots must be"),
        (lambda: recorded(0, slots, 5), "guidance.bits"),
        (lambda: quantize_record.quantize_record(x.view(1, 3, 32), 1.0, fmt=fmt), "reshape"),
        (lambda: kv_cache.kv_dequantize(buffer, buffer, slots, 1.0, fmt=fmt), "cache_codes|cache_scale"),
    ):
        with pytest.raises(UserError, match=message):
            call()
