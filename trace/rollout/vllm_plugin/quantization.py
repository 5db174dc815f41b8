"""``trace_nvfp4``: the quantization config vLLM builds a model with.

The config comes from the ``quantization_config`` of the Hugging Face config (of a packed checkpoint, or passed by
``hf_overrides``):

    {"quant_method": "trace_nvfp4", "quant": QuantSpec, "scales": StaticScales | null, "packed": bool}

With every scope off it is pure BF16: the same code runs the BF16 control. Linear layers and embeddings are BF16 and
keep plain weights: vLLM's own methods prepack them on CPU and drop the original, after which new weights cannot be
loaded in place (its reload then corrupts silently).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import extract_layer_index

from trace_rl import formats
from trace_rl.config.quant import QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.rollout.vllm_plugin import QUANTIZATION
from trace_rl.rollout.vllm_plugin.attention import KVQuantizer, QuantizedCacheWrite
from trace_rl.rollout.vllm_plugin.moe import TraceMoEMethod
from trace_rl.rollout.vllm_plugin.shadow import Shadow


class PlainLinearMethod(UnquantizedLinearMethod):
    """A BF16 linear layer whose weight stays as loaded, so that it can be overwritten in place."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing: no prepacking."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out]."""
        return F.linear(x, layer.weight, bias)


class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Embedding and output head with plain weights; the head divides its logits by the scoring temperature, if any."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing: no prepacking."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of hidden states; float32 and divided by the temperature while scoring, as vLLM's sampler does it."""
        logits = F.linear(x, layer.weight, bias)
        if self.shadow.score_temperature is None:
            return logits
        return logits.float().div_(self.shadow.score_temperature)


class TraceConfig(QuantizationConfig):
    """Routed experts and KV cache in FP4 as ``quant`` says, everything else BF16. One per engine; owns the shadow."""

    def __init__(self, *, quant: QuantSpec, scales: StaticScales | None, packed: bool) -> None:
        super().__init__()
        self.quant = quant
        self.scales = scales
        self.packed = packed
        self.shadow = Shadow()
        if scales is None and (quant.activations or quant.kv):
            raise UserError("quantization_config has no `scales`; FP4 activations and KV need calibrated static scales")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TraceConfig":
        """Parse the ``quantization_config`` dictionary."""
        scales = config.get("scales")
        return cls(
            quant=QuantSpec(**config.get("quant", {})),
            scales=scales and StaticScales.from_json(scales),
            packed=bool(config.get("packed", False)),
        )

    def get_name(self) -> str:
        """The name in ``quant_method``."""
        return QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """BF16 only: both sides multiply BF16 operands."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any GPU that computes in BF16."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the config is part of config.json."""
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of one layer; attention layers get their KV quantizer attached and no weight method."""
        if isinstance(layer, RoutedExperts):
            return TraceMoEMethod(layer.moe_config, config=self, layer_id=extract_layer_index(prefix))
        if isinstance(layer, VocabParallelEmbedding | ParallelLMHead):
            return PlainEmbeddingMethod(self.shadow)
        if isinstance(layer, LinearBase):
            return PlainLinearMethod()
        if isinstance(layer, Attention):
            self._attach_kv_quantizer(layer, prefix)
        return None

    def _attach_kv_quantizer(self, layer: Attention, prefix: str) -> None:
        if not self.quant.kv or layer.impl is None:
            return
        if not isinstance(layer.impl, QuantizedCacheWrite):
            raise UserError(
                f"{prefix}: an FP4 KV cache is not implemented for attention backend "
                f"{layer.attn_backend.get_name()}; use the CPU engine or set quant.kv to false"
            )
        layer_id = extract_layer_index(prefix)
        layer.impl.kv_quantizer = KVQuantizer(
            format=formats.get(self.quant.format.kv),
            shadow=self.shadow,
            layer_id=layer_id,
            k_scale=self.scales.get("k", layer_id),
            v_scale=self.scales.get("v", layer_id),
        )
