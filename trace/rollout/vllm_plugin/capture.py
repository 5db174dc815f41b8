"""Capture mode (tests): read K and V back from the KV cache, exactly as attention reads them.

The CPU kernels keep a block's interior in a layout of their own that depends on the instruction set. It is a fixed
permutation of the values, so it is found by writing a block of known bit patterns with vLLM's own write kernel and
looking where each one went.
"""

import torch
from torch import Tensor
from vllm import _custom_ops as ops


class CacheReader:
    """Reads K and V of any slots from the caches of the given attention layers."""

    def __init__(self, model_runner: object, *, layer_names: list[str]) -> None:
        context = model_runner.compilation_config.static_forward_context
        self.layers = [context[name] for name in layer_names]
        self._permutation: Tensor | None = None

    def read(self, slots: Tensor) -> dict[str, Tensor]:
        """``k`` and ``v``: bfloat16 [slots, layers, kv heads * head dim]."""
        keys, values = zip(*(self._read_layer(layer, slots) for layer in self.layers), strict=True)
        return {"k": torch.stack(keys, dim=1), "v": torch.stack(values, dim=1)}

    def _read_layer(self, layer: torch.nn.Module, slots: Tensor) -> tuple[Tensor, Tensor]:
        _, num_heads, block_size, width = layer.kv_cache.shape
        if self._permutation is None:
            self._permutation = _find_permutation(layer, block_size=block_size, head_dim=width // 2)
        blocks = layer.kv_cache.index_select(0, slots // block_size).flatten(2)  # [n, heads, block*2*dim]
        where = self._permutation.index_select(1, slots % block_size)  # [2, n, dim]
        k, v = (blocks.gather(2, where[i][:, None, :].expand(-1, num_heads, -1)).flatten(1) for i in range(2))
        return k, v


def _find_permutation(layer: torch.nn.Module, *, block_size: int, head_dim: int) -> Tensor:
    """int64 [2 (k, v), block_size, head_dim]: index of each value inside one head's flattened block."""
    count = block_size * head_dim
    assert 2 * count < 0x7F80, "more values than finite positive bfloat16 patterns"
    codes = torch.arange(1, 2 * count + 1, dtype=torch.int16).view(torch.bfloat16).view(2, block_size, 1, head_dim)
    cache = torch.zeros(1, 1, 2 * block_size, head_dim, dtype=torch.bfloat16)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.arange(block_size, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(codes[0], codes[1], key_cache, value_cache, slots, layer.isa)
    found = cache.flatten().view(torch.int16).long()
    where = torch.empty(2 * count + 1, dtype=torch.int64)
    where[found] = torch.arange(2 * count)
    return where[1:].view(2, block_size, head_dim)
