"""Stage ``train``: one method, one seed, from the checkpoint before RL to a policy.

The run lives in an undeclared state directory named after its identity (settings, data, starting weights, code): killed
and started again it continues from its last checkpoint and ends with the same bits; a finished run started again only
writes its outputs.
"""

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trace_rl import environment, tracking
from trace_rl.config.base import digest_of
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.method import RlMethod
from trace_rl.config.overrides import with_overrides
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import QuantSpec
from trace_rl.config.stages import code_digest, method_json
from trace_rl.config.training import ProblemKind
from trace_rl.models.checkpoint_io import validate_checkpoint
from trace_rl.qat.attach import attach
from trace_rl.rl import checkpoint
from trace_rl.rl.diagnostics import diagnose
from trace_rl.rl.metrics_log import MetricsLog
from trace_rl.rl.prompts import PromptStream
from trace_rl.rl.summary import summarize
from trace_rl.rl.trainer import Trainer
from trace_rl.rollout.engine import RolloutEngine, open_engine
from trace_rl.stages.calibrated_scales import calibrated_scales
from trace_rl.tasks.dataset import score
from trace_rl.tasks.problem import Problem, read_jsonl

IDENTITY_SECTIONS = ("data", "format", "engine", "sampling", "training")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
SAMPLES_SHOWN = 8


@dataclass(frozen=True)
class TrainRun:
    """One training run: its settings, inputs and state directory."""

    config: ExperimentConfig
    paths: RunPaths
    method: RlMethod
    seed: int
    identity: str
    """Digest of everything that decides the final weights."""
    problems: list[Problem]

    @property
    def name(self) -> str:
        return f"train {self.method.name} seed {self.seed}"

    @property
    def state_dir(self) -> Path:
        return self.paths.state("train", self.method.name, f"seed{self.seed}", self.identity)

    @property
    def state_file(self) -> Path:
        return self.state_dir / "checkpoint.pt"

    @property
    def rollout_quant(self) -> QuantSpec:
        return self.method.rollout_quant(self.config.format)

    @property
    def trainer_quant(self) -> QuantSpec:
        """What the trainer may quantize; a BF16 trainer has the rollout's scopes and runs them off."""
        return self.method.trainer_quant(self.config.format)


