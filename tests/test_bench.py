"""The benchmarks' method and arithmetic: turns, rotation, bytes, ratios, targets. No time is asserted."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_config, tiny_run

from trace_rl import formats
from trace_rl.cli import main
from trace_rl.config import stages
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.guidance import FULL, GuidanceSpec
from trace_rl.config.load import parse_experiment
from trace_rl.errors import UserError
from trace_rl.guidance.record import ModelDims, RecordLayout
from trace_rl.kernels.reference import RecordTarget
from trace_rl.stages import bench_kernels, bench_step, measure, other_quantizers

METHODS_DIR = str(Path(__file__).resolve().parents[1] / "config" / "methods")


@pytest.fixture
def trace_rl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The command line in this process: exit code and standard error."""

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["trace-rl", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, capsys.readouterr().err

    return call


# Measuring --------------------------------------------------------------------------------------------------------


def test_candidates_take_turns_in_alternating_order_on_rotating_buffers():
    calls: list[tuple[str, int]] = []

    def candidate(name: str) -> Callable[[int], object]:
        return lambda index: calls.append((name, index))

    seconds = measure.alternate({"a": candidate("a"), "b": candidate("b")}, num_sets=3, rounds=3)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}
    assert min(itertools.chain(*seconds.values())) > 0
    assert [index for _, index in calls] == [number % 3 for number in range(len(calls))]
    # Warm-up of a and of b, then a b, b a, a b.
    assert [name for name, _ in itertools.groupby(calls, key=lambda call: call[0])] == list("abababab"[:6])


def test_an_output_lives_until_its_set_comes_round_again():
    alive: list[int] = []

    class Output:
        def __init__(self) -> None:
            alive.append(id(self))

        def __del__(self) -> None:
            alive.remove(id(self))

    most = 0

    def candidate(index: int) -> Output:
        nonlocal most
        most = max(most, len(alive))
        return Output()

    measure.alternate({"a": candidate}, num_sets=4, rounds=1)
    assert most == 4


def test_a_rotation_exceeds_the_cache_or_says_that_it_does_not():
    assert measure.Rotation(num_sets=3, set_bytes=10, cache_bytes=29).beyond_cache
    assert not measure.Rotation(num_sets=3, set_bytes=10, cache_bytes=30).beyond_cache
    assert not measure.Rotation(num_sets=3, set_bytes=10, cache_bytes=None).beyond_cache
    chosen = measure.rotation(1 << 20)
    if chosen.cache_bytes is not None and chosen.cache_bytes < measure.free_bytes() * measure.MEMORY_SHARE / 2:
        assert chosen.beyond_cache
    # A set that memory has no room for is still measured, and not said to be beyond the cache.
    huge = measure.rotation(1 << 50)
    assert huge.num_sets == 1
    assert measure.resident(64).as_json()["sets"] == 1


def test_ratios_are_formed_within_a_round():
    # The machine halves its speed in the second round: the ratio does not see it.
    assert measure.paired_ratio([2.0, 4.0, 3.0], [1.0, 2.0, 1.0]) == {"median": 2.0, "min": 2.0, "max": 3.0, "n": 3}
    with pytest.raises(ValueError, match="zip"):
        measure.paired_ratio([1.0], [1.0, 2.0])


