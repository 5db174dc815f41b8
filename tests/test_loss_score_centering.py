"""Score centering: the formula in NumPy, gradients through the logits, and what it is for: mean score zero."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_data import differences, gradient

from trace_rl.config.loss import GrpoLoss, ScoreCenteringLoss
from trace_rl.rl.losses import LossInput, compute
from trace_rl.rl.losses.score_centering import centering_coefficients

VOCAB, TOKENS, K = 12, 9, 4
SPEC = ScoreCenteringLoss(kind="score_centering", top_k=K)


def case(*, seed=0, gap=1.0, k=K, dtype=torch.float64):
    """Trainer logits [N, V], and what the rollout says of each token."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    rollout = (logits + gap * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)).log_softmax(-1)
    sampled = rollout.exp().multinomial(1, generator=generator)[:, 0]
    top = rollout.topk(k)
    advantages = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    tensors = {"rollout": rollout, "top": top.values, "advantages": advantages}
    return {"logits": logits.to(dtype), "sampled": sampled, "ids": top.indices} | {
        name: value.to(dtype) for name, value in tensors.items()
    }


def loss_of(c, logits, *, spec=SPEC, sampled=None):
    sampled = c["sampled"] if sampled is None else sampled
    distribution = logits.log_softmax(-1)
    logprobs = distribution.gather(1, sampled[:, None])[:, 0]
    return compute(
        LossInput(
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            rollout_logprobs=c["rollout"].gather(1, sampled[:, None])[:, 0],
            ratio=(logprobs - logprobs.detach()).exp(),
            advantages=c["advantages"],
            trajectory_index=torch.arange(TOKENS),
            distribution=distribution,
            top_ids=c["ids"],
            top_logprobs=c["top"],
        ),
        spec,
    )


def reference(c, *, cap, at=None):
    """The formula position by position in NumPy; coefficients from the logits of ``c``, log-probs from ``at``."""
    frozen = log_softmax(c["logits"].numpy())
    logp = frozen if at is None else log_softmax(at.numpy())
    f = lambda x: np.minimum(x, cap)  # noqa: E731
    total = 0.0
    for n in range(TOKENS):
        a, head = c["sampled"][n].item(), c["ids"][n].numpy()
        p, q = np.exp(frozen[n]), np.exp(c["rollout"][n].numpy())
        rho = (1 - q[head].sum()) / (1 - p[head].sum())
        alpha = rho * f(1 / rho)
        centering = sum((q[v] * f(p[v] / q[v]) - alpha * p[v]) * logp[n, v] for v in head)
        total -= c["advantages"][n].item() * (f(p[a] / q[a]) * logp[n, a] - centering)
    return total


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("cap", [2.0, 0.7, 50.0])
def test_value_and_gradient_equal_the_reference(cap):
    c = case()
    spec = ScoreCenteringLoss(kind="score_centering", top_k=K, tis_cap=cap)
    assert loss_of(c, c["logits"], spec=spec).total.item() == pytest.approx(reference(c, cap=cap), rel=1e-12)
    found = gradient(lambda x: loss_of(c, x, spec=spec).total, c["logits"])
    # The coefficients are constants: differences of the reference that holds them fixed.
    assert torch.allclose(found, differences(lambda x: reference(c, cap=cap, at=x), c["logits"]), atol=1e-7)


def test_equal_distributions_give_the_plain_policy_gradient():
    c = case(gap=0.0)
    assert not c["sampled"].eq(c["ids"][:, 0]).all(), "the case should sample beyond the most probable token"
    found = gradient(lambda x: loss_of(c, x).total, c["logits"])
    chosen = lambda x: x.log_softmax(-1).gather(1, c["sampled"][:, None])[:, 0]  # noqa: E731
    plain = gradient(lambda x: -(c["advantages"] * chosen(x)).sum(), c["logits"])
    assert torch.allclose(found, plain, atol=1e-12)
    assert loss_of(c, c["logits"]).counts["centering"].item() == pytest.approx(0.0, abs=1e-12)


