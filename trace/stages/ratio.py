"""Stage ``ratio``: does the trainer's importance ratio see what a stale rollout is stale by?

The old policy rolls out in FP4, everything recorded. Then the method `qat` takes real GRPO updates, on-policy, and
after some of them (``analysis.updates``) the engine is refitted and the *old* tokens are forced through it:

    r = log pi_new - log pi_old      both by the FP4 engine: score with the new weights, minus as sampled

is what an importance weight should contain. What the trainer can put there, with the new weights on the old record:

    estimate     log pi_train,new - log pi_rollout,old     the truncated weight's exponent, which also holds the gap
    difference   log pi_train,new - log pi_train,old       of two forwards that round alike (same mode, same record)

in BF16, QAT, RTN on the recorded scale, and guided, with the old routing replayed (``no_r3``: with live routing). In
FP4 any small change of the weights flips codes, and r holds these flips beside what the update meant. So each is also
compared with ``smooth``, the log-ratio that a BF16 engine gives the very same tokens: an estimate that follows r but
not ``smooth`` follows the flips.

The same log-probs hold the part of the gap that is staleness, which `trace_rl.stages.gap_sources` has none of:

    staleness    |log pi_train,new - log pi_rollout,old| - |log pi_train,old - log pi_rollout,old|     of one forward

Controls: all of it with BF16 rollouts and a BF16 trainer; ``floor``, the engine scoring its own tokens with the *old*
weights (decode against batched prefill, the part of r that is noise of the engine); ``shuffled``, r after an update
whose entries were permuted within each tensor: a change of the same size that no gradient chose.

The stale batch comes from the prompts that follow those of the updates, as in the staleness queue. Without burn-in the
updates are Adam's first at the full learning rate: each moves every weight by about the learning rate, farther than
later ones do. With ``analysis.burn_in`` the method first trains that long (its warm-up within), then the old policy is
the one after it.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trace_rl import tracking
from trace_rl.analysis.clusters import association
from trace_rl.analysis.forwards import (
    BF16_FORWARD,
    FOLLOW_SCALE,
    QAT,
    TRACE,
    TRACE_ALL,
    TRACE_FULL,
    TRACE_GATED,
    Forward,
    Recorded,
)
from trace_rl.analysis.ratios import describe_estimate, describe_weight, staleness_part
from trace_rl.config.analysis import AnalysisConfig
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.guidance import full_recording
from trace_rl.config.load import load_method
from trace_rl.config.method import RlMethod
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import BF16
from trace_rl.errors import UserError
from trace_rl.models.checkpoint_io import write_json
from trace_rl.qat.attach import Qat
from trace_rl.rl.trainer import Trainer
from trace_rl.rollout.engine import RolloutEngine, Sampling, open_engine
from trace_rl.stages.calibrated_scales import calibrated_scales
from trace_rl.stages.train import TrainRun, build_trainer
from trace_rl.tasks.problem import read_jsonl

METHOD = "qat"
"""The method whose updates make the rollouts stale."""
SEED_BASE = 1 << 43
"""Sampling seeds of the stale batch, apart from all others."""
FORWARDS = {
    "bf16": BF16_FORWARD,
    "qat": QAT,
    "recorded_scale": FOLLOW_SCALE,
    "trace": TRACE,
    "trace_gated": TRACE_GATED,
    "trace_all": TRACE_ALL,
    "full": TRACE_FULL,
    "bf16_no_r3": BF16_FORWARD.without_replay(),
    "qat_no_r3": QAT.without_replay(),
}
BF16_FORWARDS = {name: FORWARDS[name] for name in ("bf16", "bf16_no_r3")}
SHUFFLED = "shuffled"
STEP_METRICS = ("reward", "gap_mean", "grad_norm", "learning_rate", "is_ess", "is_truncated")

Weights = dict[str, Tensor]
Scores = dict[int | str, Tensor]
"""Version -> float32 [N], one batch's response tokens forced through the engine with these weights."""


