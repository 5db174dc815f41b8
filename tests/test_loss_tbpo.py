"""TBPO: one ratio per trajectory, a band for A < 0, an upper edge for A > 0, dropped trajectories without gradient."""

import math

import pytest
import torch
from loss_data import differences, gradient, loss_input, micro_batch

from trace_rl.config.loss import GrpoLoss, TbpoLoss
from trace_rl.rl.losses import LossInput, compute

SPEC = TbpoLoss(kind="tbpo")


def reference(fields, spec):
    """(loss, gradient) trajectory by trajectory in Python floats."""
    index = fields["trajectory_index"].tolist()
    lp, old, rollout, a = (
        fields[name].tolist() for name in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
    )
    total, slopes = 0.0, [0.0] * len(index)
    for trajectory in set(index):
        tokens = [i for i, t in enumerate(index) if t == trajectory]
        s = math.exp(sum(lp[i] - old[i] for i in tokens) / len(tokens))
        low = 1 - spec.negative_clip_low if a[tokens[0]] < 0 else -math.inf
        high = 1 + (spec.negative_clip_high if a[tokens[0]] < 0 else spec.clip_high)
        for i in tokens:
            weight = min(math.exp(old[i] - rollout[i]), spec.tis_cap)
            total -= weight * a[i] * min(max(s, low), high)
            slopes[i] = -weight * a[i] * s if low <= s <= high else 0.0
    return total, slopes


def sequences(*ratios, advantages, length=4):
    """Trajectories of ``length`` tokens whose geometric-mean ratios are ``ratios``, though no token's ratio is."""
    count = len(ratios) * length
    logs = torch.tensor(ratios, dtype=torch.float64).log().repeat_interleave(length)
    spread = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(count // 2)
    zero = torch.zeros(count, dtype=torch.float64)
    logprobs = (logs + spread).requires_grad_()
    index = torch.arange(len(ratios)).repeat_interleave(length)
    return LossInput(logprobs, zero, zero, logprobs.exp(), torch.tensor(advantages).double()[index], index)


def test_value_and_gradient_equal_the_reference():
    # A drift of the band's width, so that sequences fall on both sides of every edge.
    advantages = [(-1.0) ** i * (0.5 + i / 20) for i in range(40)]
    fields = micro_batch([3 + i % 7 for i in range(40)], advantages=advantages, drift=1e-3)
    total, slopes = reference(fields, SPEC)
    loss = compute(loss_input(fields), SPEC)
    assert loss.total.item() == pytest.approx(total, rel=1e-12)
    found = gradient(lambda x: compute(loss_input(fields, logprobs=x), SPEC).total, fields["logprobs"])
    assert torch.allclose(found, torch.tensor(slopes, dtype=torch.float64), atol=1e-12)
    assert int(loss.counts["dropped_positive"]) > 0 and int(loss.counts["dropped_negative"]) > 0
    assert int(loss.clipped) == sum(slope == 0.0 for slope in slopes) < len(slopes)


def test_gradient_is_that_of_the_sequence_objective_where_a_trajectory_has_one_weight():
    fields = micro_batch([4, 3, 5, 2], advantages=[1.0, -1.0, 0.5, -2.0], drift=1e-4)
    per_trajectory = torch.tensor([0.1, -0.3, 2.0, 0.0], dtype=torch.float64)  # the third one is at the cap
    fields["rollout_logprobs"] = fields["old_logprobs"] - per_trajectory[fields["trajectory_index"]]
    function = lambda x: compute(loss_input(fields, logprobs=x), SPEC).total  # noqa: E731
    found = gradient(function, fields["logprobs"])
    assert torch.allclose(found, differences(function, fields["logprobs"]), atol=1e-7)
    assert int(compute(loss_input(fields), SPEC).clipped) == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "kept", "value"),
    [
        (1.0003, 1.0, True, 1.0003),
        (1.0005, 1.0, False, 1.0004),
        (0.5, 1.0, True, 0.5),  # A > 0 has no lower edge: there is room to come back
        (0.9998, -1.0, True, 0.9998),
        (0.9996, -1.0, False, 0.9997),
        (1.0006, -1.0, True, 1.0006),  # beyond the edge for A > 0
        (1.0008, -1.0, False, 1.0007),  # the second clip: GRPO would keep pulling
    ],
)
def test_band_by_hand(ratio, advantage, kept, value):
    data = sequences(ratio, advantages=[advantage])
    loss = compute(data, SPEC)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(-4 * advantage * value, rel=1e-12)
    slope = -advantage * ratio if kept else 0.0
    assert data.logprobs.grad.tolist() == pytest.approx([slope] * 4, rel=1e-12)
    name = "dropped_negative" if advantage < 0 else "dropped_positive"
    assert int(loss.clipped) == int(loss.counts[name]) == (0 if kept else 4)


def test_a_dropped_trajectory_leaves_the_others_alone():
    data = sequences(0.9, 1.0, 1.1, advantages=[-1.0, -1.0, 1.0])
    compute(data, SPEC).total.backward()
    assert (data.logprobs.grad != 0).tolist() == [False] * 4 + [True] * 4 + [False] * 4


def test_one_update_per_rollout_is_grpo_with_the_smaller_cap():
    fields = micro_batch([5, 9, 30], advantages=[1.0, -1.0, 0.3], drift=0.0, gap=1.0)
    slopes = [
        gradient(lambda x, spec=spec: compute(loss_input(fields, logprobs=x), spec).total, fields["logprobs"])
        for spec in (SPEC, GrpoLoss(tis_cap=2.0))
    ]
    assert torch.allclose(*slopes, atol=1e-12)
    assert int(compute(loss_input(fields), SPEC).clipped) == 0
    assert not torch.allclose(slopes[0], -fields["advantages"])


def test_ratios_that_overflow_or_vanish_are_dropped_with_a_finite_loss():
    logprobs = torch.tensor([-200.0, 0.0, 0.0, 0.0, -200.0, 0.0]).requires_grad_()
    old = torch.tensor([0.0, 0.0, -200.0, 0.0, 0.0, -200.0])
    index = torch.tensor([0, 0, 1, 1, 2, 2])
    data = LossInput(logprobs, old, old, (logprobs - old).exp(), torch.full((6,), -1.0), index)
    assert data.ratio.tolist() == [0.0, 1.0, math.inf, 1.0, 0.0, math.inf]
    loss = compute(data, SPEC)
    loss.total.backward()
    assert math.isfinite(loss.total.item())
    assert logprobs.grad.tolist() == [0.0] * 6
    assert int(loss.clipped) == 6