def test_a_fresh_process_has_its_threads_and_its_errors_are_raised_here(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    assert measure.in_fresh_process(measure.environment, threads=2)["threads"] == 2
    assert torch.get_num_threads() == before
    with pytest.raises(UserError, match="'int3' is unknown"):
        measure.in_fresh_process(formats.get, "int3", threads=1)


def test_the_environment_is_one_line():
    line = measure.environment_line(measure.environment())
    assert torch.__version__ in line
    assert "\n" not in line


# bench kernels ----------------------------------------------------------------------------------------------------


OPERATIONS = {operation.name: operation for operation in bench_kernels.operations(64.0)}


def num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("name", OPERATIONS)
def test_bytes_are_those_of_the_tensors_read_and_written(name):
    operation = OPERATIONS[name]
    rows, cols = 16, 64
    arguments = operation.arguments(bench_kernels.activations(rows, cols, device="cpu"))
    results = operation.call(*arguments, backend="torch")
    outputs = [results] if isinstance(results, torch.Tensor) else [part for part in results if part is not None]
    moved = num_bytes(outputs)
    for argument in arguments:
        if isinstance(argument, RecordTarget):
            moved += num_bytes([argument.buffer, argument.slots])
        elif name == "kv_dequantize" and argument.dim() == 2:
            moved += num_bytes([argument]) // bench_kernels.CACHE_ROWS  # the rest of the cache is not read
        else:
            moved += num_bytes([argument])
    assert operation.num_bytes(rows, cols) == moved


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_measured_beside_copies_of_as_many_bytes(name):
    row = bench_kernels.measure_operation(
        OPERATIONS[name], shape=(16, 64), ours=["torch"], others={}, device="cpu", large=False, rounds=2
    )
    assert set(row["implementations"]) == {bench_kernels.COPY, bench_kernels.COPY_NEW, "torch"}
    assert (row["ours"], row["differing_bytes"], row["large"]) == ("torch", {}, False)
    for found in row["implementations"].values():
        rate, seconds = found["gb_per_s"], found["seconds"]
        assert rate["max"] == pytest.approx(row["bytes"] / seconds["min"] / 1e9)
        assert rate["n"] == seconds["n"] == 2
    assert row["implementations"][bench_kernels.COPY]["of_copy"]["median"] == 1.0
    json.dumps(row, allow_nan=False)


def test_a_backend_that_differs_is_counted_in_bytes():
    def call(x: torch.Tensor, *, backend: str) -> torch.Tensor:
        return x if backend == "torch" else torch.cat((x[:, :-1], -x[:, -1:]), dim=1)

    operation = bench_kernels.Operation("wrong", lambda rows, cols: 0, lambda x: (x,), call)
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    assert bench_kernels.differing_bytes(operation, (x,), backend="compiled") == 3  # the sign bit lies in one byte
    assert bench_kernels.differing_bytes(operation, (x,), backend="torch") == 0


def test_rates_shares_and_speed_ups_follow_from_the_seconds():
    seconds = {"copy": [1.0, 2.0], "torch": [8.0, 16.0], "compiled": [2.0, 4.0], "torchao": [20.0, 36.0]}
    found = bench_kernels.summarize(seconds, num_bytes=8 * 10**9)
    assert found["ours"] == "compiled"
    compiled = found["implementations"]["compiled"]
    assert compiled["gb_per_s"] == {"median": 3.0, "min": 2.0, "max": 4.0, "n": 2}
    assert compiled["of_copy"]["median"] == 0.5
    assert {name: ratio["median"] for name, ratio in found["speed_up"].items()} == {"torch": 4.0, "torchao": 9.5}
    without = bench_kernels.summarize({name: seconds[name] for name in ("copy", "torch")}, num_bytes=1)
    assert (without["ours"], without["speed_up"]) == ("torch", {})


def kernel_run(threads: int, *, ours_s: float) -> dict:
    """A large and a small operation in which the copy takes 1 s, torchao 16 s, and vLLM's reference is missing."""
    seconds = {"copy": [1.0], "compiled": [ours_s], "torchao": [16.0]}
    row = {
        "operation": "fake_quant",
        "large": True,
        "shape": [4096, 2048],
        "rotation": measure.Rotation(num_sets=12, set_bytes=1 << 25, cache_bytes=300 << 20).as_json(),
        "differing_bytes": {"compiled": 0},
        "refused": {},
        **bench_kernels.summarize(seconds, num_bytes=1),
    }
    small = row | {"shape": [64, 2048], "large": False}
    return {"threads": threads, "operations": [row, small], "agreement": {"torchao": {"values": 0.01}}, "refused": {}}


@pytest.mark.parametrize(("ours_s", "faster", "share"), [(2.0, True, True), (2.5, False, True), (2.6, False, False)])
def test_targets_of_the_kernels_are_computed_from_the_numbers(ours_s, faster, share):
    found = bench_kernels.targets(
        [kernel_run(1, ours_s=2.0), kernel_run(2, ours_s=ours_s)], shape=[4096, 2048], device="cpu"
    )
    verdicts = {(target["threads"], target["name"]): (target["value"], target["met"]) for target in found}
    assert verdicts == {
        (1, "times faster than torchao"): (8.0, True),
        (1, "times faster than vllm reference"): (None, None),
        (2, "times faster than torchao"): (16.0 / ours_s, faster),
        (2, "times faster than vllm reference"): (None, None),
        (2, "share of copy"): (1.0 / ours_s, share),
    }


def test_a_target_that_was_not_measured_is_named():
    found = bench_kernels.targets([kernel_run(1, ours_s=2.0)], shape=[4096, 2048], device="cpu")
    open_targets = [target for target in found if target["name"] == "share of copy"]
    assert [target["operation"] for target in open_targets] == list(bench_kernels.TARGET_OPERATIONS)
    assert {(target["met"], target["threads"]) for target in open_targets} == {(None, 2)}


def test_the_table_hides_neither_missed_targets_nor_refused_implementations():
    runs = [kernel_run(2, ours_s=2.6)]
    runs[0]["operations"][0]["differing_bytes"] = {"compiled": 5}
    runs[0]["operations"][0]["refused"] = {"torch": "it has no fake_quant"}
    runs[0]["refused"] = {"triton": "no GPU here"}
    result = {
        "runs": runs,
        "targets": bench_kernels.targets(runs, shape=[4096, 2048], device="cpu"),
        "environment": measure.environment(),
    }
    table = bench_kernels.kernels_table(result)
    assert "times faster than torchao >= 8: 6.15, NOT MET" in table
    assert "share of copy >= 0.4: 0.38, NOT MET" in table
    assert "times faster than vllm reference >= 8: not measured" in table
    assert "not timed: triton: no GPU here" in table
    assert "not timed: it has no fake_quant" in table
    assert "DIFFERS in 5 bytes" in table
    assert "more than the last-level cache holds" in table
    runs[0]["operations"][0]["rotation"]["beyond_cache"] = False
    assert "HOLDS them" in bench_kernels.kernels_table(result)


def test_every_backend_is_usable_or_refused_with_a_reason():
    usable, refused = bench_kernels.backends("cpu")
    assert "torch" in usable
    assert all(refused.values())
    assert set(usable) | set(refused) == set(bench_kernels.dispatch.BACKENDS)


@pytest.mark.slow
def test_other_quantizers_agree_or_say_in_how_many_codes_not():
    scale = 64.0
    found, refused = other_quantizers.foreign(scale, device="cpu")
    assert set(found) | set(refused) == set(other_quantizers.OTHERS)
    x = bench_kernels.activations(64, 128, device="cpu")
    shares = {name: other_quantizers.agreement(other, x, scale) for name, other in found.items()}
    # vLLM's reference is the definition of the format (tests/golden); compiled, it is the same arithmetic.
    assert set(shares[other_quantizers.VLLM].values()) == {0.0}
    # torchao divides where we multiply, which moves values that lie on a boundary.
    assert all(share < 0.01 for by_what in shares.values() for share in by_what.values())
    other = other_quantizers.Foreign(lambda x: -x)
    assert other_quantizers.agreement(other, torch.ones(2, 16, dtype=torch.bfloat16), scale) == {"values": 1.0}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--threads", "0"], "--threads 0"),
        (["--threads", "1,two"], "separated by commas"),
        (["--rows", "0"], "--rows 0"),
        (["--cols", "100"], "multiple of the block size 16"),
        (["--device", "tpu"], "choose cpu or cuda"),
    ],
)
def test_what_kernels_cannot_be_measured_on_is_a_user_error(trace_rl, arguments, expected):
    code, error = trace_rl("bench", "kernels", *arguments)
    assert code == 2
    assert error.startswith("error: ")
    assert expected in error


