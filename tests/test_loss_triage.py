"""TRIAGE: each branch of the gate and of the repair by hand, the whole loss against Python floats and differences."""

import math

import pytest
import torch
from loss_data import differences, gradient, loss_input, micro_batch

from trace_rl.config.loss import GrpoLoss, TriageLoss
from trace_rl.rl.losses import LossInput, compute
from trace_rl.rl.losses.base import windows
from trace_rl.rl.losses.triage import segment_gates, window_repair

SPEC = TriageLoss(kind="triage")


def responses(*deltas, advantages):
    """Trajectories whose tokens have these log pi_train - log pi_rollout, before any update."""
    delta = torch.tensor([d for response in deltas for d in response], dtype=torch.float64)
    index = torch.repeat_interleave(torch.arange(len(deltas)), torch.tensor([len(r) for r in deltas]))
    logprobs = (delta - 1.0).requires_grad_()
    rollout = torch.full_like(delta, -1.0)
    values = torch.tensor(advantages, dtype=torch.float64)[index]
    ratio = (logprobs - logprobs.detach()).exp()
    return LossInput(logprobs, logprobs.detach(), rollout, ratio, values, index)


def gates(*deltas, advantages, spec=SPEC):
    return segment_gates(responses(*deltas, advantages=advantages), spec).tolist()


def reference(fields, spec):
    """The whole loss, segment by segment and window by window, in Python floats."""
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
    lp, old, rollout, advantage = (fields[name].tolist() for name in names)
    index = fields["trajectory_index"].tolist()
    total = 0.0
    for trajectory in set(index):
        tokens = [i for i, t in enumerate(index) if t == trajectory]
        for start in range(0, len(tokens), 64):
            part = tokens[start : start + 64]
            deltas = [old[i] - rollout[i] for i in part]
            mean, tails = sum(deltas) / len(part), sum(d < -6 for d in deltas)
            base = 0.1 if mean < -1.5 else 0.3 if mean < -0.5 else 1.0
            gate = min(base, 1 - 0.9 * min(tails / 2, 1))
            negative = sum(advantage[i] for i in part) / len(part) < 0
            for i, d in zip(part, deltas, strict=True):
                ratio, a = math.exp(lp[i] - old[i]), advantage[i]
                surrogate = min(ratio * a, min(max(ratio, 0.8), 1.27) * a)
                total -= (gate if negative and d < 0 else 1.0) * min(math.exp(d), 5.0) * surrogate
        for start in range(0, len(tokens), 128):
            part = tokens[start : start + 128]
            if sum(advantage[i] for i in part) > 0:
                q = max(-0.03 - sum(lp[i] - rollout[i] for i in part) / len(part), 0)
                total += len(part) * 0.015 * 5e-4 * (math.sqrt(1 + q**2 / 5e-4) - 1)
    return total


@pytest.fixture
def fields():
    fields = micro_batch([3, 64, 150, 300, 1, 129], advantages=[1.0, -1.0, -0.5, 0.7, -2.0, 0.2], gap=2.0)
    return fields | {"rollout_logprobs": fields["rollout_logprobs"] + 0.8}


def test_value_and_gradient_equal_the_reference(fields):
    loss = compute(loss_input(fields), SPEC)
    assert loss.total.item() == pytest.approx(reference(fields, SPEC), rel=1e-12)
    assert int(loss.counts["gated"]) > 0 and int(loss.counts["repaired"]) > 0 and int(loss.clipped) > 0
    found = gradient(lambda x: compute(loss_input(fields, logprobs=x), SPEC).total, fields["logprobs"])
    expected = differences(lambda x: reference(fields | {"logprobs": x}, SPEC), fields["logprobs"])
    ratio = (fields["logprobs"] - fields["old_logprobs"]).exp()
    smooth = ((ratio - 0.8).abs() > 1e-3) & ((ratio - 1.27).abs() > 1e-3)
    assert torch.allclose(found[smooth], expected[smooth], atol=1e-6)


def test_windows_start_with_every_response_and_end_with_it():
    index = torch.tensor([0] * 5 + [1] * 2 + [2] * 4)
    assert windows(index, size=2).tolist() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5]
    assert windows(index, size=64).tolist() == index.tolist()


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([-0.4, -0.4], [1.0, 1.0]),
        ([-0.5, -0.5], [1.0, 1.0]),  # strictly below
        ([-0.6, -0.6], [0.3, 0.3]),
        ([-1.5, -1.5], [0.3, 0.3]),
        ([-1.6, -1.6], [0.1, 0.1]),
        ([-5.0, 0.5], [0.1, 1.0]),  # a token the trainer finds more probable is not gated
        ([-5.0, 0.0], [0.1, 1.0]),
    ],
)
def test_segment_gate_by_hand(deltas, expected):
    assert gates(deltas, advantages=[-1.0]) == expected
    assert gates(deltas, advantages=[1.0]) == [1.0, 1.0]


