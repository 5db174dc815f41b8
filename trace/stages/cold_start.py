"""Stage `checkpoint` with `source: cold_start`: train the miniature policy from scratch by supervised learning.

The policy handed to RL should know the format and be right about half of the time at temperature 1: room to rise, and
enough successes in a group of eight for a gradient. Accuracy climbs steeply within a hundred steps, so the weights
are validated often (sampled responses at temperature 1, judged by the task's verifier) and the validated weights
nearest to `target_accuracy` win; training stops once the target is passed.

Numerics: forward and backward in BF16, FP32 master weights, AdamW with linear warm-up and cosine decay, next-token
loss on response tokens only, plus the load-balancing loss of Switch Transformers (arXiv 2101.03961) so that no expert
stays idle.

Resume: the batch of a step is a function of (seed, step), so the state is master weights, optimizer moments, step and
the best candidate. It lies in a directory beside the output, which a workflow manager does not delete. A killed run
that continues is bit-identical to an uninterrupted one (same machine and thread count).
"""

import json
import logging
import math
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from trace_rl.config.base import digest_of
from trace_rl.config.checkpoint import ColdStart
from trace_rl.config.experiment import DataConfig, ExperimentConfig
from trace_rl.config.stages import code_digest
from trace_rl.errors import UserError
from trace_rl.models.checkpoint_io import replaced_directory, write_json
from trace_rl.models.families import cast_parameters
from trace_rl.models.miniature import build_model, miniature_config, sample_responses, save_checkpoint
from trace_rl.models.tokenizer import build_tokenizer, encode_example
from trace_rl.tasks.dataset import build_splits, score
from trace_rl.tasks.problem import Problem

WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.98)
MAX_GRAD_NORM = 1.0
ROUTER_LOSS = 0.01
FINAL_LR_SHARE = 0.1
LENGTH_STEP = 4  # sequences are padded to a multiple of it: few shapes for oneDNN, little padding
WINDOW_STEPS = 16  # batches are cut from a window of this many steps sorted by length
LOSS_DECAY = 0.98
VALIDATE_BELOW_LOSS = 0.12  # a policy above it finishes next to no chain: sampling would be wasted time
VALIDATION_SEED = 20_26
SUMMARY = "cold_start.json"

_log = logging.getLogger(__name__)


def run(config: ExperimentConfig, out_dir: Path) -> dict[str, Any]:
    """Train (or continue, or find finished) and write the checkpoint directory `out_dir`; returns the summary."""
    out_dir = Path(out_dir)
    recipe, data = config.checkpoint, config.data
    if not isinstance(recipe, ColdStart):
        raise UserError(f"checkpoint.source is {recipe.source!r}; this stage trains source cold_start")
    if data.source != "generated":
        raise UserError(f"data.source is {data.source!r}; a cold start trains on source generated")
    # Settings and code: a finished or half-done run of an older recipe is not continued.
    digest = digest_of(
        {
            "recipe": recipe.model_dump(mode="json"),
            "data": data.model_dump(mode="json"),
            "code": code_digest("cold_start"),
        }
    )
    summary_path = out_dir / SUMMARY
    if summary_path.is_file():
        summary = json.loads(summary_path.read_text())
        if summary["digest"] == digest:
            _log.info("%s is finished (%d steps); nothing to do", out_dir, summary["steps"])
            return summary
    torch.set_num_threads(recipe.threads)
    return _Trainer(recipe, data=data, digest=digest, out_dir=out_dir).train()


