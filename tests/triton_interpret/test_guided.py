"""guided_fake_quant against its twin, bit for bit, on guidance of nearby and of unrelated rollouts."""

import pytest
import torch
from triton_interpret.cases import FORMATS, boundary_grid, golden, hard_rows, row_bytes, same

from trace_rl.errors import UserError
from trace_rl.formats import e2m1
from trace_rl.guidance.align import CLOSED
from trace_rl.kernels import guided_fake_quant, reference
from trace_rl.kernels.reference import RecordTarget

BITS = [1, 2, 3, 4]
SCALE = 30.0


def record(rollout, fmt, bits, *, encode_scale=SCALE, start=5):
    """(guidance, block scales) as strided views into record rows."""
    rows, cols = rollout.shape
    target = RecordTarget(torch.empty(0), torch.arange(rows), start, bits, 8)
    buffer = torch.zeros((rows, row_bytes(start, target.num_bytes(cols, fmt.block_size))), dtype=torch.uint8)
    target = RecordTarget(buffer, target.slots, start, bits, 8)
    reference.quantize_record(rollout, encode_scale, fmt=fmt, target=target)
    middle = start + cols * bits // 8
    return buffer[:, start:middle], buffer[:, middle : middle + cols // fmt.block_size]


def agree(x, guidance, block_scale, fmt, bits, *, encode_scale=SCALE, **options):
    arguments = (x, guidance, block_scale, encode_scale)
    twin = reference.guided_fake_quant(*arguments, fmt=fmt, bits=bits, **options)
    ours = guided_fake_quant.guided_fake_quant(*arguments, fmt=fmt, bits=bits, **options)
    assert same(twin, ours)
    return ours


def noisy(x, *, seed=0, size=0.3):
    generator = torch.Generator().manual_seed(seed)
    return x * (1 + size * torch.randn(x.shape, generator=generator))


@pytest.mark.parametrize("gate", [0.5, 0.2, 1e-3])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", FORMATS)
def test_hard_rows_beside_a_noisy_rollout(name, bits, gate):
    fmt = FORMATS[name]
    rollout = hard_rows(96, seed=bits)
    guidance, block_scale = record(rollout, fmt, bits)
    for x in (noisy(rollout), -rollout, hard_rows(96, seed=9)):
        for dtype in (torch.bfloat16, torch.float32):
            agree(x.to(dtype), guidance, block_scale, fmt, bits, gate=gate)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["nvfp4", "even"])
