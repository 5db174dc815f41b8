"""Bad input through the command line: one clear error, exit code 2, nothing half-written."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import tiny_policy, tiny_problems

from trace_rl.cli import main
from trace_rl.config.paths import RunPaths
from trace_rl.tasks.problem import write_jsonl


@pytest.fixture
def run_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable:
    """Run a stage on a configuration; returns (exit code, last line of standard error, files under results)."""

    def call(stage: str, config: dict, *arguments: str) -> tuple[int, str, list[Path]]:
        base = {"run": "bad", "tracking": {"enabled": False}, "engine": {"name": "torch", "max_model_len": 64}}
        inline = json.dumps(base | {"sampling": {"max_new_tokens": 8}} | config)
        monkeypatch.setattr(
            sys, "argv", ["trace-rl", stage, "--config", inline, "--results", str(tmp_path / "results"), *arguments]
        )
        with pytest.raises(SystemExit) as stop:
            main()
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) <= 1
        return stop.value.code, errors[0] if errors else "", sorted((tmp_path / "results").rglob("*"))

    return call


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A good checkpoint to damage."""
    directory = tmp_path / "policy"
    tiny_policy(directory)
    return directory


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def no_eos(policy: Path) -> None:
    settings = json.loads((policy / "tokenizer_config.json").read_text())
    settings.pop("eos_token", None)
    (policy / "tokenizer_config.json").write_text(json.dumps(settings))
    (policy / "special_tokens_map.json").unlink(missing_ok=True)


def small_vocabulary(policy: Path) -> None:
    edit_json(policy / "config.json", vocab_size=10)


def odd_head(policy: Path) -> None:
    edit_json(policy / "config.json", head_dim=24)


def no_weights(policy: Path) -> None:
    (policy / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [(no_eos, "eos"), (small_vocabulary, "vocab"), (odd_head, "head_dim"), (no_weights, "safetensors")],
)
def test_unsuitable_checkpoints(run_cli, policy, damage, message):
    damage(policy)
    code, error, files = run_cli("checkpoint", {"checkpoint": {"source": "local", "path": str(policy)}})
    assert code == 2 and message in error, error
    assert not [path for path in files if path.is_file()]


def test_missing_checkpoint(run_cli, tmp_path):
    missing = tmp_path / "nowhere"
    code, error, files = run_cli("checkpoint", {"checkpoint": {"source": "local", "path": str(missing)}})
    assert code == 2 and str(missing) in error and not [path for path in files if path.is_file()]


def test_unknown_key(run_cli):
    code, error, files = run_cli("train", {"training": {"learnign_rate": 1.0}}, "--method", "trace")
    assert code == 2 and "training.learnign_rate" in error and "unknown key" in error and not files


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "empty"),
        ('{"kind":"math","prompt":"","answer":"1","payload":{"target":1}}\n', "zero-length prompt"),
    ],
)
def test_bad_rl_data_stops_training_before_anything_is_written(run_cli, policy, tmp_path, repository, rows, message):
    paths = RunPaths("bad", root=tmp_path / "results")
    shutil.copytree(policy, paths.checkpoint)
    paths.data.mkdir(parents=True)
    write_jsonl(paths.data / "rl.jsonl", problems=tiny_problems())
    (paths.data / "rl.jsonl").write_text(rows)
    (paths.data / "manifest.json").write_text("{}")
    paths.scales.parent.mkdir(parents=True)
    paths.scales.write_text("{}")
    before = sorted(paths.root.rglob("*"))
    methods = {"methods_dir": str(repository / "config" / "methods")}
    code, error, files = run_cli("train", {"suite": methods}, "--method", "bf16")
    assert code == 2 and message in error, error
    assert files == before


def test_a_dataset_of_no_problems_is_refused_by_the_configuration(run_cli):
    code, error, files = run_cli("data", {"data": {"rl_problems": 0}})
    assert code == 2 and "rl_problems" in error and not files
