"""One file per loss; each works on the flat response tokens of a micro-batch and returns a sum."""

from collections.abc import Callable

from trace_rl.config.loss import Loss
from trace_rl.rl.losses.base import LossInput, TokenLoss
from trace_rl.rl.losses.grpo import grpo_loss
from trace_rl.rl.losses.score_centering import score_centering_loss
from trace_rl.rl.losses.tbpo import tbpo_loss
from trace_rl.rl.losses.triage import triage_loss

_LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "grpo": grpo_loss,
    "tbpo": tbpo_loss,
    "score_centering": score_centering_loss,
    "triage": triage_loss,
}


def compute(data: LossInput, spec: Loss) -> TokenLoss:
    """The loss that ``spec`` names."""
    return _LOSSES[spec.kind](data, spec)


__all__ = ["LossInput", "TokenLoss", "compute"]
