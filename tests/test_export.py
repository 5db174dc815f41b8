"""Checkpoint validation and the packed export, on a tiny random Qwen3-MoE written as a real checkpoint directory."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trace_rl import formats
from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.models import checkpoint_io, export
from trace_rl.models.miniature import build_model, miniature_config, save_checkpoint
from trace_rl.models.scopes import is_expert_weight
from trace_rl.models.tokenizer import build_tokenizer

SCALES = StaticScales(fc1={0: 60.0, 1: 61.5}, fc2={0: 1.0, 1: 2.0}, k={0: 3.0, 1: 4.0}, v={0: 5.0, 1: 6.0})


def tiny_checkpoint(directory: Path, **overrides) -> Path:
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "max_position_embeddings": 64,
    }
    tokenizer = build_tokenizer(model_max_length=64)
    config = miniature_config(tokenizer, **(sizes | overrides))
    save_checkpoint(directory, config=config, state=build_model(config, seed=0).state_dict(), tokenizer=tokenizer)
    return directory


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture
def checkpoint(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "policy"))


def edit_json(path: Path, **changes) -> None:
    value = json.loads(path.read_text())
    for key, new in changes.items():
        if new is None:
            value.pop(key, None)
        else:
            value[key] = new
    path.write_text(json.dumps(value))


def test_a_good_checkpoint_validates(checkpoint):
    info = checkpoint_io.validate_checkpoint(checkpoint, quant=QuantSpec())
    assert info.dims == {"hidden_size": 32, "expert_width": 16, "head_dim": 16}
    assert info.tokenizer_size == info.vocab_size
    manifest = checkpoint_io.build_manifest(info, source={"source": "local"})
    assert manifest["weight_bytes"] == 2 * manifest["num_parameters"] > 0


def _no_directory(path):
    shutil.rmtree(path)


def _no_config(path):
    (path / "config.json").unlink()


def _broken_config(path):
    (path / "config.json").write_text("{")


def _no_weights(path):
    (path / "model.safetensors").unlink()


def _no_tokenizer(path):
    (path / "tokenizer.json").unlink()


def _unknown_family(path):
    edit_json(path / "config.json", model_type="gpt2")


def _vocabulary(path):
    edit_json(path / "config.json", vocab_size=100)


def _no_eos(path):
    edit_json(path / "tokenizer_config.json", eos_token=None)
    if (path / "special_tokens_map.json").is_file():
        edit_json(path / "special_tokens_map.json", eos_token=None)


def _truncated(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def _lost_shard(path):
    tensors = load_file(path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _small_embedding(path):
    tensors = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:-2].clone()
    rows = tensors["lm_head.weight"].shape[0]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", vocab_size=rows)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_directory, "no such checkpoint directory"),
        (_no_config, r"config\.json: no such file"),
        (_broken_config, "not valid JSON"),
        (_no_weights, r"no \*\.safetensors"),
        (_lost_shard, "1 of 1 weight files missing, first model-00001-of-00001"),
        (_truncated, "damaged or incomplete"),
        (_no_tokenizer, "no tokenizer"),
        (_unknown_family, "gpt2.* is not supported"),
        (_vocabulary, "vocabulary mismatch: config.json says vocab_size 100"),
        (_small_embedding, "vocabulary mismatch: the tokenizer's token"),
        (_no_eos, "no eos token"),
    ],
)
def test_each_fault_is_one_clear_error(checkpoint, damage, message):
    damage(checkpoint)
    with pytest.raises(UserError, match=message) as error:
        checkpoint_io.validate_checkpoint(checkpoint, quant=QuantSpec())
    assert "\n" not in str(error.value)


def test_an_fp4_dimension_must_hold_whole_blocks(checkpoint):
    with pytest.raises(UserError, match="expert_width 16 is not a multiple of the FP4 block size 32 of mxfp4"):
        checkpoint_io.validate_checkpoint(checkpoint, quant=QuantSpec(format="mxfp4"))
    checkpoint_io.validate_checkpoint(checkpoint, quant=BF16)


def test_the_digest_ignores_sharding_but_not_values(checkpoint):
    before = checkpoint_io.weights_digest(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, checkpoint / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (checkpoint / checkpoint_io.INDEX).write_text(json.dumps(index))
    assert checkpoint_io.weights_digest(checkpoint) == before
    tensors[names[0]].view(-1)[0] += 1
    save_file({name: tensors[name] for name in names[::2]}, checkpoint / "model-1.safetensors")
    assert checkpoint_io.weights_digest(checkpoint) != before


def test_a_failed_write_leaves_the_old_directory(tmp_path):
    target = tmp_path / "out"
    with checkpoint_io.replaced_directory(target) as directory:
        (directory / "a").write_text("old")
    with pytest.raises(FileNotFoundError), checkpoint_io.replaced_directory(target) as directory:  # noqa: PT012
        (directory / "a").write_text("new")
        shutil.copyfile(tmp_path / "missing", directory / "b")
    assert (target / "a").read_text() == "old"
    with checkpoint_io.replaced_directory(target) as directory:
        (directory / "a").write_text("new")
    assert (target / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("format_name", ["nvfp4", "fouroversix"])
def test_the_export_is_the_fake_quantized_policy_bit_for_bit(checkpoint, tmp_path, format_name):
    target = tmp_path / "packed"
    target.mkdir()
    quant = QuantSpec(format=format_name)
    reports = export.export_packed(checkpoint, target=target, quant=quant, scales=SCALES)
    assert len(reports) == 4
    assert all(report.packed_bytes * 3 < report.bf16_bytes for report in reports)
    assert all(0 < report.relative_mse < 0.03 for report in reports)
    read = export.read_packed(target)
    fmt = formats.get(format_name)
    stored = load_file(checkpoint / "model.safetensors")
    for layer in range(2):
        for expert in range(4):
            stem = f"model.layers.{layer}.mlp.experts"
            gate_up = torch.cat([stored[f"{stem}.{expert}.{part}_proj.weight"] for part in ("gate", "up")])
            want = fmt.fake_quant(gate_up)  # one encode scale from the amax of gate and up together
            assert torch.equal(read[f"{stem}.gate_up_proj"][expert].view(torch.int32), want.view(torch.int32))
    assert torch.equal(read["model.layers.1.mlp.gate.weight"], stored["model.layers.1.mlp.gate.weight"])
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["packed"]) == ("trace_nvfp4", True)
    assert QuantSpec.model_validate(config["quant"]) == quant
    assert config["scales"]["fc1"] == {"0": 60.0, "1": 61.5}
    names = load_file(target / "model.safetensors")
    assert names["model.layers.0.mlp.experts.gate_up_proj.codes"].shape == (4, 32, 16)
    assert names["model.layers.0.mlp.experts.gate_up_proj.block_scale"].shape == (4, 32, 2)
    assert names["model.layers.0.mlp.experts.down_proj.encode_scale"].shape == (4,)
    checkpoint_io.validate_checkpoint(target, quant=QuantSpec())


def test_packed_scopes_are_read_from_the_files(checkpoint, tmp_path):
    target = tmp_path / "packed"
    target.mkdir()

    def sloppy(name: str) -> bool:
        return is_expert_weight(name) or re.search(r"mlp\.gate", name) is not None

    export.export_packed(checkpoint, target=target, quant=QuantSpec(), scales=SCALES, select=sloppy)
    scopes = export.packed_scopes(target)
    assert scopes["model.layers.0.mlp.gate.weight"] == "nvfp4"
    assert scopes["model.layers.0.mlp.experts.down_proj"] == "nvfp4"
    assert scopes["lm_head.weight"] == "bf16"


def test_nan_weights_and_scales_are_named(checkpoint, tmp_path):
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    target = tmp_path / "packed"
    target.mkdir()
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        export.export_packed(checkpoint, target=target, quant=QuantSpec(), scales=SCALES)
    packed = export.pack_tensor(torch.randn(2, 16, 32).bfloat16(), name="w", format_name="nvfp4")
    packed.block_scale[1, 3, 0] = 0x7F
    with pytest.raises(UserError, match=r"w\.block_scale: 1 NaN"):
        export.scan_scales(packed, name="w", format_name="nvfp4")


def test_the_fp32_master_and_a_quantized_policy_are_refused(checkpoint, tmp_path):
    with pytest.raises(UserError, match="BF16-rounded"):
        export.pack_tensor(torch.randn(2, 16, 32), name="w", format_name="nvfp4")
    edit_json(checkpoint / "config.json", quantization_config={"quant_method": "trace_nvfp4"})
    with pytest.raises(UserError, match="already quantized"):
        export.export_packed(checkpoint, target=tmp_path, quant=QuantSpec(), scales=SCALES)