@dataclass
class Study:
    """What the FP4 engine and the updates gave."""

    steps: list[dict[str, float]]
    """Metrics of every update, those of the burn-in first."""
    versions: dict[int, Weights]
    """The policy after some numbers of updates; 0 is the one that rolled out."""
    shuffled: Weights
    """The old policy plus the first measured update, permuted."""
    fp4: Recorded
    """The stale batch."""
    scores: Scores

    @property
    def weights(self) -> dict[int | str, Weights]:
        """Every version, with the shuffled one."""
        return {**self.versions, SHUFFLED: self.shuffled}


def run(config: ExperimentConfig, paths: RunPaths, *, seed: int) -> dict[str, Any]:
    """Measure and write ``paths.ratio(seed)``."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    started = time.perf_counter()
    with tracking.stage_run(config, stage="ratio", paths=paths, wildcards={"seed": seed}) as tracker:
        model = AutoModelForCausalLM.from_pretrained(paths.checkpoint, dtype=torch.bfloat16, local_files_only=True)
        this = training_run(config, paths, seed=seed)
        scales = calibrated_scales(config, paths, quant=this.rollout_quant)
        engine = open_engine(paths.checkpoint, quant=this.rollout_quant, scales=scales, config=config.engine)
        try:
            trainer = build_trainer(
                this, model=model, engine=engine, tokenizer=AutoTokenizer.from_pretrained(paths.checkpoint)
            )
            study = go_stale(trainer, engine, settings=config.analysis, seed=seed)
        finally:
            engine.close()
        engine = open_engine(paths.checkpoint, quant=BF16, scales=None, config=config.engine)
        try:
            control, smooth = score_bf16(engine, trainer, study, settings=config.analysis, seed=seed)
        finally:
            engine.close()
        measure = {"model": model, "qat": trainer.qat, "versions": study.versions, "settings": config.analysis}
        result: dict[str, Any] = {
            "seed": seed,
            "engine": config.engine.name,
            "quant": this.rollout_quant.model_dump(mode="json"),
            "method": METHOD,
            "learning_rate": config.training.learning_rate,
            "burn_in": config.analysis.burn_in,
            "sequences_per_update": config.training.prompts_per_step * config.training.samples_per_prompt,
            "trajectories": config.analysis.num_prompts,
            "steps": [{name: step[name] for name in STEP_METRICS if name in step} for step in study.steps],
            "weights_moved": {str(name): distance(study.versions[0], new) for name, new in study.weights.items()},
            "fp4": compare(study.fp4, study.scores, smooth=smooth, forwards=FORWARDS, **measure),
            "bf16": compare(*control, smooth=control[1], forwards=BF16_FORWARDS, **measure),
        }
        result["gap_by_updates"] = gap_table(result)
        result["seconds"] = time.perf_counter() - started
        write_json(paths.ratio(seed), result)
        tracker.log_metrics({"gap_by_updates": result["gap_by_updates"]})
        tracker.log_artifact(paths.ratio(seed))
    print(ratio_table(result))
    return result


def go_stale(trainer: Trainer, engine: RolloutEngine, *, settings: AnalysisConfig, seed: int) -> Study:
    """Roll out, update, and force the old tokens through the engine with every version's weights."""
    steps = [trainer.step() for _ in range(settings.burn_in)]
    versions = {0: weights_of(trainer.model)}
    fp4, scores = stale_batch(engine, trainer, settings=settings, seed=seed)
    for update in range(1, settings.updates[-1] + 1):
        steps.append(trainer.step())
        if update in settings.updates:
            versions[update] = weights_of(trainer.model)
    shuffled = shuffle_update(versions[0], versions[settings.updates[0]], seed=seed)
    study = Study(steps=steps, versions=versions, shuffled=shuffled, fp4=fp4, scores={0: scores})
    study.scores = score_versions(engine, fp4, versions=study.weights, known=study.scores)
    return study


def score_bf16(
    engine: RolloutEngine, trainer: Trainer, study: Study, *, settings: AnalysisConfig, seed: int
) -> tuple[tuple[Recorded, Scores], Scores]:
    """A BF16 engine on its own rollouts of the old policy and on the FP4 engine's."""
    engine.load_policy(study.versions[0].items(), 0)
    bf16, scores = stale_batch(engine, trainer, settings=settings, seed=seed)
    control = score_versions(engine, bf16, versions=study.weights, known={0: scores})
    return (bf16, control), score_versions(engine, study.fp4, versions=study.weights, known={})


