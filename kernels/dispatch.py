"""One call per kernel; the backend follows the device and an explicit setting.

    torch              the plain PyTorch twins: any device, any format
    compiled           a C++ operator: CPU; NVFP4 and MXFP4
    triton             Triton kernels: CUDA; NVFP4 and MXFP4
    triton-interpret   the same kernels, interpreted on CPU tensors (start Python with TRITON_INTERPRET=1): for tests

Setting: the keyword `backend`, else the environment variable TRACE_RL_KERNELS, else `auto`. A named backend that cannot
run is refused with the reason. `auto` means the fastest that can: `triton` on CUDA, `compiled` on CPU, and `torch` for
whatever these have no kernel for; on a CPU host where the C++ operator cannot be built it says so once and uses
`torch`. All give the same bits (the matrix products excepted), so the setting is no part of an experiment's identity.
The routed experts and RMS norms on a CPU (`trace_rl.kernels.experts`, `rms_norm`) follow it too; their sums have an
order of their own, so `compiled` and `torch` agree there within the noise of BF16, not bit for bit.
"""

import importlib
import importlib.util
import os
import sys
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import Format
from trace_rl.formats.quantized import EncodeScale
from trace_rl.guidance.align import UNGATED
from trace_rl.kernels import compiled, reference
from trace_rl.kernels.reference import PackedExperts, Quantized, RecordTarget

BACKENDS = ("torch", "compiled", "triton", "triton-interpret")
VARIABLE = "TRACE_RL_KERNELS"

_TRITON_MODULES = {
    "fake_quant": "fake_quant",
    "fake_quant_experts": "fake_quant",
    "quantize_record": "quantize_record",
    "guided_fake_quant": "guided_fake_quant",
    "kv_quantize_record": "kv_cache",
    "kv_dequantize": "kv_cache",
    "repack": "repack",
    "w4a16_moe": "w4a16_moe",
    "w4a4_moe": "w4a4_moe",
}


def choose(device: torch.device | str, setting: str | None = None) -> str:
    """The backend for tensors on this device; UserError with the reason where the named one cannot run."""
    device = torch.device(device)
    setting = setting or os.environ.get(VARIABLE) or "auto"
    if setting == "auto":
        return _automatic(device.type)
    if setting not in BACKENDS:
        raise UserError(
            f"kernel backend {setting!r} is unknown; choose one of auto, {', '.join(BACKENDS)} ({VARIABLE})"
        )
    if reason := _why_not(setting, device.type):
        raise UserError(f"kernel backend {setting!r} cannot run on {device.type}: {reason}")
    return setting


def refusal(backend: str, kernel: str, *, device: torch.device | str, fmt: Format) -> str | None:
    """Why this backend cannot run this kernel here, or None if it can."""
    if reason := _why_not(backend, torch.device(device).type):
        return reason
    return None if _implementation(backend, kernel, fmt) else f"it has no {kernel} for {fmt.name}"


def _automatic(device_type: str) -> str:
    if device_type == "cuda":
        return "triton" if _say_once("triton", "cuda") is None else "torch"
    if device_type == "cpu" and _say_once("compiled", "cpu") is None:
        return "compiled"
    return "torch"


@lru_cache(maxsize=2)
def _say_once(backend: str, device_type: str) -> str | None:
    reason = _why_not(backend, device_type)
    if reason is not None:
        print(f"trace_rl: quantizing in plain PyTorch, several times slower: {reason}", file=sys.stderr)
    return reason


@lru_cache(maxsize=32)
def _why_not(backend: str, device_type: str) -> str | None:
    if backend == "torch":
        return None
    if backend == "triton":
        if device_type != "cuda":
            return "Triton kernels run on CUDA devices"
        return None if importlib.util.find_spec("triton") else "the package triton is not installed"
    if device_type != "cpu":
        return "it works on CPU tensors"
    if backend == "compiled":
        return compiled.why_not()
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "Python was not started with TRITON_INTERPRET=1"
    return None


def _implementation(backend: str, kernel: str, fmt: Format) -> ModuleType | None:
    """The module with this kernel, None where the backend lacks it."""
    if backend == "torch":
        return reference
    if fmt.name not in ("nvfp4", "mxfp4"):
        return None
    module = compiled if backend == "compiled" else _triton_module(kernel)
    return module if hasattr(module, kernel) else None


@lru_cache(maxsize=16)
def _triton_module(kernel: str) -> ModuleType:
    return importlib.import_module(f"trace_rl.kernels.{_TRITON_MODULES[kernel]}")  # Triton only where it is used


