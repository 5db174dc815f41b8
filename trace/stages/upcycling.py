"""The policy of source `smollm2_upcycled`: load, upcycle, a few supervised steps, save.

    dense (FP32) -> experts are copies -> noise on the experts -> BF16 -> `steps` supervised steps -> checkpoint

The steps teach the form of the answers, and pull the experts apart. They use the trainer's own forward
(`trace_rl.qat`, nothing quantized) and its optimizer, FP32 masters of a BF16 model; the loss is the mean cross-entropy
of the answer's tokens, end token included. It takes minutes, so a killed run starts over.
"""

import json
import random
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from trace_rl.config.checkpoint import UpcycledCheckpoint
from trace_rl.config.quant import BF16
from trace_rl.models import smollm
from trace_rl.models.checkpoint_io import replaced_directory
from trace_rl.models.families import cast_parameters
from trace_rl.qat.attach import Qat, attach
from trace_rl.rl.optimizer import MasterAdamW
from trace_rl.tasks.problem import Problem, read_jsonl

SUMMARY = "upcycling.json"
MAX_LOGIT_DIFFERENCE = 1e-3
BETAS = (0.9, 0.99)
WARMUP_STEPS = 5
WIDTH_MULTIPLE = 8
IGNORED = -100


def run(recipe: UpcycledCheckpoint, out_dir: Path, *, data: Path) -> dict[str, object]:
    """Write the checkpoint directory ``out_dir``; returns what happened. Supervised rows are ``data/sft.jsonl``."""
    torch.set_num_threads(recipe.threads)
    rows = read_jsonl(data / "sft.jsonl")
    tokenizer = smollm.load_tokenizer()
    dense = smollm.load_dense()
    model = smollm.upcycle(
        dense, num_experts=recipe.num_experts, num_experts_per_tok=recipe.num_experts_per_tok, seed=recipe.seed
    )
    difference = smollm.logit_difference(dense, model, token_ids=tokenizer(rows[0].prompt)["input_ids"])
    assert difference <= MAX_LOGIT_DIFFERENCE, f"upcycling changed the logits by {difference}"
    del dense
    smollm.perturb_experts(model, scale=recipe.expert_noise, seed=recipe.seed)
    cast_parameters(model, torch.bfloat16)
    losses = fine_tune(model, recipe, tokenizer=tokenizer, rows=rows)
    summary = {"logit_difference": difference, "losses": losses}
    with replaced_directory(out_dir) as target:
        smollm.save_checkpoint(target, model=model, tokenizer=tokenizer)
        (target / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    print(f"upcycled: logits moved by {difference:.1e}; supervised loss {losses[:1]} -> {losses[-1:]}")
    return summary


def fine_tune(
    model: nn.Module, recipe: UpcycledCheckpoint, *, tokenizer: PreTrainedTokenizerBase, rows: list[Problem]
) -> list[float]:
    """Train ``recipe.steps`` steps on rows in seeded order, round and round; returns the loss of each step."""
    if recipe.steps == 0:
        return []
    qat = attach(model, quant=BF16)
    optimizer = MasterAdamW(
        model,
        learning_rate=recipe.learning_rate,
        warmup_steps=WARMUP_STEPS,
        betas=BETAS,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    order = list(range(len(rows)))
    random.Random(recipe.seed).shuffle(order)
    losses = []
    bar = tqdm(range(recipe.steps), desc="supervised", unit="step", mininterval=1.0)
    for step in bar:
        started = time.perf_counter()
        chosen = [rows[order[i % len(order)]] for i in range(step * recipe.batch_size, (step + 1) * recipe.batch_size)]
        input_ids, labels = make_batch(tokenizer, problems=chosen)
        loss = answer_loss(model, qat, input_ids=input_ids, labels=labels)
        loss.backward()
        optimizer.accumulate()
        optimizer.step()
        losses.append(round(float(loss.detach()), 5))
        bar.set_postfix(loss=losses[-1], tokens_per_s=round(input_ids.numel() / (time.perf_counter() - started)))
    return losses


def make_batch(tokenizer: PreTrainedTokenizerBase, *, problems: list[Problem]) -> tuple[Tensor, Tensor]:
    """int64 [B, T] right-padded token ids, and labels [B, T]: the next token where that belongs to the answer."""
    examples = []
    for problem in problems:
        prompt = tokenizer(problem.prompt)["input_ids"]
        answer = tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
        examples.append((prompt, [*answer, tokenizer.eos_token_id]))
    width = max(len(prompt) + len(answer) for prompt, answer in examples) - 1
    width += -width % WIDTH_MULTIPLE
    input_ids = torch.full((len(examples), width), tokenizer.eos_token_id)
    labels = torch.full((len(examples), width), IGNORED)
    for row, (prompt, answer) in enumerate(examples):
        ids = torch.tensor(prompt + answer)
        input_ids[row, : len(ids) - 1] = ids[:-1]
        labels[row, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    return input_ids, labels


def answer_loss(model: nn.Module, qat: Qat, *, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the labelled positions; padding is to the right, so causality alone keeps it out."""
    chosen = labels != IGNORED
    with qat.forward(mode="off"):
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[chosen])
    return cross_entropy(logits.float(), labels[chosen])
