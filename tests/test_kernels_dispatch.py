"""Which backend runs, why another one cannot, and what happens where the C++ operator cannot be built."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton_interpret.cases import FORMATS, hard_rows, same

from trace_rl import formats
from trace_rl.errors import UserError
from trace_rl.kernels import compiled, dispatch, reference
from trace_rl.kernels.dispatch import VARIABLE, choose

NVFP4 = FORMATS["nvfp4"]
KERNELS = [
    "fake_quant",
    "fake_quant_experts",
    "quantize_record",
    "guided_fake_quant",
    "kv_quantize_record",
    "kv_dequantize",
    "repack",
    "w4a16_moe",
    "w4a4_moe",
]

needs_operator = pytest.mark.skipif(compiled.why_not() is not None, reason=f"no operator: {compiled.why_not()}")


@pytest.fixture(autouse=True)
def no_setting(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


class Operations(TorchDispatchMode):
    """Names of the PyTorch operations that ran."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def quantizes_in_pytorch(call):
    """Whether the call rounds with PyTorch's own operations."""
    with Operations() as operations:
        call()
    return "clamp_" in operations.names


def python(code, tmp_path, **environment):
    """stdout and stderr of a fresh interpreter, away from the repository, with these variables (None: unset)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: None, **environment}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={name: value for name, value in environment.items() if value is not None},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stderr


# Choosing -------------------------------------------------------------------------------------------------------------


def test_auto_is_the_fastest_of_the_device():
    assert choose("cuda") == choose("cuda:1") == "triton"
    assert choose("meta") == "torch"


@needs_operator
def test_auto_on_a_cpu_is_the_operator():
    assert choose("cpu") == choose(torch.device("cpu"), "auto") == "compiled"
    x = hard_rows(64)
    assert not quantizes_in_pytorch(lambda: dispatch.fake_quant(x, 1.0, fmt=NVFP4))
    assert quantizes_in_pytorch(lambda: dispatch.fake_quant(x, 1.0, fmt=NVFP4, backend="torch"))


def test_the_variable_is_followed_and_the_keyword_precedes_it(monkeypatch):
    x = hard_rows(64)
    monkeypatch.setenv(VARIABLE, "torch")
    assert choose("cpu") == choose("cuda") == "torch"
    assert quantizes_in_pytorch(lambda: dispatch.fake_quant(x, 1.0, fmt=NVFP4))
    assert choose("cuda", "triton") == choose("cuda", "auto") == "triton"
    monkeypatch.setenv(VARIABLE, "")
    assert choose("cuda") == "triton"
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(UserError, match=rf"'fast' is unknown; choose one of auto, torch, .*\({VARIABLE}\)"):
        dispatch.fake_quant(x, 1.0, fmt=NVFP4)
    assert choose("cpu", "torch") == "torch"


@pytest.mark.parametrize(
    ("device", "setting", "reason"),
    [
        ("cpu", "triton", "cannot run on cpu: Triton kernels run on CUDA devices"),
        ("cuda", "compiled", "cannot run on cuda: it works on CPU tensors"),
        ("cuda", "triton-interpret", "cannot run on cuda: it works on CPU tensors"),
        ("meta", "triton", "cannot run on meta: Triton kernels run on CUDA devices"),
        ("cpu", "nonsense", "'nonsense' is unknown"),
    ],
)
def test_a_named_backend_that_cannot_run_is_refused(device, setting, reason, monkeypatch):
    with pytest.raises(UserError, match=reason):
        choose(device, setting)
    monkeypatch.setenv(VARIABLE, setting)
    with pytest.raises(UserError, match=reason):
        choose(device)


def test_the_interpreter_needs_a_python_started_for_it(tmp_path):
    code = """
from trace_rl.errors import UserError
from trace_rl.kernels.dispatch import choose
try:
    print(choose("cpu", "triton-interpret"))
except UserError as error:
    print(error)
