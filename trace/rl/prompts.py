"""The data cursor: batch ``i`` of a run is a pure function of (seed, i).

Each epoch is its own seeded permutation of the problems, so a resumed run needs no cursor state and a batch never
depends on what was consumed before.
"""

from collections.abc import Sequence

import torch

from trace_rl.errors import UserError


class PromptStream:
    """Problems in seeded order, by batch."""

    def __init__(self, token_ids: Sequence[list[int]], *, prompts_per_step: int, seed: int) -> None:
        if not token_ids:
            raise UserError("the RL dataset is empty; raise data.rl_problems")
        if len(token_ids) < prompts_per_step:
            raise UserError(
                f"the RL dataset has {len(token_ids)} problems, fewer than training.prompts_per_step "
                f"{prompts_per_step}; raise data.rl_problems or lower prompts_per_step"
            )
        self._token_ids = token_ids
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def token_ids(self, problem: int) -> list[int]:
        """Prompt tokens of a problem."""
        return self._token_ids[problem]

    def batch(self, index: int) -> list[int]:
        """Problem indices of batch ``index``; the incomplete tail of an epoch is left out."""
        per_epoch = len(self._token_ids) // self._prompts_per_step
        epoch, position = divmod(index, per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed << 20) + epoch)
            self._order = torch.randperm(len(self._token_ids), generator=generator).tolist()
            self._epoch = epoch
        start = position * self._prompts_per_step
        return self._order[start : start + self._prompts_per_step]
