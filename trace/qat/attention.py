"""The ``trace`` attention function: K and V are fake-quantized where they arrive, then plain FP32-softmax attention.

Registered in transformers' ``ALL_ATTENTION_FUNCTIONS``; it receives K after its norm and RoPE and V as projected, which
is what a rollout engine writes to its cache. ``[B, kv_heads, T, D]`` is flattened to ``[B*T, kv_heads*D]`` for the
quantizer, the order in which the rollout records one token's K (heads one after another).

The softmax and both products run in FP32 on BF16 operands: at these sizes that is faster on a CPU than BF16
flash attention, whose backward costs 80 ms per layer.

Shapes: B sequences, T queries, S keys, H query heads, G key/value heads, D head dim.
"""

import torch
from torch import Tensor, nn
from transformers.masking_utils import sdpa_mask

from trace_rl.errors import UserError


def trace_mask(*args, **kwargs) -> Tensor | None:
    """Boolean [B, 1, T, S] mask, True where attention is allowed; never skipped, so padding is always masked."""
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


def flatten_heads(x: Tensor) -> Tensor:
    """[B, G, T, D] -> [B*T, G*D], one row per token."""
    batch, heads, length, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch * length, heads * head_dim)


def unflatten_heads(x: Tensor, *, shape: torch.Size) -> Tensor:
    """The inverse of ``flatten_heads`` for the given [B, G, T, D] shape."""
    batch, heads, length, head_dim = shape
    return x.view(batch, length, heads, head_dim).transpose(1, 2)


def quantize_heads(qat, states: Tensor, *, layer: int, tensor: str) -> Tensor:
    """K or V states [B, G, T, D] through the handle's quantizer; the states themselves where it leaves them alone."""
    if not qat.active().touches(layer=layer, tensor=tensor):
        return states
    return unflatten_heads(qat.quantize(flatten_heads(states), layer=layer, tensor=tensor), shape=states.shape)


def trace_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, None]:
    """query [B,H,T,D], key and value [B,G,S,D] -> [B,T,H,D] in the query's dtype."""
    for unsupported in ("s_aux", "softcap"):
        if kwargs.get(unsupported) is not None:
            raise UserError(f"attention with {unsupported} is not supported by the FP4 trainer; choose another model")
    if dropout:
        raise UserError("attention dropout breaks the comparison of train and rollout; set attention_dropout to 0")
    qat = module.trace_qat
    if not qat.active().kv_in_cache:
        key = quantize_heads(qat, key, layer=module.layer_idx, tensor="k")
        value = quantize_heads(qat, value, layer=module.layer_idx, tensor="v")
    return attend(query, key, value, mask=attention_mask, scaling=scaling).to(query.dtype), None


def attend(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scaling: float) -> Tensor:
    """Grouped-query attention in FP32; mask is boolean [B, 1, T, S] or None for no masking. Returns [B,T,H,D]."""
    batch, heads, length, head_dim = query.shape
    groups, span = key.shape[1], key.shape[2]
    per_group = heads // groups
    q = (query.float() * scaling).reshape(batch * groups, per_group * length, head_dim)
    k = key.float().reshape(batch * groups, span, head_dim)
    v = value.float().reshape(batch * groups, span, value.shape[-1])
    scores = torch.bmm(q, k.transpose(1, 2)).view(batch, groups, per_group, length, span)
    if mask is not None:
        # The smallest finite value, not -inf: rows of pure padding stay finite. Added in place, it absorbs the score,
        # and unlike a masked fill needs no pass of its own in the backward: the probabilities there are zero, and rows
        # of pure padding, which no other row attends to, receive no gradient.
        scores += torch.where(mask.unsqueeze(2), 0.0, torch.finfo(torch.float32).min)
    probs = torch.softmax(scores, dim=-1).view(batch * groups, per_group * length, span)
    out = torch.bmm(probs, v)
    return out.view(batch, heads, length, value.shape[-1]).transpose(1, 2)
