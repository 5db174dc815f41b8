"""The training loop: roll out, reward, train on what the engine rounded to, refit.

    while step < steps:
        fill the staleness queue with rollouts (recording guidance and routing)
        pop the oldest batch, compute advantages
        one or more clipped, importance-weighted updates, the forward rounding as the method says
        refit the engine with the new BF16 weights

Every random choice is a function of (seed, step, prompt, sample): a resumed run repeats none and skips none. Where this
departs from the paper's setting: with one update per rollout, pi_old_train is the log-prob of the same forward,
detached (equal by definition), instead of a separate pass.
"""

import time
from collections.abc import Callable, Iterator
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
from trace_rl.rl.losses.grpo import grpo_loss
from trace_rl.rl.mismatch import logprob_gap
from trace_rl.rl.optimizer import MasterAdamW
from trace_rl.rl.prompts import PromptStream
from trace_rl.rl.queue import QueuedBatch, StalenessQueue
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


def response_logprobs(logits: Tensor, *, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens at the sampling temperature and the entropy there (float32 [N] both)."""
    selected = logits[batch.response].float() / temperature
    distribution = torch.log_softmax(selected, dim=-1)
    logprobs = distribution.gather(1, batch.targets[batch.response][:, None])[:, 0]
    entropy = -(distribution.detach().exp() * distribution.detach()).sum(-1)
    return logprobs, entropy


@dataclass
class StepInput:
    """What one step trains on."""

    trajectories: list[Trajectory]
    rewards: Tensor
    advantages: Tensor
    groups: Tensor


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
        return RecordLayout.build(spec, self.engine.dims, block_size=self.qat.fmt.block_size)

    # One step ---------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Run one step; returns its metrics under flat names."""
        watch = Stopwatch()
        started = time.perf_counter()
        while self.queue.missing():
            self.queue.push(self.roll_out(self.next_batch_index(), watch=watch))
        trajectories, rewards, ages, dropped = self.queue.pop(policy_version=self.step_index)
        metrics: dict[str, float] = {"step": self.step_index, "dropped_trajectories": dropped}
        metrics |= {f"staleness/{age}": count for age, count in sorted(ages.items())}
        if not trajectories:
            raise RuntimeError(f"step {self.step_index}: every trajectory is older than max_version_diff")
        groups = torch.tensor([t.prompt_index for t in trajectories])
        reward = torch.tensor(rewards)
        metrics |= describe_rollout(trajectories, rewards=reward, groups=groups)
        advantages = group_advantages(reward, groups, std=self.training.advantage_std)
        before = dict(self.qat.seconds)
        metrics |= self.update(
            StepInput(trajectories=trajectories, rewards=reward, advantages=advantages, groups=groups), watch=watch
        )
        # Part of the training forward, so not a phase of its own.
        metrics |= {f"quantize_s/{part}": self.qat.seconds[part] - before[part] for part in before}
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
        self.newest_batch = QueuedBatch(index=index, batch=batch, rewards=rewards)
        return self.newest_batch

    def update(self, data: StepInput, *, watch: Stopwatch) -> dict[str, float]:
        """All optimizer steps of one rollout batch."""
        parts = split_by_prompt(data.groups, parts=self.training.updates_per_rollout)
        old = None
        if len(parts) > 1:
            with watch.phase("old_logprobs"), torch.no_grad():
                old = self.old_logprobs(data)
        totals: dict[str, list[Tensor]] = {"logprobs": [], "rollout": [], "entropy": []}
        metrics: dict[str, float] = {}
        clipped = tokens = 0
        for part in parts:
            part_tokens = sum(data.trajectories[i].logprobs.numel() for i in part)
            for start in range(0, len(part), self.training.micro_batch_sequences):
                rows = part[start : start + self.training.micro_batch_sequences]
                with watch.phase("transfer"):
                    batch = pack([data.trajectories[i] for i in rows], pad_id=self.pad_id)
                with watch.phase("train_forward"):
                    logprobs, entropy = self.forward(batch)
                    old_rows = logprobs.detach() if old is None else torch.cat([old[i] for i in rows])
                    weights = truncated_weights(old_rows, batch.rollout_logprobs, cap=self.method.loss.tis_cap)
                    loss = grpo_loss(
                        logprobs,
                        old_logprobs=old_rows,
                        weights=weights.weights,
                        advantages=data.advantages[rows][batch.trajectory_index],
                        clip_low=self.method.loss.clip_low,
                        clip_high=self.method.loss.clip_high,
                    )
                with watch.phase("train_backward"):
                    (loss.total / part_tokens).backward()
                    self.optimizer.accumulate()
                clipped += int(loss.clipped)
                tokens += batch.num_response_tokens
                totals["logprobs"].append(old_rows)
                totals["rollout"].append(batch.rollout_logprobs)
                totals["entropy"].append(entropy)
            with watch.phase("optimizer"):
                metrics |= self.optimizer.step()
        logprobs, rollout = torch.cat(totals["logprobs"]), torch.cat(totals["rollout"])
        weights = truncated_weights(logprobs, rollout, cap=self.method.loss.tis_cap)
        metrics |= logprob_gap(logprobs, rollout)
        metrics |= {
            "is_truncated": weights.truncated,
            "is_ess": weights.ess,
            "entropy": float(torch.cat(totals["entropy"]).mean()),
            "clip_fraction": clipped / tokens,
            "response_tokens": tokens,
            "replayed_fraction": self.qat.replayed_fraction if self.method.router_replay == "r3" else 0.0,
        }
        if self.layout is not None:
            metrics["guidance_bytes_per_token"] = self.layout.row_bytes
        return metrics

    # Forward passes ---------------------------------------------------------------------------------------------

    def forward(
        self, batch: PackedBatch, *, mode: Mode | None = None, collect: Collector | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy of the response tokens under the method's forward (or ``mode``)."""
        mode = mode or self.mode
        with self.qat.forward(
            mode=mode,
            guidance=(batch.record, self.layout) if mode == "guided" else None,
            valid=batch.valid,
            expert_ids=batch.expert_ids if self.method.router_replay == "r3" else None,
            collect=collect,
        ):
            logits = self.model(input_ids=batch.input_ids, attention_mask=batch.valid.long(), use_cache=False).logits
        return response_logprobs(logits, batch=batch, temperature=self.temperature)

    def old_logprobs(self, data: StepInput) -> list[Tensor]:
        """pi_old_train of every trajectory's response, before the first update."""
        result: list[Tensor] = []
        for start in range(0, len(data.trajectories), self.training.micro_batch_sequences):
            rows = data.trajectories[start : start + self.training.micro_batch_sequences]
            logprobs, _ = self.forward(pack(rows, pad_id=self.pad_id))
            result += logprobs.split([t.logprobs.numel() for t in rows])
        return result

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
