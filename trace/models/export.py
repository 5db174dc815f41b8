"""Packed export: the routed experts as FP4 codes and block scales, everything else BF16.

A quantized parameter `P` of shape [E, R, C] becomes three tensors in the safetensors file:

    P.codes         uint8 [E, R, C/2]      E2M1 codes, even column in the low nibble
    P.block_scale   uint8 [E, R, C/block]  scale bytes (E4M3, or E8M0 for mxfp4; hif4 has four per block of 64)
    P.encode_scale  float32 [E]            global scale G, one per expert; gate and up share one

The input is the BF16-rounded weight, as in rollout and trainer, so the export dequantizes to exactly what both multiply
with. ``hscale`` searches its block scales by the importance of each expert's input columns and stores plain NVFP4. The
written files are read back and compared bitwise. Scale bytes are scanned for NaN. `config.json` gains
`quantization_config` with `quant_method: trace_nvfp4`, `packed: true`, the quant spec and the static scales.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trace_rl import formats
from trace_rl.config.quant import QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.models.checkpoint_io import INDEX, MANIFEST, iterate_tensors, read_json, write_json
from trace_rl.models.families import cast_parameters
from trace_rl.models.scopes import BF16_NAME, Selector, is_expert_weight

QUANT_METHOD = "trace_nvfp4"
PARTS = ("codes", "block_scale", "encode_scale")


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


def pack_tensor(weight: Tensor, *, name: str, format_name: str, importance: Tensor | None = None) -> PackedTensor:
    """Pack a BF16 [E, R, C] weight ([R, C] counts as one expert). UserError for NaN, Inf and ragged blocks.

    ``importance`` float32 [E, C], for ``hscale`` alone: a row of zeros (an idle expert) counts all columns the same.
    """
    if weight.dtype != torch.bfloat16:
        raise UserError(f"{name}: {weight.dtype} weight; quantize the BF16-rounded weight, never the FP32 master")
    block_size = formats.packed(format_name).block_size
    if weight.shape[-1] % block_size:
        raise UserError(
            f"{name}: last dimension {weight.shape[-1]} is not a multiple of the {format_name} block {block_size}"
        )
    formats.check_finite(weight, name)
    experts = weight if weight.dim() == 3 else weight[None]
    scale = expert_encode_scales(experts, format_name=format_name)
    codecs = _codecs(format_name, name=name, experts=experts, importance=importance)
    parts = [codec.quantize(expert, g) for codec, expert, g in zip(codecs, experts, scale, strict=True)]
    packed = PackedTensor(
        codes=torch.stack([part.codes for part in parts]).view(*weight.shape[:-1], -1),
        block_scale=torch.stack([part.block_scale for part in parts]).view(*weight.shape[:-1], -1),
        encode_scale=scale,
    )
    scan_scales(packed, name=name, format_name=format_name)
    return packed


def _codecs(format_name: str, *, name: str, experts: Tensor, importance: Tensor | None) -> list[formats.PackedFormat]:
    """The format of each expert; with ``hscale`` they differ by their columns' importance."""
    if format_name != "hscale":
        return [formats.packed(format_name)] * len(experts)
    if importance is None:
        raise UserError(f"{name}: hscale needs the importance of its input columns; run the calibration stage again")
    if importance.shape != (experts.shape[0], experts.shape[2]):
        raise UserError(
            f"{name}: importance of shape {tuple(importance.shape)} does not belong to a weight of shape "
            f"{tuple(experts.shape)}; calibrate this model again"
        )
    return [formats.packed("hscale", importance=h if bool(h.any()) else None) for h in importance]


def unpack_tensor(packed: PackedTensor, *, format_name: str) -> Tensor:
    """The float32 values a packed parameter stands for, in its original shape."""
    shape = packed.codes.shape
    experts = shape[0] if len(shape) == 3 else 1
    rows = packed.codes.numel() // shape[-1] // experts
    stored = formats.QuantizedTensor(
        format=formats.packed(format_name),
        codes=packed.codes.reshape(-1, shape[-1]),
        block_scale=packed.block_scale.reshape(-1, packed.block_scale.shape[-1]),
        encode_scale=packed.encode_scale.repeat_interleave(rows),
    )
    values = stored.dequantize()
    return values.view(*shape[:-1], shape[-1] * 2)


def scan_scales(packed: PackedTensor, *, name: str, format_name: str) -> None:
    """Refuse NaN scale bytes and encode scales that are not positive finite numbers."""
    bad = formats.packed(format_name).nan_scales(packed.block_scale)
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
    importance: Mapping[str, Tensor] | None = None,
) -> list[TensorReport]:
    """Write the packed checkpoint of ``policy_dir`` into the existing directory ``target``.

    ``select`` names the parameters (Hugging Face names, experts fused) to pack; ``importance`` holds the weight of each
    one's columns, for ``hscale``. Raises UserError for NaN weights, ragged blocks, or when what was written does not
    read back bitwise.
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
    format_name = quant.format.weights
    for name, tensor in state.items():
        formats.check_finite(tensor, name)
        if not select(name):
            written[name] = tensor.contiguous()
            continue
        packed = pack_tensor(
            tensor, name=name, format_name=format_name, importance=None if importance is None else importance.get(name)
        )
        written.update({f"{name}.{part}": getattr(packed, part) for part in PARTS})
        values = unpack_tensor(packed, format_name=format_name)
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


def check_packed(directory: Path, *, quant: QuantSpec) -> None:
    """UserError unless the export's weights are in the format that ``quant`` asks for."""
    held = QuantSpec.model_validate(quantization_of(directory)["quant"]).format_of("weights")
    asked = quant.format_of("weights")
    if asked != held:
        raise UserError(
            f"{directory}: the checkpoint holds {held} expert weights, the engine was asked for {asked or 'BF16'} "
            "ones; use a BF16 checkpoint"
        )


def read_packed(directory: Path) -> dict[str, Tensor]:
    """All parameters under Hugging Face names: packed ones dequantized to float32, the others as stored."""
    format_name = QuantSpec.model_validate(quantization_of(directory)["quant"]).format.weights
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
    format_name = QuantSpec.model_validate(quantization_of(directory)["quant"]).format.weights
    scopes = {}
    for name, tensor in iterate_tensors(directory):
        stem, _, part = name.rpartition(".")
        if part in PARTS:
            scopes[stem] = format_name
        else:
            scopes[name] = BF16_NAME if tensor.dtype == torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")
    return scopes


def load_packed(directory: Path) -> PreTrainedModel:
    """The exported policy as a transformers model: BF16 parameters that hold the values the codes stand for."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    cast_parameters(model, torch.bfloat16)
    own = dict(model.named_parameters())
    stored = read_packed(directory)
    if missing := sorted(set(own) - set(stored)):
        raise UserError(f"{directory}: {missing[0]} is missing; export the policy again")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(stored[name])
    return model
