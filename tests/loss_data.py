"""Random micro-batches in float64 for the tests of losses, and central differences to compare gradients with."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trace_rl.rl.losses import LossInput


def micro_batch(
    lengths: Sequence[int], *, advantages: Sequence[float], seed: int = 0, drift: float = 0.3, gap: float = 0.5
) -> dict[str, Tensor]:
    """The fields of a LossInput but ``ratio``: log-probs that ``drift`` from the old ones, those ``gap`` from the
    rollout's."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    noise = lambda: torch.randn(index.numel(), generator=generator, dtype=torch.float64)  # noqa: E731
    old = -torch.rand(index.numel(), generator=generator, dtype=torch.float64) * 3
    return {
        "logprobs": old + noise() * drift,
        "old_logprobs": old,
        "rollout_logprobs": old + noise() * gap,
        "advantages": torch.tensor(advantages, dtype=torch.float64)[index],
        "trajectory_index": index,
    }


def loss_input(fields: dict[str, Tensor], *, logprobs: Tensor | None = None) -> LossInput:
    """The micro-batch with the ratio between its own forwards; ``logprobs`` replaces those of pi_theta."""
    if logprobs is not None:
        fields = fields | {"logprobs": logprobs}
    ratio = (fields["logprobs"] - fields["old_logprobs"]).exp()
    return LossInput(ratio=ratio, **fields)


def differences(function: Callable[[Tensor], Tensor | float], x: Tensor, *, step: float = 1e-6) -> Tensor:
    """Central differences of a scalar function, by element of ``x``."""
    gradient = torch.empty_like(x)
    for index in range(x.numel()):
        up, down = x.clone(), x.clone()
        up.view(-1)[index] += step
        down.view(-1)[index] -= step
        gradient.view(-1)[index] = (float(function(up)) - float(function(down))) / (2 * step)
    return gradient


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What backward gives for the same function."""
    leaf = x.clone().requires_grad_()
    function(leaf).backward()
    return leaf.grad
