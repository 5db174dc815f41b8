"""Queue, data cursor, packing, metrics log and checkpoints: what resuming rests on."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trace_rl.config.training import TrainingConfig
from trace_rl.errors import UserError
from trace_rl.rl import checkpoint
from trace_rl.rl.batch import pack
from trace_rl.rl.metrics_log import MetricsLog
from trace_rl.rl.mismatch import logprob_gap
from trace_rl.rl.optimizer import MasterAdamW
from trace_rl.rl.prompts import PromptStream
from trace_rl.rl.queue import QueuedBatch, StalenessQueue
from trace_rl.rl.summary import summarize
from trace_rl.rl.trainer import Trainer, split_by_prompt
from trace_rl.trajectory import RolloutBatch, Trajectory


def trajectory(*, tokens: int, prompt_len: int, version: int = 0, prompt: int = 0) -> Trajectory:
    return Trajectory(
        prompt_index=prompt,
        sample_index=0,
        token_ids=torch.arange(1, tokens + 1, dtype=torch.int32),
        prompt_len=prompt_len,
        logprobs=-torch.arange(1, tokens - prompt_len + 1, dtype=torch.float32),
        expert_ids=torch.full((tokens - 1, 2, 3), version, dtype=torch.int16),
        record=torch.full((tokens - 1, 5), tokens, dtype=torch.uint8),
        policy_version=version,
        finish_reason="stop",
    )


def batch_of(*trajectories: Trajectory) -> RolloutBatch:
    return RolloutBatch(list(trajectories), recording=None, quant_hash="", policy_version=0)


def test_queue_trains_each_batch_staleness_versions_late():
    queue = StalenessQueue(staleness=2, max_version_diff=3)
    seen, next_index = [], 0
    for version in range(6):
        while queue.missing():
            made = batch_of(trajectory(tokens=4, prompt_len=2, version=version))
            queue.push(QueuedBatch(index=next_index, batch=made, rewards=[1.0]))
            next_index += 1
        popped = queue.pop(policy_version=version)
        assert len(popped.trajectories) == len(popped.rewards) == 1 and popped.dropped == 0
        seen.append(next(iter(popped.ages)))
    assert seen == [0, 1, 2, 2, 2, 2]


def test_queue_drops_and_counts_what_is_too_old():
    queue = StalenessQueue(staleness=0, max_version_diff=3)
    young, old = (trajectory(tokens=4, prompt_len=2, version=version) for version in (7, 6))
    kept_logprobs = {"off": [torch.tensor([-7.0]), torch.tensor([-6.0])]}
    queue.push(QueuedBatch(index=0, batch=batch_of(young, old), rewards=[0.0, 1.0], old=kept_logprobs))
    popped = queue.pop(policy_version=10)
    assert [t.policy_version for t in popped.trajectories] == [7] and popped.rewards == [0.0]
    assert popped.dropped == 1 and popped.ages == {3: 1, 4: 1}
    assert popped.old == {"off": [torch.tensor([-7.0])]}


def test_staleness_beyond_the_limit_is_refused_by_the_config():
    with pytest.raises(ValueError, match="raise max_version_diff"):
        TrainingConfig(staleness=4, max_version_diff=3)


def test_prompt_batches_are_a_function_of_seed_and_index():
    ids = [[i] for i in range(10)]
    stream = PromptStream(ids, prompts_per_step=3, seed=1)
    in_order = [stream.batch(i) for i in range(7)]
    again = PromptStream(ids, prompts_per_step=3, seed=1)
    assert [again.batch(i) for i in reversed(range(7))] == in_order[::-1]
    assert len({i for batch in in_order[:3] for i in batch}) == 9  # no repeats within an epoch
    assert PromptStream(ids, prompts_per_step=3, seed=2).batch(0) != in_order[0]


def test_prompt_stream_refuses_empty_and_small_datasets():
    with pytest.raises(UserError, match="empty"):
        PromptStream([], prompts_per_step=1, seed=0)
    with pytest.raises(UserError, match="fewer than"):
        PromptStream([[1]], prompts_per_step=2, seed=0)


def test_pack_aligns_rows_targets_and_records():
    first, second = trajectory(tokens=6, prompt_len=2), trajectory(tokens=4, prompt_len=3, version=1, prompt=1)
    batch = pack([first, second], pad_id=0)
    assert batch.input_ids.shape == (2, 8)
    assert batch.input_ids[0].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert batch.targets[1, :3].tolist() == [2, 3, 4]
    assert batch.valid.sum(1).tolist() == [5, 3]
    assert batch.response[0].nonzero()[:, 0].tolist() == [1, 2, 3, 4]  # predicts tokens 2..5
    assert batch.response[1].nonzero()[:, 0].tolist() == [2]
    assert batch.rollout_logprobs.tolist() == [-1, -2, -3, -4, -1]
    assert batch.trajectory_index.tolist() == [0, 0, 0, 0, 1]
    assert batch.record[1, :3].unique().tolist() == [4] and batch.record[1, 3:].unique().tolist() == [0]
    assert batch.expert_ids[1, :3].unique().tolist() == [1]


def test_gap_metrics_by_hand():
    train, rollout = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.9])
    metrics = logprob_gap(train, rollout)
    assert metrics["gap_mean"] == pytest.approx(0.3)
    assert metrics["gap_max"] == pytest.approx(0.5)
    assert metrics["kl_k1"] == pytest.approx(-0.2)
    assert metrics["kl_k3"] == pytest.approx(((1.6487213 - 1.5) + (0.9048374 - 0.9)) / 2, rel=1e-4)
    assert metrics["perplexity_ratio"] == pytest.approx(torch.tensor(-0.2).exp().item())


def test_split_by_prompt_keeps_groups_together():
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    parts = split_by_prompt(groups, parts=3)
    assert sorted(i for part in parts for i in part) == list(range(8))
    owners = [{groups[i].item() for i in part} for part in parts]
    assert all(a.isdisjoint(b) for n, a in enumerate(owners) for b in owners[n + 1 :])


def small_optimizer(model: nn.Module) -> MasterAdamW:
    return MasterAdamW(
        model, learning_rate=1e-2, warmup_steps=4, betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0
    )


def test_resumed_optimizer_is_bit_identical(tmp_path):
    def gradients(step: int, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)

    def build() -> tuple[nn.Module, MasterAdamW]:
        torch.manual_seed(0)
        model = nn.Linear(16, 16).to(torch.bfloat16)
        return model, small_optimizer(model)

    model, optimizer = build()
    for step in range(6):
        gradients(step, model)
        optimizer.accumulate()
        optimizer.step()
        if step == 2:
            state = checkpoint.TrainState(
                step=3,
                optimizer=optimizer.state_dict(),
                queue=StalenessQueue(staleness=0, max_version_diff=3),
                rng=torch.get_rng_state(),
            )
            checkpoint.save(tmp_path / "checkpoint.pt", state, identity="a")
    resumed, other = build()
    other.load_state_dict(checkpoint.load(tmp_path / "checkpoint.pt", identity="a").optimizer)
    for step in range(3, 6):
        gradients(step, resumed)
        other.accumulate()
        other.step()
    assert torch.equal(model.weight, resumed.weight) and torch.equal(model.bias, resumed.bias)
    assert all(torch.equal(a, b) for a, b in zip(optimizer.masters, other.masters, strict=True))


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / "checkpoint.pt"
    assert checkpoint.load(path, identity="a") is None
    queue = StalenessQueue(staleness=0, max_version_diff=3)
    checkpoint.save(
        path, checkpoint.TrainState(step=1, optimizer={}, queue=queue, rng=torch.get_rng_state()), identity="a"
    )
    with pytest.raises(UserError, match="other settings"):
        checkpoint.load(path, identity="b")


def test_metrics_log_survives_a_torn_line_and_truncates(tmp_path):
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    for step in range(4):
        log.append({"step": step, "reward": step / 4})
    with log.path.open("a") as file:
        file.write('{"step": 4, "rew')
    assert [row["step"] for row in log.rows()] == [0, 1, 2, 3]
    log.truncate(steps=2)
    assert [row["step"] for row in log.rows()] == [0, 1]


def rows(end: float, *, start: float = 0.5, nonfinite: float = 0.0) -> list[dict[str, float]]:
    """Metrics of 30 steps."""
    rewards = [start] * 10 + [0.5] * 10 + [end] * 10
    return [
        {
            "step": i,
            "reward": r,
            "gap_mean": 0.1,
            "gap_p99": 0.2,
            "gap_max": 0.3,
            "nonfinite_gradients": nonfinite * (i >= len(rewards) - 3),
            "tokens_per_s": 1.0,
            "quantize_s/activations": 0.1,
            "quantize_s/weights": 0.1,
            "seconds/step": 1.0,
        }
        for i, r in enumerate(rewards)
    ]


def test_numbers_that_a_diverging_run_lost_are_null():
    diverged = rows(0.0, nonfinite=1.0)
    diverged[-1] |= {"gap_mean": math.nan, "gap_max": math.inf, "diag/own/gap_mean": math.nan}
    summary = summarize(diverged)
    json.dumps(summary, allow_nan=False)
    assert summary["collapsed"] is True and summary["logprob_gap_mean"] is None
    assert summary["diagnostics"] == {"diag/own/gap_mean": None}


def test_collapse_is_the_stated_rule():
    assert summarize(rows(0.24))["collapsed"] is True
    assert summarize(rows(0.26))["collapsed"] is False
    assert summarize(rows(0.24, start=0.2))["collapsed"] is True  # it rose first
    assert summarize(rows(0.5, nonfinite=1.0))["collapsed"] is True


def test_an_update_without_a_finite_gradient_is_left_out_and_counted():
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = MasterAdamW(
        model, learning_rate=0.1, warmup_steps=0, betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0
    )
    (model(torch.ones(1, 3, dtype=torch.bfloat16)).sum() * float("nan")).backward()
    optimizer.accumulate()
    assert optimizer.step()["nonfinite_gradients"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.accumulate()
    assert optimizer.step()["nonfinite_gradients"] == 1.0
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    other = MasterAdamW(
        model, learning_rate=0.1, warmup_steps=0, betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0
    )
    other.load_state_dict(optimizer.state_dict())
    assert other.nonfinite_gradients == 1


def test_micro_batches_hold_sequences_of_like_length():
    lengths = (9, 3, 7, 5, 8, 4)
    made = [trajectory(tokens=tokens, prompt_len=2) for tokens in lengths]
    stub = SimpleNamespace(training=TrainingConfig(micro_batch_sequences=2))
    batches = Trainer.micro_batches(stub, made, range(6))
    assert [[lengths[i] for i in rows] for rows in batches] == [[3, 4], [5, 7], [8, 9]]
    assert [[lengths[i] for i in rows] for rows in Trainer.micro_batches(stub, made, [4, 0, 1])] == [[3, 8], [9]]