class _Trainer:
    """State of one cold start: model (BF16), master weights (FP32), optimizer, history and best candidate."""

    def __init__(self, recipe: ColdStart, *, data: DataConfig, digest: str, out_dir: Path) -> None:
        self.recipe, self.digest, self.out_dir = recipe, digest, out_dir
        self.state_dir = out_dir.with_name(out_dir.name + ".state")
        self.state_dir.mkdir(parents=True, exist_ok=True)
        self.tokenizer = build_tokenizer(model_max_length=recipe.model.max_position_embeddings)
        self.model_config = miniature_config(self.tokenizer, **recipe.model.model_dump())
        master = build_model(self.model_config, seed=recipe.seed)
        self.model = cast_parameters(build_model(self.model_config, seed=recipe.seed), torch.bfloat16)
        self.names = [name for name, _ in master.named_parameters()]
        self.master = [parameter.detach().clone().requires_grad_() for parameter in master.parameters()]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.master if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
                {"params": [p for p in self.master if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=recipe.learning_rate,
            betas=BETAS,
            eps=1e-9,
        )
        self.step, self.cpu_s, self.loss, self.history, self.best = 0, 0.0, None, [], None
        splits = build_splits(**data.model_dump(exclude={"source"}))
        self.train_rows = _encode(self.tokenizer, problems=splits["train"])
        self.max_new_tokens = max(len(ids) - prompt for rows in self.train_rows.values() for ids, prompt in rows) + 4
        kinds = {kind: [p for p in splits["validation"] if p.kind == kind] for kind in self.train_rows}
        share = -(-recipe.validation_problems // len(kinds))
        self.validation = [problem for problems in kinds.values() for problem in problems[:share]]

    def train(self) -> dict[str, Any]:
        self._load_state()
        recipe = self.recipe
        started, cpu_before = time.process_time(), self.cpu_s
        bar = tqdm(total=recipe.steps, initial=self.step, desc="cold start", unit="step", mininterval=1.0)
        while self.step < recipe.steps and not self._passed_target():
            loss = self._update()
            self.loss = loss if self.loss is None else LOSS_DECAY * self.loss + (1 - LOSS_DECAY) * loss
            self.step += 1
            self.cpu_s = cpu_before + time.process_time() - started
            bar.update()
            last = self.step == recipe.steps
            if last or (self.step % recipe.validate_every == 0 and self.loss < VALIDATE_BELOW_LOSS):
                self._validate()
            accuracy = f"{self.history[-1]['accuracy']:.3f}" if self.history else "-"
            bar.set_postfix(loss=f"{self.loss:.3f}", accuracy=accuracy, refresh=False)
            if self.step % recipe.checkpoint_every == 0 or last or self._passed_target():
                self.cpu_s = cpu_before + time.process_time() - started
                self._save_state()
        bar.close()
        return self._finish()

    def _update(self) -> float:
        """One optimizer step; returns the next-token loss."""
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(
                self.step, peak=recipe.learning_rate, warmup=recipe.warmup_steps, total=recipe.steps
            )
        ids, mask, targets = make_batch(
            self.train_rows,
            seed=recipe.seed,
            step=self.step,
            batch_size=recipe.batch_size,
            pad=self.model_config.pad_token_id,
        )
        output = self.model.model(input_ids=ids, attention_mask=mask, output_router_logits=True)
        answered = targets != -100
        logits = self.model.lm_head(output.last_hidden_state[answered]).float()
        loss = F.cross_entropy(logits, targets[answered])
        balance = load_balancing_loss_func(
            output.router_logits, self.model_config.num_experts, self.model_config.num_experts_per_tok, mask
        )
        (loss + ROUTER_LOSS * balance).backward()
        weights = list(self.model.parameters())
        for weight, parameter in zip(weights, self.master, strict=True):
            parameter.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.master, MAX_GRAD_NORM)
        self.optimizer.step()
        self._copy_weights()
        return loss.item()

    def _copy_weights(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), self.master)

    def _validate(self) -> None:
        """Success rates at temperature 1; keeps the weights when they are the nearest to the target so far."""
        accuracy = success_rates(
            self.model,
            tokenizer=self.tokenizer,
            problems=self.validation,
            temperature=1.0,
            max_new_tokens=self.max_new_tokens,
            seed=VALIDATION_SEED,
        )
        mean = sum(accuracy.values()) / len(accuracy)
        distance = abs(mean - self.recipe.target_accuracy)
        self.history.append({"step": self.step, "loss": self.loss, "accuracy": mean, **accuracy})
        _log.info("step %d loss %.4f %s cpu %.0f s", self.step, self.loss, accuracy, self.cpu_s)
        if self.best is None or distance < self.best["distance"]:
            weights = {name: p.detach().to(torch.bfloat16) for name, p in zip(self.names, self.master, strict=True)}
            self.best = {"step": self.step, "distance": distance, "accuracy": accuracy, "weights": weights}

    def _passed_target(self) -> bool:
        return bool(self.history) and self.history[-1]["accuracy"] >= self.recipe.target_accuracy

    def _save_state(self) -> None:
        temporary = self.state_dir / "state.pt.tmp"
        state = {
            "digest": self.digest,
            "step": self.step,
            "cpu_s": self.cpu_s,
            "loss": self.loss,
            "history": self.history,
            "best": self.best,
            "master": [p.detach() for p in self.master],
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.state_dir / "state.pt")

    def _load_state(self) -> None:
        path = self.state_dir / "state.pt"
        if not path.is_file():
            return
        state = torch.load(path, weights_only=True)
        if state["digest"] != self.digest:
            _log.warning("%s belongs to another configuration; starting from scratch", path)
            return
        self.step, self.cpu_s, self.loss = state["step"], state["cpu_s"], state["loss"]
        self.history, self.best = state["history"], state["best"]
        with torch.no_grad():
            torch._foreach_copy_(self.master, state["master"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self._copy_weights()
        _log.info("continuing the cold start at step %d", self.step)

    def _finish(self) -> dict[str, Any]:
        """Write the chosen weights as a checkpoint directory, complete or not at all."""
        summary = {
            "digest": self.digest,
            "steps": self.step,
            "chosen_step": self.best["step"],
            "accuracy": self.best["accuracy"],
            "cpu_s": self.cpu_s,
            "threads": self.recipe.threads,
            "validation_problems": len(self.validation),
            "history": self.history,
        }
        with replaced_directory(self.out_dir) as target:
            save_checkpoint(target, config=self.model_config, state=self.best["weights"], tokenizer=self.tokenizer)
            write_json(target / SUMMARY, summary)
        shutil.rmtree(self.state_dir)
        return summary


def learning_rate(step: int, *, peak: float, warmup: int, total: int) -> float:
    """Linear warm-up to `peak`, then cosine decay to a tenth of it at `total`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_batch(
    rows: dict[str, list[tuple[list[int], int]]], *, seed: int, step: int, batch_size: int, pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input ids, attention mask and next-token targets (-100 outside the response) [B, T] of one step.

    A window of `WINDOW_STEPS` batches, equal parts of every kind, is drawn, sorted by length and cut into batches in
    random order; it depends only on (seed, step), so a resumed run needs no cursor besides the step.
    """
    window, position = divmod(step, WINDOW_STEPS)
    rng = random.Random(f"{seed}/window/{window}")
    drawn: list[tuple[list[int], int]] = []
    for index, kind in enumerate(sorted(rows)):
        count = (batch_size * WINDOW_STEPS + index) // len(rows)
        drawn += rng.choices(rows[kind], k=count)
    drawn.sort(key=lambda row: len(row[0]))
    order = list(range(WINDOW_STEPS))
    rng.shuffle(order)
    batch = drawn[order[position] * batch_size :][:batch_size]
    length = -(-max(len(ids) - 1 for ids, _ in batch) // LENGTH_STEP) * LENGTH_STEP
    ids, targets = torch.full((len(batch), length), pad), torch.full((len(batch), length), -100)
    for row, (tokens, prompt_len) in enumerate(batch):
        ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        targets[row, prompt_len - 1 : len(tokens) - 1] = torch.tensor(tokens[prompt_len:])
    mask = (torch.arange(length) < torch.tensor([len(tokens) - 1 for tokens, _ in batch])[:, None]).long()
    return ids, mask, targets


def success_rates(
    model: Qwen3MoeForCausalLM,
    *,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> dict[str, float]:
    """Share of right responses by kind, one sampled response per problem."""
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in problems]
    responses = sample_responses(
        model, prompts=prompts, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed
    )
    rewards: dict[str, list[float]] = {}
    for problem, ids in zip(problems, responses, strict=True):
        rewards.setdefault(problem.kind, []).append(score(problem, tokenizer.decode(ids)))
    return {kind: sum(values) / len(values) for kind, values in sorted(rewards.items())}


def _encode(tokenizer: PreTrainedTokenizerFast, *, problems: list[Problem]) -> dict[str, list[tuple[list[int], int]]]:
    """(token ids, prompt length) of every training row, by kind."""
    rows: dict[str, list[tuple[list[int], int]]] = {}
    for problem in problems:
        rows.setdefault(problem.kind, []).append(
            encode_example(tokenizer, prompt=problem.prompt, answer=problem.answer)
        )
    return rows
