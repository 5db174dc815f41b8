"""Number formats: reference codecs in plain PyTorch, one implementation for every stage.

Use:
    formats.get("nvfp4").fake_quant(x, encode_scale)      float32 xhat, the fast path
    formats.get("mxfp4", rule="floor").quantize(x)        QuantizedTensor: codes, block_scale, encode_scale
"""

from typing import Any

from trace_rl.errors import UserError
from trace_rl.formats.e2m1 import pack_codes, unpack_codes
from trace_rl.formats.fouroversix import FourOverSix
from trace_rl.formats.hif4 import HiF4
from trace_rl.formats.hscale import HScale
from trace_rl.formats.mxfp4 import MXFP4
from trace_rl.formats.nvfp4 import NVFP4
from trace_rl.formats.quantized import Format, QuantizedTensor, check_finite
from trace_rl.formats.static_scales import StaticScales

_FORMATS: dict[str, type[Format]] = {
    format_class.name: format_class for format_class in (NVFP4, MXFP4, FourOverSix, HiF4, HScale)
}


def get(name: str, **options: Any) -> Format:
    """The format of this name.

    Options are the format's own: `rule=` for mxfp4 and fouroversix, `importance=` for hscale.
    """
    if name not in _FORMATS:
        raise UserError(f"format {name!r} is unknown; choose one of {', '.join(sorted(_FORMATS))}")
    try:
        return _FORMATS[name](**options)
    except TypeError:
        raise UserError(f"format {name!r} does not take the options {', '.join(sorted(options))}") from None


__all__ = [
    "Format",
    "QuantizedTensor",
    "StaticScales",
    "check_finite",
    "get",
    "pack_codes",
    "unpack_codes",
]
