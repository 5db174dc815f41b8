"""Number formats: reference codecs in plain PyTorch, one implementation for every stage.

Use:
    formats.get("nvfp4").fake_quant(x, encode_scale)      float32 xhat, the fast path
    formats.get("mxfp4_floor").quantize(x)                QuantizedTensor: codes, block_scale, encode_scale
    formats.get(quant.format.of("fc1"))                   the format of one tensor of a QuantSpec
"""

from typing import TYPE_CHECKING, Any

from trace_rl.errors import UserError
from trace_rl.formats.e2m1 import pack_codes, unpack_codes
from trace_rl.formats.fouroversix import FourOverSix
from trace_rl.formats.hif4 import HiF4
from trace_rl.formats.hscale import HScale
from trace_rl.formats.mxfp4 import MXFP4
from trace_rl.formats.mxfp8 import MXFP8
from trace_rl.formats.nvfp4 import NVFP4
from trace_rl.formats.quantized import (
    CodewordFormat,
    Format,
    PackedFormat,
    QuantizedTensor,
    check_finite,
    with_codewords,
)
from trace_rl.formats.static_scales import StaticScales

if TYPE_CHECKING:  # a GPU host that runs the kernels alone has no pydantic
    from trace_rl.config.quant import FormatChoice

_FORMATS: dict[str, type[Format]] = {
    format_class.name: format_class for format_class in (NVFP4, MXFP4, FourOverSix, HiF4, HScale, MXFP8)
}
_RULES = {"mxfp4_floor": ("mxfp4", "floor"), "mxfp4_even": ("mxfp4", "even"), "fouroversix_mae": ("fouroversix", "mae")}
"""Names that stand for a format with a rule other than its default."""


def get(name: str, **options: Any) -> Format:
    """The format of this name, one of ``trace_rl.config.quant.FormatName``.

    Options are the format's own: `rule=` for mxfp4 and fouroversix, `importance=` for hscale.
    """
    if name in _RULES and not options:
        name, rule = _RULES[name]
        options = {"rule": rule}
    if name not in _FORMATS:
        raise UserError(f"format {name!r} is unknown; choose one of {', '.join(sorted([*_FORMATS, *_RULES]))}")
    try:
        return _FORMATS[name](**options)
    except TypeError:
        raise UserError(f"format {name!r} does not take the options {', '.join(sorted(options))}") from None


def packed(name: str, **options: Any) -> PackedFormat:
    """The format of this name; UserError if it has no 4-bit stored form."""
    fmt = get(name, **options)
    if not isinstance(fmt, PackedFormat):
        raise UserError(f"format {name!r} has no stored form of 4 bits; export weights in another format")
    return fmt


def block_sizes(choice: "FormatChoice") -> dict[str, int]:
    """Values per block of each guidable tensor: what a record's layout depends on."""
    return {tensor: get(choice.of(tensor)).block_size for tensor in ("fc1", "k", "v")}


__all__ = [
    "CodewordFormat",
    "Format",
    "PackedFormat",
    "QuantizedTensor",
    "StaticScales",
    "block_sizes",
    "check_finite",
    "get",
    "pack_codes",
    "packed",
    "unpack_codes",
    "with_codewords",
]
