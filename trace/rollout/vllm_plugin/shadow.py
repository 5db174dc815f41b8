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
from trace_rl.kernels.reference import RecordTarget


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
        self._recorded: dict[tuple[int, str], int] = {}
        """First byte in the row of each recorded (layer, tensor)."""

    def configure(
        self, *, layout: RecordLayout | None, num_slots: int, num_expert_ids: int, device: torch.device
    ) -> None:
        """Record ``layout`` (None: nothing) and ``num_expert_ids`` (the router's k; 0: none) per token and layer."""
        self.layout = layout
        self._recorded = {} if layout is None else {(f.layer, f.tensor): f.start for f in layout.fields}
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

    def target(self, layer_id: int, tensor: str, *, slots: Tensor) -> RecordTarget | None:
        """Where the quantizer writes this tensor's guidance for the tokens at ``slots``; None: it is not recorded."""
        start = self._recorded.get((layer_id, tensor))
        if start is None:
            return None
        return RecordTarget(self.rows, slots, start, self.layout.spec.bits, self.layout.spec.scale_bits)

    def write_experts(self, layer_id: int, *, slots: Tensor, ids: Tensor) -> None:
        """Record the routed expert ``ids`` [tokens, k]."""
        self.experts[slots, self.moe_index[layer_id]] = ids.to(torch.int16)
