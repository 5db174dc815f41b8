"""Replayed is what was recorded: guidance and routing of a real (oracle-engine) rollout, followed by the trainer.

In BF16 the oracle and the trainer run the same kernels and hardly differ, so replay must be exact. The genuine
numerical noise between two engines is made here by a trainer that computes in FP32 on the same BF16 weights.
"""

import pytest
import torch
from tiny import random_weights
from transformers import AutoModelForCausalLM

from trace_rl.config.guidance import FULL, GuidanceSpec
from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.config.rollout import EngineConfig
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.guidance.align import align_codes
from trace_rl.guidance.record import RecordLayout
from trace_rl.models.families import cast_parameters
from trace_rl.qat.attach import attach
from trace_rl.qat.collector import Collector
from trace_rl.rl.batch import pack
from trace_rl.rl.trainer import response_logprobs
from trace_rl.rollout.engine import Sampling, open_engine

LAYERS = 4
SAMPLING = Sampling(temperature=1.0, max_new_tokens=24, n=8, seed=3, ignore_eos=True)


def scales() -> StaticScales:
    one = dict.fromkeys(range(LAYERS), 100.0)
    return StaticScales(fc1=one, fc2=one, k=one, v=one)


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    """A checkpoint, its full-record rollout, and the engine's captured operands."""
    path = tmp_path_factory.mktemp("policy")
    random_weights(path, num_layers=LAYERS, initializer_range=0.12)
    engine = open_engine(
        path, quant=QuantSpec(), scales=scales(), config=EngineConfig(name="torch", max_num_seqs=64), capture=True
    )
    batch = engine.generate([[3, 4, 5], [6, 7, 8, 9, 10], [11, 12]], SAMPLING, FULL)
    return path, batch, engine


def trainer(path, quant: QuantSpec, dtype=torch.float32):
    model = cast_parameters(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), dtype)
    return model, attach(model, quant=quant, scales=scales())


def compact(rows, *, source: RecordLayout, target: RecordLayout):
    """The rows a rollout with the target spec would have recorded, from full rows."""
    flat = rows.reshape(-1, rows.shape[-1])
    out = torch.zeros(flat.shape[0], target.row_bytes, dtype=torch.uint8)
    for field in target.fields:
        codes, block_scale = source.read(flat, field.layer, field.tensor)
        target.write(out, torch.arange(flat.shape[0]), field.layer, field.tensor, codes, block_scale)
    return out.view(*rows.shape[:-1], target.row_bytes)


def forward(rollout, *, quant=None, spec=None, replay=True, compare=False, collector=None, dtype=torch.float32):
    """Mean |dlogp| on response tokens and the logits of one trainer forward."""
    path, batch, engine = rollout
    model, qat = trainer(path, quant or QuantSpec(), dtype)
    b = pack(batch.trajectories, pad_id=0)
    full = RecordLayout.build(FULL, engine.dims)
    if collector is not None:
        collector.reference = (b.record, full)
    guidance = None
    if spec is not None:
        layout = RecordLayout.build(spec, engine.dims)
        guidance = (compact(b.record, source=full, target=layout), layout)
    mode = "guided" if spec is not None else ("rtn" if qat.quant.enabled else "off")
    with (
        torch.no_grad(),
        qat.forward(
            mode=mode,
            guidance=guidance,
            valid=b.valid,
            expert_ids=b.expert_ids if replay or compare else None,
            replay=replay,
            collect=collector,
        ),
    ):
        logits = model(input_ids=b.input_ids, attention_mask=b.valid.long(), use_cache=False).logits
    assert qat.replayed_fraction == 1.0
    gap = (response_logprobs(logits, batch=b, temperature=1.0)[0] - b.rollout_logprobs).abs()
    return float(gap.mean()), logits


ALL_LAYERS = [FULL, *(GuidanceSpec(bits=bits, layers="all") for bits in (1, 2, 3))]


@pytest.mark.parametrize("spec", ALL_LAYERS, ids=lambda spec: f"{spec.bits}bit")
def test_the_same_engine_replays_exactly(rollout, spec):
    collector = Collector()
    gap, _ = forward(rollout, spec=spec, collector=collector, dtype=torch.bfloat16)
    counts = collector.total()
    assert counts.values > 100_000
    assert counts.mismatches == counts.bracket_misses == counts.scale_mismatches == 0
    assert collector.router_disagreement() == 0
    assert gap < 0.002


@pytest.mark.parametrize("spec", ALL_LAYERS, ids=lambda spec: f"{spec.bits}bit")
def test_a_noisy_engine_is_followed_wherever_the_bracket_allows(rollout, spec):
    plain, guided = Collector(), Collector()
    control, _ = forward(rollout, collector=plain)
    gap, _ = forward(rollout, spec=spec, collector=guided)
    assert guided.total().mismatches == guided.total().bracket_misses
    assert guided.total().mismatch_rate < plain.total().mismatch_rate / 100
    assert guided.total().scale_mismatches == 0
    assert gap < control / 5


def test_gap_orders_trace_below_qat_below_naive(rollout):
    plain, guided = Collector(), Collector()
    unquantized = Collector()
    naive, _ = forward(rollout, quant=BF16, collector=unquantized)
    qat, _ = forward(rollout, collector=plain)
    trace, _ = forward(rollout, spec=GuidanceSpec(), collector=guided)
    assert trace < qat < naive
    assert unquantized.total().mismatch_rate > plain.total().mismatch_rate > 0.01
    assert plain.total().adjacent_share > 0.9
    assert plain.total().bracket_misses < plain.total().mismatches / 3
    assert plain.total().lower + plain.total().higher == plain.total().mismatches
    assert guided.total(layers=(2, 3)).mismatch_rate < plain.total(layers=(2, 3)).mismatch_rate / 2
    assert guided.total(layers=(0, 1)).mismatches == plain.total(layers=(0, 1)).mismatches
    assert guided.total("k", layers=(0,)).values > 0


