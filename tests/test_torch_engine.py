"""The PyTorch oracle engine: recorded is what was used, samples are independent of batching, weights reload."""

import time

import pytest
import torch
from tiny import random_weights

from trace_rl import formats
from trace_rl.config.guidance import FULL, GuidanceSpec
from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.config.rollout import EngineConfig
from trace_rl.errors import UserError
from trace_rl.formats import e2m1
from trace_rl.formats.static_scales import StaticScales
from trace_rl.guidance.align import align
from trace_rl.guidance.record import RecordLayout
from trace_rl.rollout.engine import Sampling, open_engine

LAYERS = 3
PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]
SAMPLING = Sampling(temperature=1.0, max_new_tokens=10, n=2, seed=7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    random_weights(path, num_layers=LAYERS, initializer_range=0.15)
    return path


def scales() -> StaticScales:
    one = dict.fromkeys(range(LAYERS), 100.0)
    return StaticScales(fc1=one, fc2=one, k=one, v=one)


def engine(checkpoint, quant=None, *, max_num_seqs=256, capture=False):
    config = EngineConfig(name="torch", max_num_seqs=max_num_seqs)
    return open_engine(checkpoint, quant=quant or QuantSpec(), scales=scales(), config=config, capture=capture)


def test_dequantized_records_equal_the_operands_bitwise(checkpoint):
    eng = engine(checkpoint, capture=True)
    batch = eng.generate(PROMPTS, SAMPLING, FULL)
    layout = RecordLayout.build(FULL, eng.dims)
    fmt = formats.get("nvfp4")
    compared = 0
    for trajectory, operands in zip(batch.trajectories, eng.captured, strict=True):
        for field in layout.fields:
            codes, block_scale = layout.read(trajectory.record, field.layer, field.tensor)
            step = fmt.scale_values(block_scale, scales().get(field.tensor, field.layer))
            xhat = (e2m1.values(codes).unflatten(-1, (-1, 16)) * step.unsqueeze(-1)).flatten(-2)
            used = operands[field.layer, field.tensor]
            assert used.shape == xhat.shape
            assert torch.equal(xhat.to(torch.bfloat16), used)
            compared += used.numel()
    assert compared > 10_000


def test_one_bit_records_select_the_operands(checkpoint):
    spec = GuidanceSpec(bits=1, layers="all")
    eng = engine(checkpoint, capture=True)
    batch = eng.generate(PROMPTS, SAMPLING, spec)
    layout = RecordLayout.build(spec, eng.dims)
    for trajectory, operands in zip(batch.trajectories, eng.captured, strict=True):
        for field in layout.fields:
            bits, block_scale = layout.read(trajectory.record, field.layer, field.tensor)
            used = operands[field.layer, field.tensor].float()
            # The operand lies within BF16 rounding of a grid value, so the bit must bring it back.
            xhat = align(used, block_scale, bits, 1, scales().get(field.tensor, field.layer))
            assert (xhat - used).abs().max() <= 2**-7 * used.abs().max()


def test_shapes_orders_and_finish_reasons(checkpoint):
    batch = engine(checkpoint).generate(PROMPTS, SAMPLING, GuidanceSpec())
    order = [(t.prompt_index, t.sample_index) for t in batch.trajectories]
    assert order == [(p, s) for p in range(3) for s in range(2)]
    for t in batch.trajectories:
        assert t.token_ids[: t.prompt_len].tolist() == PROMPTS[t.prompt_index]
        assert t.expert_ids.shape == (t.num_tokens - 1, LAYERS, 2)
        assert int(t.expert_ids.min()) >= 0
        ended = int(t.token_ids[-1]) == 1
        assert t.finish_reason == ("stop" if ended else "length")
        assert ended or t.num_tokens - t.prompt_len == 10
        assert 1 not in t.response_ids[:-1]


def test_phases_do_not_overlap(checkpoint):
    eng = engine(checkpoint)
    started = time.perf_counter()
    seconds = eng.generate(PROMPTS, SAMPLING, GuidanceSpec()).seconds
    elapsed = time.perf_counter() - started
    assert seconds["generate"] > 0 and seconds["record"] > 0
    assert seconds["generate"] + seconds["record"] <= elapsed


def test_samples_do_not_depend_on_the_batch(checkpoint):
    together = engine(checkpoint).generate(PROMPTS, SAMPLING, None).trajectories
    apart = engine(checkpoint, max_num_seqs=1).generate(PROMPTS, SAMPLING, None).trajectories
    same = sum(torch.equal(a.token_ids, b.token_ids) for a, b in zip(together, apart, strict=True))
    assert same >= len(together) - 1  # batching changes matmul order, which may flip one borderline draw
    assert not torch.equal(together[0].token_ids, together[1].token_ids)


def test_score_agrees_with_generate(checkpoint):
    for quant, bound in ((BF16, 0.02), (QuantSpec(), 0.2)):
        eng = engine(checkpoint, quant)
        batch = eng.generate(PROMPTS, SAMPLING, None)
        scored = eng.score([t.token_ids.tolist() for t in batch.trajectories], 1.0)
        gap = torch.cat([s[t.prompt_len - 1 :] - t.logprobs for s, t in zip(scored, batch.trajectories, strict=True)])
        assert gap.abs().mean() < bound


def test_greedy_is_the_most_likely_token(checkpoint):
    eng = engine(checkpoint)
    greedy = Sampling(temperature=0.0, max_new_tokens=5, n=2, ignore_eos=True)
    first, second = eng.generate([[3, 4]], greedy, None).trajectories
    assert torch.equal(first.token_ids, second.token_ids)
    assert first.num_tokens == 7
    assert bool((first.logprobs >= torch.log(torch.tensor(1 / 24))).all())


def test_load_policy_replaces_the_policy(checkpoint):
    eng, other = engine(checkpoint), engine(checkpoint)
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(1.25)
    tokens = [[3, 4, 5, 6, 7, 8]]
    before = eng.score(tokens, 1.0)[0]
    eng.load_policy(other.model.state_dict(), 4)
    after = eng.score(tokens, 1.0)[0]
    assert not torch.equal(before, after)
    assert torch.equal(after, other.score(tokens, 1.0)[0])
    assert eng.generate(PROMPTS, SAMPLING, None).policy_version == 4
    with pytest.raises(UserError, match="lacks"):
        eng.load_policy({"lm_head.weight": other.model.lm_head.weight}, 5)
    with pytest.raises(UserError, match="no parameter"):
        eng.load_policy({"lm_tail.weight": other.model.lm_head.weight}, 5)


def test_bad_input_is_named(checkpoint):
    eng = engine(checkpoint, BF16)
    with pytest.raises(UserError, match="zero tokens"):
        eng.generate([[3], []], SAMPLING, None)
    with pytest.raises(UserError, match="BF16"):
        eng.generate(PROMPTS, SAMPLING, GuidanceSpec())
