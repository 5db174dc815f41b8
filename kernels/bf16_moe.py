"""Routed SwiGLU experts in BF16, as PyTorch computes them: what `w4a16_moe` is measured against.

Three versions, because none is the fastest everywhere: a loop over the experts, PyTorch's grouped product, and a padded
batched product. Each gets the best case. The experts that a batch reaches are neighbours, so `bmm` reads a view of the
weights; loop and `bmm` find their indices ready-made. `grouped` sorts the pairs itself, as the packed kernels do.
Results are rounded where the packed layer rounds, except that gate and up become BF16 before SiLU.

Shapes: T tokens, K experts per token, E experts, H hidden, I expert width; gate_up [E, 2I, H] (gate rows first), down
[E, H, I].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """T tokens and where they go. The experts they reach are `first` to `first + count - 1`."""

    x_TH: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    first: int
    count: int
    members: list[tuple[int, Tensor, Tensor]]
    """(expert, its tokens [n], their weights [n, 1]) of each expert."""
    padded: Tensor
    """int64 [count, most tokens of an expert]: tokens of each expert, filled up with token 0."""
    padded_weights: Tensor
    """float32, padded's shape: 0 where it was filled up."""


def make_batch(tokens: int, *, place: int, device: str, hidden: int, num_experts: int, top_k: int) -> Batch:
    """Random routing whose experts are made neighbours, from the `place`-th of the stretches this divides E into."""
    chosen = torch.rand(tokens, num_experts).argsort(dim=1)[:, :top_k]
    used, ids = torch.unique(chosen, return_inverse=True)
    count = len(used)
    first = place * count % (num_experts - count + 1)
    weights = torch.rand(tokens, top_k)
    weights /= weights.sum(dim=1, keepdim=True)
    pairs = [(ids == expert).nonzero(as_tuple=True) for expert in range(count)]
    most = max(len(token) for token, _ in pairs)
    padded, padded_weights = torch.zeros(count, most, dtype=torch.int64), torch.zeros(count, most)
    for row, (token, k) in enumerate(pairs):
        padded[row, : len(token)], padded_weights[row, : len(token)] = token, weights[token, k]
    members = [
        (first + row, token.to(device), weights[token, k, None].to(device)) for row, (token, k) in enumerate(pairs)
    ]
    x = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
    moved = (weights.to(device), (ids + first).to(device))
    return Batch(x, *moved, first, count, members, padded.to(device), padded_weights.to(device))


def loop(batch: Batch, gate_up: Tensor, down: Tensor) -> Tensor:
    """Expert after expert, indices ready-made."""
    out = torch.zeros(batch.x_TH.shape, dtype=torch.float32, device=batch.x_TH.device)
    for expert, token, weight in batch.members:
        gate, up = (batch.x_TH[token] @ gate_up[expert].T).chunk(2, dim=1)
        hidden = torch.nn.functional.silu(gate) * up
        out.index_add_(0, token, (hidden @ down[expert].T).float() * weight)
    return out.to(torch.bfloat16)


def bmm(batch: Batch, gate_up: Tensor, down: Tensor) -> Tensor:
    """All experts at once, each with as many tokens as the fullest; indices ready-made."""
    experts = slice(batch.first, batch.first + batch.count)
    gate, up = torch.bmm(batch.x_TH[batch.padded], gate_up[experts].mT).chunk(2, dim=2)
    pairs = torch.bmm(torch.nn.functional.silu(gate) * up, down[experts].mT).float() * batch.padded_weights[..., None]
    out = torch.zeros(batch.x_TH.shape, dtype=torch.float32, device=batch.x_TH.device)
    return out.index_add_(0, batch.padded.flatten(), pairs.flatten(0, 1)).to(torch.bfloat16)


def grouped(batch: Batch, gate_up: Tensor, down: Tensor) -> Tensor:
    """PyTorch's grouped product of the pairs, sorted by expert here."""
    ids, order = torch.sort(batch.ids_TK.flatten())
    token = order // batch.ids_TK.shape[1]
    experts = torch.arange(len(down), device=ids.device)
    ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
    grouped_mm = torch.nn.functional.grouped_mm
    gate, up = grouped_mm(batch.x_TH[token], gate_up.mT, offs=ends).chunk(2, dim=1)
    pairs = grouped_mm(torch.nn.functional.silu(gate) * up, down.mT, offs=ends).float()
    out = torch.zeros(batch.x_TH.shape, dtype=torch.float32, device=batch.x_TH.device)
    return out.index_add_(0, token, pairs * batch.weights_TK.flatten()[order, None]).to(torch.bfloat16)


VERSIONS: dict[str, Callable[[Batch, Tensor, Tensor], Tensor]] = {
    "bf16 loop": loop,
    "bf16 grouped_mm": grouped,
    "bf16 bmm": bmm,
}