"""
    refused, _ = python(code, tmp_path, TRITON_INTERPRET=None)
    assert "Python was not started with TRITON_INTERPRET=1" in refused
    accepted, _ = python(code, tmp_path, TRITON_INTERPRET="1")
    assert accepted.split() == ["triton-interpret"]


# Kernels that a backend lacks -----------------------------------------------------------------------------------------


@needs_operator
def test_refusal_says_which_kernel_a_backend_lacks():
    def refusal(backend, kernel, device="cpu", fmt=NVFP4):
        return dispatch.refusal(backend, kernel, device=device, fmt=fmt)

    assert refusal("torch", "w4a4_moe", "cuda") is None
    assert refusal("compiled", "fake_quant") is None
    assert refusal("compiled", "w4a16_moe") == "it has no w4a16_moe for nvfp4"
    assert refusal("compiled", "fake_quant", fmt=formats.get("hif4")) == "it has no fake_quant for hif4"
    assert refusal("compiled", "fake_quant", "cuda") == "it works on CPU tensors"
    assert refusal("triton", "fake_quant") == "Triton kernels run on CUDA devices"


@needs_operator
def test_a_named_backend_without_the_kernel_is_refused_and_auto_runs_it_in_pytorch(monkeypatch):
    x = hard_rows(64)
    codes, block_scale = torch.zeros((4, 32), dtype=torch.uint8), torch.full((4, 4), 56, dtype=torch.uint8)
    slots = torch.tensor([1, 3])
    for name in ("fouroversix", "hscale", "hif4"):
        fmt = formats.get(name)
        assert same(dispatch.fake_quant(x, 1.0, fmt=fmt), reference.fake_quant(x, 1.0, fmt=fmt))
        with pytest.raises(UserError, match=f"'compiled' has no fake_quant for {name}; set {VARIABLE}=auto"):
            dispatch.fake_quant(x, 1.0, fmt=fmt, backend="compiled")
    arguments = (codes, block_scale, slots, 1.0)
    assert same(dispatch.kv_dequantize(*arguments, fmt=NVFP4), reference.kv_dequantize(*arguments, fmt=NVFP4))
    monkeypatch.setenv(VARIABLE, "compiled")
    with pytest.raises(UserError, match=f"'compiled' has no kv_dequantize for nvfp4; set {VARIABLE}=auto"):
        dispatch.kv_dequantize(*arguments, fmt=NVFP4)


def test_every_backend_has_the_signatures_of_the_definition():
    for name in KERNELS:
        expected = inspect.signature(getattr(reference, name))
        parameters = dict(inspect.signature(getattr(dispatch, name)).parameters)
        backend = parameters.pop("backend")
        assert backend.default is None and backend.kind is inspect.Parameter.KEYWORD_ONLY
        assert list(parameters.values()) == list(expected.parameters.values()), name
        if hasattr(compiled, name):
            assert inspect.signature(getattr(compiled, name)) == expected, name


@pytest.mark.parametrize("backend", ["torch", pytest.param("compiled", marks=needs_operator), "auto"])
def test_each_function_hands_all_its_arguments_on(backend):
    x = hard_rows(64).bfloat16()
    fmt = FORMATS["floor"]
    scale = torch.linspace(1, 2, 9)
    outcomes = []
    for module, options in ((reference, {}), (dispatch, {"backend": backend})):
        buffer, codes, block_scale = (torch.zeros((12, n), dtype=torch.uint8) for n in (60, 32, 2))
        target = reference.RecordTarget(buffer, torch.arange(9) + 2, 3, 3, 2)
        options = options | {"fmt": fmt}
        quantized = module.quantize_record(
            x, scale, target=target, want_xhat=False, want_codes=True, check=False, **options
        )
        assert quantized.xhat is None
        module.kv_quantize_record(
            x, scale, codes, block_scale, torch.arange(9) + 1, target=target, check=False, **options
        )
        guidance = buffer[2:11, 3:27]
        guided = module.guided_fake_quant(
            -x, guidance, block_scale[1:10], scale, bits=3, gate=0.2, valid=scale > 1.5, check=False, **options
        )
        weight = x.view(3, 3, 64)
        outcomes.append(
            (
                buffer,
                codes,
                block_scale,
                guided,
                quantized.codes,
                module.fake_quant(x, scale, check=False, **options),
                module.fake_quant_experts(weight, check=False, **options),
                *module.repack(weight, check=False, **options),
            )
        )
    assert all(same(*pair) for pair in zip(*outcomes, strict=True))


# Processes ------------------------------------------------------------------------------------------------------------

USE = """
import sys
import torch
from trace_rl import formats
from trace_rl.kernels import dispatch
x = torch.linspace(-9, 9, 64).view(2, 32)
for name in ("nvfp4", "mxfp4", "nvfp4"):
    xhat = dispatch.fake_quant(x, 1.0, fmt=formats.get(name))
