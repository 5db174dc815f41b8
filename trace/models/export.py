"""Packed export: the routed experts as FP4 codes and block scales, everything else BF16.

A quantized parameter `P` of shape [E, R, C] becomes three tensors in the safetensors file:

    P.codes         uint8 [E, R, C/2]      E2M1 codes, even column in the low nibble
    P.block_scale   uint8 [E, R, C/block]  scale bytes (E4M3, or E8M0 for mxfp4)
    P.encode_scale  float32 [E]            global scale G, one per expert; gate and up share one

The input is the BF16-rounded weight, as in rollout and trainer, so the export dequantizes to exactly what both multiply
with. The written files are read back and compared bitwise. Scale bytes are scanned for NaN. `config.json` gains
`quantization_config` with `quant_method: trace_nvfp4`, `packed: true`, the quant spec and the static scales.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from trace_rl import formats
from trace_rl.config.quant import QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.models.checkpoint_io import INDEX, MANIFEST, iterate_tensors, read_json, write_json
from trace_rl.models.scopes import BF16_NAME, Selector, is_expert_weight

QUANT_METHOD = "trace_nvfp4"
PARTS = ("codes", "block_scale", "encode_scale")
E4M3_NAN, E8M0_NAN = 0x7F, 0xFF


@dataclass(frozen=True)
class PackedTensor:
    """One parameter as it is written; shapes in the module docstring."""

    codes: Tensor
    block_scale: Tensor
    encode_scale: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.block_scale, self.encode_scale))


@dataclass(frozen=True)
class TensorReport:
    """Size and error of one exported parameter."""

    name: str
    bf16_bytes: int
    packed_bytes: int
    relative_mse: float
    """sum (w - what)^2 / sum w^2."""


def expert_encode_scales(weight: Tensor, *, format_name: str) -> Tensor:
    """float32 [E]: one encode scale per expert from its amax over [R, C]."""
    return formats.get(format_name).encode_scale(weight.abs().amax(dim=(1, 2)).float())


def pack_tensor(weight: Tensor, *, name: str, format_name: str) -> PackedTensor:
    """Pack a BF16 [E, R, C] weight ([R, C] counts as one expert). UserError for NaN, Inf and ragged blocks."""
    if weight.dtype != torch.bfloat16:
        raise UserError(f"{name}: {weight.dtype} weight; quantize the BF16-rounded weight, never the FP32 master")
    fmt = formats.get(format_name)
    if weight.shape[-1] % fmt.block_size:
        raise UserError(
            f"{name}: last dimension {weight.shape[-1]} is not a multiple of the {format_name} block {fmt.block_size}"
        )
    formats.check_finite(weight, name)
    experts = weight if weight.dim() == 3 else weight[None]
    scale = expert_encode_scales(experts, format_name=format_name)
    rows = experts.shape[1]
    quantized = fmt.quantize(experts.reshape(-1, experts.shape[-1]), scale.repeat_interleave(rows))
    packed = PackedTensor(
        codes=quantized.codes.view(*weight.shape[:-1], -1).contiguous(),
        block_scale=quantized.block_scale.view(torch.uint8).view(*weight.shape[:-1], -1).contiguous(),
        encode_scale=scale,
    )
    scan_scales(packed, name=name, format_name=format_name)
    return packed


def unpack_tensor(packed: PackedTensor, *, format_name: str) -> Tensor:
    """The float32 values a packed parameter stands for, in its original shape."""
    shape = packed.codes.shape
    experts = shape[0] if len(shape) == 3 else 1
    rows = packed.codes.numel() // shape[-1] // experts
    stored = formats.QuantizedTensor(
        format=formats.get(format_name),
        codes=packed.codes.reshape(-1, shape[-1]),
        block_scale=packed.block_scale.reshape(-1, packed.block_scale.shape[-1]),
        encode_scale=packed.encode_scale.repeat_interleave(rows),
    )
    values = stored.dequantize()
    return values.view(*shape[:-1], shape[-1] * 2)


def scan_scales(packed: PackedTensor, *, name: str, format_name: str) -> None:
    """Refuse NaN scale bytes and encode scales that are not positive finite numbers."""
    if format_name == "mxfp4":
        bad = packed.block_scale == E8M0_NAN
    else:
        bad = (packed.block_scale & 0x7F) == E4M3_NAN
    if bool(bad.any()):
        raise UserError(f"{name}.block_scale: {int(bad.sum())} NaN scale bytes; the weights or the file are damaged")
    if not bool((torch.isfinite(packed.encode_scale) & (packed.encode_scale > 0)).all()):
        raise UserError(f"{name}.encode_scale: not a positive finite number; the weights or the file are damaged")


def export_packed(
    policy_dir: Path,
    *,
    target: Path,
    quant: QuantSpec,
    scales: StaticScales | None,
    select: Selector = is_expert_weight,
) -> list[TensorReport]:
    """Write the packed checkpoint of ``policy_dir`` into the existing directory ``target``.

    ``select`` names the parameters (Hugging Face names, experts fused) to pack. Raises UserError for NaN weights,
    ragged blocks, or when what was written does not read back bitwise.
    """
    config = read_json(policy_dir / "config.json")
    if "quantization_config" in config:
        raise UserError(f"{policy_dir}: already quantized; export the BF16 policy")
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.bfloat16, local_files_only=True)
    state = model.state_dict()
    if model.config.get_text_config().tie_word_embeddings:
        state.pop("lm_head.weight", None)
    written: dict[str, Tensor] = {}
    reports = []
    for name, tensor in state.items():
        formats.check_finite(tensor, name)
        if not select(name):
            written[name] = tensor.contiguous()
            continue
        packed = pack_tensor(tensor, name=name, format_name=quant.format)
        written.update({f"{name}.{part}": getattr(packed, part) for part in PARTS})
        values = unpack_tensor(packed, format_name=quant.format)
        reports.append(_report(name, tensor=tensor, packed=packed, values=values))
    if not reports:
        raise UserError(f"{policy_dir}: no parameter to quantize; expected routed experts")
    _save(written, target=target)
    extra = {
        "quantization_config": {
            "quant_method": QUANT_METHOD,
            "packed": True,
            "quant": quant.model_dump(mode="json"),
            "scales": None if scales is None else scales.to_json(residual=quant.residual == "channels"),
        }
    }
    write_json(target / "config.json", config | extra)
    for path in sorted(policy_dir.iterdir()):
        skipped = path.suffix in (".safetensors", ".bin") or path.name in ("config.json", INDEX, MANIFEST)
        if path.is_file() and not skipped and not path.name.startswith("metrics"):
            shutil.copyfile(path, target / path.name)
    _check_read_back(target, written=written)
    return reports


def _report(name: str, *, tensor: Tensor, packed: PackedTensor, values: Tensor) -> TensorReport:
    weight = tensor.double()
    return TensorReport(
        name=name,
        bf16_bytes=tensor.numel() * 2,
        packed_bytes=packed.num_bytes,
        relative_mse=float((weight - values.double()).square().sum() / weight.square().sum().clamp(min=1e-30)),
    )


def _save(tensors: dict[str, Tensor], *, target: Path) -> None:
    split = split_torch_state_dict_into_shards(tensors, max_shard_size="4GB")
    for file_name, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, target / file_name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (target / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))


def _check_read_back(directory: Path, *, written: dict[str, Tensor]) -> None:
    read = 0
    for name, tensor in iterate_tensors(directory):
        if not torch.equal(tensor.view(torch.uint8), written[name].view(torch.uint8)):
            raise UserError(f"{directory}: {name} does not read back as written; check the disk")
        read += 1
    if read != len(written):
        raise UserError(f"{directory}: {len(written) - read} tensors are missing after writing; check the disk")


def quantization_of(directory: Path) -> dict[str, Any]:
    """The ``quantization_config`` of a packed export; UserError when the directory is not one."""
    config = read_json(directory / "config.json").get("quantization_config") or {}
    if config.get("quant_method") != QUANT_METHOD or not config.get("packed"):
        raise UserError(f"{directory}: not a packed export (quantization_config.quant_method {QUANT_METHOD!r}, packed)")
    return config


def read_packed(directory: Path) -> dict[str, Tensor]:
    """All parameters under Hugging Face names: packed ones dequantized to float32, the others as stored."""
    format_name = QuantSpec.model_validate(quantization_of(directory)["quant"]).format
    whole: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in iterate_tensors(directory):
        stem, _, part = name.rpartition(".")
        if part in PARTS:
            parts.setdefault(stem, {})[part] = tensor
        else:
            whole[name] = tensor
    for name, found in parts.items():
        missing = [part for part in PARTS if part not in found]
        if missing:
            raise UserError(f"{directory}: {name}.{missing[0]} is missing; export the policy again")
        packed = PackedTensor(**found)
        scan_scales(packed, name=name, format_name=format_name)
        whole[name] = unpack_tensor(packed, format_name=format_name)
    return whole


def packed_scopes(directory: Path) -> dict[str, str]:
    """Parameter name -> format, from the tensors that are really in the files."""
    format_name = QuantSpec.model_validate(quantization_of(directory)["quant"]).format
    scopes = {}
    for name, tensor in iterate_tensors(directory):
        stem, _, part = name.rpartition(".")
        if part in PARTS:
            scopes[stem] = format_name
        else:
            scopes[name] = BF16_NAME if tensor.dtype == torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")
    return scopes
