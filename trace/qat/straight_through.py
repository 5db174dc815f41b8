"""Straight-through fake quantization: the forward uses the quantized value, the gradient passes unchanged.

    y = xhat        dL/dx = dL/dy

There is no clipping mask: values beyond the largest codeword also receive the full gradient (METHOD.md section 3, also
where the block scale is 0 and xhat is 0).
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, xhat: Tensor) -> Tensor:
        return xhat.detach()  # a new tensor object over the same memory: cached weights are not copied

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight_through(x: Tensor, xhat: Tensor) -> Tensor:
    """``xhat`` in the forward, identity to ``x`` in the backward. Same shape and dtype for both."""
    assert (x.shape, x.dtype) == (xhat.shape, xhat.dtype), (x.shape, xhat.shape, x.dtype, xhat.dtype)
    return _StraightThrough.apply(x, xhat)
