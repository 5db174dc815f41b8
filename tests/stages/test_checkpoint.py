"""The checkpoint stage: every source ends as one validated directory, or as one error and no output."""

import json
import re
from pathlib import Path

import pytest

from trace_rl.config.checkpoint import ColdStart, HubCheckpoint, LocalCheckpoint, MiniatureModel
from trace_rl.config.experiment import DataConfig
from trace_rl.config.quant import QuantSpec
from trace_rl.errors import UserError
from trace_rl.models.checkpoint_io import validate_checkpoint, weights_digest
from trace_rl.stages import checkpoint


@pytest.fixture
def local(new_run, policy_factory, tmp_path):
    """A run whose checkpoint section names a directory of one's own."""
    run = new_run()
    source = policy_factory(tmp_path / "mine", seed=3)
    return run.config.model_copy(update={"checkpoint": LocalCheckpoint(source="local", path=str(source))}), run.paths


def test_a_local_directory_becomes_the_checkpoint(local):
    config, paths = local
    old = weights_digest(paths.checkpoint)
    manifest = checkpoint.run(config, paths)
    assert manifest == json.loads((paths.checkpoint / "manifest.json").read_text())
    assert manifest["weights_digest"] == weights_digest(paths.checkpoint) != old
    assert manifest["source"] == {"source": "local", "path": config.checkpoint.path}
    assert manifest["dims"] == {"hidden_size": 64, "expert_width": 32, "head_dim": 32}
    assert manifest["files"]["model.safetensors"] == (paths.checkpoint / "model.safetensors").stat().st_size
    validate_checkpoint(paths.checkpoint, quant=QuantSpec())
    assert checkpoint.run(config, paths) == manifest


def test_a_bad_checkpoint_leaves_the_output_as_it_was(local):
    config, paths = local
    before = {path.name: path.stat().st_mtime_ns for path in paths.checkpoint.iterdir()}
    tokenizer_config = Path(config.checkpoint.path) / "tokenizer_config.json"
    tokenizer = json.loads(tokenizer_config.read_text())
    del tokenizer["eos_token"]
    tokenizer_config.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="no eos token"):
        checkpoint.run(config, paths)
    assert {path.name: path.stat().st_mtime_ns for path in paths.checkpoint.iterdir()} == before
    assert not [path for path in paths.base.iterdir() if re.search(r"\.(tmp|old)$", path.name)]


def test_a_missing_directory_is_one_error(new_run):
    run = new_run()
    config = run.config.model_copy(update={"checkpoint": LocalCheckpoint(source="local", path="/nonexistent/model")})
    with pytest.raises(UserError, match="/nonexistent/model: no such checkpoint directory"):
        checkpoint.run(config, run.paths)


def test_an_unpinned_hub_revision_is_refused_before_any_request(new_run):
    run = new_run()
    hub = HubCheckpoint(source="hub", repo="owner/name", revision="main")
    with pytest.raises(UserError, match="is not a commit"):
        checkpoint.run(run.config.model_copy(update={"checkpoint": hub}), run.paths)


def test_a_cold_start_ends_as_a_checkpoint_with_manifest(new_run):
    run = new_run()
    model = MiniatureModel(num_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                           num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)  # fmt: skip
    recipe = ColdStart(model=model, steps=2, batch_size=4, validate_every=2, checkpoint_every=1, validation_problems=8,
                       threads=1)  # fmt: skip
    data = DataConfig(train_problems=32, rl_problems=8, eval_problems=4)
    config = run.config.model_copy(update={"checkpoint": recipe, "data": data})
    manifest = checkpoint.run(config, run.paths)
    assert manifest["model_type"] == "qwen3_moe"
    assert manifest["source"]["steps"] == 2
    validate_checkpoint(run.paths.checkpoint, quant=QuantSpec())
    # The finished state lies outside the output, so a workflow that deletes the output does not train again.
    assert checkpoint.run(config, run.paths)["weights_digest"] == manifest["weights_digest"]
