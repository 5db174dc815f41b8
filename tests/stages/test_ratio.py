"""The stage of the importance ratio on the tiny policy."""

import json

import pytest
import torch

from trace_rl.config.load import load_method
from trace_rl.stages import ratio


@pytest.fixture(scope="module")
def result(tiny_run, repository):
    training = tiny_run.config.training.model_copy(
        update={"prompts_per_step": 4, "samples_per_prompt": 4, "learning_rate": 1e-3}
    )
    analysis = tiny_run.config.analysis.model_copy(update={"num_prompts": 8, "updates": (1, 2), "resamples": 20})
    suite = tiny_run.config.suite.model_copy(update={"methods_dir": str(repository / "config" / "methods")})
    assert load_method(repository / "config" / "methods" / "qat.yaml").trainer.enabled
    config = tiny_run.config.model_copy(update={"training": training, "analysis": analysis, "suite": suite})
    found = ratio.run(config, tiny_run.paths, seed=1)
    assert json.loads(tiny_run.paths.ratio(1).read_text()) == json.loads(json.dumps(found))
    return found


def test_the_policy_moves_at_the_full_learning_rate(result):
    moved = result["weights_moved"]
    assert moved["0"] == 0 < moved["1"] < moved["2"]
    assert [step["learning_rate"] for step in result["steps"]] == [1e-3, 1e-3]
    # Permuted in FP32 and rounded to BF16, the update keeps its length.
    assert moved["shuffled"] == pytest.approx(moved["1"], rel=0.05)


def test_the_old_policy_is_the_floor(result):
    for precision in ("fp4", "bf16"):
        part = result[precision]
        assert part["floor"].items() <= part["rows"][0]["truth"].items()
        assert part["floor"]["mean_abs"] < part["rows"][1]["truth"]["mean_abs"]
        assert [row["updates"] for row in part["rows"]] == [0, 1, 2]
        assert "differences" not in part["rows"][0]


def test_a_trainer_that_rounds_as_the_engine_tracks_it_and_full_guidance_does_not(result):
    row = result["fp4"]["rows"][2]
    # This engine and the trainer run the same kernels: QAT rounds where the engine rounds.
    assert row["estimates"]["qat"]["correlation"] > 0.8
    assert abs(row["estimates"]["full"]["slope"]) < row["estimates"]["qat"]["slope"]
    assert result["gap_by_updates"]["full"]["2"] < result["gap_by_updates"]["qat"]["2"]
    control = result["bf16"]["rows"][2]["estimates"]["bf16"]
    assert result["bf16"]["rows"][2]["smooth"]["mean_abs"] == pytest.approx(
        result["bf16"]["rows"][2]["truth"]["mean_abs"], rel=0.1
    )
    assert control["correlation"] > 0.9
    assert control["slope"] == pytest.approx(1, abs=0.2)


def test_a_shuffled_update_keeps_each_tensors_entries():
    old = {"w": torch.zeros(4, 8), "b": torch.ones(3)}
    new = {"w": torch.arange(32.0).view(4, 8), "b": torch.ones(3)}
    shuffled = ratio.shuffle_update(old, new, seed=0)
    assert torch.equal(shuffled["w"].reshape(-1).sort().values, torch.arange(32.0))
    assert not torch.equal(shuffled["w"], new["w"])
    assert torch.equal(shuffled["b"], old["b"])
    assert ratio.distance(old, shuffled) == pytest.approx(ratio.distance(old, new))
