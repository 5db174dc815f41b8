"""A full record reduced to a method's equals what the engine records for that method."""

from dataclasses import replace

import pytest
import torch
from tiny import tiny_config, tiny_run
from transformers import AutoModelForCausalLM

from trace_rl.analysis.forwards import TRACE, TRACE_FULL, Forward, Recorded, SomeLayers
from trace_rl.analysis.picks import PickCollector
from trace_rl.config.guidance import FULL, GuidanceSpec
from trace_rl.config.quant import QuantSpec
from trace_rl.formats.static_scales import StaticScales
from trace_rl.qat.attach import attach
from trace_rl.rollout.engine import Sampling, open_engine
from trace_rl.stages.rl_prompts import rl_prompts


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Engine, model, quantization handle and prompts of a tiny random policy."""
    config = tiny_config()
    paths = tiny_run(tmp_path_factory.mktemp("forwards"), config=config)
    scales = StaticScales.load(paths.scales)
    engine = open_engine(paths.checkpoint, quant=QuantSpec(), scales=scales, config=config.engine)
    model = AutoModelForCausalLM.from_pretrained(paths.checkpoint, dtype=torch.bfloat16).eval()
    qat = attach(model, quant=QuantSpec(), scales=scales)
    return engine, model, qat, rl_prompts(paths.checkpoint, data=paths.data, count=6, setting="x")


def _recorded(policy, recording):
    sampling = Sampling(temperature=1.0, max_new_tokens=10, seed=5)
    return Recorded(policy[0].generate(policy[3], sampling, recording), temperature=1.0, pad_id=0)


@pytest.mark.parametrize(
    "spec",
    [
        GuidanceSpec(),
        GuidanceSpec(bits=2, layers="all", scale_bits=2),
        GuidanceSpec(bits=3, layers="first_half", tensors=("k", "v")),
        GuidanceSpec(layers="all", gate=0.05),
    ],
)
def test_reduced_is_recorded(policy, spec):
    _, model, qat, _ = policy
    reduced = _recorded(policy, FULL).run(Forward("guided", spec), model=model, qat=qat)
    recorded = _recorded(policy, spec).run(Forward("guided", spec), model=model, qat=qat)
    assert torch.equal(reduced.logprobs, recorded.logprobs)
    assert torch.equal(reduced.entropy, recorded.entropy)


def test_some_layers_are_those_named(policy):
    """Also against the sets of layers that have names."""
    _, model, qat, _ = policy
    recorded = _recorded(policy, FULL)
    for named in ("all", "deeper_half", "last_eighth"):
        spec = GuidanceSpec(bits=4, layers=named)
        some = SomeLayers(bits=4, chosen=spec.layer_ids(3))
        ours, theirs = (recorded.run(Forward("guided", s), model=model, qat=qat) for s in (some, spec))
        assert torch.equal(ours.logprobs, theirs.logprobs)
    with pytest.raises(AssertionError):
        SomeLayers(chosen=(3,)).layer_ids(3)


def test_clusters_positions_and_scores_follow_the_trajectories(policy):
    engine, _, _, _ = policy
    recorded = _recorded(policy, FULL)
    lengths = [t.logprobs.numel() for t in recorded.batch.trajectories]
    assert torch.bincount(recorded.clusters).tolist() == lengths
    assert recorded.positions[recorded.clusters == 2].tolist() == list(range(lengths[2]))
    scores = recorded.response_scores(engine.score(recorded.sequences, 1.0))
    assert float((scores - recorded.rollout_logprobs).abs().mean()) < 0.05


def test_full_guidance_misses_only_outside_the_bracket(policy):
    _, model, qat, _ = policy
    collector = PickCollector()
    _recorded(policy, FULL).run(TRACE_FULL, model=model, qat=qat, collector=collector)
    rows = collector.rows()
    assert {(row["layer"], row["tensor"]) for row in rows} == {(n, t) for n in range(3) for t in ("fc1", "k", "v")}
    for row in rows:
        assert row["wrong_pick"] == 0
        assert row["mismatch"] == row["bracket_miss"] == sum(row["miss_rungs"]) / row["values"]


def test_without_replay_the_trainer_routes_by_itself(policy):
    _, model, qat, _ = policy
    recorded = _recorded(policy, FULL)
    recorded.run(TRACE, model=model, qat=qat)
    assert qat.replayed_fraction == 1.0
    foreign = [torch.flip(t.expert_ids, dims=[0]) for t in recorded.batch.trajectories]
    changed = Recorded(
        replace(
            recorded.batch,
            trajectories=[
                replace(t, expert_ids=ids) for t, ids in zip(recorded.batch.trajectories, foreign, strict=True)
            ],
        ),
        temperature=1.0,
        pad_id=0,
    )
    runs = {
        replay: [r.run(Forward("rtn", replay=replay), model=model, qat=qat).logprobs for r in (recorded, changed)]
        for replay in (True, False)
    }
    assert not torch.equal(*runs[True])
    assert torch.equal(*runs[False])