print(dispatch.choose("cpu"), xhat.sum().item(), "triton" in sys.modules)
"""


def expected_sum():
    return reference.fake_quant(torch.linspace(-9, 9, 64).view(2, 32), 1.0, fmt=NVFP4).sum().item()


def test_importing_the_dispatch_does_not_import_triton(tmp_path):
    code = "import sys; import trace_rl.kernels.dispatch, trace_rl.kernels.experts; print('triton' in sys.modules)"
    assert python(code, tmp_path)[0].split() == ["False"]


@pytest.mark.parametrize("compiler", ["absent", "fails at once", "fails at compiling", "no place for the result"])
def test_auto_without_a_working_compiler_says_so_once_and_uses_pytorch(compiler, tmp_path):
    folder, cxx = tmp_path / "extensions", "/nonexistent"
    reason = r"no C\+\+ compiler '/nonexistent' \(set CXX, or install g\+\+\)"
    if compiler == "no place for the result":
        if compiled.why_not() is not None:
            pytest.skip("no compiler")
        folder.write_text("a file, not a folder")
        cxx, reason = None, "cannot be stored .*set TORCH_EXTENSIONS_DIR"
    elif compiler != "absent":
        cxx, reason = str(tmp_path / "c++"), "did not build: "
        answers = ""
        if compiler == "fails at compiling":
            real = shutil.which("g++")
            if real is None:
                pytest.skip("no g++")
            answers, reason = (
                f'case "$*" in *.o*) ;; *) exec {real} "$@";; esac\n',
                "did not build: .*no such processor",
            )
        Path(cxx).write_text(f'#!/bin/sh\n{answers}echo "x.cpp:1: fatal error: no such processor" >&2\nexit 1\n')
        Path(cxx).chmod(0o755)
    out, err = python(USE, tmp_path, CXX=cxx, TORCH_EXTENSIONS_DIR=str(folder))
    assert out.split() == ["torch", str(expected_sum()), "False"]
    (line,) = err.splitlines()
    assert line.startswith("trace_rl: quantizing in plain PyTorch, several times slower: ")
    assert re.search(reason, line), line
    if folder.is_dir():
        assert not [path for path in folder.iterdir() if path.is_dir()]  # nothing half-built is left


def test_a_named_operator_without_a_compiler_is_refused(tmp_path):
    code = """
from trace_rl.errors import UserError
from trace_rl.kernels.dispatch import choose
try:
    choose("cpu")
except UserError as error:
    print(error)
"""
    environment = {"CXX": "/nonexistent", "TORCH_EXTENSIONS_DIR": str(tmp_path), VARIABLE: "compiled"}
    out, err = python(code, tmp_path, **environment)
    assert out.startswith("kernel backend 'compiled' cannot run on cpu: no C++ compiler '/nonexistent'") and not err


@needs_operator
@pytest.mark.slow
def test_processes_that_start_at_once_share_one_build_and_do_not_trust_a_killed_one(tmp_path, monkeypatch):
    root = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root))
    finished = compiled._build_folder()
    # A folder without the operator under the final name, and what a build leaves that was killed while linking.
    for leftover, file in ((finished, "lock"), (root / f"{compiled.NAME}_build_killed", f"{compiled.NAME}.so")):
        leftover.mkdir(parents=True)
        (leftover / file).write_bytes(b"\x7fELF")
    command = [sys.executable, "-c", USE]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **options) for _ in range(2)]
    outputs = [process.communicate(timeout=600) for process in processes]
    for out, err in outputs:
        assert (out.split(), err) == (["compiled", str(expected_sum()), "False"], "")
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == sorted(
        [finished.name, f"{compiled.NAME}_build_killed"]
    )
    assert [path.name for path in finished.iterdir()] == [f"{compiled.NAME}.so"]
    # A later process loads it as it is.
    before = (finished / f"{compiled.NAME}.so").stat()
    assert python(USE, tmp_path)[0].split()[0] == "compiled"
    after = (finished / f"{compiled.NAME}.so").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
