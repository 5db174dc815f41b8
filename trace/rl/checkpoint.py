"""Checkpoints of a training run: everything a killed run needs to go on as if nothing had happened.

State is written to a temporary file, synced and renamed, so the last whole checkpoint always stands. A run's identity
(digests of settings, data and starting weights) is part of it: a checkpoint of another run is refused, never mixed in.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn

from trace_rl.environment import Commit, Machine
from trace_rl.errors import UserError
from trace_rl.rl.queue import StalenessQueue


class MadeBy(TypedDict):
    """Where some of a run's steps were trained."""

    from_step: int
    commit: Commit
    machine: Machine


@dataclass
class TrainState:
    """What a checkpoint holds."""

    step: int
    """Finished steps; also the policy version."""
    optimizer: dict[str, Any]
    """Masters, moments, update count."""
    queue: StalenessQueue
    """Sampled, not yet trained trajectories and the data cursor (the index of the last batch)."""
    rng: torch.Tensor
    """PyTorch's CPU generator."""
    made_by: list[MadeBy] = field(default_factory=list)
    """The processes that trained these steps, in order."""


def sync_directory(path: Path) -> None:
    """Make a rename in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save(path: Path, state: TrainState, *, identity: str) -> None:
    """Write a checkpoint atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save({"identity": identity, "state": state}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def load(path: Path, *, identity: str) -> TrainState | None:
    """The checkpoint at ``path``, or None when there is none; UserError when it belongs to other settings."""
    if not path.is_file():
        return None
    # The file is our own, written by `save`: it holds dataclasses, which the weights-only loader refuses.
    payload = torch.load(path, weights_only=False)
    if payload["identity"] != identity:
        raise UserError(
            f"{path}: belongs to a run with other settings, data or starting weights; delete "
            f"{path.parent} to start anew"
        )
    return payload["state"]


@torch.no_grad()
def restore_weights(model: nn.Module, state: TrainState) -> None:
    """Round a checkpoint's master weights into a model."""
    params = [param for param in model.parameters() if param.requires_grad]
    for param, master in zip(params, state.optimizer["masters"], strict=True):
        param.copy_(master)