def run(config: ExperimentConfig, paths: RunPaths, *, method: RlMethod, seed: int) -> None:
    """Train ``method`` with ``seed``; writes ``policy/``, ``metrics.jsonl`` and ``metrics.json``."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = with_overrides(config, method)
    this = TrainRun(
        config=config,
        paths=paths,
        method=method,
        seed=seed,
        identity=run_identity(config, paths, method=method, seed=seed),
        problems=rl_problems(paths, kind=config.training.problems),
    )
    log = MetricsLog(this.state_dir / "metrics.jsonl")
    state = checkpoint.load(this.state_file, identity=this.identity)
    with tracking.stage_run(
        config,
        stage="train",
        paths=paths,
        wildcards={"method": method.name, "seed": seed},
        digests={"identity": this.identity},
        tags={"method": method.name, "seed": str(seed), "quant_hash": this.rollout_quant.hash()},
    ) as tracker:
        tracker.log_params({"method": method.model_dump(mode="json")})
        model = AutoModelForCausalLM.from_pretrained(paths.checkpoint, dtype=torch.bfloat16)
        made_by = [] if state is None else list(state.made_by)
        if state is not None and state.step == config.training.steps:
            print(f"{this.name}: all {state.step} steps are done; writing the outputs again")
            checkpoint.restore_weights(model, state)
        else:
            made_by.append(
                checkpoint.MadeBy(
                    from_step=0 if state is None else state.step,
                    commit=environment.commit(),
                    machine=environment.machine(),
                )
            )
            train(this, model=model, state=state, log=log, tracker=tracker, made_by=made_by)
        summary = publish(this, model=model, log=log, made_by=made_by)
        tracker.log_metrics({key: value for key, value in summary.items() if isinstance(value, int | float)})
        tracker.log_artifact(paths.train(method.name, seed) / "metrics.jsonl")


def rl_problems(paths: RunPaths, *, kind: ProblemKind | None) -> list[Problem]:
    """The RL data set, or its problems of one kind."""
    return [problem for problem in read_jsonl(paths.data / "rl.jsonl") if kind in (None, problem.kind)]


def train(
    this: TrainRun,
    *,
    model: PreTrainedModel,
    state: checkpoint.TrainState | None,
    log: MetricsLog,
    tracker: tracking.StageRun,
    made_by: list[checkpoint.MadeBy],
) -> None:
    """Run the remaining steps on ``model``."""
    validate_checkpoint(this.paths.checkpoint, quant=this.rollout_quant)
    tokenizer = AutoTokenizer.from_pretrained(this.paths.checkpoint)
    engine = open_engine(
        this.paths.checkpoint,
        quant=this.rollout_quant,
        scales=calibrated_scales(this.config, this.paths, quant=this.rollout_quant),
        config=this.config.engine,
    )
    try:
        trainer = build_trainer(this, model=model, engine=engine, tokenizer=tokenizer)
        if state is not None:
            trainer.restore(state)
            print(f"{this.name}: continuing after step {state.step}")
        log.truncate(steps=trainer.step_index)
        tracker.log_step_metrics(log.rows())  # those a kill kept from MLflow; stored steps are skipped
        engine.load_policy(trainer.policy_tensors(), trainer.step_index)
        loop(this, trainer=trainer, tokenizer=tokenizer, log=log, tracker=tracker, made_by=made_by)
    finally:
        engine.close()


def build_trainer(
    this: TrainRun, *, model: PreTrainedModel, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase
) -> Trainer:
    """The trainer of one method on an open engine."""
    training = this.config.training

    def reward(problem: int, response: list[int]) -> float:
        return score(this.problems[problem], response_text(tokenizer, response))

    return Trainer(
        model,
        qat=attach(model, quant=this.trainer_quant, scales=engine.scales),
        engine=engine,
        method=this.method,
        training=training,
        temperature=this.config.sampling.temperature,
        max_new_tokens=this.config.sampling.max_new_tokens,
        prompts=PromptStream(
            [tokenizer(problem.prompt)["input_ids"] for problem in this.problems],
            prompts_per_step=training.prompts_per_step,
            seed=this.seed,
        ),
        reward=reward,
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        seed=this.seed,
    )


def loop(
    this: TrainRun,
    *,
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    log: MetricsLog,
    tracker: tracking.StageRun,
    made_by: list[checkpoint.MadeBy],
) -> None:
    """Steps, diagnostics, checkpoints, progress."""
    training = trainer.training
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("reward {task.fields[reward]:.3f}  gap {task.fields[gap]:.4f}  {task.fields[rate]:.0f} tok/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    pending: list[dict[str, float]] = []
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=1) as progress:
        fields = {"reward": 0.0, "gap": 0.0, "rate": 0.0}
        bar = progress.add_task(this.name, total=training.steps, completed=trainer.step_index, **fields)
        while trainer.step_index < training.steps:
            diagnostics = diagnose(trainer) if trainer.step_index % training.diagnose_every == 0 else {}
            row = trainer.step() | diagnostics
            log.append(row)
            pending.append(row)
            progress.update(bar, advance=1, reward=row["reward"], gap=row["gap_mean"], rate=row["tokens_per_s"])
            if trainer.step_index % training.checkpoint_every == 0 or trainer.step_index == training.steps:
                state = replace(trainer.snapshot(), made_by=made_by)
                checkpoint.save(this.state_file, state, identity=this.identity)
                tracker.log_step_metrics(pending)
                tracker.log_text(sample_table(this, trainer, tokenizer), f"samples/step{trainer.step_index:05d}.txt")
                pending = []


def response_text(tokenizer: PreTrainedTokenizerBase, response: list[int]) -> str:
    """Text of a response without its end token; an unfinished response keeps everything it has."""
    if response and response[-1] == tokenizer.eos_token_id:
        response = response[:-1]
    return tokenizer.decode(response, skip_special_tokens=False)


def sample_table(this: TrainRun, trainer: Trainer, tokenizer: PreTrainedTokenizerBase) -> str:
    """A few responses of the newest rollout, with rewards."""
    newest = trainer.newest_batch
    pairs = list(zip(newest.batch.trajectories, newest.rewards, strict=True))
    problems = trainer.prompts.batch(newest.index)
    lines = []
    for trajectory, reward in pairs[:: max(1, len(pairs) // SAMPLES_SHOWN)]:
        problem = this.problems[problems[trajectory.prompt_index]]
        text = response_text(tokenizer, trajectory.response_ids)
        lines.append(f"{reward:.0f}  {problem.prompt!r} -> {text!r}  (reference {problem.answer!r})")
    return "\n".join(lines) + "\n"


def run_identity(config: ExperimentConfig, paths: RunPaths, *, method: RlMethod, seed: int) -> str:
    """Digest of everything that decides the final weights."""
    dumped = config.model_dump(mode="json")
    quant = method.rollout_quant(config.format)
    scales = calibrated_scales(config, paths, quant=quant)
    return digest_of(
        {
            "sections": {name: dumped[name] for name in IDENTITY_SECTIONS},
            "method": method_json(method),
            "seed": seed,
            "code": code_digest("train"),
            "checkpoint": json.loads((paths.checkpoint / "manifest.json").read_text()),
            "data": json.loads((paths.data / "manifest.json").read_text()),
            # Those in use: in a format of the method's own they are not in the calibration's file of scales.
            "scales": None if scales is None else scales.to_json(residual=quant.residual != "none"),
        }
    )


def publish(
    this: TrainRun, *, model: PreTrainedModel, log: MetricsLog, made_by: list[checkpoint.MadeBy]
) -> dict[str, object]:
    """Write the declared outputs: the policy as a Hugging Face checkpoint, the metrics; returns the summary."""
    out = this.paths.train(this.method.name, this.seed)
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    policy = temporary / "policy"
    policy.mkdir(parents=True)
    model.save_pretrained(policy)
    for name in TOKENIZER_FILES:
        if (this.paths.checkpoint / name).is_file():
            shutil.copy2(this.paths.checkpoint / name, policy / name)
    shutil.copy2(log.path, temporary / "metrics.jsonl")
    summary = {
        "method": this.method.name,
        "seed": this.seed,
        **summarize(log.rows()),
        "made_by": made_by,
    }
    (temporary / "metrics.json").write_text(json.dumps(summary, indent=1) + "\n")
    out.mkdir(parents=True, exist_ok=True)
    for item in temporary.iterdir():
        target = out / item.name
        if target.is_dir():
            shutil.rmtree(target)
        item.replace(target)
    temporary.rmdir()
    return summary
