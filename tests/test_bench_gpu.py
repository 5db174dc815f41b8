"""kernels/bench_gpu.py as a GPU host starts it, but on the CPU: torch, triton and the checkout, nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trace_rl.kernels import bench_gpu, bf16_moe, gpu_checks

# Runs before the program, as sitecustomize. What torch and triton import themselves stays allowed; the checkout may
# import nothing but them and the standard library, and must not be found through the editable install.
GUARD = """
import builtins
import sys

CHECKOUT = tuple(f"{root}/{{folder}}/" for folder in ("trace", "kernels"))
ALLOWED = {{*sys.stdlib_module_names, "torch", "triton", "trace_rl"}}
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
unguarded = builtins.__import__


def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {{}}).get("__file__") or ""
    if level == 0 and importer.startswith(CHECKOUT) and name.partition(".")[0] not in ALLOWED:
        raise ModuleNotFoundError(f"{{importer}} imports {{name}}, which a GPU host does not have", name=name)
    return unguarded(name, globals, locals, fromlist, level)


builtins.__import__ = guarded
"""


def run(repository: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Python on a host without any package but torch and triton, and without a GPU."""
    (folder / "sitecustomize.py").write_text(GUARD.format(root=repository))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=repository, env=environment, capture_output=True, text=True, timeout=600
    )


def test_the_guard_hides_other_packages_and_the_installation(repository: Path, tmp_path: Path) -> None:
    program = f"exec('import numpy', {{'__file__': '{repository}/kernels/any.py'}})"
    found = run(repository, tmp_path, "-c", program)
    assert found.returncode == 1 and "does not have" in found.stderr
    found = run(repository, tmp_path, "-P", "-c", "import trace_rl")
    assert found.returncode == 1 and "No module named 'trace_rl'" in found.stderr


def test_without_a_gpu_it_says_so(repository: Path, tmp_path: Path) -> None:
    found = run(repository, tmp_path, "kernels/bench_gpu.py", "--json", str(tmp_path / "found.json"))
    assert found.returncode == 2, found.stdout + found.stderr
    assert found.stderr.startswith("error: no CUDA device") and "--interpret" in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert not (tmp_path / "found.json").exists()


def test_a_result_that_could_not_be_written_is_refused_first(repository: Path, tmp_path: Path) -> None:
    found = run(repository, tmp_path, "kernels/bench_gpu.py", "--json", str(tmp_path / "missing" / "found.json"))
    assert found.returncode == 2 and "there is no folder" in found.stderr


@pytest.mark.slow
def test_all_checks_pass_in_the_interpreter(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    found = run(repository, tmp_path, "kernels/bench_gpu.py", "--interpret", "--json", str(file))
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-5000:]
    result = json.loads(file.read_text())
    checked = {kernel.strip() for row in result["checks"] for kernel in row["kernel"].split(",")}
    assert checked == {
        "fake_quant",
        "fake_quant_experts",
        "quantize_record",
        "guided_fake_quant",
        "kv_quantize_record",
        "kv_dequantize",
        "repack",
        "w4a16_moe",
        "w4a4_moe",
    }
    assert all(row["cases"] > 0 and row["failed"] == 0 for row in result["checks"])
    assert not (result["failures"] or result["streaming"] or result["moe"])
    assert "0 failures" in found.stdout


def test_what_raises_or_finds_no_time_is_reported_and_the_rest_goes_on() -> None:
    bench = bench_gpu.Bench("cpu", quick=False, deadline=float("inf"))
    assert bench.attempt("sum", lambda: 1 + 1) == 2
    assert bench.attempt("quotient", lambda: 1 / 0) is None
    bench.deadline = 0.0
    assert bench.attempt("late", lambda: 1) is None
    assert bench.attempt("comparison", lambda: 1, ours=False) is None
    assert [failure.partition(":")[0] for failure in bench.failures] == ["quotient", "late"]
    assert "no time" in bench.failures[1] and list(bench.found["not_run"]) == ["comparison"]