def training_run(config: ExperimentConfig, paths: RunPaths, *, seed: int) -> TrainRun:
    """The method on this experiment's budget, on-policy; the warm-up lasts no longer than the burn-in."""
    file = Path(config.suite.methods_dir) / f"{METHOD}.yaml"
    method = load_method(file)
    if not isinstance(method, RlMethod):
        raise UserError(f"{file}: kind {method.kind!r}; the ratio stage trains this method, so it must be of kind rl")
    changes = {
        "staleness": 0,
        "updates_per_rollout": 1,
        "warmup_steps": min(config.training.warmup_steps, config.analysis.burn_in),
    }
    training = config.training.model_copy(update=changes)
    return TrainRun(
        config=config.model_copy(update={"training": training}),
        paths=paths,
        method=method,
        seed=seed,
        identity="ratio",
        problems=read_jsonl(paths.data / "rl.jsonl"),
    )


def stale_prompts(trainer: Trainer, *, settings: AnalysisConfig) -> list[list[int]]:
    """Prompts of the batches after those that the updates train on."""
    problems: list[int] = []
    index = settings.burn_in + settings.updates[-1]
    while len(problems) < settings.num_prompts:
        problems += trainer.prompts.batch(index)
        index += 1
    return [trainer.prompts.token_ids(problem) for problem in problems[: settings.num_prompts]]


def stale_batch(
    engine: RolloutEngine, trainer: Trainer, *, settings: AnalysisConfig, seed: int
) -> tuple[Recorded, Tensor]:
    """Rollouts of the engine's present policy, one per prompt, and its own scores of them."""
    prompts = stale_prompts(trainer, settings=settings)
    sampling = Sampling(
        temperature=trainer.temperature, max_new_tokens=trainer.max_new_tokens, seed=SEED_BASE + (seed << 32)
    )
    batch = engine.generate(prompts, sampling, full_recording(engine.quant))
    recorded = Recorded(batch, temperature=trainer.temperature, pad_id=trainer.pad_id)
    return recorded, recorded.response_scores(engine.score(recorded.sequences, trainer.temperature))


def score_versions(
    engine: RolloutEngine, recorded: Recorded, *, versions: dict[int | str, Weights], known: Scores
) -> Scores:
    """The batch's response tokens forced through the engine with each version's weights, unless known."""
    scores = dict(known)
    for number, (name, weights) in enumerate(versions.items()):
        if name not in scores:
            engine.load_policy(weights.items(), number)
            scores[name] = recorded.response_scores(engine.score(recorded.sequences, recorded.temperature))
    return scores


def compare(
    recorded: Recorded,
    scores: Scores,
    *,
    smooth: Scores,
    forwards: dict[str, Forward],
    model: PreTrainedModel,
    qat: Qat,
    versions: dict[int, Weights],
    settings: AnalysisConfig,
) -> dict[str, Any]:
    """Truth, estimates, differences and staleness after each number of updates; 0 is the old policy itself."""
    clusters, sampled = recorded.clusters, recorded.rollout_logprobs
    bootstrap = {"resamples": settings.resamples, "seed": settings.seed}
    before: dict[str, Tensor] = {}
    rows = []
    for updates, weights in versions.items():
        model.load_state_dict(weights)
        qat.invalidate_weights()
        truth, meant = scores[updates] - sampled, smooth[updates] - smooth[0]
        logprobs = {name: recorded.run(forward, model=model, qat=qat).logprobs for name, forward in forwards.items()}
        before = before or logprobs

        def beside(estimate: Tensor, truth: Tensor = truth, meant: Tensor = meant) -> dict[str, Any]:
            found = describe_estimate(estimate, truth, clusters, **bootstrap)
            return found | {"smooth": association(meant, estimate, clusters, **bootstrap)}

        row: dict[str, Any] = {
            "updates": updates,
            "truth": beside(truth),
            "smooth": describe_weight(meant, clusters),
            "estimates": {name: beside(value - sampled) for name, value in logprobs.items()},
        }
        if updates:
            row["truth"]["share_of_floor"] = share_of_variance(scores[0] - sampled, truth)
            row["differences"] = {name: beside(value - before[name]) for name, value in logprobs.items()}
            row["staleness"] = {
                name: staleness_part(value, before[name], sampled, clusters) for name, value in logprobs.items()
            }
        rows.append(row)
    return {
        "tokens": sampled.numel(),
        "floor": describe_weight(scores[0] - sampled, clusters),
        "shuffled": describe_weight(scores[SHUFFLED] - sampled, clusters),
        "rows": rows,
    }


