"""The shadow of the KV cache: one row of guidance and of expert ids per KV slot.

A token's KV slot is the one name it has inside the engine that survives batching, chunked prefill and shared
prefixes: whoever reads a slot's K and V was computed with what was recorded at that slot, whichever request wrote it.
So everything is recorded by slot, and read back through a request's block table when it finishes.

Slots are those of one attention layer, the anchor; with several KV cache groups the tokens of a step are in the same
order in all of them, so the anchor's slots name the tokens for every layer. Eager execution never pads a step, so
every slot is a real one.

``capture`` (tests) also keeps the FC1 operands as multiplied; K and V are read from the cache itself.
"""

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from trace_rl.guidance.record import RecordLayout


class Shadow:
    """Recording state of one engine; the layers write, the worker configures and reads."""

    def __init__(self) -> None:
        self.anchor: str | None = None
        self.layout: RecordLayout | None = None
        self.rows: Tensor | None = None
        """uint8 [num_slots, row_bytes], or None while no guidance is recorded."""
        self.experts: Tensor | None = None
        """int16 [num_slots, num_moe_layers, k], or None while routing is not recorded."""
        self.moe_index: dict[int, int] = {}
        """Layer id -> position among the MoE layers."""
        self.captured_fc1: Tensor | None = None
        """bfloat16 [num_slots, num_moe_layers, hidden] in capture mode."""
        self.score_temperature: float | None = None
        self._recorded: frozenset[tuple[int, str]] = frozenset()

    def configure(
        self, *, layout: RecordLayout | None, num_slots: int, num_expert_ids: int, device: torch.device
    ) -> None:
        """Record ``layout`` (None: nothing) and ``num_expert_ids`` (the router's k; 0: none) per token and layer."""
        self.layout = layout
        self._recorded = frozenset() if layout is None else frozenset((f.layer, f.tensor) for f in layout.fields)
        self.rows = None
        self.experts = None
        if layout is not None:
            self.rows = torch.zeros(num_slots, layout.row_bytes, dtype=torch.uint8, device=device)
        if num_expert_ids:
            shape = (num_slots, len(self.moe_index), num_expert_ids)
            self.experts = torch.full(shape, -1, dtype=torch.int16, device=device)

    def records(self, layer_id: int, tensor: str) -> bool:
        """Whether this tensor of this layer is recorded."""
        return (layer_id, tensor) in self._recorded

    def slots(self) -> Tensor | None:
        """int64 KV slots of the step's tokens, in the order of the hidden states; None in a dummy run."""
        mapping = get_forward_context().slot_mapping
        return mapping.get(self.anchor) if isinstance(mapping, dict) else None

    def write(self, layer_id: int, tensor: str, *, slots: Tensor, codes: Tensor, block_scale: Tensor) -> None:
        """Record unpacked ``codes`` [tokens, cols] and ``block_scale`` of one tensor at ``slots``."""
        self.layout.write(self.rows, slots, layer_id, tensor, codes, block_scale)

    def write_experts(self, layer_id: int, *, slots: Tensor, ids: Tensor) -> None:
        """Record the routed expert ``ids`` [tokens, k]."""
        self.experts[slots, self.moe_index[layer_id]] = ids.to(torch.int16)
