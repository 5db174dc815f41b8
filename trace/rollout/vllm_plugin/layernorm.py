"""vLLM's RMS norm operations on our CPU operator, as one more provider of its IR operations.

``register_impl`` is vLLM's own registry; the engine puts the provider first in ``ir_op_priority``. vLLM's native
implementations are six PyTorch operations each, which is a tenth of a small decode step. Cases the operator does not
take (other dtypes, a variance over part of the columns) fall to the next provider by ``supports_args``.
"""

from torch import Tensor
from vllm import ir

from trace_rl.kernels import rms_norm as kernels

PROVIDER = "trace_rl"


def _takes(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and kernels.supported(x, weight)


def _takes_residual(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return x.dtype == x_residual.dtype and _takes(x, weight, epsilon, variance_size)


@ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_takes)
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """See ``vllm.ir.ops.rms_norm``."""
    return kernels.rms_norm(x, weight, eps=epsilon)


@ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_takes_residual)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """See ``vllm.ir.ops.fused_add_rms_norm``."""
    return kernels.add_rms_norm(x, x_residual, weight, eps=epsilon)
