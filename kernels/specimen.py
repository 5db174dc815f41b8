"""Kernels as they are compiled for a GPU, on a host that has none: resources, spills and PTX of every variant.

Triton needs no driver to compile: a `Specimen` names a kernel, the types of its arguments and its constants, and
`compile_specimen` makes the machine code for an architecture with the assembler that Triton carries. The loaded
kernel's spill count (`n_spills`) is only known to a driver, so resources are read from the machine code itself with
`cuobjdump -res-usage`: REG is registers per thread, SHARED the static shared memory, and STACK + LOCAL the bytes of
local memory, where the assembler puts whatever does not fit into registers. A kernel here has no arrays, and its only
call, the slow path of a division, needs no frame, so any byte of local memory is a spill (`ptxas -v` says the same).
"""

import importlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = ("fake_quant", "guided_fake_quant", "kv_cache", "quantize_record", "repack", "w4a16_moe", "w4a4_moe")
"""Modules of this package that export SPECIMENS."""

CAPABILITIES = (90, 100, 120)
"""Hopper, data-centre Blackwell, consumer Blackwell."""


@dataclass(frozen=True)
class Specimen:
    """A kernel and one way to call it."""

    name: str
    kernel: Any
    """The @triton.jit function."""
    signature: dict[str, str]
    """Triton types of the arguments that are not constants: *bf16, *u8, i32, fp32. An argument that the launcher gives
    as None is a constant. A type that ends in `:16` (`*bf16:16`) promises a multiple of 16, as Triton finds at a
    launch."""
    constexprs: dict[str, Any]
    num_warps: int = 4
    min_capability: int = 90
    bit_exact: bool = True
    """Whether results must equal the twin's bits: no contraction may appear in the PTX."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a specimen."""

    ptx: str
    cubin: bytes
    registers: int
    """Per thread."""
    shared_bytes: int
    """Per program, static and dynamic."""
    local_bytes: int
    """Per thread: above 0, registers were spilled."""


def specimens() -> list[Specimen]:
    """Every specimen of every Triton module (imports triton)."""
    return [specimen for module in modules() for specimen in module.SPECIMENS]


def modules() -> list[ModuleType]:
    """The Triton modules."""
    return [importlib.import_module(f"trace_rl.kernels.{name}") for name in MODULES]


def compile_specimen(specimen: Specimen, capability: int) -> Compiled:
    """Compile for an architecture (90 = sm_90), FP contraction off as in every launch. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = specimen.kernel.arg_names
    unknown = (specimen.signature.keys() | specimen.constexprs.keys()) ^ set(names)
    assert not unknown, f"{specimen.name}: {sorted(unknown)} are arguments without a type, or no arguments"
    types = {name: specimen.signature.get(name, "constexpr") for name in names}
    multiples = {
        (names.index(name),): [["tt.divisibility", 16]] for name, text in types.items() if text.endswith(":16")
    }
    source = ASTSource(
        specimen.kernel,
        {name: text.removesuffix(":16") for name, text in types.items()},
        constexprs=dict(specimen.constexprs),
        attrs=multiples,
    )
    options = {"enable_fp_fusion": False, "num_warps": specimen.num_warps}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _resources(kernel.asm["cubin"])
    return Compiled(
        ptx=kernel.asm["ptx"],
        cubin=kernel.asm["cubin"],
        registers=usage["REG"],
        shared_bytes=max(kernel.metadata.shared, usage["SHARED"]),
        local_bytes=usage["STACK"] + usage["LOCAL"],
    )


def _resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL, ... of the one kernel in a cubin."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line for line in text.splitlines() if "REG:" in line]
    assert len(lines) == 1, text
    return {key: int(value) for key, value in re.findall(r"([A-Z]+)(?:\[\d+\])?:(\d+)", lines[0])}
