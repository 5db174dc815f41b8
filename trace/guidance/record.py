"""The record: one token's guidance as one byte row of fixed length.

A row is the concatenation, over guided layers in order and in each over FC1 input, K and V, of

    [ payload: cols * bits / 8 bytes | scales: cols/block bytes, or a quarter of it with scale_bits 2 ]

so a buffer indexed by KV slot is a plain uint8 matrix: recording is a row scatter, collecting a request is a row
gather, and nothing needs an index or a header. FC1 exists in MoE layers (one hidden vector per token, shared by its
experts), K and V in layers with a KV cache (num_kv_heads*head_dim columns, head after head).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

import torch
from torch import Tensor

from trace_rl.config.guidance import GuidanceSpec
from trace_rl.errors import UserError
from trace_rl.guidance.bits import pack_bits, packed_bytes, unpack_bits
from trace_rl.guidance.scales import pack_scales, packed_scale_bytes

TENSORS = ("fc1", "k", "v")


@dataclass(frozen=True)
class ModelDims:
    """What recording must know of a model."""

    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    moe_layers: tuple[int, ...]
    """Layers with routed experts, ascending."""
    attention_layers: tuple[int, ...]
    """Layers with a KV cache (linear-attention layers have none), ascending."""
    num_experts: int
    top_k: int

    @classmethod
    def from_config(cls, config: Any) -> "ModelDims":
        """From a Hugging Face config: the dict of config.json, or a config object; multimodal ones by `text_config`."""
        values = _ConfigValues(config)
        num_layers = values.require("num_hidden_layers")
        hidden_size = values.require("hidden_size")
        num_heads = values.require("num_attention_heads")
        layers = range(num_layers)
        return cls(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_kv_heads=values.get("num_key_value_heads") or num_heads,
            head_dim=values.get("head_dim") or hidden_size // num_heads,
            moe_layers=tuple(layer for layer in layers if _is_moe(values, layer)),
            attention_layers=tuple(layer for layer in layers if _has_kv_cache(values, layer)),
            num_experts=values.require("num_experts", "num_local_experts", "n_routed_experts"),
            top_k=values.require("num_experts_per_tok", "num_experts_per_token", "moe_top_k"),
        )

    def columns(self, tensor: str) -> int:
        """Values per token of a guided tensor."""
        return self.hidden_size if tensor == "fc1" else self.num_kv_heads * self.head_dim

    def layers_with(self, tensor: str) -> tuple[int, ...]:
        """Layers that have this tensor."""
        return self.moe_layers if tensor == "fc1" else self.attention_layers


@dataclass(frozen=True)
class Field:
    """One guided tensor of one layer: columns, and where its bytes sit in the row."""

    layer: int
    tensor: str
    cols: int
    start: int
    middle: int
    stop: int
    block_size: int
    """Values per block scale: the format's."""

    @property
    def payload(self) -> slice:
        """Bytes of the packed code bits."""
        return slice(self.start, self.middle)

    @property
    def scales(self) -> slice:
        """Bytes of the block scales."""
        return slice(self.middle, self.stop)