def test_tail_gate_by_hand():
    # Sixty tokens above zero hold the mean up, so that only the tail acts, and only on tokens below zero.
    calm = [1.0] * 60
    assert gates([*calm, -0.1, -6.5], advantages=[-1.0])[-2:] == pytest.approx([0.55, 0.55])
    assert gates([*calm, -0.1, -6.5, -7.0], advantages=[-1.0])[-3:] == pytest.approx([0.1] * 3)
    assert gates([*calm, -9.0, -9.0, -7.0, -7.0], advantages=[-1.0])[-4:] == pytest.approx([0.1] * 4)
    assert gates([*calm, -0.1, -6.0], advantages=[-1.0])[-2:] == [1.0, 1.0]  # strictly below
    assert gates([*calm, -0.1, -6.5], advantages=[-1.0])[:60] == [1.0] * 60
    assert gates([*calm, -0.1, -6.5], advantages=[1.0]) == [1.0] * 62


def test_the_smaller_of_the_two_gates_counts():
    assert gates([-6.5, -0.1], advantages=[-1.0]) == pytest.approx([0.1, 0.1])  # mean -3.3: .1; one tail token: .55
    assert gates([-6.5] + [-0.1] * 9, advantages=[-1.0]) == pytest.approx([0.3] * 10)  # mean -.74: .3; one: .55


def test_segments_are_judged_apart():
    low, high = [-1.0] * 64, [-0.1] * 10
    assert gates([*low, *high], advantages=[-1.0]) == [0.3] * 64 + [1.0] * 10
    assert gates([*high, *low], advantages=[-1.0]) == [0.3] * 64 + [0.3] * 10
    assert gates(high, low, advantages=[-1.0, -1.0]) == [1.0] * 10 + [0.3] * 64


def test_gate_ignores_what_this_batchs_updates_did():
    data = responses([-0.1, -0.1], advantages=[-1.0])
    moved = data.logprobs.detach() - 5.0
    later = LossInput(
        moved, data.old_logprobs, data.rollout_logprobs, data.ratio, data.advantages, data.trajectory_index
    )
    assert segment_gates(later, SPEC).tolist() == [1.0, 1.0]


def test_repair_by_hand():
    def repair(*deltas, advantage=1.0, spec=SPEC):
        data = responses(*deltas, advantages=[advantage] * len(deltas))
        values, active = window_repair(data, spec)
        (slopes,) = torch.autograd.grad(values.sum(), data.logprobs) if values.requires_grad else (None,)
        return values.detach(), active.tolist(), slopes

    q = 0.07
    values, active, slopes = repair([-0.1, -0.1, -0.1])
    expected = 0.015 * 5e-4 * (math.sqrt(1 + q * q / 5e-4) - 1)
    assert values.tolist() == pytest.approx([expected] * 3) and active == [True] * 3
    # Descent pulls the window's log-probs up, at most by .015 beta per token.
    assert slopes.tolist() == pytest.approx([-0.015 * q / math.sqrt(1 + q * q / 5e-4)] * 3)
    assert repair([-1e3])[2].item() == pytest.approx(-0.015 * math.sqrt(5e-4), rel=1e-3)
    for deltas, advantage in (([-0.03, -0.02], 1.0), ([-0.1, 0.2], 1.0), ([-0.1], -1.0), ([-0.1], 0.0)):
        values, active, slopes = repair(deltas, advantage=advantage)
        assert not values.any() and not any(active) and not slopes.any()
    # The second window has its own mean.
    assert repair([0.0] * 128 + [-0.1] * 2)[1] == [False] * 128 + [True] * 2
    off = TriageLoss(kind="triage", repair=False)
    values, active, slopes = repair([-0.1], spec=off)
    assert not values.any() and not any(active) and slopes is None


def test_a_trainer_that_believes_every_token_gives_grpo():
    fields = micro_batch([70, 200], advantages=[1.0, -1.0], gap=0.0)
    fields["rollout_logprobs"] = torch.minimum(fields["old_logprobs"], fields["logprobs"])  # delta >= 0 everywhere
    found, plain = (compute(loss_input(fields), spec).total.item() for spec in (SPEC, GrpoLoss()))
    assert found == pytest.approx(plain, rel=1e-12)


def test_counts_by_hand():
    data = responses([-0.6, -0.6, 0.1], [-0.1], [0.0], advantages=[-1.0, 1.0, 1.0])
    loss = compute(data, SPEC)
    counts = {name: float(value) for name, value in loss.counts.items()}
    assert counts["gated"] == 0  # the mean is -.37
    data = responses([-0.9, -0.9, 0.1], [-0.1], [0.0], advantages=[-1.0, 1.0, 1.0])
    counts = {name: float(value) for name, value in compute(data, SPEC).counts.items()}
    assert counts["gated"] == 2 and counts["gate"] == pytest.approx(2 * 0.3 + 3) and counts["repaired"] == 1
    assert counts["repair"] == pytest.approx(0.015 * 5e-4 * (math.sqrt(1 + 0.07**2 / 5e-4) - 1))


def test_severe_above_mild_is_refused():
    with pytest.raises(ValueError, match="severe gap is a larger one"):
        TriageLoss(kind="triage", severe=-0.1)
