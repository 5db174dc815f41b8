"""The command line: quick help, exit codes, and agreement with the stages."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

STAGES = ["checkpoint", "data", "calibrate", "audit", "parity", "train", "quantize", "evaluate", "report", "summary"]
GROUPS = [
    ["bench"],
    ["bench", "rollout"],
    ["config"],
    ["config", "schema"],
    ["config", "defaults"],
    ["config", "write"],
]
COMMANDS = [[], *([name] for name in STAGES), ["plan"], ["verify"], *GROUPS]
HEAVY = ("torch", "vllm", "transformers", "mlflow")


def trace_rl(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "trace_rl", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_needs_no_heavy_library(command: list[str], tmp_path: Path) -> None:
    code = f"""
import sys
from trace_rl.cli import main
sys.argv = ["trace-rl", *{command!r}, "--help"]
try:
    main()
except SystemExit as stop:
    print("exit", stop.code, [name for name in {HEAVY!r} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert "Usage: trace-rl" in result.stdout
    assert result.stdout.splitlines()[-1] == "exit 0 []", result.stderr


def test_unknown_key_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("training:\n  stepz: 5\n")
    result = trace_rl("data", "--config", "config.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "error: config.yaml: training.stepz: unknown key; remove it or correct its spelling"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]  # nothing half-written


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["data", "--config", "absent.yaml"], "absent.yaml: no such configuration file"),
        (["data", "--config", "list.yaml"], "expected a mapping"),
        (["data", "--config", "good.yaml", "--set", "training.steps"], "expected KEY=VALUE"),
        (["data", "--config", "good.yaml", "--set", "run.name=5"], "run is a value"),
        (["data", "--config", "good.yaml", "--set", "training.steps=0"], "training.steps"),
        (["plan"], "give either"),
        (["train"], "--method"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_user_errors_exit_with_2(arguments: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "good.yaml").write_text("run: mini\n")
    result = trace_rl(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_set_overrides_a_nested_key() -> None:
    from trace_rl.cli import override

    data = {"training": {"steps": 3}}
    override(data, "training.steps=7")
    override(data, "suite.methods=[bf16, trace]")
    override(data, "evaluate.limit=null")
    assert data == {
        "training": {"steps": 7},
        "suite": {"methods": ["bf16", "trace"]},
        "evaluate": {"limit": None},
    }


def test_config_schema_and_defaults_describe_the_same_keys(tmp_path: Path) -> None:
    schema = json.loads(trace_rl("config", "schema", cwd=tmp_path).stdout)
    defaults = yaml.safe_load(trace_rl("config", "defaults", cwd=tmp_path).stdout)
    assert list(schema["properties"]) == list(defaults)
    (tmp_path / "defaults.yaml").write_text(yaml.safe_dump(defaults))
    from trace_rl.config.experiment import ExperimentConfig
    from trace_rl.config.load import load_experiment

    assert load_experiment(tmp_path / "defaults.yaml") == ExperimentConfig()


def test_every_command_calls_its_stage_with_arguments_it_has(repository: Path) -> None:
    """`stage.function(...)` in the CLI against the definition in trace/stages/stage.py, without importing either."""
    stages = repository / "trace/stages"
    calls = 0
    for command in ast.parse((repository / "trace/cli.py").read_text()).body:
        if not isinstance(command, ast.FunctionDef):
            continue
        imported = {
            alias.name
            for node in ast.walk(command)
            if isinstance(node, ast.ImportFrom) and node.module == "trace_rl.stages"
            for alias in node.names
        }
        for call in ast.walk(command):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if not (isinstance(call.func.value, ast.Name) and call.func.value.id in imported):
                continue
            module, function = call.func.value.id, call.func.attr
            definitions = {
                node.name: node.args
                for node in ast.parse((stages / f"{module}.py").read_text()).body
                if isinstance(node, ast.FunctionDef)
            }
            arguments = definitions[function]
            required = {
                argument.arg
                for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                if default is None
            }
            given = {keyword.arg for keyword in call.keywords}
            allowed = {argument.arg for argument in arguments.kwonlyargs}
            assert required <= given <= allowed, f"{module}.{function}: the CLI gives {given}, it takes {allowed}"
            num_required = len(arguments.args) - len(arguments.defaults)
            assert num_required <= len(call.args) <= len(arguments.args), f"{module}.{function}: positional arguments"
            calls += 1
    assert calls >= 12


def test_plan_counts_guidance_bytes(repository: Path, tmp_path: Path) -> None:
    model = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32}
    model |= {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    (tmp_path / "config.json").write_text(json.dumps(model))
    table = trace_rl("plan", "--model", "config.json", cwd=tmp_path)
    assert table.returncode == 0, table.stderr
    for figure in ("54.0 KiB", "9.0 KiB", "6.0x"):
        assert figure in table.stdout
    suite = trace_rl("plan", "config/config.yaml", cwd=repository)
    assert suite.returncode == 0, suite.stderr
    # 6 layers of 128 + 2 * 64 values with whole codes; 3 of them, 1 bit; and an 8-bit scale per 16 values.
    assert f"{6 * 256 * (4 + 8 / 16) / 8:.0f} B / {3 * 256 * (1 + 8 / 16) / 8:.0f} B" in suite.stdout


def test_method_of_the_wrong_kind_is_a_user_error(repository: Path) -> None:
    result = trace_rl("train", "--method", "ptq_nvfp4", cwd=repository)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --method ptq_nvfp4: this method is quantized after training")
    result = trace_rl("quantize", "--method", "absent", cwd=repository)
    assert result.returncode == 2
    assert "config/methods/absent.yaml: no such configuration file" in result.stderr
