"""Weights into a vLLM model, at start and at every refit, in place and with full coverage.

Names are those of Hugging Face checkpoints in any of their spellings; a *unit* is the smallest tensor one can name:

    experts, fused      model.layers.0.mlp.experts.gate_up_proj  [E, 2I, H]      units (0, gate, e), (0, up, e)
    experts, separate   model.layers.0.mlp.experts.3.gate_proj.weight [I, H]     unit  (0, gate, 3)
    experts, packed     model.layers.0.mlp.experts.gate_up_proj.{codes,block_scale,encode_scale}
    everything else     its name, with ``block_sparse_moe`` read as ``mlp``

The units of the first load are what every refit must bring, no more and no less. A refit is checked completely
(names, shapes, finite values) before the first weight changes, so a refused one leaves the engine as it was.
Experts are copied into the parameters here and quantized by their layer's method; the rest goes through the model's
own ``load_weights``. Packed experts hold codes: they are dequantized, not quantized again.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from trace_rl import formats
from trace_rl.errors import UserError
from trace_rl.formats import PackedFormat, QuantizedTensor, check_finite
from trace_rl.rollout.vllm_plugin.moe import TraceMoEMethod

Unit = str | tuple[int, str, int]

_FUSED = re.compile(r"\blayers\.(\d+)\.\w+\.experts\.(gate_up_proj|down_proj)$")
_SEPARATE = re.compile(r"\blayers\.(\d+)\.\w+\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_PACKED = re.compile(r"^(.*\.experts\.(?:gate_up_proj|down_proj))\.(codes|block_scale|encode_scale)$")
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


class PolicyWeights:
    """The weights of one vLLM model, addressed by Hugging Face names."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.experts: dict[int, RoutedExperts] = {
            extract_layer_index(name): module
            for name, module in model.named_modules()
            if isinstance(module, RoutedExperts)
        }
        self.modules = {name for name, _ in model.named_modules()}
        self.expected: dict[Unit, tuple[int, ...]] = {}
        """Shape of every unit of the first load."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """First load: take everything, remember the units, check that no parameter was left out."""
        loaded = self._write(self._remember(tensors))
        missing = [
            name
            for name, _ in self.model.named_parameters()
            if name not in loaded and ".routed_experts." not in name and not name.endswith(".routed_experts")
        ]
        missing += [str(unit) for unit in self._expert_units() if unit not in self.expected]
        if missing:
            raise UserError(f"the checkpoint lacks {len(missing)} weights of the model, first {missing[0]}")

    def refit(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace every weight in place and quantize the experts again."""
        tensors = list(tensors)
        self._check(tensors)
        self._write(self._without_tied_head(tensors))
        for layer in self.experts.values():
            layer.quant_method.quantize_weights(layer)

    def _remember(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            check_finite(tensor, name)
            self.expected.update(units_of(name, tensor))
            yield name, tensor

    def _check(self, tensors: list[tuple[str, Tensor]]) -> None:
        for layer in self.experts.values():
            layer.quant_method.check_quantizes()
        seen: set[Unit] = set()
        for name, tensor in self._without_tied_head(tensors):
            for unit, shape in units_of(name, tensor).items():
                if unit not in self.expected:
                    raise UserError(f"load_policy: the engine's model has no weight {name!r}")
                if shape != self.expected[unit]:
                    raise UserError(f"load_policy: {name!r} has shape {shape}, the engine's has {self.expected[unit]}")
                if unit in seen:
                    raise UserError(f"load_policy: {name!r} was given twice")
                seen.add(unit)
            check_finite(tensor, name)
        if missing := self.expected.keys() - seen:
            first = sorted(map(str, missing))[0]
            raise UserError(f"load_policy: {len(missing)} weights are missing, first {first}; pass the whole policy")

    def _without_tied_head(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Drop ``lm_head.weight`` where the head is the embedding: a state dict lists it, the checkpoint may not."""
        for name, tensor in tensors:
            if name != "lm_head.weight" or name in self.expected:
                yield name, tensor

    def _write(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy every tensor into the model; returns the names of the non-expert parameters that were written."""
        return self.model.load_weights(self._split_off_experts(tensors))

    def _split_off_experts(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Copy expert tensors, pass the others on under the names this vLLM model reads."""
        for name, tensor in tensors:
            if match := _FUSED.search(name):
                layer = self._layer(int(match[1]), name)
                weight = layer.w13_weight if match[2] == "gate_up_proj" else layer.w2_weight
                self._copy(weight.data, tensor, name)
            elif match := _SEPARATE.search(name):
                layer = self._layer(int(match[1]), name)
                part, expert = _PARTS[match[3]], int(match[2])
                width = layer.w2_weight.shape[2]
                rows = {"gate": layer.w13_weight[:, :width], "up": layer.w13_weight[:, width:], "down": layer.w2_weight}
                self._copy(rows[part].data[expert], tensor, name)
            else:
                yield self._vllm_name(name), tensor

    def _layer(self, layer_id: int, name: str) -> RoutedExperts:
        if layer_id not in self.experts:
            raise UserError(f"{name}: layer {layer_id} of the engine's model has no routed experts")
        return self.experts[layer_id]

    @staticmethod
    def _copy(target: Tensor, source: Tensor, name: str) -> None:
        if target.shape != source.shape:
            raise UserError(f"{name!r} has shape {tuple(source.shape)}, the engine's model wants {tuple(target.shape)}")
        target.copy_(source)

    def _vllm_name(self, name: str) -> str:
        """vLLM's Mixtral calls the MoE block ``block_sparse_moe``, transformers calls it ``mlp``."""
        for ours, theirs in ((".mlp.", ".block_sparse_moe."), (".block_sparse_moe.", ".mlp.")):
            block, found, rest = name.partition(ours)
            if found and block + ours[:-1] not in self.modules and block + theirs[:-1] in self.modules:
                return block + theirs + rest
        return name

    def _expert_units(self) -> Iterator[Unit]:
        for layer_id, layer in self.experts.items():
            for expert in range(layer.w2_weight.shape[0]):
                yield from ((layer_id, part, expert) for part in ("gate", "up", "down"))


def units_of(name: str, tensor: Tensor) -> dict[Unit, tuple[int, ...]]:
    """The units a tensor covers and their shapes."""
    if match := _FUSED.search(name):
        layer_id = int(match[1])
        num_experts, rows, cols = tensor.shape
        if match[2] == "down_proj":
            return {(layer_id, "down", e): (rows, cols) for e in range(num_experts)}
        return {(layer_id, part, e): (rows // 2, cols) for e in range(num_experts) for part in ("gate", "up")}
    if match := _SEPARATE.search(name):
        return {(int(match[1]), _PARTS[match[3]], int(match[2])): tuple(tensor.shape)}
    return {name.replace(".block_sparse_moe.", ".mlp."): tuple(tensor.shape)}


def checkpoint_tensors(checkpoint_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint directory's safetensors files."""
    files = sorted(checkpoint_dir.glob("*.safetensors"))
    if not files:
        raise UserError(f"{checkpoint_dir}: no *.safetensors files")
    for file in files:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (safe_open is no mapping)
                yield name, shard.get_tensor(name)


def dequantized(tensors: Iterable[tuple[str, Tensor]], *, format: PackedFormat) -> Iterator[tuple[str, Tensor]]:
    """Replace the three parts of each packed expert tensor by its BF16 values; pass everything else."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        match = _PACKED.match(name)
        if not match:
            yield name, tensor
            continue
        found = parts.setdefault(match[1], {})
        found[match[2]] = tensor
        if len(found) == 3:
            yield match[1], _unpack(parts.pop(match[1]), format=format)
    if parts:
        name, found = next(iter(parts.items()))
        raise UserError(f"packed checkpoint: {name} has only {', '.join(sorted(found))}")


def _unpack(parts: dict[str, Tensor], *, format: PackedFormat) -> Tensor:
    """codes [E, R, C/2], block_scale [E, R, C/block], encode_scale [E] -> bfloat16 [E, R, C]."""
    codes, scale = parts["codes"], parts["block_scale"].view(torch.uint8)
    experts = [
        QuantizedTensor(format=format, codes=codes[e], block_scale=scale[e], encode_scale=parts["encode_scale"][e])
        for e in range(codes.shape[0])
    ]
    return torch.stack([expert.dequantize().to(torch.bfloat16) for expert in experts])


def keep_plain_weights(model: nn.Module, *, method: Callable[[], UnquantizedLinearMethod]) -> None:
    """Give linear layers that a model builds without its quantization config (routers) the plain method, too."""
    for module in model.modules():
        if isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod:
            module.quant_method = method()


class TraceModelLoader(BaseModelLoader):
    """vLLM's load format ``trace``: local safetensors, plain or packed, into a ``trace_nvfp4`` model."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing: the model is a local directory."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the directory; leaves the loaded units on the model as ``trace_weights`` for the refit."""
        from trace_rl.rollout.vllm_plugin.quantization import PlainLinearMethod

        methods = [m.quant_method for m in model.modules() if isinstance(m, RoutedExperts)]
        if not methods or not all(isinstance(method, TraceMoEMethod) for method in methods):
            raise UserError(f"{model_config.model}: load format `trace` needs MoE layers and quantization trace_nvfp4")
        if current_platform.is_cpu():
            keep_plain_weights(model, method=PlainLinearMethod)
        weights = PolicyWeights(model)
        tensors = checkpoint_tensors(Path(model_config.model))
        if methods[0].weights_hold_codes:
            tensors = dequantized(tensors, format=formats.packed(methods[0].quant.format.weights))
        weights.load(tensors)
        model.trace_weights = weights