# bench step -------------------------------------------------------------------------------------------------------


def test_steps_are_timed_on_one_budget():
    bench = {"step_methods": ["qat", "qat@training.staleness=3"]}
    config = ExperimentConfig(bench=bench, suite={"methods_dir": METHODS_DIR})
    with pytest.raises(UserError, match="qat@training.staleness=3; steps are timed on one budget"):
        bench_step.step_methods(config)


def step(*, scale: float = 1.0, tokens: float = 100.0, **seconds: float) -> bench_step.StepRow:
    """A step of one second per phase, times ``scale``; ``seconds`` are added to a phase."""
    row = dict.fromkeys((*bench_step.PHASES, *bench_step.QUANTIZE), 0.0)
    row |= {"generate": 4.0, "train_forward": 2.0, "train_backward": 3.0, "optimizer": 1.0, bench_step.QUANTIZE[0]: 0.5}
    row = {phase: scale * (value + seconds.get(phase, 0.0)) for phase, value in row.items()}
    total = bench_step.total(row, bench_step.PHASES)
    return row | {
        "step": total,
        bench_step.CPU: total / 2,
        bench_step.OTHER: 0.0,
        "tokens": tokens,
        "response_tokens": tokens / 2,
    }


SPECS = {"qat": None, "trace": GuidanceSpec(), "trace_full": FULL}


