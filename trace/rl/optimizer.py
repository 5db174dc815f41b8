"""AdamW on FP32 master weights of a BF16 model.

The BF16 parameters are what forward, rollout and quantizer see; gradients arrive in BF16 per micro-batch and are summed
in FP32. Quantizing the FP32 master instead of the BF16 weight would give trainer and engine different codes.
"""

from typing import Any

import torch
from torch import nn


class MasterAdamW:
    """AdamW, linear warm-up then constant, gradient clipping by global norm."""

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float,
        warmup_steps: int,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.params]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.max_grad_norm = max_grad_norm
        self.updates = 0
        self.nonfinite_gradients = 0
        """Updates left out because a gradient was NaN or infinite."""
        self.optimizer = torch.optim.AdamW(self.masters, lr=learning_rate, betas=betas, weight_decay=weight_decay)

    def accumulate(self) -> None:
        """Add the parameters' gradients to the FP32 sum and clear them."""
        for param, master in zip(self.params, self.masters, strict=True):
            if param.grad is not None:
                master.grad.add_(param.grad)
                param.grad = None

    def step(self) -> dict[str, float]:
        """Clip, update the masters, round them into the model; returns gradient norm and learning rate.

        An update with a NaN or infinite gradient is left out and counted: a diverging run goes on to the end of its
        budget and is shown as what it is, instead of stopping the suite.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        rate = self.learning_rate * min(1.0, (self.updates + 1) / max(1, self.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if bool(norm.isfinite()):
            self.optimizer.step()
            self.write_back()
        else:
            self.nonfinite_gradients += 1
        self.updates += 1
        for master in self.masters:
            master.grad.zero_()
        found = {"grad_norm": float(norm), "learning_rate": rate}
        return found | {"nonfinite_gradients": float(self.nonfinite_gradients)}

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model's parameters."""
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Masters, moments and the counts of updates."""
        counts = {"updates": self.updates, "nonfinite_gradients": self.nonfinite_gradients}
        return {"masters": self.masters, "optimizer": self.optimizer.state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of the same model and write the masters back."""
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.data.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
        self.nonfinite_gradients = state["nonfinite_gradients"]
        self.write_back()