@dataclass(frozen=True)
class RecordLayout:
    """Byte layout of a record row. `build` makes it; equal spec and dims give equal layouts."""

    spec: GuidanceSpec
    dims: ModelDims
    fields: tuple[Field, ...]
    row_bytes: int
    _index: dict[tuple[int, str], Field] = dataclass_field(repr=False, compare=False)

    @classmethod
    def build(cls, spec: GuidanceSpec, dims: ModelDims, *, block_size: int | Mapping[str, int] = 16) -> "RecordLayout":
        """Layout for this guidance on this model; block_size is the format's (16 for NVFP4), or each tensor's
        (`trace_rl.formats.block_sizes`)."""
        sizes = dict.fromkeys(TENSORS, block_size) if isinstance(block_size, int) else block_size
        guided = spec.layer_ids(dims.num_layers)
        fields, offset = [], 0
        for layer in guided:
            for tensor in TENSORS:
                if tensor not in spec.tensors or layer not in dims.layers_with(tensor):
                    continue
                cols, block = dims.columns(tensor), sizes[tensor]
                if cols % block or (tensor != "fc1" and dims.head_dim % block):
                    raise UserError(
                        f"layer {layer}, {tensor}: {cols} columns (head_dim {dims.head_dim}) do not divide into blocks "
                        f"of {block}; use a format with smaller blocks, or drop {tensor!r} from guidance.tensors"
                    )
                middle = offset + packed_bytes(cols, spec.bits)
                stop = middle + packed_scale_bytes(cols // block, spec.scale_bits)
                fields.append(Field(layer, tensor, cols, offset, middle, stop, block))
                offset = stop
        index = {(field.layer, field.tensor): field for field in fields}
        return cls(spec, dims, tuple(fields), offset, index)

    def field(self, layer: int, tensor: str) -> Field | None:
        """The field of a tensor, None if it is not guided."""
        return self._index.get((layer, tensor))

    def write(self, buffer: Tensor, rows: Tensor, layer: int, tensor: str, codes: Tensor, block_scale: Tensor) -> None:
        """Write one tensor of T tokens into rows of the buffer, in place.

        buffer uint8 [slots, row_bytes]; rows int64 [T], distinct; codes unpacked uint8 [T, cols]; block_scale uint8
        [T, cols/block].
        """
        field = self._require(layer, tensor)
        packed = torch.cat((pack_bits(codes, self.spec.bits), pack_scales(block_scale, self.spec.scale_bits)), dim=1)
        buffer[:, field.start : field.stop].index_copy_(0, rows, packed)

    def read(self, rows: Tensor, layer: int, tensor: str) -> tuple[Tensor, Tensor]:
        """(unpacked guidance uint8 [T, cols], block scales uint8 as recorded) of rows uint8 [T, row_bytes].

        With scale_bits 2 the second is packed; `recover_scales` turns it into block scales.
        """
        planes, scales = self.packed(rows, layer, tensor)
        return unpack_bits(planes, self.spec.bits, self.dims.columns(tensor)), scales.contiguous()

    def packed(self, rows: Tensor, layer: int, tensor: str) -> tuple[Tensor, Tensor]:
        """(packed guidance, block scales) as recorded: column ranges of ``rows`` uint8 [T, row_bytes], not copied."""
        field = self._require(layer, tensor)
        return rows[:, field.payload], rows[:, field.scales]

    def _require(self, layer: int, tensor: str) -> Field:
        field = self._index.get((layer, tensor))
        if field is None:
            raise UserError(
                f"the record has no {tensor!r} of layer {layer}: guidance.layers is {self.spec.layers!r} and "
                f"guidance.tensors {self.spec.tensors}"
            )
        return field


class _ConfigValues:
    """Uniform access to a config dict or object, looking into `text_config` where there is one."""

    def __init__(self, config: Any):
        values = config if isinstance(config, Mapping) else config.to_dict()
        self._values = values.get("text_config") or values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def require(self, *names: str) -> int:
        for name in names:
            if self._values.get(name) is not None:
                return self._values[name]
        raise UserError(
            f"the model config has none of {', '.join(names)}: it is not the config.json of a mixture-of-experts model"
        )


def _is_moe(values: _ConfigValues, layer: int) -> bool:
    if layer in (values.get("mlp_only_layers") or ()) or layer < (values.get("first_k_dense_replace") or 0):
        return False
    if values.get("mlp_layer_types"):
        return values.get("mlp_layer_types")[layer] == "sparse"
    return (layer + 1) % (values.get("decoder_sparse_step") or 1) == 0


def _has_kv_cache(values: _ConfigValues, layer: int) -> bool:
    if values.get("layer_types"):
        return values.get("layer_types")[layer] not in ("linear_attention", "mamba", "conv")
    return (layer + 1) % (values.get("full_attention_interval") or 1) == 0
