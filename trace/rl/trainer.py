"""The training loop: roll out, reward, train on what the engine rounded to, refit.

    while step < steps:
        fill the staleness queue with rollouts (recording guidance and routing)
        pop the oldest batch, compute advantages
        one or more clipped, importance-weighted updates, the forward rounding as the method says
        refit the engine with the new BF16 weights

Every random choice is a function of (seed, step, prompt, sample): a resumed run repeats none and skips none. Which
forwards the importance ratios compare is the method's `RatioSpec` (`trace_rl.rl.ratios`).
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trace_rl.config.guidance import GuidanceSpec
from trace_rl.config.method import RlMethod
from trace_rl.config.training import TrainingConfig
from trace_rl.guidance.record import RecordLayout
from trace_rl.qat.attach import Qat
from trace_rl.qat.collector import Collector
from trace_rl.qat.context import Mode
from trace_rl.rl.advantages import group_advantages, informative_groups
from trace_rl.rl.batch import PackedBatch, pack
from trace_rl.rl.checkpoint import TrainState
from trace_rl.rl.importance import truncated_weights
from trace_rl.rl.losses import LossInput, compute
from trace_rl.rl.mismatch import logprob_gap
from trace_rl.rl.optimizer import MasterAdamW
from trace_rl.rl.prompts import PromptStream
from trace_rl.rl.queue import QueuedBatch, StalenessQueue
from trace_rl.rl.ratios import Ratios
from trace_rl.rollout.engine import RolloutEngine, Sampling
from trace_rl.trajectory import Trajectory

Reward = Callable[[int, list[int]], float]
"""Reward of (problem index, response token ids)."""


class Stopwatch:
    """Wall seconds by phase of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's duration to ``name``."""
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add to a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def response_distribution(logits: Tensor, *, batch: PackedBatch, temperature: float) -> Tensor:
    """Log-probs of the vocabulary at every response token, at the sampling temperature (float32 [N, V])."""
    return torch.log_softmax(logits[batch.response].float() / temperature, dim=-1)