def test_one_wrong_bit_fails_a_check() -> None:
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    gpu_checks.assert_same((x, None), (x.clone(), None), "x")
    with pytest.raises(AssertionError, match="1 of 6 differ"):
        gpu_checks.assert_same(torch.where(torch.arange(6).view(2, 3) == 4, -x, x), x, "x")  # -0
    with pytest.raises(AssertionError, match="float32"):
        gpu_checks.assert_same(x.float(), x, "x")


def test_a_product_is_compared_with_a_bound_that_means_something() -> None:
    expected = torch.ones(3, dtype=torch.float64)
    bound = expected * 0.01
    gpu_checks.assert_within(torch.tensor([1.0, 1.005, 0.995]), expected, bound, "y")
    for wrong in (1.02, float("nan")):
        with pytest.raises(AssertionError, match="off by"):
            gpu_checks.assert_within(torch.tensor([1.0, wrong, 1.0]), expected, bound, "y")
    with pytest.raises(AssertionError, match="proves nothing"):
        gpu_checks.assert_within(torch.ones(3), expected, bound * 100, "y")


def test_inputs_of_the_checks() -> None:
    every = gpu_checks.every_bfloat16()
    assert len(torch.unique(every.view(torch.int16))) == every.numel() == 2**16 - 2 * 128
    points = set(gpu_checks.boundaries().flatten().tolist())
    assert {0.0, 0.25, 0.75, 5.0, 6.0, -3.5, 2.5 * 0.125} <= points
    assert float(torch.nextafter(torch.tensor(2.5), torch.tensor(9.0))) in points


@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_bf16_versions_compute_the_layer(tokens: int) -> None:
    torch.manual_seed(tokens)
    experts, hidden, width, top_k = 8, 32, 16, 3
    batch = bf16_moe.make_batch(tokens, place=2, device="cpu", hidden=hidden, num_experts=experts, top_k=top_k)
    assert torch.equal(torch.unique(batch.ids_TK), torch.arange(batch.first, batch.first + batch.count))
    assert batch.first + batch.count <= experts
    gate_up, down = (
        torch.randn(experts, *shape).to(torch.bfloat16) * 0.2 for shape in ((2 * width, hidden), (hidden, width))
    )
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for weight, expert in zip(batch.weights_TK[token].double(), batch.ids_TK[token], strict=True):
            gate, up = (gate_up[expert].double() @ batch.x_TH[token].double()).chunk(2)
            expected[token] += weight * (down[expert].double() @ (torch.nn.functional.silu(gate) * up))
    for name, version in bf16_moe.VERSIONS.items():
        found = version(batch, gate_up, down).double()
        assert float((found - expected).norm() / expected.norm()) < 0.02, name


def test_targets_and_tables() -> None:
    def row(name: str, share: float) -> dict[str, object]:
        values = bench_gpu.spread([share])
        return {"operation": name, "seconds": values, "gb_per_s": values, "share_of_copy": values}

    slow = bench_gpu.moe_row(16, {"bf16 loop": [9.0, 9.0], "bf16 bmm": [4.0, 6.0], "w4a16_moe": [2.0, 2.0]}, experts=82)
    assert slow["baseline"] == "bf16 bmm" and slow["speedup"]["median"] == 2.5 and slow["speedup"]["min"] == 2.0
    fast = bench_gpu.moe_row(32, {"bf16 loop": [9.0], "w4a16_moe": [9.0]}, experts=111)
    found = {
        "checks": [{"kernel": "fake_quant", "cases": 3, "failed": 1}],
        "streaming": [row("copy", 1.0), row("quantize_record, xhat", 0.8), row("guided_fake_quant, full record", 0.7)],
        "moe": [part | {"predicted_speedup": None} for part in (slow, fast)],
        "not_run": {"w4a4_moe": "no FP4 tensor cores"},
        "failures": ["check fake_quant: one"],
        "seconds": 7.0,
    }
    found["targets"] = bench_gpu.targets(found)
    assert [(target["value"], target["met"]) for target in found["targets"]] == [(0.8, True), (0.7, False), (2.5, True)]
    text = bench_gpu.report(found)
    assert "met     quantize_record, xhat" in text and "NOT MET guided_fake_quant, full record" in text
    assert "FAILED check fake_quant: one" in text and "not run: w4a4_moe" in text and "2.50 (2.00-3.00)" in text
