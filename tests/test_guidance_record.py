"""Record rows, packing, two-bit scales, byte accounting and shards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig

from trace_rl import formats
from trace_rl.config.guidance import FULL, GuidanceSpec
from trace_rl.errors import UserError
from trace_rl.guidance import pack_bits, pack_scales, recover_scales, unpack_bits
from trace_rl.guidance.accounting import plan
from trace_rl.guidance.record import ModelDims, RecordLayout
from trace_rl.guidance.store import read_shard, write_shard

MINI = ModelDims(
    num_layers=6,
    hidden_size=128,
    num_kv_heads=2,
    head_dim=32,
    moe_layers=(1, 2, 3, 4, 5),
    attention_layers=(0, 1, 3, 5),
    num_experts=16,
    top_k=4,
)
QWEN35_35B = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 10,
    },
}


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_packing_keeps_the_low_bits(bits, data):
    rows, groups = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    codes = torch.randint(0, 16, (rows, groups * 8), dtype=torch.uint8, generator=generator)
    packed = pack_bits(codes, bits)
    assert packed.shape == (rows, groups * bits)
    assert torch.equal(unpack_bits(packed, bits, groups * 8), codes & ((1 << bits) - 1))


def test_packing_order_is_least_significant_first():
    codes = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 1], [3, 2, 1, 0, 0, 0, 0, 5]], dtype=torch.uint8)
    assert pack_bits(codes[:1], 1).tolist() == [[0b10000001]]
    assert pack_bits(codes[1:], 2).tolist() == [[0b00011011, 0b01000000]]
    word = sum(int(code) << (3 * j) for j, code in enumerate(codes[1]))
    assert pack_bits(codes[1:], 3).tolist() == [list(word.to_bytes(3, "little"))]
    assert torch.equal(pack_bits(codes, 4), formats.pack_codes(codes))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("scale_bits", [2, 8])
def test_record_round_trip_of_every_field(bits, scale_bits):
    spec = GuidanceSpec(bits=bits, layers="all", scale_bits=scale_bits)
    layout = RecordLayout.build(spec, MINI)
    assert {(f.layer, f.tensor) for f in layout.fields} == {
        *((layer, "fc1") for layer in MINI.moe_layers),
        *((layer, t) for layer in MINI.attention_layers for t in ("k", "v")),
    }
    buffer = torch.full((50, layout.row_bytes), 255, dtype=torch.uint8)
    fmt = formats.get("nvfp4")
    slots = torch.randperm(50)[:20]
    written = {}
    for field in layout.fields:
        x = torch.randn(20, field.cols).bfloat16()
        codes, scale, _ = fmt.quantize_codes(x, 64.0)
        layout.write(buffer, slots, field.layer, field.tensor, codes, scale)
        written[field] = codes, scale
    untouched = torch.ones(50, dtype=torch.bool)
    untouched[slots] = False
    assert (buffer[untouched] == 255).all()
    rows = buffer[slots]
    for field, (codes, scale) in written.items():
        guide, stored = layout.read(rows, field.layer, field.tensor)
        assert torch.equal(guide, codes & ((1 << bits) - 1))
        recovered, uncertain = recover_scales(stored, scale_bits, scale)
        assert torch.equal(recovered, scale)
        assert uncertain is None or not uncertain.any()
    ends = [f.scales.stop for f in layout.fields]
    assert [f.payload.start for f in layout.fields] == [0, *ends[:-1]]
    assert ends[-1] == layout.row_bytes


def test_layout_of_the_default_and_of_unguided_tensors():
    layout = RecordLayout.build(GuidanceSpec(), MINI)
    assert {f.layer for f in layout.fields} == {3, 4, 5}
    assert layout.field(2, "fc1") is None
    assert layout.field(4, "k") is None
    assert layout == RecordLayout.build(GuidanceSpec(), MINI)
    with pytest.raises(UserError, match="no 'fc1' of layer 0"):
        layout.read(torch.zeros(1, layout.row_bytes, dtype=torch.uint8), 0, "fc1")
    with pytest.raises(UserError, match="blocks of 32"):
        RecordLayout.build(GuidanceSpec(), ModelDims(**{**vars(MINI), "head_dim": 16}), block_size=32)


@pytest.mark.parametrize("blocks", [1, 3, 4, 8, 13])
def test_two_bit_scales_recover_neighbours_and_count_what_they_cannot(blocks):
    own = torch.randint(2, 124, (9, blocks), dtype=torch.uint8)
    for delta in (-1, 0, 1):
        rollout = (own.int() + delta).to(torch.uint8)
        recovered, uncertain = recover_scales(pack_scales(rollout, 2), 2, own)
        assert torch.equal(recovered, rollout)
        assert not uncertain.any()
    rollout = own + 2
    recovered, uncertain = recover_scales(pack_scales(rollout, 2), 2, own)
    assert uncertain.all()
    assert torch.equal(recovered, rollout)
    for delta, noticed in ((-2, True), (3, False)):
        rollout = (own.int() + delta).clamp(0, 126).to(torch.uint8)
        recovered, uncertain = recover_scales(pack_scales(rollout, 2), 2, own)
        assert (uncertain == noticed).all() and (recovered != rollout).all()


def test_two_bit_scales_stay_within_the_codes_range():
    own = torch.tensor([[0, 0, 0, 0, 126, 126, 126, 126]], dtype=torch.uint8)
    packed = pack_scales(torch.tensor([[0, 1, 2, 3, 126, 125, 124, 123]], dtype=torch.uint8), 2)
    recovered, _ = recover_scales(packed, 2, own)
    assert recovered.tolist()[0][:4] == [0, 1, 2, 3]
    assert recovered.tolist()[0][4:7] == [126, 125, 124]
    # Three codes away it cannot be right, but it is never the code behind the largest, which is NaN.
    far, _ = recover_scales(pack_scales(torch.tensor([[123]], dtype=torch.uint8), 2), 2, own.new_tensor([[126]]))
    assert far.tolist() == [[123]]
    # E8M0 goes on: 127 is 2^0.
    one = torch.tensor([[127, 126]], dtype=torch.uint8)
    assert recover_scales(pack_scales(one, 2), 2, one.flip(1), largest=254)[0].tolist() == one.tolist()
    with pytest.raises(UserError, match=r"guidance\.scale_bits is 4"):
        pack_scales(own, 4)


def test_the_papers_figures():
    text = {row.name: row.text for row in plan(QWEN35_35B)}
    assert text["full, activations"] == "45.0 KiB"
    assert text["full, KV"] == "5.625 KiB"
    assert text["compact, activations"] == "7.5 KiB"
    assert text["compact, KV"] == "0.94 KiB"
    assert text["full / compact"] == "6.0x"
    assert text["one RL step, full activations + KV"] == "50.6 TiB"
    assert text["one RL step, full, at 300 GB/s"] == "186 s"
    exact = {row.name: row.num_bytes for row in plan(QWEN35_35B)}
    assert exact["full, activations"] == 40 * 2048 * 4.5 / 8
    assert exact["compact, KV"] == 5 * 1024 * 1.5 / 8
    assert exact["compact, activations, 2-bit scales"] == 20 * 2048 * 1.125 / 8


def test_dims_of_known_config_shapes():
    dims = ModelDims.from_config(QWEN35_35B)
    assert dims.attention_layers == tuple(range(3, 40, 4))
    assert dims.moe_layers == tuple(range(40))
    mixtral = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_local_experts": 8}
    dims = ModelDims.from_config({**mixtral, "num_experts_per_tok": 2})
    assert (dims.num_kv_heads, dims.head_dim, dims.num_experts, dims.top_k) == (4, 16, 8, 2)
    sparse = {
        **mixtral,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    assert ModelDims.from_config(sparse).moe_layers == (1, 5)
    with pytest.raises(UserError, match="mixture-of-experts"):
        ModelDims.from_config({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4})


def test_dims_of_a_transformers_config_object():
    config = Qwen3MoeConfig(
        num_hidden_layers=6,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
    )
    dims = ModelDims.from_config(config)
    assert dims == ModelDims.from_config(config.to_dict())
    assert dims.moe_layers == dims.attention_layers == tuple(range(6))


def test_full_rows_reduce_to_what_a_compact_recording_would_hold():
    full = RecordLayout.build(FULL, MINI)
    compact = RecordLayout.build(GuidanceSpec(), MINI)
    x = torch.randn(4, 128).bfloat16()
    codes, scale, _ = formats.get("nvfp4").quantize_codes(x, 64.0)
    slots = torch.arange(4)
    rows = {
        name: torch.zeros(4, layout.row_bytes, dtype=torch.uint8)
        for name, layout in (("full", full), ("direct", compact), ("reduced", compact))
    }
    full.write(rows["full"], slots, 5, "fc1", codes, scale)
    compact.write(rows["direct"], slots, 5, "fc1", codes, scale)
    compact.write(rows["reduced"], slots, 5, "fc1", *full.read(rows["full"], 5, "fc1"))
    assert torch.equal(rows["direct"], rows["reduced"])


def shard(path):
    tensors = {
        "record": torch.randint(0, 256, (30, 72), dtype=torch.uint8),
        "token_ids": torch.arange(30, dtype=torch.int32),
    }
    write_shard(path, tensors, policy_version=7, quant_hash="abc")
    return tensors


def test_shard_round_trip_leaves_no_partial_file(tmp_path):
    tensors = shard(tmp_path / "s.safetensors")
    loaded = read_shard(tmp_path / "s.safetensors", policy_version=7, quant_hash="abc")
    assert loaded.policy_version == 7
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in tensors.items())
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


def test_damaged_or_foreign_shards_are_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    shard(path)
    with pytest.raises(UserError, match="policy version 7, expected 8"):
        read_shard(path, policy_version=8)
    with pytest.raises(UserError, match="quantization abc"):
        read_shard(path, quant_hash="def")
    with pytest.raises(UserError, match="no guidance shard"):
        read_shard(tmp_path / "missing")
    content = path.read_bytes()
    for position in (len(content) - 1, len(content) // 2):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged"):
            read_shard(path)
    path.write_bytes(content.replace(b'"policy_version":"7"', b'"policy_version":"6"'))
    with pytest.raises(UserError, match="damaged"):
        read_shard(path)
    path.write_bytes(content[:100])
    with pytest.raises(UserError, match="damaged"):
        read_shard(path)
