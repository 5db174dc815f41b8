"""Backend `compiled`: the quantizer as a C++ operator for CPUs, built once per machine by PyTorch's extension builder.

One pass over memory instead of a dozen: amax, scale, codes, xhat and record of a block while it sits in registers
(csrc/fp4_block.h). Equal bit for bit to `trace_rl.kernels.reference`. The operator is built at first use, about half a
minute, into PyTorch's extension folder (`TORCH_EXTENSIONS_DIR`, default ~/.cache/torch_extensions) under a name that
holds everything its bits depend on: sources, flags, PyTorch, Python, processor. Other processes wait for the one
that builds; a killed build leaves nothing behind that a later one would trust.

Only functions of x's values are here. Whatever has no entry in this module runs on the plain PyTorch twin.
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from trace_rl.errors import UserError
from trace_rl.formats import Format, check_finite
from trace_rl.formats.mxfp4 import MXFP4
from trace_rl.formats.nvfp4 import NVFP4, checked_encode_scale
from trace_rl.formats.quantized import EncodeScale
from trace_rl.guidance.align import UNGATED, check_guidance
from trace_rl.guidance.bits import packed_bytes
from trace_rl.kernels import reference
from trace_rl.kernels.reference import PackedExperts, Quantized, RecordTarget, check_slots

NAME = "trace_rl_fp4"
SOURCES = Path(__file__).parent / "csrc"
# No fused multiply-add: it would round once where the definition rounds twice.
# OpenMP: without it, PyTorch's parallel_for compiles to a serial loop.
FLAGS = ("-O3", "-std=c++20", "-march=native", "-ffp-contract=off", "-fopenmp")
_MXFP4_NUMBER = {"rceil": 1, "floor": 2, "even": 3}


def format_number(fmt: Format) -> int | None:
    """The operator's number of a format, None for one it does not know."""
    if type(fmt) is NVFP4:
        return 0
    return _MXFP4_NUMBER[fmt.rule] if type(fmt) is MXFP4 else None


