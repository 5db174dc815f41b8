"""From a Hugging Face `config.json` to what the decode model must know, and the packaged models and hardware.

Layers, KV heads and experts are parsed where recording parses them (`trace_rl.guidance.record.ModelDims`), so the two
cannot disagree about a model. What the decode model could only get wrong is refused by name: latent attention (its
cache is not 2 * kv_heads * head_dim values), sliding windows (their cache stops growing) and unknown layer types.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from trace_rl.errors import UserError
from trace_rl.guidance.record import ModelDims
from trace_rl.stages.decode_model import Architecture, Hardware, LinearAttention, SparseAttention

GATED_QUERY = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text")
"""Model types whose full attention has an output gate; newer configs say so themselves (`attn_output_gate`)."""
LAYER_TYPES = {"full_attention", "linear_attention"}
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PackagedModel:
    """A model of the paper: its config's architecture fields, and where they were read."""

    name: str
    source: str
    config: Mapping[str, Any]


@cache
def packaged() -> Mapping[str, Any]:
    """The content of decode_models.yaml."""
    return yaml.safe_load((resources.files("trace_rl.stages") / "decode_models.yaml").read_text())


def packaged_models() -> list[PackagedModel]:
    """The paper's four models."""
    return [PackagedModel(name, item["source"], item["config"]) for name, item in packaged()["models"].items()]


def packaged_hardware(name: str) -> Hardware:
    """A line of decode_models.yaml, or several of its devices: `B200`, `B200x8`; UserError for others."""
    lines = packaged()["hardware"]
    line, _, count = name.partition("x")
    if line not in lines or (count and (not count.isdecimal() or int(count) < 1)):
        raise UserError(
            f"--hardware {name}: not known; give one of {', '.join(lines)}, with a number of devices where you like "
            f"(B200x8), or CPU for this host, which is measured"
        )
    values = {key: value for key, value in lines[line].items() if key != "source"}
    return Hardware(name=line, **values, devices=int(count or 1))


def read_architecture(name: str, config: Mapping[str, Any]) -> Architecture:
    """From the dict of config.json (multimodal ones by `text_config`); UserError for what the model would get wrong."""
    dims = ModelDims.from_config(config)
    values = _Fields(name, config.get("text_config") or config)
    _refuse_unknown_attention(values)
    attention_layers, moe_layers = len(dims.attention_layers), len(dims.moe_layers)
    linear_layers = dims.num_layers - attention_layers
    dense_mlp_layers = dims.num_layers - moe_layers
    hidden = dims.hidden_size
    residual_weights, lookup_weights = _residual_streams(values, hidden=hidden, num_layers=dims.num_layers)
    return Architecture(
        name=name,
        hidden_size=hidden,
        num_heads=values.require("num_attention_heads"),
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        attention_layers=attention_layers,
        linear_layers=linear_layers,
        moe_layers=moe_layers,
        dense_mlp_layers=dense_mlp_layers,
        num_experts=dims.num_experts,
        top_k=dims.top_k,
        expert_size=values.require("moe_intermediate_size", "intermediate_size"),
        shared_expert_size=_shared_expert_size(values),
        dense_mlp_size=values.require("intermediate_size") if dense_mlp_layers else 0,
        vocab_size=values.require("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", values.get("tie_word_embeddings"))),
        output_gate=bool(values.get("attn_output_gate", values.get("model_type") in GATED_QUERY)),
        linear=_linear_attention(values) if linear_layers else None,
        sparse=_sparse_attention(values),
        other_weights=residual_weights,
        lookup_weights=lookup_weights,
    )


class _Fields:
    """Fields of a config, with the model's name in every error."""

    def __init__(self, name: str, values: Mapping[str, Any]):
        self.name, self._values = name, values

    def get(self, field: str, default: Any = None) -> Any:
        value = self._values.get(field)
        return default if value is None else value

    def require(self, *fields: str) -> int:
        """The first of these fields that is there, as a positive number."""
        for field in fields:
            value = self._values.get(field)
            if value is not None:
                if not isinstance(value, int) or value < 1:
                    raise UserError(f"{self.name}: {field} is {value!r}; expected a positive whole number")
                return value
        raise UserError(f"{self.name}: the config has no {' or '.join(fields)}; give the model's own config.json")


def _refuse_unknown_attention(values: _Fields) -> None:
    if values.get("kv_lora_rank"):
        raise UserError(f"{values.name}: latent attention (kv_lora_rank) is not modelled, its KV bytes would be wrong")
    if values.get("sliding_window") and values.get("use_sliding_window", True):
        raise UserError(f"{values.name}: sliding-window attention is not modelled, its KV bytes would be wrong")
    unknown = sorted(set(values.get("layer_types", ())) - LAYER_TYPES)
    if unknown:
        raise UserError(f"{values.name}: layer types {unknown} are not modelled; known: {sorted(LAYER_TYPES)}")


def _shared_expert_size(values: _Fields) -> int:
    size = values.get("shared_expert_intermediate_size") or values.get("shared_intermediate_size")
    if size:
        return size
    count = values.get("n_shared_experts", 0)
    return count * values.require("moe_intermediate_size") if count else 0


def _linear_attention(values: _Fields) -> LinearAttention:
    dtype = values.get("mamba_ssm_dtype", "bfloat16")  # METHOD.md section 2: BF16 unless the model says otherwise
    if dtype not in STATE_BYTES:
        raise UserError(f"{values.name}: mamba_ssm_dtype is {dtype!r}; known: {', '.join(STATE_BYTES)}")
    return LinearAttention(
        key_heads=values.require("linear_num_key_heads"),
        key_dim=values.require("linear_key_head_dim"),
        value_heads=values.require("linear_num_value_heads"),
        value_dim=values.require("linear_value_head_dim"),
        conv_kernel=values.require("linear_conv_kernel_dim"),
        state_bytes_per_value=STATE_BYTES[dtype],
    )


def _sparse_attention(values: _Fields) -> SparseAttention | None:
    if not values.get("indexer_budget"):
        return None
    return SparseAttention(
        heads=values.require("indexer_n_heads"),
        head_dim=values.require("indexer_head_dim"),
        budget=values.require("indexer_budget"),
        compress=values.require("indexer_compress_ratio"),
    )


def _residual_streams(values: _Fields, *, hidden: int, num_layers: int) -> tuple[int, int]:
    """(dense weights, table weights) of the hyper-connections and per-layer n-gram embeddings of qwen4_exp.

    Two mixers a layer (before attention and before the experts) and a last one that only reads. The tables have about
    `ngram_vocab_size_base` rows a head (the next primes), of which a token reads one.
    """
    streams = values.get("hc_count", 0)
    if not streams:
        return 0, 0
    wide = streams * hidden
    mixer = 2 * wide * values.require("hc_lowrank")
    weights = 2 * num_layers * (mixer + wide * streams) + mixer
    tables = len(values.get("ple_layer_ids", ()))
    embedding = values.get("ple_embed_dim", hidden)
    kernel = values.require("ple_conv_kernel_size") if tables else 0
    weights += tables * (embedding * (wide + hidden) + wide * kernel)
    return weights, tables * values.require("ngram_vocab_size_base") * embedding if tables else 0