def test_two_bit_scales_recover(rollout):
    collector = Collector()
    gap, _ = forward(rollout, spec=GuidanceSpec(bits=1, layers="all", scale_bits=2), collector=collector)
    counts = collector.total()
    assert counts.scale_recovery_failures <= 1e-3 * counts.blocks
    whole, _ = forward(rollout, spec=GuidanceSpec(bits=1, layers="all"))
    assert gap == pytest.approx(whole, rel=0.5)


def test_live_routers_disagree_less_when_guided(rollout):
    collector = Collector()
    forward(rollout, collector=collector)
    disagreement = collector.router_disagreement()
    assert 0 < disagreement < 0.5  # what the live routers would have chosen
    guided = Collector()
    forward(rollout, spec=FULL, collector=guided)
    assert guided.router_disagreement() < disagreement / 5


def test_routing_is_compared_without_being_replayed(rollout):
    free = Collector()
    _, plain = forward(rollout, replay=False)
    _, compared = forward(rollout, replay=False, compare=True, collector=free)
    assert torch.equal(plain, compared)
    assert 0 < free.router_disagreement() < 0.5
    _, replayed = forward(rollout)
    assert not torch.equal(plain, replayed)


def test_the_rollouts_own_activations_give_zero_mismatch(rollout):
    _, batch, engine = rollout
    layout = RecordLayout.build(FULL, engine.dims)
    for trajectory, operands in zip(batch.trajectories[:4], engine.captured, strict=False):
        for field in layout.fields:
            codes, block_scale = layout.read(trajectory.record, field.layer, field.tensor)
            x = operands[field.layer, field.tensor]
            scale = scales().get(field.tensor, field.layer)
            assert torch.equal(align_codes(x, block_scale, codes, 4, scale), codes)


def test_unguided_layers_are_bitwise_round_to_nearest(rollout):
    path, batch, engine = rollout
    model, qat = trainer(path, QuantSpec())
    b = pack(batch.trajectories, pad_id=0)
    spec = GuidanceSpec()
    layout = RecordLayout.build(spec, engine.dims)
    guidance = (compact(b.record, source=RecordLayout.build(FULL, engine.dims), target=layout), layout)
    hidden = {}
    for name, kwargs in {"rtn": {}, "guided": {"guidance": guidance}}.items():
        with torch.no_grad(), qat.forward(mode=name, valid=b.valid, expert_ids=b.expert_ids, **kwargs):
            hidden[name] = model(
                input_ids=b.input_ids, attention_mask=b.valid.long(), use_cache=False, output_hidden_states=True
            ).hidden_states
    for layer in range(LAYERS // 2 + 1):
        assert torch.equal(hidden["rtn"][layer], hidden["guided"][layer])
    assert not torch.equal(hidden["rtn"][3], hidden["guided"][3])


def test_positions_without_a_record_round_by_themselves(rollout):
    path, batch, engine = rollout
    model, qat = trainer(path, QuantSpec())
    b = pack(batch.trajectories, pad_id=0)
    full = RecordLayout.build(FULL, engine.dims)
    nothing = torch.zeros_like(b.valid)
    kwargs = {"input_ids": b.input_ids, "attention_mask": b.valid.long(), "use_cache": False}
    with torch.no_grad():
        with qat.forward(mode="guided", guidance=(torch.randint_like(b.record, 255), full), valid=nothing):
            guided = model(**kwargs).logits
        with qat.forward(mode="rtn"):
            nearest = model(**kwargs).logits
    assert torch.equal(guided, nearest)


def test_bad_routing_and_bad_guidance_are_refused(rollout):
    path, batch, engine = rollout
    model, qat = trainer(path, QuantSpec())
    b = pack(batch.trajectories, pad_id=0)
    for position, value in (((1, 4, 2, 0), -1), ((0, 0, 0, 1), 8)):
        ids = b.expert_ids.clone()
        ids[position] = value
        with pytest.raises(UserError, match="routing replay"):
            with qat.forward(mode="rtn", valid=b.valid, expert_ids=ids):
                pass
    twice = b.expert_ids.clone()
    twice[2, 3, 1] = 5
    with pytest.raises(UserError, match="distinct"):
        with qat.forward(mode="rtn", valid=b.valid, expert_ids=twice):
            pass
    full, other = (RecordLayout.build(spec, engine.dims) for spec in (FULL, GuidanceSpec()))
    with pytest.raises(UserError, match="another guidance spec"):
        with qat.forward(mode="guided", guidance=(b.record, other), valid=b.valid):
            pass
    _, weights_only = trainer(path, QuantSpec(activations=False, kv=False))
    with pytest.raises(UserError, match="does not quantize"):
        with weights_only.forward(mode="guided", guidance=(b.record, full), valid=b.valid):
            pass


def test_replayed_ids_are_the_ones_the_experts_receive(rollout):
    path, batch, _ = rollout
    model, qat = trainer(path, QuantSpec())
    b = pack(batch.trajectories, pad_id=0)
    received = {}
    for index, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(lambda _, args, index=index: received.__setitem__(index, args[1]))
    with torch.no_grad(), qat.forward(mode="rtn", valid=b.valid, expert_ids=b.expert_ids):
        model(input_ids=b.input_ids, attention_mask=b.valid.long(), use_cache=False)
    for index in range(LAYERS):
        got = received[index].view(*b.valid.shape, -1)[b.valid]
        assert torch.equal(got, b.expert_ids[:, :, index][b.valid].long())
