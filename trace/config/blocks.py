"""Do the blocks of the formats fit a model's dimensions?

Asked of every checkpoint and attached model (`trace_rl.models.checkpoint_io`), and of the miniature before it is
trained: its architecture is in the configuration, so a block that does not divide a dimension is known before any job.
"""

from collections.abc import Mapping

from trace_rl.config.quant import SCOPES, FormatName, QuantSpec, Scope
from trace_rl.errors import UserError

BLOCK_SIZES: dict[FormatName, int] = {
    "nvfp4": 16,
    "mxfp4": 32,
    "mxfp4_floor": 32,
    "mxfp4_even": 32,
    "fouroversix": 16,
    "fouroversix_mae": 16,
    "hif4": 64,
    "hscale": 16,
    "mxfp8": 32,
}
"""Values per block, as in `trace_rl.formats`, which needs PyTorch."""
DIMENSIONS: dict[Scope, tuple[str, ...]] = {
    "weights": ("hidden_size", "expert_width"),
    "activations": ("hidden_size", "expert_width"),
    "kv": ("head_dim",),
}
"""Reduction dimensions of the operands of each scope: FC1 input, FC2 input, one head of K and V."""
SMALLER_BLOCKS: tuple[FormatName, ...] = ("mxfp4", "nvfp4")
"""What is offered, in this order, where a format's block does not divide a dimension."""


def check_blocks(
    dims: Mapping[str, int],
    *,
    quant: QuantSpec,
    where: str,
    otherwise: str = "choose another checkpoint",
    keys: Mapping[str, str] | None = None,
) -> None:
    """Every dimension in an FP4 scope must hold whole blocks: a ragged block would need its own scale layout.

    UserError for the first that does not. ``dims``: the sizes by name as in `DIMENSIONS`, and ``keys`` what ``where``
    calls them; ``otherwise``: what can be done beside another format.
    """
    for scope in SCOPES:
        name = quant.format_of(scope)
        if name is None:
            continue
        block = BLOCK_SIZES[name]
        for dim in DIMENSIONS[scope]:
            if dims[dim] % block:
                smaller = [other for other in SMALLER_BLOCKS if dims[dim] % BLOCK_SIZES[other] == 0]
                remedy = f"set format.{scope}: {smaller[0]}" if smaller else f"leave {scope} in BF16"
                raise UserError(
                    f"{where}: {(keys or {}).get(dim, dim)} {dims[dim]} is not a multiple of the FP4 block size "
                    f"{block} of {name}, the format of {scope}; {remedy}, or {otherwise}"
                )
