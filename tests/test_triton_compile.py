"""Every Triton kernel compiles for every GPU generation without a GPU, spills nothing and contracts nothing.

Registers and local memory are read from the machine code (trace_rl.kernels.specimen says how). Contraction of a*b+c
into one rounding would change bits; it is looked for in the PTX and forbidden again to the assembler (`--fmad=false`),
as is flushing subnormals, which the codes' arithmetic needs.
"""

import ast
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trace_rl.kernels import specimen
from trace_rl.kernels.specimen import Specimen, compile_specimen

MAX_REGISTERS = 128  # with 64 threads a program, 8 programs per multiprocessor
SHARED_BYTES = {90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # most that a program may have

pytestmark = pytest.mark.slow


def _label(case: Specimen) -> str:
    """File of the kernel and name of the specimen."""
    return f"{case.kernel.fn.__module__.rpartition('.')[2]}: {case.name}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("capability", specimen.CAPABILITIES)
@pytest.mark.parametrize("case", specimen.specimens(), ids=_label)
def test_kernel_compiles_without_spills_and_contraction(case: Specimen, capability: int) -> None:
    if capability < case.min_capability:
        pytest.skip(f"{_label(case)} needs sm_{case.min_capability}")
    compiled = compile_specimen(case, capability)
    print(f"{_label(case)}, sm_{capability}: {compiled.registers} registers, {compiled.shared_bytes} B shared")
    assert compiled.local_bytes == 0, f"{compiled.local_bytes} bytes of registers per thread were spilled"
    assert 0 < compiled.registers <= 255
    assert compiled.shared_bytes <= SHARED_BYTES[capability]
    assert f".target sm_{capability}" in compiled.ptx
    if case.bit_exact:
        assert compiled.registers <= MAX_REGISTERS
        assert "fma.rn" not in compiled.ptx
        assert ".ftz" not in compiled.ptx
        assert "div.full" not in compiled.ptx and "div.approx" not in compiled.ptx


@triton.jit
def crowded_kernel(x_ptr, VALUES: tl.constexpr):
    """All values stay alive until their sum is known."""
    pointer = x_ptr + tl.arange(0, VALUES)
    x = tl.load(pointer)
    tl.store(pointer, x / tl.sum(x, axis=0))


@triton.jit
def contractible_kernel(x_ptr):
    """A product and a sum."""
    pointer = x_ptr + tl.arange(0, 128)
    x = tl.load(pointer)
    tl.store(pointer, x * x + 3.0)


def test_spills_are_seen() -> None:
    small, large = (
        Specimen("crowded", crowded_kernel, {"x_ptr": "*fp32:16"}, {"VALUES": values}, num_warps=1)
        for values in (1024, 16384)
    )
    assert compile_specimen(small, 90).local_bytes == 0
    assert compile_specimen(large, 90).local_bytes > 0


def test_contraction_is_seen_and_switched_off() -> None:
    case = Specimen("contractible", contractible_kernel, {"x_ptr": "*fp32:16"}, {}, num_warps=1)
    source = ASTSource(contractible_kernel, {"x_ptr": "*fp32"})
    fused = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
    assert "fma.rn" in fused.asm["ptx"]
    assert "fma.rn" not in compile_specimen(case, 90).ptx


def test_every_launch_switches_contraction_off() -> None:
    launches = 0
    for module in specimen.modules():
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):  # kernel[grid](...)
                launches += 1
                options = {keyword.arg or ast.unparse(keyword.value) for keyword in node.keywords}
                assert options & {"LAUNCH", "enable_fp_fusion"}, f"{module.__name__}, line {node.lineno}"
    assert launches >= 4
