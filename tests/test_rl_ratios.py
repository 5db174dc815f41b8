"""Importance ratios: which forwards they compare, their values and gradients by hand."""

import pytest
import torch

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
    assert default.from_current and not default.from_sampling
    assert default.forwards(has_old=True) == ("guided",)


def test_an_unpinned_weight_needs_one_more_forward_and_an_anchored_ratio_two():
    assert ratios(mismatch="rtn").forwards(has_old=False) == ("rtn",)
    anchored = ratios(old_policy="sampling", staleness="rtn")
    assert anchored.from_sampling and not anchored.from_current
    assert anchored.forwards(has_old=True) == ("guided", "rtn")
    assert ratios(old_policy="sampling", staleness="bf16").forwards(has_old=True) == ("guided", "off")


@pytest.mark.parametrize("spec", [{}, {"old_policy": "sampling"}, {"old_policy": "sampling", "staleness": "bf16"}])
def test_fresh_batches_trained_once_keep_no_logprobs(spec):
    """The policy that sampled them is the policy that trains on them."""
    fresh = ratios(training=FRESH, **spec)
    assert not fresh.from_sampling
    assert fresh.forwards(has_old=False) == ("guided",)


def test_several_updates_move_the_policy_too():
    assert ratios(old_policy="sampling", training=TrainingConfig(updates_per_rollout=2)).from_sampling


def test_value_from_the_chosen_forward_gradient_through_the_own():
    anchored = ratios(old_policy="sampling", staleness="rtn")
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
