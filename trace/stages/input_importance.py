"""How much each input column of an expert matters: h = diag(X^T X), for H-Scale (2608.28113).

X are the calibration tokens routed to the expert: the FC1 input for its gate and up projection, and the FC2 input,
act(gate) * up of the same tokens, for its down projection. Everything in BF16 as the model computes it, the squares
summed in float64 and stored in float32. Under the name of the parameter whose columns they are:

    model.layers.0.mlp.experts.gate_up_proj    float32 [E, H]
    model.layers.0.mlp.experts.down_proj       float32 [E, I]

An expert that no token was routed to has a row of zeros.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from trace_rl.models.families import moe_layers

Importance = dict[str, Tensor]
"""By parameter name, shapes above."""


@contextmanager
def measured_importance(model: PreTrainedModel) -> Iterator[Importance]:
    """Sum over every forward in the block; the dictionary is complete when it ends."""
    sums: Importance = {}
    handles = []
    for moe in moe_layers(model):
        gate_up, down = moe.experts.gate_up_proj, moe.experts.down_proj
        for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
            sums[f"{moe.experts_name}.{name}"] = torch.zeros(weight.shape[0], weight.shape[2], dtype=torch.float64)

        def add(module: nn.Module, args: tuple[Tensor, ...], *, prefix: str = moe.experts_name) -> None:
            hidden_NH, ids_NK = args[0], args[1]
            for expert in ids_NK.unique().tolist():
                x = hidden_NH[(ids_NK == expert).any(dim=1)]
                h = module._apply_gate(linear(x, module.gate_up_proj[expert]))
                sums[f"{prefix}.gate_up_proj"][expert] += x.double().square().sum(0)
                sums[f"{prefix}.down_proj"][expert] += h.double().square().sum(0)

        handles.append(moe.experts.register_forward_pre_hook(add))
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()
        sums.update({name: total.float() for name, total in sums.items()})
