"""Trajectories to padded tensors for the trainer's forwards.

Sequences are padded on the right to a multiple of 16: oneDNN builds a kernel per shape, so lengths are bucketed. Row t
of guidance and expert ids belongs to token t. The last token of a trajectory was sampled but never fed, so its position
has no record: ``valid`` is False there and on the padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.trajectory import Trajectory

LENGTH_MULTIPLE = 16


@dataclass(frozen=True)
class ReplayBatch:
    """Padded tensors of B trajectories of at most T tokens."""

    input_ids: Tensor
    """int64 [B, T], 0 on the padding."""
    attention_mask: Tensor
    """int64 [B, T], 1 on tokens."""
    valid: Tensor
    """bool [B, T]: positions that were fed in the rollout and so have a record."""
    response: Tensor
    """bool [B, T]: sampled tokens."""
    logprobs: Tensor
    """float32 [B, T]: rollout log-probability of the token at that position; 0 where it was not sampled."""
    rows: Tensor | None
    """uint8 [B, T, row_bytes] guidance, or None when nothing was recorded."""
    expert_ids: Tensor | None
    """int16 [B, T, moe_layers, K], -1 where not valid, or None when routing was not recorded."""


def collate(trajectories: Sequence[Trajectory], *, length: int | None = None) -> ReplayBatch:
    """Pad to ``length`` tokens, or to the longest trajectory rounded up to a multiple of 16."""
    if not trajectories:
        raise UserError("no trajectories to train on; every one was dropped or the rollout returned none")
    longest = max(t.num_tokens for t in trajectories)
    if length is None:
        length = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    assert length >= longest, (length, longest)
    batch = len(trajectories)
    input_ids = torch.zeros(batch, length, dtype=torch.int64)
    position = torch.arange(length)
    num_tokens = torch.tensor([t.num_tokens for t in trajectories])[:, None]
    prompt_len = torch.tensor([t.prompt_len for t in trajectories])[:, None]
    logprobs = torch.zeros(batch, length)
    rows = _empty([t.record for t in trajectories], length=length, fill=0, what="guidance rows")
    expert_ids = _empty([t.expert_ids for t in trajectories], length=length, fill=-1, what="expert ids")
    for i, t in enumerate(trajectories):
        n = t.num_tokens
        input_ids[i, :n] = t.token_ids
        logprobs[i, t.prompt_len : n] = t.logprobs
        if rows is not None:
            rows[i, : n - 1] = t.record
        if expert_ids is not None:
            expert_ids[i, : n - 1] = t.expert_ids
    return ReplayBatch(
        input_ids=input_ids,
        attention_mask=(position < num_tokens).long(),
        valid=position < num_tokens - 1,
        response=(position >= prompt_len) & (position < num_tokens),
        logprobs=logprobs,
        rows=rows,
        expert_ids=expert_ids,
    )


def token_logprobs(logits: Tensor, input_ids: Tensor, *, temperature: float) -> Tensor:
    """float32 [B, T]: log-probability of the token at each position given those before it; 0 at position 0.

    Differentiable. Temperature 0 (greedy) is read as 1, as in the rollout engines.
    """
    logp = torch.log_softmax(logits[:, :-1].float() / (temperature or 1.0), dim=-1)
    chosen = logp.gather(2, input_ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(chosen, (1, 0))


def _empty(parts: list[Tensor | None], *, length: int, fill: int, what: str) -> Tensor | None:
    have = [p for p in parts if p is not None]
    if not have:
        return None
    if len(have) != len(parts):
        raise UserError(f"{len(parts) - len(have)} of {len(parts)} trajectories lack {what}; do not mix recordings")
    return torch.full((len(parts), length, *have[0].shape[1:]), fill, dtype=have[0].dtype)
