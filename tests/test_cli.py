"""The command line: quick help, exit codes, and agreement with the stages."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from trace_rl.cli import app, main, override
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.load import load_experiment
from trace_rl.stages.failure import StageFailure

STAGES = [
    "checkpoint",
    "data",
    "calibrate",
    "audit",
    "parity",
    "train",
    "quantize",
    "evaluate",
    "gap-sources",
    "ratio",
    "report",
    "tables",
    "summary",
]
GROUPS = [
    ["bench"],
    ["bench", "rollout"],
    ["bench", "step"],
    ["bench", "kernels"],
    ["bench", "moe"],
    ["bench", "model"],
    ["config"],
    ["config", "schema"],
    ["config", "defaults"],
    ["config", "write"],
]
COMMANDS = [[], *([name] for name in STAGES), ["plan"], ["verify"], *GROUPS]
HEAVY = ["torch", "vllm", "transformers", "mlflow"]

# In a fresh interpreter, because this one has imported everything.
ASK_FOR_HELP = """
import contextlib, io, json, sys
from trace_rl.cli import main

answers = []
for command in json.loads(sys.argv[1]):
    sys.argv = ["trace-rl", *command, "--help"]
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            main()
    except SystemExit as stop:
        heavy = [name for name in json.loads('HEAVY') if name in sys.modules]
        answers.append([stop.code, text.getvalue().splitlines()[0], heavy])
print(json.dumps(answers))
"""


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def trace_rl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """The command line in this process."""

    def call(*arguments: str, cwd: Path) -> Result:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["trace-rl", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return Result(stop.value.code or 0, *capsys.readouterr())

    return call


def test_help_of_every_command_needs_no_heavy_library(tmp_path: Path) -> None:
    code = ASK_FOR_HELP.replace("HEAVY", json.dumps(HEAVY))
    arguments = [sys.executable, "-c", code, json.dumps(COMMANDS)]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    answers = json.loads(result.stdout)
    for command, (exit_code, usage, heavy) in zip(COMMANDS, answers, strict=True):
        assert (exit_code, heavy) == (0, []), command
        assert usage.startswith(" ".join(["Usage: trace-rl", *command]))


def test_commands_tested_are_all_there_are() -> None:
    named = {command.name or command.callback.__name__ for command in app.registered_commands}
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    nested = [[name, inner.name] for name, group in groups.items() for inner in group.registered_commands]
    assert sorted([[name] for name in named | set(groups)] + nested) == sorted(COMMANDS[1:])


@pytest.mark.parametrize("program", [["-P", "-m", "trace_rl"], [Path(sys.executable).with_name("trace-rl")]])
def test_unknown_key_is_one_line_and_exit_code_2(program: list[str | Path], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("training:\n  stepz: 5\n")
    command = [sys.executable, *program, "data", "--config", "config.yaml"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
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
        (["data", "--config", '{"run": '], "not valid JSON"),
        (["data", "--config", '{"run": "x", "format": "int3"}'], "error: --config: format"),
        (["data", "--config", "good.yaml", "--set", "training.steps"], "expected KEY=VALUE"),
        (["data", "--config", "good.yaml", "--set", "run.name=5"], "run is a value"),
        (["data", "--config", "good.yaml", "--set", "training.steps=0"], "training.steps"),
        (["plan"], "give either"),
        (["train"], "--method"),
        (["tables"], "--target"),
        (
            ["tables", "--target", "table9", "--config", "good.yaml"],
            "target 'table9' is unknown; choose one of table1,",
        ),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_user_errors_exit_with_2(
    arguments: list[str], expected: str, trace_rl: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "good.yaml").write_text("run: mini\n")
    result = trace_rl(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert expected in result.stderr


def test_a_gate_that_says_no_exits_with_1(trace_rl: Callable[..., Result], tmp_path: Path) -> None:
    @app.command("gate-of-a-test")
    def gate() -> None:
        raise StageFailure("gap 0.5 exceeds 0.02")

    try:
        result = trace_rl("gate-of-a-test", cwd=tmp_path)
    finally:
        app.registered_commands.pop()
    assert result == Result(1, "", "failed: gap 0.5 exceeds 0.02\n")


def test_set_overrides_a_nested_key() -> None:
    data = {"training": {"steps": 3}}
    override(data, "training.steps=7")
    override(data, "suite.methods=[bf16, trace]")
    override(data, "evaluate.limit=null")
    assert data == {
        "training": {"steps": 7},
        "suite": {"methods": ["bf16", "trace"]},
        "evaluate": {"limit": None},
    }


def test_config_schema_and_defaults_describe_the_same_keys(trace_rl: Callable[..., Result], tmp_path: Path) -> None:
    schema = json.loads(trace_rl("config", "schema", cwd=tmp_path).stdout)
    defaults = yaml.safe_load(trace_rl("config", "defaults", cwd=tmp_path).stdout)
    assert list(schema["properties"]) == list(defaults)
    (tmp_path / "defaults.yaml").write_text(yaml.safe_dump(defaults))
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


def test_plan_counts_guidance_bytes(trace_rl: Callable[..., Result], repository: Path, tmp_path: Path) -> None:
    model = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32}
    model |= {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    (tmp_path / "config.json").write_text(json.dumps(model))
    table = trace_rl("plan", "--model", "config.json", cwd=tmp_path)
    assert table.returncode == 0, table.stderr
    for figure in ("54.0 KiB", "9.0 KiB", "6.0x"):
        assert figure in table.stdout
    suite = trace_rl("plan", "config/config.yaml", cwd=repository)
    assert suite.returncode == 0, suite.stderr
    # 8 layers of 128 + 2 * 64 values with whole codes; 4 of them, 1 bit; and an 8-bit scale per 16 values.
    assert f"{8 * 256 * (4 + 8 / 16) / 8:.0f} B / {4 * 256 * (1 + 8 / 16) / 8:.0f} B" in suite.stdout


def test_method_of_the_wrong_kind_is_a_user_error(trace_rl: Callable[..., Result], repository: Path) -> None:
    result = trace_rl("train", "--method", "ptq_nvfp4", cwd=repository)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --method ptq_nvfp4: this method is quantized after training")
    result = trace_rl("quantize", "--method", "absent", cwd=repository)
    assert result.returncode == 2
    assert "config/methods/absent.yaml: no such configuration file" in result.stderr
