"""RMS norms of a transformers model on our CPU operator.

A norm module is replaced by one that holds the same parameter under the same name, so state dicts, optimizers and
exports do not notice. Only classes whose arithmetic is known to be ``weight * x_normalized.to(dtype)`` are replaced
(families like Qwen3-Next multiply by 1 + weight in FP32); they are named in ``trace_rl.models.families``.
"""

import torch
from torch import Tensor, nn

from trace_rl.kernels import rms_norm as kernels


class RMSNorm(nn.Module):
    """The given norm's parameter and epsilon; plain PyTorch wherever the operator cannot run."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C] in x's dtype."""
        if kernels.supported(x, self.weight):
            return kernels.rms_norm_with_gradient(x, self.weight, eps=self.variance_epsilon)
        values = x.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * values.to(x.dtype)


def replace_norms(model: nn.Module, *, class_name: str | None) -> None:
    """Replace every module of this class, by name; None replaces nothing."""
    found = [name for name, module in model.named_modules() if type(module).__name__ == class_name]
    for name in found:
        model.set_submodule(name, RMSNorm(model.get_submodule(name)))
