"""The rollout's most probable tokens: what both engines return, and how they travel to the loss."""

from dataclasses import replace

import pytest
import torch
from loss_data import gradient
from tiny import random_weights
from vllm_tiny import VOCAB, engine, prompts, qwen3_moe, trainer

from trace_rl.config.loss import ScoreCenteringLoss
from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.config.rollout import EngineConfig
from trace_rl.formats.static_scales import StaticScales
from trace_rl.rl.batch import pack
from trace_rl.rl.losses import LossInput, compute
from trace_rl.rollout.engine import Sampling, open_engine

K = 5
TEMPERATURE = 0.7


def torch_engine(checkpoint, *, quant=BF16, layers=3):
    scales = StaticScales(**{name: dict.fromkeys(range(layers), 100.0) for name in ("fc1", "fc2", "k", "v")})
    return open_engine(checkpoint, quant=quant, scales=scales, config=EngineConfig(name="torch"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A policy of 24 tokens for the PyTorch engine."""
    path = tmp_path_factory.mktemp("small")
    random_weights(path, num_layers=3, initializer_range=0.15)
    return path


def assert_top_tokens(trajectories, *, k):
    """Shapes, order, mass, and the sampled token's log-prob wherever the token is in the set."""
    found = 0
    for t in trajectories:
        n = t.num_tokens - t.prompt_len
        assert t.top_ids.shape == t.top_logprobs.shape == (n, k)
        assert t.top_ids.dtype == torch.int32 and t.top_logprobs.dtype == torch.float32
        assert (t.top_logprobs.diff(dim=1) <= 0).all()
        assert (t.top_logprobs.exp().sum(1) <= 1 + 1e-5).all()
        assert all(len(set(row)) == k for row in t.top_ids.tolist())
        hit = t.top_ids == t.token_ids[t.prompt_len :, None]
        assert torch.equal(t.top_logprobs[hit], t.logprobs[hit.any(1)])
        # A token outside the set is no more probable than its last.
        assert (t.logprobs[~hit.any(1)] <= t.top_logprobs[~hit.any(1), -1]).all()
        found += int(hit.sum())
    assert found > 0


def test_torch_engine_returns_them_whatever_the_batch(small):
    sampling = Sampling(temperature=1.0, max_new_tokens=10, n=3, seed=7, top_logprobs=K)
    asked = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]
    batch = torch_engine(small, quant=QuantSpec()).generate(asked, sampling, None)
    assert_top_tokens(batch.trajectories, k=K)
    assert len({t.num_tokens for t in batch.trajectories}) > 1
    # Asking changes nothing else.
    plain = replace(sampling, top_logprobs=0)
    unasked = torch_engine(small, quant=QuantSpec()).generate(asked, plain, None).trajectories
    for a, b in zip(batch.trajectories, unasked, strict=True):
        assert torch.equal(a.token_ids, b.token_ids) and torch.equal(a.logprobs, b.logprobs)
        assert b.top_ids is None and b.top_logprobs is None


def test_more_than_the_vocabulary_is_the_vocabulary(small):
    sampling = Sampling(temperature=1.0, max_new_tokens=6, n=2, seed=7, top_logprobs=1000)
    (first, *_) = torch_engine(small).generate([[3, 4, 5]], sampling, None).trajectories
    assert first.top_ids.sort(dim=1).values.tolist() == [list(range(24))] * (first.num_tokens - 3)
    assert torch.allclose(first.top_logprobs.exp().sum(1), torch.ones(1), atol=1e-5)


def test_packed_flat_in_the_order_of_the_sampled_tokens(small):
    sampling = Sampling(temperature=1.0, max_new_tokens=10, n=3, seed=7, top_logprobs=1000)
    trajectories = torch_engine(small).generate([[3, 4, 5, 6, 7], [8, 9]], sampling, None).trajectories
    batch = pack(trajectories, pad_id=0)
    assert batch.top_ids.dtype == torch.int64
    targets = batch.targets[batch.response]
    assert batch.top_ids.shape == batch.top_logprobs.shape == (len(targets), 24)
    # The whole vocabulary is there, so the sampled token's log-prob must be found at each row.
    assert torch.equal(batch.top_logprobs[batch.top_ids == targets[:, None]], batch.rollout_logprobs)
    plain = torch_engine(small).generate([[3]], Sampling(temperature=1.0, max_new_tokens=2), None).trajectories
    assert pack(plain, pad_id=0).top_ids is None and pack(plain, pad_id=0).top_logprobs is None


def test_score_centering_of_an_engine_that_is_the_trainer_is_the_policy_gradient(small):
    sampling = Sampling(temperature=1.0, max_new_tokens=8, n=2, seed=7, top_logprobs=128)
    batch = pack(torch_engine(small).generate([[3, 4, 5], [6, 7]], sampling, None).trajectories, pad_id=0)
    n, targets = batch.num_response_tokens, batch.targets[batch.response]
    logits = torch.zeros(n, 24).scatter(1, batch.top_ids, batch.top_logprobs)
    advantages = torch.linspace(-1, 1, n)

    def chosen(x):
        return x.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def centered(x):
        data = LossInput(
            logprobs=chosen(x),
            old_logprobs=chosen(x).detach(),
            rollout_logprobs=batch.rollout_logprobs,
            ratio=torch.ones(n),
            advantages=advantages,
            trajectory_index=batch.trajectory_index,
            distribution=x.log_softmax(-1),
            top_ids=batch.top_ids,
            top_logprobs=batch.top_logprobs,
        )
        return compute(data, ScoreCenteringLoss(kind="score_centering")).total

    plain = gradient(lambda x: -(advantages * chosen(x)).sum(), logits)
    assert torch.allclose(gradient(centered, logits), plain, atol=1e-5)


@pytest.mark.engine
def test_vllm_engine_returns_the_softmax_at_the_sampling_temperature(tmp_path):
    checkpoint = qwen3_moe(tmp_path)
    sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=12, n=2, seed=3, top_logprobs=K)
    eng = engine(checkpoint, quant=BF16)
    some = eng.generate(prompts(), sampling, None).trajectories
    every = eng.generate(prompts(), replace(sampling, top_logprobs=1000), None).trajectories
    none = eng.generate(prompts(), replace(sampling, top_logprobs=0), None).trajectories
    eng.close()
    assert_top_tokens(some, k=K)
    assert_top_tokens(every, k=VOCAB)
    for a, b, c in zip(some, every, none, strict=True):
        assert torch.equal(a.token_ids, b.token_ids) and torch.equal(a.token_ids, c.token_ids)
        assert torch.equal(a.logprobs, c.logprobs) and c.top_ids is None
        assert torch.equal(a.top_logprobs, b.top_logprobs[:, :K])
        assert torch.allclose(b.top_logprobs.exp().sum(1), torch.ones(1), atol=1e-5)
    model = trainer(checkpoint)
    found, at_one = (
        torch.cat([(full_softmax(model, t, temperature=value) - by_id(t)).abs() for t in every])
        for value in (TEMPERATURE, 1.0)
    )
    # BF16 noise between two programs; the few positions beyond it chose other experts.
    assert found.median() < 0.01 and found.quantile(0.95) < 0.05 < at_one.median()
    # The PyTorch engine draws other tokens; what it says of the same past is the same.
    decoded = torch_engine(checkpoint).generate(prompts(), replace(sampling, top_logprobs=1000), None).trajectories
    first = torch.stack([by_id(t)[0] for t in every]) - torch.stack([by_id(t)[0] for t in decoded])
    assert first.abs().median() < 0.01 and first.abs().quantile(0.95) < 0.1


def by_id(trajectory):
    """[n, V] log-probs of the whole vocabulary in order of the ids."""
    top = trajectory.top_logprobs
    return torch.zeros_like(top).scatter(1, trajectory.top_ids.long(), top)


def full_softmax(model, trajectory, *, temperature):
    """The same from one transformers forward over the sequence."""
    with torch.no_grad():
        logits = model(input_ids=trajectory.token_ids.long()[None]).logits[0, trajectory.prompt_len - 1 : -1].float()
    return (logits / temperature).log_softmax(-1)
