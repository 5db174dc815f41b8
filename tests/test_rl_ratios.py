"""Importance ratios: which forwards they compare, their values and gradients by hand."""

import pytest
import torch

from trace_rl.config.loss import ScoreCenteringLoss
from trace_rl.config.method import RatioSpec, RlMethod
from trace_rl.config.training import TrainingConfig
from trace_rl.rl.ratios import Ratios

STALE = TrainingConfig(staleness=1)
FRESH = TrainingConfig()


def ratios(*, mode="guided", training=STALE, **spec):
    return Ratios.of(RatioSpec(**spec), mode=mode, training=training)


def test_the_default_compares_the_method_with_itself():
    default = ratios()
    assert (default.mismatch, default.staleness) == ("guided", "guided")
    assert default.from_sampling and not default.from_current
    assert default.forwards(has_old=True) == ("guided",)


@pytest.mark.parametrize("updates", [1, 3])
def test_the_current_policy_is_kept_only_for_several_updates(updates):
    """Of one update it is pi_theta itself, whatever the age of the batch: nothing to clip."""
    current = ratios(old_policy="current", training=TrainingConfig(staleness=1, updates_per_rollout=updates))
    assert not current.from_sampling and current.from_current == (updates > 1)


def test_a_loss_without_an_old_policy_keeps_none():
    training = TrainingConfig(staleness=1, updates_per_rollout=3)
    loss = ScoreCenteringLoss(kind="score_centering")
    free = Ratios.of(RatioSpec(), mode="rtn", training=training, uses_old=loss.uses_old_policy)
    assert not free.from_sampling and not free.from_current


def test_an_overflowing_ratio_keeps_a_finite_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ratio = ratios().staleness_ratio(logprobs, now={"guided": logprobs.detach()}, old={"guided": logprobs - 200.0})
    torch.minimum(ratio, ratio.clamp(max=1.27)).sum().backward()
    assert ratio.isfinite().all() and logprobs.grad.tolist() == [0.0, 0.0]


def test_an_unpinned_weight_needs_one_more_forward_and_an_anchored_ratio_two():
    assert ratios(mismatch="rtn").forwards(has_old=False) == ("rtn",)
    anchored = ratios(staleness="rtn")
    assert anchored.from_sampling and not anchored.from_current
    assert anchored.forwards(has_old=True) == ("guided", "rtn")
    assert ratios(staleness="bf16").forwards(has_old=True) == ("guided", "off")


@pytest.mark.parametrize("spec", [{}, {"old_policy": "current"}, {"staleness": "bf16"}])
def test_fresh_batches_trained_once_keep_no_logprobs(spec):
    """The policy that sampled them is the policy that trains on them."""
    fresh = ratios(training=FRESH, **spec)
    assert not fresh.from_sampling
    assert fresh.forwards(has_old=False) == ("guided",)


def test_several_updates_move_the_policy_too():
    assert ratios(training=TrainingConfig(updates_per_rollout=2)).from_sampling


def test_value_from_the_chosen_forward_gradient_through_the_own():
    anchored = ratios(staleness="rtn")
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    now = {"rtn": torch.tensor([-1.5, -2.0], dtype=torch.float64), "guided": logprobs.detach()}
    old = {"rtn": torch.tensor([-2.0, -1.0], dtype=torch.float64), "guided": logprobs.detach() + 5.0}
    ratio = anchored.staleness_ratio(logprobs, now=now, old=old)
    expected = torch.tensor([0.5, -1.0], dtype=torch.float64).exp()
    assert torch.allclose(ratio.detach(), expected)
    ratio.sum().backward()
    assert torch.allclose(logprobs.grad, expected)


def test_without_a_moved_policy_the_ratio_is_one_with_the_plain_gradient():
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    ratio = ratios().staleness_ratio(logprobs, now={}, old=None)
    assert ratio.tolist() == [1.0, 1.0]
    (ratio * torch.tensor([2.0, -1.0])).sum().backward()
    assert logprobs.grad.tolist() == [2.0, -1.0]


def test_a_ratio_of_rtn_forwards_needs_an_fp4_trainer():
    for spec in ({"mismatch": "rtn"}, {"staleness": "rtn"}):
        with pytest.raises(ValueError, match="needs an FP4 trainer"):
            RlMethod(name="x", description="x", source="x", ratio=spec)
