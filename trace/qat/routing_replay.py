"""Routing replay R3 (2510.11370): the rollout's expert choice, the trainer's gate values.

A forward hook on every router replaces the selected experts by the recorded ids and recomputes their gate values from
the trainer's live logits, so gradients still reach the router:

    renormalizing routers   softmax over the selected logits
    others                  softmax over all logits, then select

Positions without a record (padding, the last token, which the rollout never fed) keep the live choice: no loss
depends on them. Every other position must have a full set of valid ids; ``check_expert_ids`` refuses anything else
before the forward starts. The softmax runs in FP32 and is rounded to the dtype the router itself returns.
"""

import torch
from torch import Tensor, nn

from trace_rl.errors import UserError


def check_expert_ids(ids_NLK: Tensor, *, valid_N: Tensor, num_experts: int, num_layers: int, top_k: int) -> None:
    """Raise ``UserError`` unless every valid position has ``top_k`` distinct ids in [0, num_experts) in every layer."""
    if ids_NLK.shape[1:] != (num_layers, top_k):
        raise UserError(
            f"recorded expert ids have {tuple(ids_NLK.shape[1:])} (MoE layers, experts per token), the model has "
            f"{(num_layers, top_k)}; the rollout was made by another model"
        )
    bad = (ids_NLK < 0) | (ids_NLK >= num_experts)
    if top_k > 1:
        ordered = ids_NLK.sort(dim=-1).values
        bad[..., 1:] |= ordered[..., 1:] == ordered[..., :-1]
    bad &= valid_N[:, None, None]
    if bool(bad.any()):
        position, layer, _ = bad.nonzero()[0].tolist()
        raise UserError(
            f"routing replay: position {position}, MoE layer {layer} has expert ids "
            f"{ids_NLK[position, layer].tolist()}; expected {top_k} distinct ids in [0, {num_experts}). "
            "Record the rollout with record_experts=True and replay it on the same model"
        )


def gate_values(logits_NE: Tensor, ids_NK: Tensor, *, renormalizes: bool) -> Tensor:
    """Gate values [N, K] in FP32 of the given experts from live router logits."""
    if renormalizes:
        return torch.softmax(logits_NE.gather(1, ids_NK).float(), dim=-1)
    return torch.softmax(logits_NE.float(), dim=-1).gather(1, ids_NK)


def router_hook(module: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...] | None:
    """The forward hook; returns the router's output with ids and gate values replaced, or None to leave it alone."""
    qat = module.trace_qat
    state = qat.active()
    if state.expert_ids is None and state.recorder is None:
        return None
    named = dict(zip(qat.family.router_output, output, strict=True))
    if state.recorder is not None:
        state.recorder.on_experts(module.trace_moe_index, named["ids"])
    if state.expert_ids is None:
        return None
    live = named["ids"].reshape(-1, named["ids"].shape[-1])
    recorded = state.expert_ids[:, module.trace_moe_index]
    if state.collector is not None:
        state.collector.on_routing(layer=module.trace_layer, live=live, replayed=recorded, valid=state.valid)
    if not state.replay:
        return None
    ids = torch.where(state.valid[:, None], recorded, live)
    weights = gate_values(named["logits"], ids, renormalizes=qat.renormalizes).to(named["weights"].dtype)
    state.replayed_layers.add(module.trace_moe_index)
    named["ids"], named["weights"] = ids, weights.view(named["weights"].shape)
    return tuple(named[name] for name in qat.family.router_output)
