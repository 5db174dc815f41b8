"""GRPO loss, importance weights and advantages against float64 references, finite differences and by hand."""

import pytest
import torch

from trace_rl.rl.advantages import group_advantages, informative_groups
from trace_rl.rl.importance import truncated_weights
from trace_rl.rl.losses.grpo import grpo_loss


def reference_loss(logprobs, *, old, rollout, advantages, low, high, cap):
    """Token by token in Python floats."""
    total = 0.0
    for lp, o, r, a in zip(logprobs.tolist(), old.tolist(), rollout.tolist(), advantages.tolist(), strict=True):
        ratio = torch.tensor(lp - o, dtype=torch.float64).exp().item()
        weight = min(torch.tensor(o - r, dtype=torch.float64).exp().item(), cap)
        total -= weight * min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    return total


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(0)
    n = 400
    old = -torch.rand(n, generator=generator, dtype=torch.float64) * 3
    return {
        "logprobs": old + torch.randn(n, generator=generator, dtype=torch.float64) * 0.3,
        "old": old,
        "rollout": old + torch.randn(n, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(n, generator=generator, dtype=torch.float64),
    }


def loss_of(tokens, logprobs, *, cap=5.0):
    weights = truncated_weights(tokens["old"], tokens["rollout"], cap=cap).weights
    return grpo_loss(
        logprobs,
        old_logprobs=tokens["old"],
        weights=weights,
        advantages=tokens["advantages"],
        clip_low=0.2,
        clip_high=0.27,
    )


def test_grpo_equals_the_scalar_reference(tokens):
    expected = reference_loss(
        tokens["logprobs"],
        old=tokens["old"],
        rollout=tokens["rollout"],
        advantages=tokens["advantages"],
        low=0.2,
        high=0.27,
        cap=5.0,
    )
    assert loss_of(tokens, tokens["logprobs"]).total.item() == pytest.approx(expected, rel=1e-12)


def test_grpo_gradient_equals_finite_differences(tokens):
    logprobs = tokens["logprobs"].clone().requires_grad_()
    loss_of(tokens, logprobs).total.backward()
    step = 1e-6
    # Away from the clip's kinks, where a difference quotient means something.
    ratio = (tokens["logprobs"] - tokens["old"]).exp()
    smooth = ((ratio - 0.8).abs() > 1e-3) & ((ratio - 1.27).abs() > 1e-3)
    for index in smooth.nonzero()[:60, 0].tolist():
        up, down = tokens["logprobs"].clone(), tokens["logprobs"].clone()
        up[index] += step
        down[index] -= step
        quotient = (loss_of(tokens, up).total - loss_of(tokens, down).total) / (2 * step)
        assert logprobs.grad[index].item() == pytest.approx(quotient.item(), abs=1e-6)


def test_clipping_counts_and_stops_gradients():
    logprobs = torch.tensor([1.0, -1.0, 1.0, -1.0]).requires_grad_()
    loss = grpo_loss(
        logprobs,
        old_logprobs=torch.zeros(4),
        weights=torch.ones(4),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.27,
    )
    loss.total.backward()
    # Too far up with A > 0 and too far down with A < 0 are clipped; the other two keep pulling back.
    assert int(loss.clipped) == 2
    assert (logprobs.grad != 0).tolist() == [False, True, True, False]


def test_weights_truncate_at_the_cap_only_and_carry_no_gradient():
    old = torch.tensor([0.0, -1.0, 0.0], requires_grad=True)
    result = truncated_weights(old, torch.tensor([-3.0, -1.0, 0.5]), cap=5.0)
    assert result.weights.tolist() == pytest.approx([5.0, 1.0, 0.6065306])
    assert result.truncated == pytest.approx(1 / 3)
    assert not result.weights.requires_grad
    raw = torch.tensor([3.0, 0.0, -0.5]).exp()
    assert result.ess == pytest.approx(float(raw.sum() ** 2 / (3 * (raw**2).sum())))


def test_no_cap_means_no_weight():
    assert truncated_weights(torch.zeros(2), torch.tensor([-9.0, 1.0]), cap=None).weights.tolist() == [1.0, 1.0]


def test_equal_policies_give_the_plain_policy_gradient():
    logprobs = torch.tensor([-0.3, -0.7, -1.1]).requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 2.0])
    old = logprobs.detach().clone()
    weights = truncated_weights(old, old, cap=5.0).weights
    grpo_loss(
        logprobs, old_logprobs=old, weights=weights, advantages=advantages, clip_low=0.2, clip_high=0.27
    ).total.backward()
    assert torch.allclose(logprobs.grad, -advantages)


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    groups = torch.tensor([7, 7, 3, 3, 9, 9])
    centred = group_advantages(rewards, groups, std=False)
    assert centred.tolist() == pytest.approx([0.5, -0.5, 0.0, 0.0, 0.5, -0.5])
    scaled = group_advantages(rewards, groups)
    assert scaled.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0, 1.0, -1.0], abs=1e-5)
    assert informative_groups(rewards, groups) == pytest.approx(2 / 3)