def why_not() -> str | None:
    """Why the operator cannot be used here, or None. Builds it if need be."""
    try:
        operator()
    except UserError as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def operator() -> ModuleType:
    """The loaded operator. UserError where there is no compiler or it refuses the source."""
    target = _build_folder() / f"{NAME}.so"
    try:
        if not target.is_file():
            target.parent.parent.mkdir(parents=True, exist_ok=True)
            with open(target.parent.parent / f"{NAME}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released with the process, however it ends
                if not target.is_file():
                    _build(target.parent)
    except OSError as error:
        raise UserError(f"the C++ operator cannot be stored ({error}): set TORCH_EXTENSIONS_DIR") from error
    spec = importlib.util.spec_from_file_location(NAME, target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build_folder() -> Path:
    parts = [torch.__version__, sys.version, platform.machine(), _processor_flags(), _compiler_version(), *FLAGS]
    parts += [file.read_text() for file in sorted(SOURCES.iterdir())]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    return Path(root) / f"{NAME}_{key}"


def _processor_flags() -> str:
    """What `-march=native` means here: a home folder may be shared by unlike machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


@lru_cache(maxsize=1)
def _compiler_version() -> str:
    found = shutil.which(_compiler())
    if found is None:
        raise UserError(f"no C++ compiler {_compiler()!r} (set CXX, or install g++)")
    return subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout


def _build(folder: Path) -> None:
    from torch.utils import cpp_extension  # slow to import, and needed once per machine

    # The builder's own lock file outlives a killed build, so every build has a folder of its own.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{NAME}_build_") as scratch, _ninja_on_path():
        try:
            cpp_extension.load(
                NAME,
                [str(file) for file in sorted(SOURCES.glob("*.cpp"))],
                extra_cflags=list(FLAGS),
                extra_ldflags=["-fopenmp"],
                build_directory=scratch,
                is_python_module=False,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            reason = next((line for line in str(error).splitlines() if "error: " in line), str(error)[:200])
            raise UserError(f"the C++ operator did not build: {reason.strip()}") from error
        finished = Path(scratch) / "finished"
        finished.mkdir()
        shutil.copy2(Path(scratch) / f"{NAME}.so", finished)
        shutil.rmtree(folder, ignore_errors=True)  # without the operator in it: whatever it holds is in the way
        finished.replace(folder)


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """The environment's own ninja is found also by a Python whose environment was not activated."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


# The functions of trace_rl.kernels.reference ------------------------------------------------------------------------


def fake_quant(x: Tensor, encode_scale: EncodeScale, *, fmt: Format, check: bool = True) -> Tensor:
    """See reference.fake_quant."""
    return _quantize(x, encode_scale, fmt=fmt, checked_as="x" if check else None).xhat


def fake_quant_experts(weight_ERC: Tensor, *, fmt: Format, check: bool = True) -> Tensor:
    """See reference.fake_quant_experts."""
    encode_scale = reference.expert_encode_scale(weight_ERC, fmt=fmt)[:, None]
    return _quantize(weight_ERC, encode_scale, fmt=fmt, checked_as="expert weights" if check else None).xhat


def quantize_record(
    x: Tensor,
    encode_scale: EncodeScale,
    *,
    fmt: Format,
    target: RecordTarget | None = None,
    want_xhat: bool = True,
    want_codes: bool = False,
    check: bool = True,
) -> Quantized:
    """See reference.quantize_record."""
    return _quantize(
        x,
        encode_scale,
        fmt=fmt,
        target=target,
        want_xhat=want_xhat,
        want_codes=want_codes,
        checked_as="x" if check else None,
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
) -> Tensor:
    """See reference.guided_fake_quant."""
    check_guidance(x, block_scale, bits, gate=gate, fmt=fmt)
    if guidance.shape != (*x.shape[:-1], packed_bytes(x.shape[-1], bits)):
        raise UserError(
            f"guidance of shape {tuple(guidance.shape)} does not belong to a tensor of shape {tuple(x.shape)} at "
            f"{bits} bits: pass the packed rows of the same tokens"
        )
    rows = _rows(x, fmt)
    if valid is not None and (valid.shape != rows.shape[:1] or valid.dtype != torch.bool):
        raise UserError(f"valid must be bool [{rows.shape[0]}]; it is {valid.dtype} {tuple(valid.shape)}")
    xhat = torch.empty(x.shape, dtype=x.dtype)
    scale, group = _scale(encode_scale, x)
    finite = operator().guided(
        rows,
        _dense(guidance),
        _dense(block_scale),
        scale,
        group,
        format_number(fmt),
        bits,
        0.5 * (0.5 - gate) if gate < UNGATED else -1.0,
        None if valid is None else valid.contiguous(),
        xhat.view(rows.shape),
    )
    if not finite:
        return reference.guided_fake_quant(
            x, guidance, block_scale, encode_scale, fmt=fmt, bits=bits, gate=gate, valid=valid, check=check
        )
    return xhat


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
) -> None:
    """See reference.kv_quantize_record."""
    check_slots(slots, x.shape[0])
    # Before the record is written.
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < len(cache_codes):
        raise UserError(
            f"slots {int(slots.min())} to {int(slots.max())} lie outside a cache of {len(cache_codes)} rows"
        )
    _, codes, block_scale = quantize_record(
        x, encode_scale, fmt=fmt, target=target, want_xhat=False, want_codes=True, check=check
    )
    cache_codes.index_copy_(0, slots, codes)
    cache_scale.index_copy_(0, slots, block_scale)


def repack(weight_ERC: Tensor, *, fmt: Format, check: bool = True) -> PackedExperts:
    """See reference.repack."""
    encode_scale = reference.expert_encode_scale(weight_ERC, fmt=fmt)
    _, codes, block_scale = _quantize(
        weight_ERC,
        encode_scale[:, None],
        fmt=fmt,
        want_xhat=False,
        want_codes=True,
        checked_as="expert weights" if check else None,
    )
    return PackedExperts(codes=codes, block_scale=block_scale, encode_scale=encode_scale)


def _quantize(
    x: Tensor,
    encode_scale: EncodeScale,
    *,
    fmt: Format,
    target: RecordTarget | None = None,
    want_xhat: bool = True,
    want_codes: bool = False,
    checked_as: str | None,
) -> Quantized:
    """As `quantize_record`; `checked_as`: the name under which NaN and Inf are reported, None: not at all."""
    rows = _rows(x, fmt)
    cols = x.shape[-1]
    xhat = torch.empty(x.shape, dtype=x.dtype) if want_xhat else None
    codes = torch.empty((*x.shape[:-1], cols // 2), dtype=torch.uint8) if want_codes else None
    block_scale = torch.empty((*x.shape[:-1], cols // fmt.block_size), dtype=torch.uint8) if want_codes else None
    scale, group = _scale(encode_scale, x)
    buffer = slots = None
    start = bits = 0
    scale_bits = 8
    if target is not None:
        target.check(rows, fmt=fmt)
        buffer, slots, start = target.buffer, target.slots, target.start
        bits, scale_bits = target.bits, target.scale_bits
    finite = operator().nearest(
        rows,
        scale,
        group,
        format_number(fmt),
        None if xhat is None else xhat.view(rows.shape),
        codes,
        block_scale,
        buffer,
        slots,
        start,
        bits,
        scale_bits,
    )
    if not finite:
        if checked_as is not None:
            check_finite(x, checked_as)
        # What NaN and Inf become is the definition's to say.
        return reference.quantize_record(
            x, encode_scale, fmt=fmt, target=target, want_xhat=want_xhat, want_codes=want_codes, check=False
        )
    return Quantized(xhat=xhat, codes=codes, block_scale=block_scale)


def _rows(x: Tensor, fmt: Format) -> Tensor:
    """x as [rows, cols] with dense rows."""
    fmt.check_columns(x)
    x = x.detach()
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    return x.contiguous().view(-1, x.shape[-1])


def _dense(packed: Tensor) -> Tensor:
    """[T, bytes] with dense rows; a column range of the record rows is taken as it is."""
    packed = packed if packed.dim() == 2 else packed.reshape(-1, packed.shape[-1])
    return packed if packed.stride(1) == 1 else packed.contiguous()


@lru_cache(maxsize=4096)
def _number(encode_scale: float) -> Tensor:
    return torch.tensor([checked_encode_scale(encode_scale)], dtype=torch.float32)


def _scale(encode_scale: EncodeScale, x: Tensor) -> tuple[Tensor, int]:
    """(float32 encode scales, rows that share one; 0: all rows do)."""
    if not isinstance(encode_scale, Tensor):
        return _number(float(encode_scale)), 0
    scale = encode_scale.detach().float()
    if scale.numel() == 1:
        return scale.reshape(1), 0
    shape = (1,) * (x.dim() - 1 - scale.dim()) + tuple(scale.shape)
    grouped = 0  # trailing dimensions over which one scale holds: experts [E, 1] of [E, R, C] need no copy per row
    while grouped < len(shape) and shape[len(shape) - 1 - grouped] == 1:
        grouped += 1
    outer = x.shape[: x.dim() - 1 - grouped]
    group = x.shape[x.dim() - 1 - grouped : -1].numel()
    return scale.reshape(shape[: len(shape) - grouped]).expand(outer).reshape(-1).contiguous(), max(1, group)