def costs_of(**added: float) -> dict:
    """Costs of a guided method with ``added`` seconds, on a machine that is twice as slow in the second round."""
    rounds = {
        "qat": [[step(), step()], [step(scale=2.0)]],
        "trace": [[step(**added), step(**added)], [step(scale=2.0, **added)]],
        "trace_full": [[step(), step()], [step(scale=2.0)]],
    }
    return bench_step.guidance_costs(rounds, guidance=SPECS)


def test_costs_of_guidance_are_shares_of_what_qat_takes():
    quantize = bench_step.QUANTIZE[0]
    costs = costs_of(generate=0.2, record=0.2, train_forward=0.3, **{quantize: 0.12})
    trace = {name: cost["median"] for name, cost in costs["trace"].items() if isinstance(cost, dict)}
    assert trace == {
        "step": pytest.approx(7.0),  # 0.7 of 10
        "step_cpu": pytest.approx(7.0),
        "recording": pytest.approx(10.0),  # 0.4 of 4
        "training": pytest.approx(5.0),  # 0.3 of 6
        "guided_quantization": pytest.approx(100 * 0.12 / 6),
    }
    assert costs["trace"]["step"]["n"] == 3
    assert (costs["trace"]["bits"], costs["trace_full"]["bits"]) == (1, 4)
    assert all(costs["trace_full"][name]["median"] == 0.0 for name in trace)
    assert bench_step.guidance_costs({"trace": [[step()]]}, guidance={"trace": GuidanceSpec()}) == {}


@pytest.mark.parametrize(
    ("added", "met"),
    [
        ({"record": 0.11, "train_forward": 0.18, bench_step.QUANTIZE[0]: 0.17}, (True, True, True)),
        ({"record": 0.13, "train_forward": 0.18, bench_step.QUANTIZE[0]: 0.17}, (True, False, True)),
        ({"train_forward": 0.51}, (False, True, True)),
        ({"train_forward": 0.4, bench_step.QUANTIZE[0]: 0.19}, (True, True, False)),
    ],
)
def test_targets_of_the_step_are_computed_from_the_numbers(added, met):
    found = bench_step.targets(costs_of(**added))
    assert tuple(target["met"] for target in found) == met
    assert all(target["met"] == (target["value"] <= target["at_most"]) for target in found)
    assert bench_step.targets({}) == []


def test_rows_of_a_method_pool_its_rounds_and_keep_their_medians():
    row = bench_step.method_rows({"qat": [[step(), step()], [step(scale=3.0)]]})["qat"]
    assert row["seconds"]["step"] == {"median": 10.0, "min": 10.0, "max": 30.0, "n": 3}
    assert row["step_by_round"] == [10.0, 30.0]
    assert row["us_per_token"]["step"] == pytest.approx(1e5)
    assert row["tokens_per_s"]["rollout"]["median"] == 50 / 4
    assert row["tokens_per_s"]["trainer"]["median"] == pytest.approx(100 / 6)


def test_a_forced_response_is_judged_up_to_its_first_end_token():
    trainer = SimpleNamespace(reward=lambda problem, response: float(10 * problem + len(response)))
    bench_step.reward_until_end(trainer, eos_id=1)
    assert trainer.reward(2, [5, 6, 1, 7, 1]) == 23.0
    assert trainer.reward(2, [5, 6, 7]) == 23.0


@pytest.mark.slow
def test_every_method_steps_on_the_same_tokens(tmp_path, capsys):
    config = tiny_config(
        bench={
            "step_methods": ["qat", "trace"],
            "step_rounds": 2,
            "step_warmup": 1,
            "step_repeats": 1,
        },
        suite={"methods_dir": METHODS_DIR},
    )
    paths = tiny_run(tmp_path, config=config)
    result = bench_step.run(config, paths)
    assert result == json.loads(paths.bench_step.read_text())
    assert list(result["methods"]) == ["qat", "trace"]
    for row in result["methods"].values():
        assert row["response_tokens"] == 3 * 4 * 12  # prompts, samples, forced tokens
        assert row["seconds"]["step"]["n"] == 2
        assert set(row["seconds"]) == {
            *("step", bench_step.CPU, bench_step.OTHER),
            *bench_step.PHASES,
            *bench_step.QUANTIZE,
        }
        assert min(row["seconds"][phase]["min"] for phase in ("generate", "train_forward", "train_backward")) > 0
    assert result["methods"]["qat"]["tokens"] == result["methods"]["trace"]["tokens"]
    assert set(result["guidance"]) == {"trace"}
    assert len(result["targets"]) == 3
    printed = capsys.readouterr().out
    assert "trace over qat, step: " in printed
    assert printed.count("met") + printed.count("NOT MET") >= 3


