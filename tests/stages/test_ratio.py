"""The stage of the importance ratio on the tiny policy."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_rl.config.quant import BF16
from trace_rl.formats.static_scales import StaticScales
from trace_rl.rollout.engine import open_engine
from trace_rl.stages import ratio
from trace_rl.stages.train import build_trainer

LEARNING_RATE = 1e-3


@pytest.fixture(scope="module")
def config(tiny_run, repository):
    """Two measured updates of 16 sequences."""
    training = tiny_run.config.training.model_copy(
        update={"prompts_per_step": 4, "samples_per_prompt": 4, "learning_rate": LEARNING_RATE}
    )
    analysis = tiny_run.config.analysis.model_copy(
        update={"num_prompts": 8, "updates": (1, 2), "burn_in": 0, "resamples": 20}
    )
    suite = tiny_run.config.suite.model_copy(update={"methods_dir": str(repository / "config" / "methods")})
    return tiny_run.config.model_copy(update={"training": training, "analysis": analysis, "suite": suite})


@pytest.fixture(scope="module")
def measured(config, tiny_run):
    """A policy that moves: a random one solves nothing, so an odd first token is rewarded. (study, FP4, BF16)."""
    paths, settings = tiny_run.paths, config.analysis
    this = ratio.training_run(config, paths, seed=1)
    engine = open_engine(
        paths.checkpoint, quant=this.rollout_quant, scales=StaticScales.load(paths.scales), config=config.engine
    )
    model = AutoModelForCausalLM.from_pretrained(paths.checkpoint, dtype=torch.bfloat16)
    trainer = build_trainer(this, model=model, engine=engine, tokenizer=AutoTokenizer.from_pretrained(paths.checkpoint))
    trainer.reward = lambda problem, response: float(response[0] % 2)
    study = ratio.go_stale(trainer, engine, settings=settings, seed=1)
    bf16 = open_engine(paths.checkpoint, quant=BF16, scales=None, config=config.engine)
    control, smooth = ratio.score_bf16(bf16, trainer, study, settings=settings, seed=1)
    options = {"model": model, "qat": trainer.qat, "versions": study.versions, "settings": settings}
    fp4 = ratio.compare(study.fp4, study.scores, smooth=smooth, forwards=ratio.FORWARDS, **options)
    return study, fp4, ratio.compare(*control, smooth=control[1], forwards=ratio.BF16_FORWARDS, **options)


def test_the_stage_writes_what_it_returns_and_tracks_the_file(config, tiny_run, tracked, tmp_path):
    found = ratio.run(tracked(config, tmp_path), tiny_run.paths, seed=1)
    assert tracked.artifact(tmp_path, name="ratio seed1") == tiny_run.paths.ratio(1).read_text()
    assert json.loads(tiny_run.paths.ratio(1).read_text()) == json.loads(json.dumps(found))
    assert [row["updates"] for row in found["fp4"]["rows"]] == [0, 1, 2]
    assert set(found["gap_by_updates"]) == {"bf16_both", *ratio.FORWARDS}
    # No response of a random policy is rewarded, so nothing moves and nothing can be said of a ratio.
    assert found["weights_moved"]["2"] == 0
    assert found["fp4"]["rows"][2]["estimates"]["qat"]["correlation"] is None


def test_the_policy_moves_at_the_full_learning_rate(measured):
    study, _, _ = measured
    moved = {name: ratio.distance(study.versions[0], new) for name, new in study.weights.items()}
    assert moved[0] == 0 < moved[1] < moved[2]
    assert [step["learning_rate"] for step in study.steps] == [LEARNING_RATE, LEARNING_RATE]
    # Permuted in FP32 and rounded to BF16, the update keeps about its length.
    assert moved["shuffled"] == pytest.approx(moved[1], rel=0.1)


def test_the_old_policy_is_the_floor(measured):
    _, *parts = measured
    for part in parts:
        first, second = part["rows"][:2]
        assert part["floor"].items() <= first["truth"].items()
        assert part["floor"]["mean_abs"] < second["truth"]["mean_abs"]
        assert "differences" not in first


def test_staleness_is_the_growth_of_the_gap_on_the_same_tokens(measured):
    _, *parts = measured
    for part in parts:
        first, *later = part["rows"]
        assert "staleness" not in first
        for row in later:
            assert set(row["staleness"]) == set(row["estimates"])
            for name, found in row["staleness"].items():
                now, before = (r["estimates"][name] for r in (row, first))
                assert found["mean"] == pytest.approx(now["mean_abs"] - before["mean_abs"], abs=1e-6)
                # Paired: the tokens, and most of what the forwards differ from the rollout by, are the same.
                assert 0 < found["mean_stderr"] <= now["mean_abs_stderr"] + before["mean_abs_stderr"]
    # The gap of a trainer that rounds as the engine does is all staleness after updates this large.
    row = parts[0]["rows"][2]
    assert row["staleness"]["qat"]["mean"] > 3 * row["staleness"]["qat"]["mean_stderr"]


def test_a_trainer_that_rounds_by_itself_tracks_the_engine_and_full_guidance_is_held_back(measured):
    _, fp4, bf16 = measured
    estimates, differences = (fp4["rows"][2][kind] for kind in ("estimates", "differences"))
    assert estimates["qat"]["correlation"] > 0.4
    assert abs(estimates["full"]["slope"]) < estimates["qat"]["slope"]
    assert differences["full"]["smooth"]["slope"] < differences["bf16"]["smooth"]["slope"]
    assert estimates["full"]["mean_abs"] < estimates["qat"]["mean_abs"]
    # Without replay the trainer's BF16 forward on the FP4 tokens is the BF16 engine's; the old routing holds it back.
    assert differences["bf16"]["smooth"]["slope"] < 0.9
    assert differences["bf16_no_r3"]["smooth"]["slope"] == pytest.approx(1, abs=0.1)
    row = bf16["rows"][2]
    assert row["estimates"]["bf16_no_r3"]["correlation"] > 0.9
    assert row["estimates"]["bf16_no_r3"]["slope"] == pytest.approx(1, abs=0.2)
    assert row["smooth"]["mean_abs"] == pytest.approx(row["truth"]["mean_abs"], rel=0.1)


def test_a_shuffled_update_keeps_each_tensors_entries():
    old = {"w": torch.zeros(4, 8), "b": torch.ones(3)}
    new = {"w": torch.arange(32.0).view(4, 8), "b": torch.ones(3)}
    shuffled = ratio.shuffle_update(old, new, seed=0)
    assert torch.equal(shuffled["w"].reshape(-1).sort().values, torch.arange(32.0))
    assert not torch.equal(shuffled["w"], new["w"])
    assert torch.equal(shuffled["b"], old["b"])
    assert ratio.distance(old, shuffled) == pytest.approx(ratio.distance(old, new))
