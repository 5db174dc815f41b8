"""Routed SwiGLU experts on a CPU as one operator, forward and backward, with the FC2 input's rounding inside.

    out_n = sum_k w_nk * down_e( q( silu(gate_e(x_n)) * up_e(x_n) ) ),   e = ids_nk

Backend `compiled` of what `trace_rl.qat.experts` composes from PyTorch operations: the same roundings to BF16 in the
same places, but sums in the order of oneDNN's tiles, so the two agree within the noise of BF16 products, not bit for
bit. Trainer and engine use the same operator, which makes their difference smaller than with two implementations.

The operator needs BF16 matrix instructions through oneDNN (`experts_supported`) and sizes that divide into its tiles;
`refusal` says what is missing.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from trace_rl.errors import UserError
from trace_rl.formats import Format
from trace_rl.kernels import compiled, dispatch

TILE = 32
"""Hidden size and expert width must be multiples of this."""


def refusal(*, hidden_size: int, expert_width: int, device: torch.device, fmt: Format | None) -> str | None:
    """Why the operator cannot run, or None. ``fmt``: the format of the FC2 input, None for BF16."""
    if dispatch.choose(device) != "compiled":
        return f"the kernel backend is {dispatch.choose(device)}"
    if hidden_size % TILE or expert_width % TILE:
        return f"hidden size {hidden_size} and expert width {expert_width} must be multiples of {TILE}"
    if fmt is not None and compiled.format_number(fmt) is None:
        return f"it does not know {fmt.name}"
    return None if compiled.operator().experts_supported() else "oneDNN has no BF16 products for this processor"


def can_run(*, hidden_size: int, expert_width: int, device: torch.device, fmt: Format | None) -> bool:
    """Whether the operator can run. A reason against it is said once where the kernels are compiled by themselves, and
    refused (UserError) where ``compiled`` was named."""
    reason = refusal(hidden_size=hidden_size, expert_width=expert_width, device=device, fmt=fmt)
    if reason is not None and dispatch.choose(device) == "compiled":
        if os.environ.get(dispatch.VARIABLE) == "compiled":
            raise UserError(f"kernel backend 'compiled' has no experts here: {reason}; set {dispatch.VARIABLE}=auto")
        _say(reason)
    return reason is None


@lru_cache(maxsize=8)
def _say(reason: str) -> None:
    print(f"trace_rl: experts run composed of PyTorch operations, about half as fast: {reason}", file=sys.stderr)


@dataclass(frozen=True)
class ExpertMatrices:
    """Expert weights as the operator reads them: two neighbours of the reduction dimension beside each other.

    ``gate_up`` int32 [E, H/2, 2I] and ``down`` int32 [E, I/2, H] (pairs of BF16) for the forward; the ``turned`` ones
    bfloat16 [E, I, H, 2] and [E, H/2, I, 2] for the backward, None where there is none; the ``plain`` ones are what was
    packed.
    """

    plain_gate_up: Tensor
    plain_down: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_turned: Tensor | None
    down_turned: Tensor | None

    @staticmethod
    def pack(gate_up: Tensor, down: Tensor, *, backward: bool) -> "ExpertMatrices":
        """From gate_up [E, 2I, H] and down [E, H, I], bfloat16."""
        gate_up, down = gate_up.detach().contiguous(), down.detach().contiguous()
        return ExpertMatrices(
            plain_gate_up=gate_up,
            plain_down=down,
            gate_up=_paired(gate_up),
            down=_paired(down),
            gate_up_turned=_turned(gate_up) if backward else None,
            down_turned=_turned(down) if backward else None,
        )


def _paired(weight_ERC: Tensor) -> Tensor:
    return weight_ERC.view(torch.int32).transpose(1, 2).contiguous()


def _turned(weight_ERC: Tensor) -> Tensor:
    return weight_ERC.unflatten(1, (-1, 2)).transpose(2, 3).contiguous()


OnForward = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Called with (FC1 input [N, H], gate_up [E, 2I, H], FC2 input [P, I], down [E, H, I]) as they were multiplied."""

_observers: list[OnForward] = []


@contextmanager
def observed(on_forward: OnForward) -> Iterator[None]:
    """Report the operands of every forward while the block runs: PyTorch does not see the operator's products."""
    _observers.append(on_forward)
    try:
        yield
    finally:
        _observers.remove(on_forward)


def routed_experts(
    x_NH: Tensor,
    weights_NK: Tensor,
    ids_NK: Tensor,
    matrices: ExpertMatrices,
    *,
    fmt: Format | None,
    fc2_scale: float = 1.0,
) -> Tensor:
    """bfloat16 [N, H] without autograd; ``fmt``: round the FC2 input to it at the encode scale ``fc2_scale``."""
    out, _ = _forward(x_NH, weights_NK, ids_NK, matrices, fmt=fmt, fc2_scale=fc2_scale, keep=False)
    return out


def _forward(
    x_NH: Tensor,
    weights_NK: Tensor,
    ids_NK: Tensor,
    matrices: ExpertMatrices,
    *,
    fmt: Format | None,
    fc2_scale: float,
    keep: bool,
) -> tuple[Tensor, object]:
    x_NH = x_NH.detach().contiguous()
    out, saved = compiled.operator().experts_forward(
        x_NH,
        weights_NK.detach().float().contiguous(),
        ids_NK.long().contiguous(),
        matrices.gate_up,
        matrices.down,
        -1 if fmt is None else compiled.format_number(fmt),
        fc2_scale,
        keep or bool(_observers),
    )
    for on_forward in _observers:
        packed = (_paired(matrices.plain_gate_up), _paired(matrices.plain_down))
        assert torch.equal(packed[0], matrices.gate_up) and torch.equal(packed[1], matrices.down), "stale matrices"
        on_forward(x_NH, matrices.plain_gate_up, saved.hidden, matrices.plain_down)
    return out, saved


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x_NH: Tensor,
        weights_NK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        ids_NK: Tensor,
        matrices: ExpertMatrices,
        fmt: Format | None,
        fc2_scale: float,
    ) -> Tensor:
        out, ctx.saved = _forward(x_NH, weights_NK, ids_NK, matrices, fmt=fmt, fc2_scale=fc2_scale, keep=True)
        ctx.matrices = matrices
        ctx.save_for_backward(weights_NK, x_NH)  # x lies in `saved` too, where autograd would miss a change in place
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, _ = ctx.saved_tensors
        grad_x, grad_weights, grad_gate_up, grad_down = compiled.operator().experts_backward(
            grad.contiguous(),
            ctx.saved,
            weights.detach().float().contiguous(),
            ctx.matrices.gate_up_turned,
            ctx.matrices.down_turned,
        )
        return grad_x, grad_weights.to(weights.dtype), grad_gate_up, grad_down, None, None, None, None


def routed_experts_with_gradient(
    x_NH: Tensor,
    weights_NK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids_NK: Tensor,
    matrices: ExpertMatrices,
    *,
    fmt: Format | None,
    fc2_scale: float = 1.0,
) -> Tensor:
    """As `routed_experts`; gradients reach x, the gate values, and gate_up and down, of which ``matrices`` are packed.

    The rounding of the FC2 input passes its gradient unchanged.
    """
    if not torch.is_grad_enabled():
        return routed_experts(x_NH, weights_NK, ids_NK, matrices, fmt=fmt, fc2_scale=fc2_scale)
    return _RoutedExperts.apply(x_NH, weights_NK, gate_up, down, ids_NK, matrices, fmt, fc2_scale)
