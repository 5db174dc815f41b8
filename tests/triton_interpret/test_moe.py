"""The MoE kernels, interpreted, against float64 with bounds derived from the arithmetic, and decoded weights bitwise.

What the interpreter cannot show: tl.dot of BF16 operands (it multiplies their bits, so the same operands are multiplied
in FP32 there) and tl.dot_scaled with E4M3 scales (it reads them as E8M0, so NVFP4 is decoded before the product). With
E8M0 scales tl.dot_scaled itself is interpreted.

Legend: T tokens, K experts per token, E experts, H hidden, I expert width, R rows, C columns.
"""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_rl import formats
from trace_rl.errors import UserError
from trace_rl.formats import Format
from trace_rl.kernels import reference
from trace_rl.kernels.moe_routing import block_pairs, max_blocks, route
from trace_rl.kernels.reference import PackedExperts
from trace_rl.kernels.w4a4_moe import hidden_vectors, w4a4_moe, weighted_outputs
from trace_rl.kernels.w4a16_moe import _rows_times_vectors, by_place, w4a16_moe

BF16_HALF_ULP = 2.0**-8  # relative to the value; its significand has 8 bits
FP32_ULP = 2.0**-23
NUM_EXPERTS, HIDDEN, WIDTH = 4, 160, 32  # 160: a whole tile of w4a4's columns and part of one


@pytest.fixture(params=["nvfp4", "mxfp4"])
def fmt(request: pytest.FixtureRequest) -> Format:
    return formats.get(request.param)


def packed_experts(rows: int, cols: int, *, fmt: Format, seed: int) -> PackedExperts:
    """Random experts of different sizes, with zero blocks and an expert of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(NUM_EXPERTS, rows, cols, generator=generator) * 0.2
    weight *= torch.tensor([1.0, 0.01, 3.0, 1.0])[:, None, None]
    weight[:, ::3, : fmt.block_size] = 0
    return reference.repack(weight.to(torch.bfloat16), fmt=fmt)


def layer(fmt: Format) -> tuple[PackedExperts, PackedExperts]:
    return (
        packed_experts(2 * WIDTH, HIDDEN, fmt=fmt, seed=1),
        packed_experts(HIDDEN, WIDTH, fmt=fmt, seed=2),
    )


def routed_tokens(num_tokens: int, top_k: int, *, ids: str = "spread") -> tuple[Tensor, Tensor, Tensor]:
    """(x bfloat16 [T, H], weights float32 [T, K], ids [T, K])."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    weights = torch.rand(num_tokens, top_k, generator=generator)
    if ids == "one expert":
        return x, weights, torch.full((num_tokens, top_k), 2)
    experts = NUM_EXPERTS if ids == "spread" else NUM_EXPERTS - 2  # "unused": the last two
    chosen = torch.rand(num_tokens, experts, generator=generator).argsort(dim=1)[:, :top_k]
    return x, weights, chosen