def share_of_variance(part: Tensor, whole: Tensor) -> float | None:
    """Mean square of ``part`` over that of ``whole``; None where the whole is zero."""
    square = float(whole.double().square().mean())
    return float(part.double().square().mean()) / square if square else None


def weights_of(model: PreTrainedModel) -> Weights:
    """A copy of the policy."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def shuffle_update(old: Weights, new: Weights, *, seed: int) -> Weights:
    """``old`` plus the update to ``new`` with its entries permuted within each tensor, in the weights' dtype."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = {}
    for name, before in old.items():
        change = (new[name].float() - before.float()).reshape(-1)
        order = torch.randperm(change.numel(), generator=generator)
        shuffled[name] = (before.float() + change[order].view(before.shape)).to(before.dtype)
    return shuffled


def distance(old: Weights, new: Weights) -> float:
    """Euclidean norm of the change, relative to that of the old weights."""
    change = sum(float((new[name].double() - tensor.double()).square().sum()) for name, tensor in old.items())
    return (change / sum(float(tensor.double().square().sum()) for tensor in old.values())) ** 0.5


def gap_table(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """mean |log pi_train,new - log pi_rollout,old| by forward and number of updates; ``bf16_both``: BF16 engine too."""
    table = {"bf16_both": [(row["updates"], row["estimates"]["bf16"]) for row in result["bf16"]["rows"]]}
    table |= {name: [(row["updates"], row["estimates"][name]) for row in result["fp4"]["rows"]] for name in FORWARDS}
    return {name: {str(updates): found["mean_abs"] for updates, found in rows} for name, rows in table.items()}


def ratio_table(result: dict[str, Any]) -> str:
    """Every estimate and difference beside r, and its slope on the smooth log-ratio."""
    names = ("mean |.|", "error", "corr", "+-", "slope", "+-", "smooth", "+-", "ESS", "trunc")
    head = "".join(f"{name:>{width}}" for name, width in zip(names, (10, 9, 8, 6, 8, 6, 8, 6, 7, 8), strict=True))
    lines = [f"{'':34}{head}"]
    for precision in ("fp4", "bf16"):
        part = result[precision]
        for name in ("floor", "shuffled"):
            lines.append(f"{precision} engine, {name:<21}{part[name]['mean_abs']:10.5f}")
        for row in part["rows"]:
            lines.append(
                f"{precision} engine, {row['updates']} updates, {'smooth':<9}{row['smooth']['mean_abs']:10.5f}"
            )
            lines.append(f"{precision} engine, {row['updates']} updates, {'r':<9}{_numbers(row['truth'])}")
            for kind in ("estimates", "differences"):
                for name, found in row.get(kind, {}).items():
                    lines.append(f"  {kind[:-1]:<12}{name:<20}{_numbers(found)}")
    return "\n".join(lines)


def _numbers(found: dict[str, Any]) -> str:
    columns = [(found, "correlation"), (found, "slope"), (found["smooth"], "slope")]
    shown = [
        f"{'-' if source[key] is None else format(source[key], '.3f'):>{width}}"
        for source, name in columns
        for key, width in ((name, 8), (f"{name}_stderr", 6))
    ]
    return (
        f"{found['mean_abs']:10.5f}{found['mean_abs_error']:9.5f}{''.join(shown)}{found['ess']:7.3f}"
        f"{found['truncated']:8.4f}"
    )
