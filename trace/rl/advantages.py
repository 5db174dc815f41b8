"""Group-relative advantages (GRPO, 2402.03300; the form without std is MiniRL's, 2512.01374).

A = (R - mean) / (std + 1e-6) over the responses of one prompt, std with Bessel's correction off. A group whose rewards
are all equal has zero advantages and teaches nothing; the share of such groups is a metric.
"""

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def group_advantages(rewards: Tensor, groups: Tensor, *, std: bool = True) -> Tensor:
    """Advantages of each trajectory.

    Args:
        rewards: float [N].
        groups: int64 [N], the prompt each trajectory answers.
        std: divide by the group's standard deviation.

    Returns:
        float32 [N].
    """
    rewards = rewards.float()
    ids, inverse = torch.unique(groups, return_inverse=True)
    count = torch.zeros(len(ids)).index_add_(0, inverse, torch.ones_like(rewards))
    mean = torch.zeros(len(ids)).index_add_(0, inverse, rewards) / count
    centred = rewards - mean[inverse]
    if not std:
        return centred
    variance = torch.zeros(len(ids)).index_add_(0, inverse, centred.square()) / count
    return centred / (variance.sqrt()[inverse] + STD_EPSILON)


def informative_groups(rewards: Tensor, groups: Tensor) -> float:
    """Share of groups whose rewards differ."""
    ids, inverse = torch.unique(groups, return_inverse=True)
    top = torch.full((len(ids),), -torch.inf).scatter_reduce_(0, inverse, rewards.float(), "amax")
    bottom = torch.full((len(ids),), torch.inf).scatter_reduce_(0, inverse, rewards.float(), "amin")
    return float((top > bottom).float().mean())
