"""Which pairs of which expert a program works on, and what may be asked for: the host's part of both MoE kernels.

A pair is one of the T*K (token, expert) assignments, numbered token*K + k. Sorting the pairs by expert makes every
expert's pairs one range of `order`; ranges are cut into blocks of at most `block_pairs`, and block b holds
order[start[b]:end[b]], all of expert[b]. An expert without tokens has no block, so its weights are never read.

Nothing in `route` waits for the device: the number of blocks is a bound that depends on shapes alone (surplus blocks
have expert -1 and their programs return at once), and counts come from `searchsorted`, not from `bincount`, which reads
its largest value back. So it can be captured in a CUDA graph. Checking the ids does wait, hence `check`.

Legend: T tokens, H hidden, K experts per token, E experts, I expert width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import Format
from trace_rl.kernels.fp4_device import check_device, rule_of
from trace_rl.kernels.reference import PackedExperts

MIN_BLOCK_PAIRS = 16
MAX_BLOCK_PAIRS = 32


class Routing(NamedTuple):
    """Blocks of pairs of one expert each. All tensors are int32."""

    order: Tensor
    """[T*K]: pairs sorted by expert."""
    expert: Tensor
    """[blocks]: expert of the block, -1 for a surplus one."""
    start: Tensor
    """[blocks]: first position in `order`."""
    end: Tensor
    """[blocks]: one past the last position."""
    block_pairs: int
    """The most pairs of a block."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the kernels read."""
        return self.order, self.expert, self.start, self.end


def route(ids_TK: Tensor, num_experts: int, block_pairs: int) -> Routing:
    """Sort the pairs of `ids_TK` (integers in [0, num_experts)) by expert and cut them into blocks."""
    ids, order = torch.sort(ids_TK.reshape(-1).to(torch.int32), stable=True)
    first = torch.searchsorted(ids, torch.arange(num_experts + 1, device=ids.device, dtype=torch.int32), out_int32=True)
    blocks_of_expert = (first.diff() + block_pairs - 1) // block_pairs
    last_block = blocks_of_expert.cumsum(0, dtype=torch.int32)

    block = torch.arange(max_blocks(ids.numel(), num_experts, block_pairs), device=ids.device, dtype=torch.int32)
    expert = torch.searchsorted(last_block, block, right=True, out_int32=True)
    used = expert < num_experts
    expert = expert.clamp_max(num_experts - 1)
    block_of_expert = block - (last_block - blocks_of_expert)[expert]
    start = first[expert] + block_of_expert * block_pairs
    end = torch.minimum(start + block_pairs, first[expert + 1])
    return Routing(order.to(torch.int32), torch.where(used, expert, -1), start, end, block_pairs)


def max_blocks(num_pairs: int, num_experts: int, block_pairs: int) -> int:
    """The most blocks that `num_pairs` pairs can need: each used expert may leave one block nearly empty."""
    used = min(num_pairs, num_experts)
    return min(num_pairs, used + (num_pairs - used) // block_pairs)


def block_pairs(num_pairs: int, num_experts: int) -> int:
    """Pairs per block: a power of two at least twice the mean load, so that most experts are read by one block.

    Only shapes decide, never the ids, so that a captured graph stays valid. Below the minimum nothing is gained:
    padding costs no weight bytes. Above the maximum the sums leave no registers for the weights; an expert with more
    pairs is read again for each block, from the last-level cache if it is still there.
    """
    size = MIN_BLOCK_PAIRS
    while size < MAX_BLOCK_PAIRS and size * num_experts < 2 * num_pairs:
        size *= 2
    return size


def check_arguments(
    x_TH: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    weights_TK: Tensor,
    ids_TK: Tensor,
    *,
    fmt: Format,
    check: bool,
) -> None:
    """UserError for anything the kernels would misread. `check`: also look at the ids, which waits for the device."""
    rule_of(fmt)
    if x_TH.dim() != 2 or x_TH.dtype != torch.bfloat16:
        raise UserError(f"MoE input is {x_TH.dtype} {tuple(x_TH.shape)}: pass bfloat16 [tokens, hidden]")
    check_device(x_TH, name="MoE input")
    num_experts, hidden = gate_up.codes.shape[0], x_TH.shape[1]
    width = down.codes.shape[-1] * 2
    _check_packed(gate_up, "gate_up", (num_experts, 2 * width, hidden), fmt)
    _check_packed(down, "down", (num_experts, hidden, width), fmt)
    if ids_TK.dim() != 2 or ids_TK.shape[0] != x_TH.shape[0] or ids_TK.dtype not in (torch.int32, torch.int64):
        raise UserError(
            f"expert ids are {ids_TK.dtype} {tuple(ids_TK.shape)} for {x_TH.shape[0]} tokens: pass int32 or int64 "
            "[tokens, experts per token]"
        )
    if weights_TK.shape != ids_TK.shape or weights_TK.dtype not in (torch.float32, torch.bfloat16):
        raise UserError(
            f"expert weights are {weights_TK.dtype} {tuple(weights_TK.shape)}, ids {tuple(ids_TK.shape)}: pass float32 "
            "or bfloat16 of the same shape"
        )
    for tensor in (*gate_up, *down, weights_TK, ids_TK):
        if tensor.device != x_TH.device:
            raise UserError(f"MoE arguments are on {x_TH.device} and {tensor.device}: move them to one device")
    if check and ids_TK.numel() and not 0 <= int(ids_TK.min()) <= int(ids_TK.max()) < num_experts:
        raise UserError(f"expert ids must lie in [0, {num_experts})")


def _check_packed(packed: PackedExperts, name: str, shape: tuple[int, int, int], fmt: Format) -> None:
    experts, rows, cols = shape
    expected = ((experts, rows, cols // 2), (experts, rows, cols // fmt.block_size), (experts,))
    found = tuple(tuple(tensor.shape) for tensor in packed)
    if found != expected or cols % fmt.block_size:
        raise UserError(
            f"{name} experts have codes {found[0]}, block scales {found[1]}, encode scales {found[2]}; {fmt.name} of "
            f"{shape} needs {expected[0]}, {expected[1]}, {expected[2]} and columns in whole blocks of {fmt.block_size}"
        )
    dtypes = tuple(tensor.dtype for tensor in packed)
    if dtypes != (torch.uint8, torch.uint8, torch.float32):
        raise UserError(f"{name} experts are {dtypes}: codes and block scales are uint8, encode scales float32")
    if not all(tensor.is_contiguous() for tensor in packed) or packed.codes.data_ptr() % 16:
        raise UserError(
            f"{name} experts must be contiguous and start at a multiple of 16 bytes: pass packed.codes.clone()"
        )