def test_nothing_truncated_leaves_the_weighted_policy_gradient():
    c = case(gap=0.2)
    found = gradient(lambda x: loss_of(c, x).total, c["logits"])
    chosen = lambda x: x.log_softmax(-1).gather(1, c["sampled"][:, None])[:, 0]  # noqa: E731
    weight = (chosen(c["logits"]) - c["rollout"].gather(1, c["sampled"][:, None])[:, 0]).exp()
    assert weight.max() < 2
    weighted = gradient(lambda x: -(weight * c["advantages"] * chosen(x)).sum(), c["logits"])
    assert torch.allclose(found, weighted, atol=1e-12)


@given(seed=st.integers(0, 10_000), gap=st.floats(0.1, 3.0), cap=st.sampled_from([None, 0.5, 1.0, 2.0]))
@settings(max_examples=40, deadline=None)
def test_the_mean_gradient_under_the_rollout_is_zero_when_it_sees_every_token(seed, gap, cap):
    c = case(seed=seed, gap=gap, k=VOCAB)
    spec = ScoreCenteringLoss(kind="score_centering", tis_cap=cap)
    q = c["rollout"].exp()

    def expected(logits):
        parts = []
        for token in range(VOCAB):
            sampled = torch.full((TOKENS,), token)
            weighted = c | {"advantages": q[:, token]}
            parts.append(loss_of(weighted, logits, spec=spec, sampled=sampled).total)
        return sum(parts)

    assert gradient(expected, c["logits"]).abs().max() < 1e-9


def test_truncation_alone_would_drift():
    c = case(gap=3.0, k=VOCAB)
    coefficients = centering_coefficients(c["logits"].softmax(-1).gather(1, c["ids"]), c["top"].exp(), SPEC)
    assert coefficients.abs().sum(-1).max() > 0.05


@pytest.mark.parametrize("gap", [0.0, 1e-3, 2.0])
def test_a_head_that_holds_the_whole_vocabulary_stays_finite_in_float32(gap):
    c = case(gap=gap, k=VOCAB, dtype=torch.float32)
    spec = ScoreCenteringLoss(kind="score_centering")
    found = gradient(lambda x: loss_of(c, x, spec=spec).total, c["logits"])
    exact = case(gap=gap, k=VOCAB)
    assert torch.allclose(
        found.double(), gradient(lambda x: loss_of(exact, x, spec=spec).total, exact["logits"]), atol=1e-4
    )


def test_the_tail_factor_at_its_floor_and_beyond():
    # A rollout certain of its head, a trainer that is not, and the reverse: alpha stays in [0, 1].
    p = torch.tensor([[0.5, 0.2], [0.6, 0.4], [0.6, 0.4]], dtype=torch.float64)
    q = torch.tensor([[0.6, 0.4], [0.5, 0.2], [0.7, 0.3]], dtype=torch.float64)
    found = centering_coefficients(p, q, SPEC)
    alpha = torch.tensor([2 * 1e-6 / 0.3, 1.0, 1.0], dtype=torch.float64)
    expected = torch.minimum(p, 2 * q) - alpha[:, None] * p
    assert torch.allclose(found, expected, atol=1e-12)


def test_f_is_the_truncated_weight_at_its_cap():
    for log_ratio, weight, truncated in ((np.log(2.0) - 1e-9, 2.0, 0), (np.log(2.0) + 1e-9, 2.0, 1), (3.0, 2.0, 1)):
        logprobs = torch.tensor([-1.0], dtype=torch.float64).requires_grad_()
        far = torch.full((1, 3), -2.0, dtype=torch.float64)  # a head where p = q contributes nothing
        one = torch.ones(1, dtype=torch.float64)
        rollout = logprobs.detach() - log_ratio
        ids = torch.tensor([[1, 2]])
        data = LossInput(logprobs, rollout, rollout, one, 3 * one, torch.zeros(1).long(), far, ids, far[:, 1:])
        loss = compute(data, SPEC)
        loss.total.backward()
        assert logprobs.grad.item() == pytest.approx(-3 * weight, rel=1e-8)
        assert int(loss.counts["truncated"]) == truncated


def test_counts():
    c = case()
    loss = loss_of(c, c["logits"])
    assert loss.counts["tail"].item() == pytest.approx((1 - c["top"].exp().sum(-1)).sum().item())
    assert SPEC.top_logprobs == K and GrpoLoss().top_logprobs == 0
