"""RMS normalization on a CPU as one operator, forward and backward: y = weight * bf16(x / sqrt(mean(x^2) + eps)).

The same arithmetic as transformers' and vLLM's compositions of six PyTorch operations, FP32 inside, rounded to BF16 in
the same two places; the sum of squares has its own order, so results agree but for the last bit of a few values. It is
here because it runs twice per layer and more, and memory traffic is what it costs.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from trace_rl.kernels import compiled, dispatch

LANES = 16


def supported(x: Tensor, weight: Tensor | None) -> bool:
    """Whether the operator can run: BF16 on the CPU, whole vectors of columns, backend ``compiled``."""
    return (
        weight is not None
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.bfloat16
        and x.shape[-1] % LANES == 0
        and dispatch.choose(x.device) == "compiled"
    )


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """bfloat16 [..., C] of x [..., C] and weight [C]; no gradient."""
    y, _, _ = compiled.operator().rms_norm(_rows(x), None, weight.detach(), eps, False)
    return y.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual), both bfloat16 [..., C]; the sum is normalized before it is rounded."""
    y, total, _ = compiled.operator().rms_norm(_rows(x), _rows(residual), weight.detach(), eps, False)
    return y.view(x.shape), total.view(x.shape)


def rms_norm_with_gradient(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """As `rms_norm`, with gradients for x and weight."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, _, root = compiled.operator().rms_norm(_rows(x), None, weight.detach(), eps, True)
        ctx.save_for_backward(x, weight, root)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, root = ctx.saved_tensors
        grad_x, grad_weight = compiled.operator().rms_norm_backward(
            grad.contiguous().view(-1, x.shape[-1]), _rows(x), weight.detach(), root
        )
        return grad_x.view(x.shape), grad_weight, None


def _rows(x: Tensor) -> Tensor:
    x = x.detach()
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    return x.reshape(-1, x.shape[-1]).contiguous()
