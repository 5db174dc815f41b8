"""The operand tap: which tensors a model really multiplied, in which module.

A `TorchDispatchMode` sees every matrix product below autograd with its actual operands, whatever registry, hook or
parametrization prepared them. Calibration takes the largest magnitudes from it, the scope audit the number formats. In
both, what a configuration *says* is quantized plays no part.

Products are told apart by the innermost module and by their order inside it, which the architecture fixes:

    experts     (FC1 input, gate_up^T), (FC2 input, down^T)      also from inside the C++ operator
    self_attn   (q, K^T), (probs, V)           beside the projections, which are modules of their own

This needs the `trace` implementations of experts and attention (`trace_rl.qat`), which multiply in this order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trace_rl.kernels import experts

OnProduct = Callable[[str, int, Tensor, Tensor], None]
"""Called with (module name, index of the product inside this call of the module, left operand, right operand)."""

_PRODUCTS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.baddbmm.default: (1, 2),
    torch.ops.aten._grouped_mm.default: (0, 1),
}


class _Tap(TorchDispatchMode):
    def __init__(self, on_product: OnProduct) -> None:
        super().__init__()
        self.on_product = on_product
        self.stack: list[list] = [["", 0]]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        positions = _PRODUCTS.get(func)
        if positions is not None:
            self.report(args[positions[0]], args[positions[1]])
        return func(*args, **(kwargs or {}))

    def report(self, left: Tensor, right: Tensor) -> None:
        name, index = self.stack[-1]
        self.stack[-1][1] += 1
        self.on_product(name, index, left, right)

    def on_experts(self, fc1_input: Tensor, gate_up: Tensor, fc2_input: Tensor, down: Tensor) -> None:
        self.report(fc1_input, gate_up)
        self.report(fc2_input, down)


@contextmanager
def operand_tap(model: nn.Module | None, on_product: OnProduct) -> Iterator[None]:
    """Report every matrix product of this thread while the block runs; without ``model``, under the module name ""."""
    tap = _Tap(on_product)

    def enter(name: str):
        def hook(module: nn.Module, args: tuple) -> None:
            tap.stack.append([name, 0])

        return hook

    def leave(module: nn.Module, args: tuple, output: object) -> None:
        tap.stack.pop()

    handles = []
    for name, module in () if model is None else model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        with tap, experts.observed(tap.on_experts):
            yield
    finally:
        for handle in handles:
            handle.remove()


def storage_values(x: Tensor) -> Tensor:
    """The whole storage behind ``x`` as a flat tensor: views and transposes of one tensor agree."""
    return x.new_empty(0).set_(x.untyped_storage(), 0, (x.untyped_storage().nbytes() // x.element_size(),))
