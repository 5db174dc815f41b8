"""GRPO's loss, importance weights and advantages: values against Python floats, gradients against differences."""

import math

import pytest
import torch
from loss_data import differences, gradient, loss_input, micro_batch

from trace_rl.config.loss import GrpoLoss
from trace_rl.rl.advantages import group_advantages, informative_groups
from trace_rl.rl.importance import truncated_weights
from trace_rl.rl.losses import LossInput, compute

SPEC = GrpoLoss()


def reference_loss(fields, *, low, high, cap):
    """Token by token in Python floats."""
    total = 0.0
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
    for lp, old, rollout, a in zip(*(fields[name].tolist() for name in names), strict=True):
        ratio, weight = math.exp(lp - old), min(math.exp(old - rollout), cap)
        total -= weight * min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    return total


def grpo(logprobs, *, advantages):
    """The loss of tokens whose old and rollout log-probs are 0."""
    zero = torch.zeros_like(logprobs)
    index = torch.arange(len(logprobs))
    data = LossInput(logprobs, zero, zero, logprobs.exp(), torch.tensor(advantages), trajectory_index=index)
    return compute(data, SPEC)


@pytest.fixture
def fields():
    return micro_batch([60, 1, 139, 200], advantages=[1.3, -0.4, -1.0, 0.2], gap=1.0)


def test_grpo_equals_the_scalar_reference(fields):
    expected = reference_loss(fields, low=0.2, high=0.27, cap=5.0)
    assert compute(loss_input(fields), SPEC).total.item() == pytest.approx(expected, rel=1e-12)


def test_grpo_gradient_equals_finite_differences(fields):
    function = lambda x: compute(loss_input(fields, logprobs=x), SPEC).total  # noqa: E731
    # Away from the clip's kinks, where a difference quotient means something.
    ratio = (fields["logprobs"] - fields["old_logprobs"]).exp()
    smooth = ((ratio - 0.8).abs() > 1e-3) & ((ratio - 1.27).abs() > 1e-3)
    found, expected = gradient(function, fields["logprobs"]), differences(function, fields["logprobs"])
    assert torch.allclose(found[smooth], expected[smooth], atol=1e-6)
    assert smooth.sum() > 350


def test_clipping_counts_and_stops_gradients():
    logprobs = torch.tensor([1.0, -1.0, 1.0, -1.0]).requires_grad_()
    loss = grpo(logprobs, advantages=[1.0, 1.0, -1.0, -1.0])
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


def test_a_weight_exactly_at_the_cap_is_kept_and_not_counted_as_truncated():
    old = torch.tensor([2.0, 2.0], dtype=torch.float64).log()
    above = math.nextafter(2.0, 3.0)
    at = truncated_weights(old, torch.zeros(2, dtype=torch.float64), cap=float(old.exp()[0]))
    assert at.weights.tolist() == old.exp().tolist() and at.truncated == 0.0
    over = truncated_weights(torch.tensor([above, above * 4]).double().log(), torch.zeros(2).double(), cap=2.0)
    assert over.weights.tolist() == pytest.approx([2.0, 2.0], abs=1e-15) and over.truncated >= 0.5


def test_no_cap_means_no_weight():
    assert truncated_weights(torch.zeros(2), torch.tensor([-9.0, 1.0]), cap=None).weights.tolist() == [1.0, 1.0]


def test_equal_policies_give_the_plain_policy_gradient():
    fields = micro_batch([3, 4], advantages=[1.0, -0.5], drift=0.0, gap=0.0)
    found = gradient(lambda x: compute(loss_input(fields, logprobs=x), SPEC).total, fields["logprobs"])
    assert torch.allclose(found, -fields["advantages"])


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    groups = torch.tensor([7, 7, 3, 3, 9, 9])
    centred = group_advantages(rewards, groups, std=False)
    assert centred.tolist() == pytest.approx([0.5, -0.5, 0.0, 0.0, 0.5, -0.5])
    scaled = group_advantages(rewards, groups)
    assert scaled.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0, 1.0, -1.0], abs=1e-5)
    assert informative_groups(rewards, groups) == pytest.approx(2 / 3)
