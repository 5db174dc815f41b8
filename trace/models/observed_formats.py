"""In which number format a model really computes, observed from its operands.

No declaration is read. A weight operand is compared bit for bit with the checkpoint's tensor (``bf16``) and with its
quantized values (the format's name); it is ``unknown`` when it is neither, ``unseen`` when no product used it. An
activation is on the grid of an E2M1 format when every block is a set of E2M1 multiples of one step; BF16 numbers
practically never are (16 random values would all have to lie within the BF16 rounding of 15 points). Formats of the
same block and codes are not told apart by their activations. MXFP8 gives its own values back unchanged, and HiF4 does
for one of the bases near the block's largest value: BF16 numbers have mantissa bits that neither keeps.

Two ways in, for two kinds of model: the operand tap for transformers models, whose module names are the checkpoint's;
``resident_formats`` for an engine that merges and reorders parameters (vLLM's qkv_proj, w13_weight): there every *row*
of a tensor must be among the rows the engine holds for that layer.
"""

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from trace_rl import formats
from trace_rl.config.quant import FormatChoice
from trace_rl.formats.hif4 import HiF4
from trace_rl.models.operands import operand_tap, storage_values
from trace_rl.models.scopes import BF16_NAME

UNSEEN, UNKNOWN, MIXED = "unseen", "unknown", "mixed"
GRID_SHARE = 0.98
_RATIOS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_TOLERANCE = 2.0**-7  # two BF16 roundings, of the value and of the block's largest
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_HASH_CHUNK = 1 << 22


def quantized_weight(weight: Tensor, *, format_name: str) -> Tensor:
    """BF16 values of ``weight`` in the format: [E, R, C] with one encode scale per expert, [R, C] with one."""
    fmt = formats.get(format_name)
    experts = weight if weight.dim() == 3 else weight[None]
    scale = fmt.encode_scale(experts.float().abs().amax(dim=(1, 2)))
    return fmt.fake_quant(experts, scale[:, None].expand(experts.shape[:-1])).to(weight.dtype).view_as(weight)


def on_fp4_grid(x: Tensor, *, block_size: int) -> float:
    """Share of the non-zero blocks of ``x`` [..., cols] whose values are E2M1 multiples of one step."""
    blocks = x.detach().float().abs().reshape(-1, block_size)
    largest = blocks.amax(1, keepdim=True)
    blocks, largest = blocks[largest[:, 0] > 0], largest[largest[:, 0] > 0]
    if not len(blocks):
        return 0.0
    fits = torch.zeros(len(blocks), dtype=torch.bool)
    # The largest value may be any codeword: 6 as a rule, less where the block scale was rounded up.
    for top in _RATIOS[1:]:
        distance = (blocks / largest * top).unsqueeze(-1).sub(_RATIOS).abs().amin(-1)
        fits |= (distance <= _TOLERANCE * top).all(1)
    return float(fits.float().mean())


def on_grid(x: Tensor, *, format_name: str) -> float:
    """Share of the non-zero blocks of BF16 ``x`` [..., cols] whose values the format can hold."""
    fmt = formats.get(format_name)
    if isinstance(fmt, formats.CodewordFormat):
        return on_fp4_grid(x, block_size=fmt.block_size)
    blocks = x.detach().reshape(-1, fmt.block_size)
    blocks = blocks[blocks.any(1)]
    candidates = fmt.near_roundings(blocks) if isinstance(fmt, HiF4) else [fmt.fake_quant(blocks)]
    fits = torch.stack([(candidate == blocks.float()).all(1) for candidate in candidates])
    return float(fits.any(0).float().mean()) if len(blocks) else 0.0


