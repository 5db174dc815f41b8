"""The FP4 KV cache: K and V are quantized and dequantized on their way into the cache.

K arrives after its norm and RoPE. Both are quantized per token and head in blocks along the head dimension, with the
layer's static encode scales, and the cache holds ``xhat`` in BF16: what attention reads is exactly what was recorded.
The scale bytes and codes are recorded at the token's KV slot. Every later token reads the cache, the token itself
included, so nothing unquantized is ever used.

:class:`QuantizedCacheWrite` is independent of the backend. A CUDA backend is the same two classes on top of one of
vLLM's (``FlashAttentionImpl``, ...); none is shipped, because none was tested.
"""

from torch import Tensor, nn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from trace_rl.formats import Format
from trace_rl.kernels.dispatch import quantize_record
from trace_rl.rollout.vllm_plugin.shadow import Shadow


class KVQuantizer:
    """Quantizes one layer's K and V and records the codes."""

    def __init__(self, *, format: Format, shadow: Shadow, layer_id: int, k_scale: float, v_scale: float) -> None:
        self.format = format
        self.shadow = shadow
        self.layer_id = layer_id
        self.encode_scales = {"k": k_scale, "v": v_scale}

    def __call__(self, x_TNH: Tensor, *, tensor: str, slots: Tensor) -> Tensor:
        """BF16 xhat of ``x_TNH`` [tokens, kv heads, head dim]; ``tensor`` is "k" or "v", ``slots`` [tokens]."""
        x_TC = x_TNH.reshape(x_TNH.shape[0], -1)
        target = self.shadow.target(self.layer_id, tensor, slots=slots)
        return quantize_record(x_TC, self.encode_scales[tensor], fmt=self.format, target=target, check=False).xhat.view(
            x_TNH.shape
        )


class QuantizedCacheWrite:
    """Mixin for a vLLM attention implementation: quantize K and V before they are written.

    Without a quantizer (other models, or the KV scope off) the call passes through untouched.
    """

    kv_quantizer: KVQuantizer | None = None

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """vLLM's hook; key and value are [tokens, kv heads, head dim]."""
        if self.kv_quantizer is not None:
            key = self.kv_quantizer(key, tensor="k", slots=slot_mapping)
            value = self.kv_quantizer(value, tensor="v", slots=slot_mapping)
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class TraceCPUAttentionImpl(QuantizedCacheWrite, CPUAttentionBackendImpl):
    """The stock CPU implementation with the quantized write."""


class TraceCPUAttentionBackend(CPUAttentionBackend):
    """The stock CPU backend with the implementation above."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The implementation class."""
        return TraceCPUAttentionImpl
