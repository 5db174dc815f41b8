"""From trajectories to the padded tensors of one forward pass.

The last token of a trajectory is never fed, so rows are the n - 1 fed tokens and every valid row has a record. Width is
rounded up to a multiple of 8: oneDNN keeps one kernel per shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_rl.trajectory import Trajectory

WIDTH_MULTIPLE = 8


@dataclass(frozen=True)
class PackedBatch:
    """B trajectories right-padded to T fed tokens."""

    input_ids: Tensor
    """int64 [B, T]"""
    valid: Tensor
    """bool [B, T]: positions that hold a fed token."""
    targets: Tensor
    """int64 [B, T]: the next token."""
    response: Tensor
    """bool [B, T]: positions whose target is a response token."""
    rollout_logprobs: Tensor
    """float32 [N]: of the response tokens, in row-major order of ``response``."""
    trajectory_index: Tensor
    """int64 [N]: the trajectory of each response token."""
    record: Tensor | None
    """uint8 [B, T, row_bytes] guidance rows, or None."""
    expert_ids: Tensor | None
    """int16 [B, T, moe_layers, k], or None."""
    top_ids: Tensor | None = None
    """int64 [N, K]: the rollout's most probable tokens, in the order of ``rollout_logprobs``, or None."""
    top_logprobs: Tensor | None = None
    """float32 [N, K]: their log-probs in the engine, or None."""

    @property
    def num_response_tokens(self) -> int:
        return self.rollout_logprobs.numel()


def pack(trajectories: Sequence[Trajectory], *, pad_id: int) -> PackedBatch:
    """Pad trajectories into one batch."""
    num = len(trajectories)
    width = max(t.num_tokens for t in trajectories) - 1
    width += -width % WIDTH_MULTIPLE
    input_ids = torch.full((num, width), pad_id, dtype=torch.int64)
    targets = torch.full((num, width), pad_id, dtype=torch.int64)
    valid = torch.zeros(num, width, dtype=torch.bool)
    response = torch.zeros(num, width, dtype=torch.bool)
    first = trajectories[0]
    record = None if first.record is None else torch.zeros(num, width, first.record.shape[1], dtype=torch.uint8)
    experts = (
        None if first.expert_ids is None else torch.zeros(num, width, *first.expert_ids.shape[1:], dtype=torch.int16)
    )
    for row, trajectory in enumerate(trajectories):
        fed = trajectory.num_tokens - 1
        ids = trajectory.token_ids.long()
        input_ids[row, :fed] = ids[:-1]
        targets[row, :fed] = ids[1:]
        valid[row, :fed] = True
        response[row, trajectory.prompt_len - 1 : fed] = True
        if record is not None:
            record[row, :fed] = trajectory.record
        if experts is not None:
            experts[row, :fed] = trajectory.expert_ids
    return PackedBatch(
        input_ids=input_ids,
        valid=valid,
        targets=targets,
        response=response,
        rollout_logprobs=torch.cat([t.logprobs for t in trajectories]),
        trajectory_index=response.nonzero()[:, 0],
        record=record,
        expert_ids=experts,
        top_ids=None if first.top_ids is None else torch.cat([t.top_ids for t in trajectories]).long(),
        top_logprobs=None if first.top_logprobs is None else torch.cat([t.top_logprobs for t in trajectories]),
    )