class FormatObserver:
    """Collects the formats of parameters and activations of one model over any number of forwards.

    ``reference``: the checkpoint's BF16 tensors under Hugging Face names, experts fused.
    """

    def __init__(self, model: nn.Module, *, reference: Mapping[str, Tensor], choice: FormatChoice) -> None:
        self.model = model
        self.reference = reference
        self.choice = choice
        self.block_size = formats.get(choice.weights).block_size
        self.seen: dict[str, set[str]] = {}
        self.parameters = dict(model.named_parameters())
        self.owned: dict[str, list[str]] = {}
        self.by_storage: dict[int, list[str]] = {}
        for name, parameter in self.parameters.items():
            self.owned.setdefault(name.rpartition(".")[0], []).append(name)
            self.by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)

    def run(self, forward: Callable[[], object]) -> None:
        """Observe one forward of the model."""
        with operand_tap(self.model, self._on_product):
            forward()

    def formats(self) -> dict[str, str]:
        """Name -> format of every parameter and of every activation seen."""
        found = {}
        for name, parameter in self.parameters.items():
            if name not in self.seen:
                # Norms and embeddings are used as they are, not in matrix products.
                used_directly = parameter.dim() == 1 or "embed" in name
                self.seen[name] = {self._weight_format(name, parameter) if used_directly else UNSEEN}
        for name, seen in self.seen.items():
            found[name] = next(iter(seen)) if len(seen) == 1 else MIXED
        return found

    def _on_product(self, module: str, index: int, left: Tensor, right: Tensor) -> None:
        for side, operand in (("left", left), ("right", right)):
            if not self._is_weight(module, operand):
                self._activation(module, index=index, side=side, operand=operand)

    def _is_weight(self, module: str, operand: Tensor) -> bool:
        """Whether the operand is a parameter, as it is or transformed, of the module; notes its format."""
        for name in self.by_storage.get(operand.untyped_storage().data_ptr(), ()):
            self.seen.setdefault(name, set()).add(self._weight_format(name, self.parameters[name]))
            return True
        for name in self.owned.get(module, ()):
            parameter = self.parameters[name]
            if operand.numel() == parameter.numel() and operand.shape[-2:].numel() == parameter.shape[-2:].numel():
                values = storage_values(operand)
                if values.numel() == parameter.numel():
                    found = self._weight_format(name, values.view(parameter.shape))
                    if found != UNKNOWN:
                        self.seen.setdefault(name, set()).add(found)
                        return True
        return False

    def _weight_format(self, name: str, values: Tensor) -> str:
        reference = self.reference[name]
        if torch.equal(values.float(), reference.float()):
            return BF16_NAME
        if reference.dim() == 1 or reference.shape[-1] % self.block_size:
            return UNKNOWN
        quantized = quantized_weight(reference, format_name=self.choice.weights)
        return self.choice.weights if torch.equal(values.float(), quantized.float()) else UNKNOWN

    def _activation(self, module: str, *, index: int, side: str, operand: Tensor) -> None:
        tensor = None
        if module.endswith(".experts") and side == "left":
            tensor, scope = ("fc1_input", "fc2_input")[index], "activations"
        elif module.endswith(".self_attn") and side == "right":
            tensor, scope = ("k_cache", "v_cache")[index], "kv"
            operand = operand.transpose(1, 2) if index == 0 else operand
        if tensor is not None:
            found = activation_format(operand, format_name=self.choice.of(scope))
            self.seen.setdefault(f"{module}.{tensor}", set()).add(found)


def activation_format(x: Tensor, *, format_name: str) -> str:
    """``format_name`` when the values are on its grid, else bf16."""
    return format_name if on_grid(x.contiguous(), format_name=format_name) >= GRID_SHARE else BF16_NAME


def row_hashes(x: Tensor) -> Tensor:
    """int64 [rows]: a random linear hash of the bits of every row of a BF16 tensor [..., cols]."""
    rows = x.detach().to(torch.bfloat16).contiguous().view(torch.int16).reshape(-1, x.shape[-1])
    generator = torch.Generator().manual_seed(rows.shape[1])
    weights = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=generator)
    step = max(1, _HASH_CHUNK // rows.shape[1])
    parts = [(rows[start : start + step].long() * weights).sum(1) for start in range(0, len(rows), step)]
    return torch.cat(parts)


def resident_formats(
    resident: Iterable[tuple[str, Tensor]], *, reference: Mapping[str, Tensor], format_name: str
) -> dict[str, str]:
    """Format of every checkpoint tensor in an engine that holds ``resident`` parameters under names of its own."""
    held: dict[tuple[str, int], list[Tensor]] = {}
    for name, tensor in resident:
        held.setdefault((_layer_of(name), tensor.shape[-1]), []).append(row_hashes(tensor))
    rows = {key: torch.cat(parts) for key, parts in held.items()}
    block_size = formats.get(format_name).block_size
    found = {}
    for name, tensor in reference.items():
        there = rows.get((_layer_of(name), tensor.shape[-1]), torch.empty(0, dtype=torch.int64))
        if bool(torch.isin(row_hashes(tensor), there).all()):
            found[name] = BF16_NAME
        elif tensor.dim() > 1 and tensor.shape[-1] % block_size == 0:
            quantized = row_hashes(quantized_weight(tensor, format_name=format_name))
            found[name] = format_name if bool(torch.isin(quantized, there).all()) else UNKNOWN
        else:
            found[name] = UNKNOWN
    return found


def _layer_of(name: str) -> str:
    match = _LAYER.search(name)
    return match[1] if match else ""