def hidden64(x: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """float64 (silu(gate) * up, bound of what FP32 sums, FP32 SiLU and one rounding to BF16 may change) of [n, H]."""
    gate, up = (x @ gate_up.T).chunk(2, dim=1)
    # A sum of n terms in any order is off by at most n roundings of the sum of magnitudes.
    gate_error, up_error = (x.abs() @ gate_up.abs().T * (x.shape[1] + 1) * FP32_ULP).chunk(2, dim=1)
    silu = torch.nn.functional.silu(gate)
    hidden = silu * up
    # |silu'| < 1.1; exp, division and two products in FP32 are good to 16 units in the last place.
    error = 1.1 * gate_error * (up.abs() + up_error) + silu.abs() * up_error + 16 * FP32_ULP * hidden.abs()
    return hidden, error + BF16_HALF_ULP * (hidden.abs() + error)


def outputs64(hidden: Tensor, error: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """float64 (down @ hidden, bound) of hidden [n, I] known up to `error`."""
    magnitude = (hidden.abs() + error) @ down.abs().T
    return hidden @ down.T, error @ down.abs().T + magnitude * (hidden.shape[1] + 1) * FP32_ULP


def operands64(packed: PackedExperts, *, fmt: Format) -> Tensor:
    """float64 [E, R, C]: the weights as they are multiplied."""
    return reference.unpack_experts(packed, fmt=fmt).to(torch.bfloat16).double()


def assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    excess = (found.double() - expected).abs() - bound
    assert bool((excess <= 0).all()), f"largest excess {excess.max().item()}, of {expected.abs().max().item()}"


# Decoding


@triton.jit
def _product_kernel(
    codes, scale, inverse, vectors, out, expert_ptr, num_rows, num_vectors,
    BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    expert = tl.load(expert_ptr)
    row = tl.arange(0, ROWS)
    vector = tl.arange(0, VECTORS)
    product = _rows_times_vectors(
        codes, scale, inverse, expert, num_rows, row, row < num_rows, vectors, vector, vector < num_vectors,
        BLOCK_SIZE, BLOCKS, 16,
    )  # fmt: skip
    tl.store(out + row[:, None] * VECTORS + vector[None, :], product)


def test_decoded_weights_are_the_operands_bit_for_bit(fmt: Format):
    """One-hot vectors pick columns, so products are exact: every code at every place of a block, every positive scale.

    576 columns are 36 (18) blocks: whole tiles of 16 and part of one.
    """
    generator = torch.Generator().manual_seed(0)
    rows, cols = 32, 576
    columns = torch.arange(0, cols, 9)  # 9 and the block size have no common factor: all places
    codes = torch.rand(2, rows, cols // 16, 16, generator=generator).argsort(dim=-1).to(torch.uint8)
    # Scales: all 127 finite E4M3 numbers, or 64 octaves around 1.
    scale = torch.arange(rows * cols // fmt.block_size).view(rows, -1)
    scale = (scale % 127 if fmt.name == "nvfp4" else 95 + scale % 64).to(torch.uint8).expand(2, -1, -1).contiguous()
    packed = PackedExperts(
        formats.pack_codes(codes.view(2, rows, cols)), scale, torch.tensor([1.0, 2688 / 0.37], dtype=torch.float32)
    )
    expected = reference.unpack_experts(packed, fmt=fmt).to(torch.bfloat16)[1].float()[:, columns]
    found = torch.empty(expected.shape)
    one_hot = by_place(torch.eye(cols)[columns].to(torch.bfloat16), fmt.block_size)
    _product_kernel[(1,)](
        packed.codes.view(torch.int64), scale, packed.encode_scale.reciprocal() * 2.0**63, one_hot, found,
        torch.tensor(1), rows, len(columns),
        BLOCK_SIZE=fmt.block_size, BLOCKS=cols // fmt.block_size, ROWS=rows, VECTORS=len(columns),
    )  # fmt: skip
    assert torch.equal(found, expected)
    assert len(torch.unique(expected)) > 200


# Routing


@pytest.mark.parametrize("seed", range(5))
def test_blocks_hold_every_pair_once_under_its_expert(seed: int):
    generator = torch.Generator().manual_seed(seed)
    num_experts, size = 7, 4
    ids = torch.randint(0, num_experts if seed else 1, (9, 3), generator=generator)
    routing = route(ids, num_experts, size)
    flat = ids.reshape(-1)
    seen = []
    for expert, start, end in zip(*(part.tolist() for part in routing.tensors[1:]), strict=True):
        if expert < 0:
            continue
        pairs = routing.order[start:end]
        assert 0 < len(pairs) <= size
        assert bool((flat[pairs] == expert).all())
        seen += pairs.tolist()
    assert sorted(seen) == list(range(ids.numel()))
    blocks = sum(-(-count // size) for count in torch.bincount(flat).tolist() if count)
    assert int((routing.expert >= 0).sum()) == blocks <= len(routing.expert)


def test_number_of_blocks_is_enough_for_the_worst_ids():
    for num_pairs in range(1, 40):
        for num_experts in (1, 3, 8):
            used = min(num_pairs, num_experts)
            worst = (used - 1) + -(-(num_pairs - used + 1) // 4)  # one pair each, the rest for one expert
            assert max_blocks(num_pairs, num_experts, 4) >= worst


def test_block_size_follows_the_shapes_alone():
    assert [block_pairs(tokens * 8, 128) for tokens in (1, 64, 128, 256, 4096)] == [16, 16, 16, 32, 32]


# Layers


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "ids"),
    [(1, 1, "spread"), (3, 2, "unused"), (17, 1, "one expert"), (17, 4, "spread")],
)
def test_w4a16_is_the_float64_layer_within_rounding(fmt: Format, num_tokens: int, top_k: int, ids: str):
    gate_up, down = layer(fmt)
    x, weights, ids_TK = routed_tokens(num_tokens, top_k, ids=ids)
    first, second = operands64(gate_up, fmt=fmt), operands64(down, fmt=fmt)
    expected, bound, magnitude = (torch.zeros(num_tokens, HIDDEN, dtype=torch.float64) for _ in range(3))
    for token in range(num_tokens):
        for weight, expert in zip(weights[token].double(), ids_TK[token], strict=True):
            out, error = outputs64(*hidden64(x[token : token + 1].double(), first[expert]), second[expert])
            expected[token] += weight * out[0]
            bound[token] += weight * error[0]
            magnitude[token] += weight * out[0].abs()
    bound += (top_k + 1) * FP32_ULP * (magnitude + bound)
    found = w4a16_moe(x, gate_up, down, weights, ids_TK, fmt=fmt)
    assert found.dtype == torch.bfloat16
    assert_within(found, expected, bound + BF16_HALF_ULP * (expected.abs() + bound))
    assert float(found.abs().amax()) > 0.05


@pytest.mark.parametrize(("num_tokens", "top_k", "ids"), [(1, 1, "spread"), (3, 2, "unused"), (17, 4, "spread")])
def test_w4a4_is_the_float64_layer_within_rounding(fmt: Format, num_tokens: int, top_k: int, ids: str):
    """Each half on the other's quantized output: near a rounding boundary FP4 turns the last bit into a whole step."""
    gate_up, down = layer(fmt)
    x, weights, ids_TK = routed_tokens(num_tokens, top_k, ids=ids)
    fc1_scale, fc2_scale = 448 * 6 / 4.0, 448 * 6 / 5.0
    routing = route(ids_TK, NUM_EXPERTS, block_pairs(ids_TK.numel(), NUM_EXPERTS))

    def quantized(values: Tensor, scale: float) -> tuple[reference.Quantized, Tensor]:
        parts = reference.quantize_record(values, scale, fmt=fmt, want_codes=True)
        return parts, fmt.decode(formats.unpack_codes(parts.codes), parts.block_scale, scale).double()

    first, second = (reference.unpack_experts(packed, fmt=fmt).double() for packed in (gate_up, down))
    # The kernels' operands are not rounded to FP32 steps: one FP32 rounding of 1/G and one of the step each.
    step_error = 8 * FP32_ULP
    expert = ids_TK.reshape(-1)
    token = torch.arange(num_tokens).repeat_interleave(top_k)

    x_parts, x_hat = quantized(x, fc1_scale)
    hidden = hidden_vectors(x_parts, gate_up, routing, ids_TK.shape, encode_scale=fc1_scale, fmt=fmt)
    for pair in range(len(expert)):
        vector, matrix = x_hat[token[pair]][None], first[expert[pair]]
        value, bound = hidden64(vector, matrix)
        gate, up = (vector.abs() @ matrix.abs().T).chunk(2, dim=1)
        assert_within(hidden[pair][None], value, bound + step_error * (2.2 * gate * up + value.abs()))

    hidden_parts, hidden_hat = quantized(hidden, fc2_scale)
    out = weighted_outputs(hidden_parts, down, weights, routing, encode_scale=fc2_scale, fmt=fmt)
    for pair in range(len(expert)):
        vector, matrix = hidden_hat[pair][None], second[expert[pair]]
        value, bound = outputs64(vector, torch.zeros_like(vector), matrix)
        weight = weights.reshape(-1)[pair].double()
        bound = weight * (bound + step_error * (vector.abs() @ matrix.abs().T) + FP32_ULP * value.abs())
        assert_within(out[pair][None], weight * value, bound)

    whole = w4a4_moe(x, gate_up, down, weights, ids_TK, fc1_scale=fc1_scale, fc2_scale=fc2_scale, fmt=fmt)
    assert torch.equal(whole, out.view(num_tokens, top_k, HIDDEN).sum(dim=1).to(torch.bfloat16))


def test_mxfp4_w4a4_agrees_with_the_twin():
    """Its steps are powers of two: the same operands exactly, so only the order of FP32 sums is left."""
    fmt = formats.get("mxfp4")
    gate_up, down = layer(fmt)
    x, weights, ids = routed_tokens(5, 2)
    arguments = (x, gate_up, down, weights, ids)
    found, expected = (moe(*arguments, fc1_scale=1.0, fc2_scale=1.0, fmt=fmt) for moe in (w4a4_moe, reference.w4a4_moe))
    # A hidden value at a rounding boundary may take the other neighbour; none of these does.
    torch.testing.assert_close(found, expected, rtol=2 * BF16_HALF_ULP, atol=1e-4)


def test_ids_may_repeat_within_a_token_and_order_of_tokens_does_not_matter():
    fmt = formats.get("nvfp4")
    gate_up, down = layer(fmt)
    x, weights, _ = routed_tokens(3, 2)
    twice = torch.tensor([[2, 2], [0, 2], [2, 0]])
    found = w4a16_moe(x, gate_up, down, weights, twice, fmt=fmt)
    backwards = w4a16_moe(x.flip(0), gate_up, down, weights.flip(0), twice.flip(0).to(torch.int32), fmt=fmt)
    assert torch.equal(found, backwards.flip(0))
    alone = [
        w4a16_moe(x[:1], gate_up, down, weights[:1, [k]], twice[:1, [k]], fmt=fmt).float().squeeze(0) for k in (0, 1)
    ]
    torch.testing.assert_close(found[0].float(), alone[0] + alone[1], rtol=4 * BF16_HALF_ULP, atol=0.02)


def test_no_tokens_is_no_work(fmt: Format):
    gate_up, down = layer(fmt)
    x, weights, ids = (torch.empty(0, n, dtype=d) for n, d in ((HIDDEN, torch.bfloat16), (2, torch.float32), (2, int)))
    assert w4a16_moe(x, gate_up, down, weights, ids, fmt=fmt).shape == (0, HIDDEN)
    assert w4a4_moe(x, gate_up, down, weights, ids, fc1_scale=1.0, fc2_scale=1.0, fmt=fmt).shape == (0, HIDDEN)


def test_what_the_kernels_cannot_read_is_refused():
    fmt = formats.get("nvfp4")
    gate_up, down = layer(fmt)
    x, weights, ids = routed_tokens(3, 2)

    def refused(message: str, **changed: object) -> None:
        arguments = {"x_TH": x, "gate_up": gate_up, "down": down, "weights_TK": weights, "ids_TK": ids, "fmt": fmt}
        with pytest.raises(UserError, match=message):
            w4a16_moe(**(arguments | changed))
        with pytest.raises(UserError, match=message):
            w4a4_moe(**(arguments | changed), fc1_scale=1.0, fc2_scale=1.0)

    refused("must lie in", ids_TK=ids + NUM_EXPERTS)
    refused("must lie in", ids_TK=ids - NUM_EXPERTS)
    refused("int32 or int64", ids_TK=ids.to(torch.int16))
    refused("for 3 tokens", ids_TK=ids[:2])
    refused("same shape", weights_TK=weights[:, :1])
    refused("bfloat16", x_TH=x.float())
    refused("gate_up experts have codes", x_TH=x[:, :48].contiguous())
    refused("gate_up experts have codes", gate_up=down)
    refused("down experts have codes", down=PackedExperts(down.codes, down.block_scale[:, :, :1], down.encode_scale))
    refused("encode scales float32", down=PackedExperts(*down[:2], down.encode_scale.double()))
    refused("contiguous", down=PackedExperts(down.codes.mT.contiguous().mT, *down[1:]))
    refused("no Triton kernel", fmt=formats.get("hif4"))
