"""`trace-rl plan` prints the paper's figures for its model, and an experiment's own."""

import json

import pytest

from trace_rl.config.checkpoint import LocalCheckpoint
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.errors import UserError
from trace_rl.stages import plan

QWEN35 = {
    "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
}  # fmt: skip


def test_the_papers_figures(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN35))
    plan.run_model(path)
    printed = capsys.readouterr().out
    for figure in ("45.0 KiB", "5.625 KiB", "7.5 KiB", "0.94 KiB", "6.0x", "50.6 TiB", "186 s"):
        assert figure in printed


def test_an_experiment_is_planned_without_its_checkpoint(capsys):
    rows = plan.run(ExperimentConfig())
    assert "8*128*(4 + 8/16)/8" in capsys.readouterr().out
    assert next(row for row in rows if row.name == "full / compact").value == 6.0


def test_a_local_checkpoint_is_read(tiny_run, capsys):
    local = LocalCheckpoint(source="local", path=str(tiny_run.paths.checkpoint))
    plan.run(tiny_run.config.model_copy(update={"checkpoint": local}))
    assert "3*64*(4 + 8/16)/8" in capsys.readouterr().out


def test_a_missing_model_is_one_error(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        plan.run_model(tmp_path / "config.json")