def sampled_logprobs(distribution: Tensor, *, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens and the entropy there (float32 [N] both)."""
    logprobs = distribution.gather(1, batch.targets[batch.response][:, None])[:, 0]
    entropy = -(distribution.detach().exp() * distribution.detach()).sum(-1)
    return logprobs, entropy


def response_logprobs(logits: Tensor, *, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens at the sampling temperature and the entropy there (float32 [N] both)."""
    return sampled_logprobs(response_distribution(logits, batch=batch, temperature=temperature), batch=batch)


@dataclass
class StepInput:
    """What one step trains on."""

    trajectories: list[Trajectory]
    rewards: Tensor
    advantages: Tensor
    groups: Tensor
    old: dict[Mode, list[Tensor]] | None = None
    """Log-probs of each trajectory under the version that sampled it, by forward; None where they are not needed."""


class Trainer:
    """Trains one method's policy against one engine."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        qat: Qat,
        engine: RolloutEngine,
        method: RlMethod,
        training: TrainingConfig,
        temperature: float,
        max_new_tokens: int,
        prompts: PromptStream,
        reward: Reward,
        pad_id: int,
        seed: int,
    ) -> None:
        self.model = model
        self.qat = qat
        self.engine = engine
        self.method = method
        self.training = training
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self.prompts = prompts
        self.reward = reward
        self.pad_id = pad_id
        self.seed = seed
        self.layout = None if method.guidance is None else self.record_layout(method.guidance)
        self.mode: Mode = "guided" if method.guidance else "rtn" if method.trainer.enabled else "off"
        self.ratios = Ratios.of(method.ratio, mode=self.mode, training=training, uses_old=method.loss.uses_old_policy)
        self.optimizer = MasterAdamW(
            model,
            learning_rate=training.learning_rate,
            warmup_steps=training.warmup_steps,
            betas=training.betas,
            weight_decay=training.weight_decay,
            max_grad_norm=training.max_grad_norm,
        )
        self.queue = StalenessQueue(staleness=training.staleness, max_version_diff=training.max_version_diff)
        self.step_index = 0
        self.newest_batch: QueuedBatch | None = None
        """The newest rollout, for sample tables."""

    def record_layout(self, spec: GuidanceSpec) -> RecordLayout:
        """How this engine records ``spec``: the layout depends on the format's block."""
        return self.qat.record_layout(spec)

    # One step ---------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Run one step; returns its metrics under flat names."""
        watch = Stopwatch()
        started = time.perf_counter()
        before, recovered = dict(self.qat.seconds), dict(self.qat.recovered)
        while self.queue.missing():
            self.queue.push(self.roll_out(self.next_batch_index(), watch=watch))
        popped = self.queue.pop(policy_version=self.step_index)
        trajectories, rewards, ages, dropped = popped.trajectories, popped.rewards, popped.ages, popped.dropped
        metrics: dict[str, float] = {"step": self.step_index, "dropped_trajectories": dropped}
        metrics |= {f"staleness/{age}": count for age, count in sorted(ages.items())}
        if not trajectories:
            raise RuntimeError(f"step {self.step_index}: every trajectory is older than max_version_diff")
        groups = torch.tensor([t.prompt_index for t in trajectories])
        reward = torch.tensor(rewards)
        metrics |= describe_rollout(trajectories, rewards=reward, groups=groups)
        advantages = group_advantages(reward, groups, std=self.training.advantage_std)
        metrics |= self.update(
            StepInput(trajectories, rewards=reward, advantages=advantages, groups=groups, old=popped.old), watch=watch
        )
        # Part of the trainer's forwards, those of pi_old included, so not a phase of its own.
        metrics |= {f"quantize_s/{part}": self.qat.seconds[part] - before[part] for part in before}
        blocks = self.qat.recovered["blocks"] - recovered["blocks"]
        if blocks:
            metrics["guidance_scales_uncertain"] = (self.qat.recovered["uncertain"] - recovered["uncertain"]) / blocks
        self.step_index += 1
        with watch.phase("refit"):
            self.engine.load_policy(self.policy_tensors(), self.step_index)
        metrics |= {f"seconds/{name}": value for name, value in watch.seconds.items()}
        metrics["seconds/step"] = time.perf_counter() - started
        metrics["tokens_per_s"] = sum(t.num_tokens for t in trajectories) / metrics["seconds/step"]
        return metrics

    def next_batch_index(self) -> int:
        """The batch after the last queued one; step t trains batch t."""
        return self.queue.batches[-1].index + 1 if self.queue.batches else self.step_index

    def roll_out(self, index: int, *, watch: Stopwatch) -> QueuedBatch:
        """Sample and reward batch ``index``."""
        problems = self.prompts.batch(index)
        sampling = Sampling(
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            n=self.training.samples_per_prompt,
            seed=(self.seed << 32) + index,
            top_logprobs=self.method.loss.top_logprobs,
        )
        batch = self.engine.generate(
            [self.prompts.token_ids(problem) for problem in problems],
            sampling,
            self.method.guidance,
            record_experts=self.method.router_replay == "r3",
        )
        if (batch.recording, batch.quant_hash) != (self.method.guidance, self.engine.quant.hash()):
            raise RuntimeError(
                f"batch {index}: recorded {batch.recording} under quantization {batch.quant_hash}, the method trains "
                f"on {self.method.guidance} under {self.engine.quant.hash()}"
            )
        for phase, seconds in batch.seconds.items():
            watch.add(phase, seconds)
        with watch.phase("reward"):
            rewards = [self.reward(problems[t.prompt_index], t.response_ids) for t in batch.trajectories]
        old = None
        if self.ratios.from_sampling:
            with watch.phase("old_logprobs"):
                old = self.old_logprobs(batch.trajectories)
        self.newest_batch = QueuedBatch(index=index, batch=batch, rewards=rewards, old=old)
        return self.newest_batch

    def update(self, data: StepInput, *, watch: Stopwatch) -> dict[str, float]:
        """All optimizer steps of one rollout batch."""
        parts = split_by_prompt(data.groups, parts=self.training.updates_per_rollout)
        old = data.old
        if self.ratios.from_current:
            with watch.phase("old_logprobs"):
                old = self.old_logprobs(data.trajectories)
        totals = Totals()
        updates: list[dict[str, float]] = []
        for part in parts:
            part_tokens = sum(data.trajectories[i].logprobs.numel() for i in part)
            for rows in self.micro_batches(data.trajectories, part):
                with watch.phase("transfer"):
                    batch = pack([data.trajectories[i] for i in rows], pad_id=self.pad_id)
                with watch.phase("train_forward"):
                    inputs, entropy = self.loss_input(
                        batch,
                        old=rows_of(old, rows),
                        advantages=data.advantages[rows][batch.trajectory_index],
                    )
                    loss = compute(inputs, self.method.loss)
                with watch.phase("train_backward"):
                    (loss.total / part_tokens).backward()
                    self.optimizer.accumulate()
                totals.add(inputs, entropy=entropy, counts={"clipped": loss.clipped, **loss.counts})
            with watch.phase("optimizer"):
                updates.append(self.optimizer.step())
        metrics = updates[-1] | {"grad_norm": statistics.fmean(update["grad_norm"] for update in updates)}
        metrics |= totals.metrics(cap=self.method.loss.tis_cap)
        metrics["replayed_fraction"] = self.qat.replayed_fraction if self.method.router_replay == "r3" else 0.0
        if self.layout is not None:
            metrics["guidance_bytes_per_token"] = self.layout.row_bytes
        return metrics

    def loss_input(
        self, batch: PackedBatch, *, old: dict[Mode, Tensor] | None, advantages: Tensor
    ) -> tuple[LossInput, Tensor]:
        """What the loss sees of a micro-batch, and the entropy [N]; ``old``: log-probs [N] of pi_old by forward."""
        distribution = self.distribution(batch)
        logprobs, entropy = sampled_logprobs(distribution, batch=batch)
        with torch.no_grad():
            now = {
                mode: logprobs.detach() if mode == self.mode else self.forward(batch, mode=mode)[0]
                for mode in self.ratios.forwards(has_old=old is not None)
            }
        wants_all = self.method.loss.top_logprobs > 0
        inputs = LossInput(
            logprobs=logprobs,
            old_logprobs=(now if old is None else old)[self.ratios.mismatch],
            rollout_logprobs=batch.rollout_logprobs,
            ratio=self.ratios.staleness_ratio(logprobs, now=now, old=old),
            advantages=advantages,
            trajectory_index=batch.trajectory_index,
            distribution=distribution if wants_all else None,
            top_ids=batch.top_ids,
            top_logprobs=batch.top_logprobs,
        )
        return inputs, entropy

    # Forward passes ---------------------------------------------------------------------------------------------

    def distribution(self, batch: PackedBatch, *, mode: Mode | None = None, collect: Collector | None = None) -> Tensor:
        """Log-probs of the vocabulary [N, V] under the method's forward (or ``mode``)."""
        mode = mode or self.mode
        with self.qat.forward(
            mode=mode,
            guidance=(batch.record, self.layout) if mode == "guided" else None,
            valid=batch.valid,
            expert_ids=batch.expert_ids,
            replay=self.method.router_replay == "r3",
            collect=collect,
        ):
            logits = self.model(input_ids=batch.input_ids, attention_mask=batch.valid.long(), use_cache=False).logits
        return response_distribution(logits, batch=batch, temperature=self.temperature)

    def forward(
        self, batch: PackedBatch, *, mode: Mode | None = None, collect: Collector | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy of the response tokens under the method's forward (or ``mode``)."""
        return sampled_logprobs(self.distribution(batch, mode=mode, collect=collect), batch=batch)

    @torch.no_grad()
    def old_logprobs(self, trajectories: list[Trajectory]) -> dict[Mode, list[Tensor]]:
        """Log-probs of every trajectory's response under the present weights, in each forward the ratios compare."""
        found: dict[Mode, dict[int, Tensor]] = {mode: {} for mode in self.ratios.forwards(has_old=True)}
        for rows in self.micro_batches(trajectories, range(len(trajectories))):
            chosen = [trajectories[i] for i in rows]
            batch = pack(chosen, pad_id=self.pad_id)
            for mode, by_row in found.items():
                parts = self.forward(batch, mode=mode)[0].split([t.logprobs.numel() for t in chosen])
                by_row.update(zip(rows, parts, strict=True))
        return {mode: [by_row[i] for i in range(len(trajectories))] for mode, by_row in found.items()}

    def micro_batches(self, trajectories: Sequence[Trajectory], rows: Iterable[int]) -> list[list[int]]:
        """``rows`` in micro-batches of sequences of like length: in a padded batch each costs what the longest does."""
        ordered = sorted(rows, key=lambda i: trajectories[i].num_tokens)
        size = self.training.micro_batch_sequences
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]

    def policy_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The BF16 policy under Hugging Face names."""
        yield from self.model.state_dict().items()

    # Checkpoints ------------------------------------------------------------------------------------------------

    def snapshot(self) -> TrainState:
        """Everything a resumed run needs."""
        return TrainState(
            step=self.step_index, optimizer=self.optimizer.state_dict(), queue=self.queue, rng=torch.get_rng_state()
        )

    def restore(self, state: TrainState) -> None:
        """Go on where a checkpoint stopped."""
        self.optimizer.load_state_dict(state.optimizer)
        self.queue = state.queue
        self.step_index = state.step
        torch.set_rng_state(state.rng)


def rows_of(old: dict[Mode, list[Tensor]] | None, rows: list[int]) -> dict[Mode, Tensor] | None:
    """Flat log-probs of some trajectories, by forward."""
    return None if old is None else {mode: torch.cat([by[i] for i in rows]) for mode, by in old.items()}


class Totals:
    """Metrics over the micro-batches of one rollout batch."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Tensor]] = {name: [] for name in ("own", "old", "rollout", "ratio", "entropy")}
        self.counts: dict[str, float] = {}

    def add(self, inputs: LossInput, *, entropy: Tensor, counts: dict[str, Tensor]) -> None:
        """Take in one micro-batch."""
        columns = (inputs.logprobs, inputs.old_logprobs, inputs.rollout_logprobs, inputs.ratio, entropy)
        for column, values in zip(self.columns.values(), columns, strict=True):
            column.append(values.detach())
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + float(count)

    def metrics(self, *, cap: float | None) -> dict[str, float]:
        """Gap of the method's forward, the weights and ratios used, entropy, and what the loss counted, per token.

        With several updates the gap of the later parts includes what the earlier ones moved.
        """
        own, old, rollout, ratio, entropy = (torch.cat(column) for column in self.columns.values())
        weights = truncated_weights(old, rollout, cap=cap)
        tokens = rollout.numel()
        clipped = self.counts.pop("clipped")
        return {
            **logprob_gap(own, rollout),
            "is_truncated": weights.truncated,
            "is_ess": weights.ess,
            "is_weight_mean": float(weights.weights.mean()),
            "log_ratio_abs": float(ratio.log().abs().mean()),
            "entropy": float(entropy.mean()),
            "clip_fraction": clipped / tokens,
            "response_tokens": tokens,
            **{f"loss/{name}": count / tokens for name, count in self.counts.items()},
        }


def split_by_prompt(groups: Tensor, *, parts: int) -> list[list[int]]:
    """Trajectory indices in ``parts`` nearly equal parts that keep a prompt's responses together."""
    prompts = torch.unique(groups).tolist()
    bounds = [round(i * len(prompts) / parts) for i in range(parts + 1)]
    chosen = [set(prompts[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    return [[i for i, group in enumerate(groups.tolist()) if group in part] for part in chosen if part]


def describe_rollout(trajectories: list[Trajectory], *, rewards: Tensor, groups: Tensor) -> dict[str, float]:
    """Reward and length statistics of a batch."""
    lengths = torch.tensor([t.logprobs.numel() for t in trajectories], dtype=torch.float32)
    return {
        "reward": float(rewards.mean()),
        "reward_stderr": float(rewards.std() / len(rewards) ** 0.5),
        "informative_groups": informative_groups(rewards, groups),
        "response_length": float(lengths.mean()),
        "truncated_responses": sum(t.finish_reason == "length" for t in trajectories) / len(trajectories),
    }