def test_boundary_grid_under_any_guidance(name, bits):
    fmt = FORMATS[name]
    x = boundary_grid(fmt)
    _, block_scale = record(x, fmt, bits, encode_scale=1.0)
    guidance = torch.randint(0, 256, (len(x), x.shape[1] * bits // 8), generator=torch.Generator().manual_seed(bits))
    for dtype in (torch.bfloat16, torch.float32):
        agree(x.to(dtype), guidance.to(torch.uint8), block_scale, fmt, bits, encode_scale=1.0)


@pytest.mark.parametrize("bits", BITS)
def test_values_on_the_edge_of_the_gate(bits):
    fmt = FORMATS["nvfp4"]
    x = torch.nn.functional.pad(torch.arange(-48, 49) / 8, (0, 15)).view(-1, 16)
    guidance = torch.randint(0, 256, (len(x), 2 * bits), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    one = torch.full((len(x), 1), 0x38, dtype=torch.uint8)  # 1.0 in E4M3
    moved = [agree(x, guidance, one, fmt, bits, encode_scale=1.0, gate=gate) for gate in (0.25, 0.2499)]
    assert not torch.equal(*moved)
    # Eighths are exactly on the boundaries: the closed gate follows none, the smallest of the others does.
    closed, smallest = (agree(x, guidance, one, fmt, bits, encode_scale=1.0, gate=gate) for gate in (CLOSED, 1e-6))
    assert torch.equal(closed, e2m1.round_nearest(x))
    assert not torch.equal(closed, smallest)


@pytest.mark.parametrize("bits", BITS)
def test_own_guidance_is_round_to_nearest(bits):
    for name in ("nvfp4", "rceil"):
        for case in golden(name).values():
            scale = float(case.get("encode_scale", 1.0))
            guidance, block_scale = record(case["x"], FORMATS[name], bits, encode_scale=scale)
            xhat = agree(case["x"], guidance, block_scale, FORMATS[name], bits, encode_scale=scale)
            assert same(xhat, reference.fake_quant(case["x"], scale, fmt=FORMATS[name]))


@pytest.mark.parametrize("bits", BITS)
def test_rows_without_a_record(bits):
    for name in ("nvfp4", "floor"):
        fmt = FORMATS[name]
        rollout = hard_rows(64)
        guidance, block_scale = record(rollout, fmt, bits)
        guidance[::2], block_scale[::2] = 0xFF, 0x7F  # what an unwritten row may hold: NaN for nvfp4
        for valid in (torch.arange(9) % 2 == 1, torch.zeros(9, dtype=torch.bool)):
            for gate in (0.5, 0.1):
                x = noisy(rollout, seed=1).bfloat16()
                ours = agree(x, guidance, block_scale, fmt, bits, valid=valid, gate=gate)
                assert same(ours[~valid], reference.fake_quant(x[~valid], SCALE, fmt=fmt))
    guidance, block_scale = record(rollout, fmt, bits)
    agree(x, guidance, block_scale, fmt, bits, valid=torch.ones(9, dtype=torch.bool))


def test_block_scale_zero_gives_zeros():
    fmt = FORMATS["nvfp4"]
    guidance, block_scale = torch.full((2, 4), 0xFF, dtype=torch.uint8), torch.zeros((2, 2), dtype=torch.uint8)
    xhat = agree(torch.randn(2, 32), guidance, block_scale, fmt, 1)
    assert same(xhat, torch.zeros(2, 32))


def test_encode_scales_shapes_and_layouts():
    fmt = FORMATS["nvfp4"]
    for shape in ((1, 16), (33, 48), (40, 1040), (0, 32)):
        rollout = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))
        guidance, block_scale = record(rollout, fmt, 1)
        x = noisy(rollout).bfloat16()
        for scale in (SCALE, torch.tensor(SCALE), torch.linspace(1, 50, shape[0])):
            agree(x, guidance, block_scale, fmt, 1, encode_scale=scale)
    wide = torch.cat((x, x), dim=1) if len(x) else torch.randn(6, 64)
    rollout = wide[:, 32:]
    for bits in BITS:
        for start in (0, 3):
            guidance, block_scale = record(rollout, fmt, bits, start=start)
            agree(noisy(wide)[:, 32:], guidance, block_scale, fmt, bits)
            agree(noisy(wide)[::2, 32:], guidance[::2], block_scale[::2], fmt, bits)
            agree(noisy(rollout).T.contiguous().T, guidance, block_scale, fmt, bits)


def test_what_does_not_belong_together_is_refused():
    fmt = FORMATS["nvfp4"]
    x = torch.randn(4, 32)
    guidance, block_scale = record(x, fmt, 1)

    def call(x=x, guidance=guidance, block_scale=block_scale, **options):
        options = {"bits": 1, "fmt": fmt} | options
        return guided_fake_quant.guided_fake_quant(x, guidance, block_scale, SCALE, **options)

    for options, message in (
        ({"bits": 5}, "guidance.bits"),
        ({"bits": 2}, "guidance must be"),
        ({"gate": 0.0}, "guidance.gate"),
        ({"block_scale": block_scale[:, :1]}, "block_scale must be"),
        ({"fmt": FORMATS["rceil"]}, "block_scale must be"),
        ({"valid": torch.ones(3, dtype=torch.bool)}, "valid must be"),
    ):
        with pytest.raises(UserError, match=message):
            call(**options)
    x[1, 2] = float("nan")
    with pytest.raises(UserError, match="NaN/Inf"):
        call()
    call(check=False)