@pytest.mark.slow
def test_one_method_at_a_time_is_measured_and_costs_nothing_without_qat(tmp_path, capsys):
    config = tiny_config(
        bench={"step_methods": ["trace"], "step_together": False, "step_warmup": 1, "step_repeats": 1},
        suite={"methods_dir": METHODS_DIR},
    )
    result = bench_step.run(config, tiny_run(tmp_path, config=config))
    assert result["methods"]["trace"]["seconds"]["step"]["n"] == config.bench.step_rounds == 2
    assert (result["guidance"], result["targets"]) == ({}, [])
    assert "what guidance costs: not measured, needs qat" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"bench": {"step_methods": ["ptq_nvfp4"]}}, "bench.step_methods has ptq_nvfp4"),
        ({"bench": {"step_methods": ["absent"]}}, "absent.yaml: no such configuration file"),
        ({"bench": {"step_methods": []}}, "bench.step_methods"),
        ({"bench": {"step_methods": ["bf16"]}}, "rl.jsonl does not exist"),
    ],
)
def test_a_step_that_cannot_be_measured_is_a_user_error(trace_rl, tmp_path, settings, expected):
    config = {"tracking": {"enabled": False}, "suite": {"methods_dir": METHODS_DIR}} | settings
    code, error = trace_rl("bench", "step", "--config", json.dumps(config), "--results", str(tmp_path))
    assert code == 2
    assert expected in error


# Settings ---------------------------------------------------------------------------------------------------------


def test_settings_of_the_step_do_not_measure_the_rollout_again():
    default = ExperimentConfig()
    steps = parse_experiment({"bench": {"step_repeats": 3}}, source="x")
    rollout = parse_experiment({"bench": {"num_sequences": 3}}, source="x")
    assert stages.stage_config(steps, "bench") == stages.stage_config(default, "bench")
    assert stages.stage_config(rollout, "bench") != stages.stage_config(default, "bench")
    assert stages.stage_config(rollout, "bench_step") == stages.stage_config(default, "bench_step")
    assert stages.stage_config(steps, "bench_step") != stages.stage_config(default, "bench_step")


def test_a_guided_method_records_what_the_kernels_are_measured_with():
    dims = ModelDims(
        num_layers=1,
        hidden_size=2048,
        num_kv_heads=4,
        head_dim=128,
        moe_layers=(0,),
        attention_layers=(0,),
        num_experts=128,
        top_k=8,
    )
    for spec in (GuidanceSpec(layers="all"), FULL):
        field = RecordLayout.build(spec, dims).field(0, "fc1")
        assert field.stop - field.start == bench_kernels.record_bytes(2048, spec.bits)


@pytest.mark.slow
def test_a_host_without_the_instructions_leaves_the_experts_out_and_says_so(repository, tmp_path):
    for name in ("trace", "workflow", "config"):
        shutil.copytree(repository / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(repository / "kernels", tmp_path / "trace" / "kernels")
    shutil.copy(repository / "Snakefile", tmp_path)
    stage = tmp_path / "trace" / "stages" / "bench_moe.py"
    stage.write_text(stage.read_text().replace('FEATURES = ("amx_tile"', 'FEATURES = ("no_such_instruction"'))
    (tmp_path / "import").mkdir()
    (tmp_path / "import" / "trace_rl").symlink_to(tmp_path / "trace")
    run = subprocess.run(
        [sys.executable, "-P", "-m", "snakemake", "-n", "-p", "--cores", "1", "bench"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "import")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    text = run.stdout + run.stderr
    assert run.returncode == 0, text
    assert text.count("bench_moe is left out of the benchmarks: vLLM's MXFP4 experts") == 1
    assert "no_such_instruction" in text
    assert "rule bench_model:" in text and "rule bench_moe:" not in text
    (command,) = (line for line in text.splitlines() if "trace-rl bench model" in line)
    assert command.count("--measured") == 1 and "moe.json" not in command