def _pick(kernel: str, *, device: torch.device, fmt: Format, backend: str | None) -> ModuleType:
    named = backend or os.environ.get(VARIABLE) or "auto"
    chosen = choose(device, named)
    module = _implementation(chosen, kernel, fmt)
    if module is not None:
        return module
    if named != "auto":
        raise UserError(
            f"kernel backend {chosen!r} has no {kernel} for {fmt.name}; set {VARIABLE}=auto, which runs it on `torch`"
        )
    return reference


def fake_quant(
    x: Tensor, encode_scale: EncodeScale, *, fmt: Format, check: bool = True, backend: str | None = None
) -> Tensor:
    """See `reference.fake_quant`."""
    module = _pick("fake_quant", device=x.device, fmt=fmt, backend=backend)
    return module.fake_quant(x, encode_scale, fmt=fmt, check=check)


def fake_quant_experts(weight_ERC: Tensor, *, fmt: Format, check: bool = True, backend: str | None = None) -> Tensor:
    """See `reference.fake_quant_experts`."""
    module = _pick("fake_quant_experts", device=weight_ERC.device, fmt=fmt, backend=backend)
    return module.fake_quant_experts(weight_ERC, fmt=fmt, check=check)


def quantize_record(
    x: Tensor,
    encode_scale: EncodeScale,
    *,
    fmt: Format,
    target: RecordTarget | None = None,
    want_xhat: bool = True,
    want_codes: bool = False,
    check: bool = True,
    backend: str | None = None,
) -> Quantized:
    """See `reference.quantize_record`."""
    module = _pick("quantize_record", device=x.device, fmt=fmt, backend=backend)
    return module.quantize_record(
        x, encode_scale, fmt=fmt, target=target, want_xhat=want_xhat, want_codes=want_codes, check=check
    )


def guided_fake_quant(
    x: Tensor,
    guidance: Tensor,
    block_scale: Tensor,
    encode_scale: EncodeScale,
    *,
    fmt: Format,
    bits: int,
    gate: float = UNGATED,
    valid: Tensor | None = None,
    check: bool = True,
    backend: str | None = None,
) -> Tensor:
    """See `reference.guided_fake_quant`."""
    module = _pick("guided_fake_quant", device=x.device, fmt=fmt, backend=backend)
    return module.guided_fake_quant(
        x, guidance, block_scale, encode_scale, fmt=fmt, bits=bits, gate=gate, valid=valid, check=check
    )


def kv_quantize_record(
    x: Tensor,
    encode_scale: EncodeScale,
    cache_codes: Tensor,
    cache_scale: Tensor,
    slots: Tensor,
    *,
    fmt: Format,
    target: RecordTarget | None = None,
    check: bool = True,
    backend: str | None = None,
) -> None:
    """See `reference.kv_quantize_record`."""
    module = _pick("kv_quantize_record", device=x.device, fmt=fmt, backend=backend)
    module.kv_quantize_record(x, encode_scale, cache_codes, cache_scale, slots, fmt=fmt, target=target, check=check)


def kv_dequantize(
    cache_codes: Tensor,
    cache_scale: Tensor,
    slots: Tensor,
    encode_scale: EncodeScale,
    *,
    fmt: Format,
    backend: str | None = None,
) -> Tensor:
    """See `reference.kv_dequantize`."""
    module = _pick("kv_dequantize", device=cache_codes.device, fmt=fmt, backend=backend)
    return module.kv_dequantize(cache_codes, cache_scale, slots, encode_scale, fmt=fmt)


def repack(weight_ERC: Tensor, *, fmt: Format, check: bool = True, backend: str | None = None) -> PackedExperts:
    """See `reference.repack`."""
    module = _pick("repack", device=weight_ERC.device, fmt=fmt, backend=backend)
    return module.repack(weight_ERC, fmt=fmt, check=check)


def w4a16_moe(
    x_TH: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    weights_TK: Tensor,
    ids_TK: Tensor,
    *,
    fmt: Format,
    backend: str | None = None,
) -> Tensor:
    """See `reference.w4a16_moe`."""
    module = _pick("w4a16_moe", device=x_TH.device, fmt=fmt, backend=backend)
    return module.w4a16_moe(x_TH, gate_up, down, weights_TK, ids_TK, fmt=fmt)


def w4a4_moe(
    x_TH: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    weights_TK: Tensor,
    ids_TK: Tensor,
    *,
    fc1_scale: float,
    fc2_scale: float,
    fmt: Format,
    backend: str | None = None,
) -> Tensor:
    """See `reference.w4a4_moe`."""
    module = _pick("w4a4_moe", device=x_TH.device, fmt=fmt, backend=backend)
    return module.w4a4_moe(x_TH, gate_up, down, weights_TK, ids_TK, fc1_scale=fc1_scale, fc2_scale=fc2_scale, fmt=fmt)
