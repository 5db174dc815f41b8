"""Stage ``parity``: trainer and rollout engine agree on the same tokens, before the first update and after a refit.

Per precision (BF16, and FP4 with weights, activations and KV): the engine samples ``parity.num_prompts`` responses,
recording routing and, in FP4, whole codes of all layers. The trainer computes the log-probs of the same tokens,
replaying both. Then every weight moves by a random relative update, the engine takes the new weights in place, and the
same is measured again: a refit must be proven (vLLM's own ``reload_weights`` corrupts MoE layers on CPU, and only a
comparison like this one shows it).

    gap = mean |log pi_train - log pi_rollout| over response tokens
    BF16   gap <= max_gap_bf16
    FP4    gap under full guidance <= max_gap_ratio_fp4 * (BF16 gap of the same moment + gap_floor)
    FP4, not all pinned    gap of QAT, and of what guidance there is, <= gap of the BF16 trainer on the same tokens

With routing and all guided codes pinned, what is left in FP4 is the engines' own arithmetic noise, so BF16 is its
control, and plain QAT (round to nearest) is only reported beside it. In a format whose expert inputs or KV have no
codewords to pin (``mxfp8``, ``hif4``) they round by themselves on both sides, and no multiple of the control says how
far apart that may be; but a trainer that rounds as the engine does must be nearer to it than one that does not round.
A gap that is not a finite number fails, wherever it is.
"""

import math
import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trace_rl import tracking
from trace_rl.config.experiment import ExperimentConfig, ParityConfig
from trace_rl.config.guidance import full_recording
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import BF16, FormatChoice, QuantSpec
from trace_rl.models.checkpoint_io import finite_or_none, validate_checkpoint, write_json
from trace_rl.qat.attach import Qat, attach
from trace_rl.qat.context import Mode
from trace_rl.rl.batch import pack
from trace_rl.rl.mismatch import logprob_gap
from trace_rl.rl.trainer import response_logprobs
from trace_rl.rollout.engine import RolloutEngine, Sampling, open_engine
from trace_rl.stages.calibrated_scales import calibrated_scales
from trace_rl.stages.failure import StageFailure
from trace_rl.stages.rl_prompts import pad_id, rl_prompts
from trace_rl.trajectory import RolloutBatch

SEED = 1 << 41
"""Sampling seed, apart from those of training and calibration."""
UPDATE_SEED = 7
MICRO_BATCH = 64
MOMENTS = ("start", "refit")
FORWARDS = {"off": "BF16", "guided": "guided", "rtn": "QAT"}
GAPS = ("gap_mean", "gap_p99", "gap_max")

Gaps = dict[str, dict[str, float]]
"""Trainer forward -> metrics of ``logprob_gap``."""


def run(config: ExperimentConfig, paths: RunPaths, *, formats: FormatChoice | None = None) -> dict[str, object]:
    """Measure in BF16 and in ``formats``, None for the experiment's.

    Writes ``paths.parity(...)``; StageFailure with the numbers where a threshold is broken.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    started = time.perf_counter()
    quant = QuantSpec(format=formats or config.format)
    with tracking.stage_run(config, stage="parity", paths=paths, wildcards={"format": quant.format.slug}) as tracker:
        prompts = rl_prompts(
            paths.checkpoint, data=paths.data, count=config.parity.num_prompts, setting="parity.num_prompts"
        )
        precisions = {"bf16": BF16, "fp4": quant}
        gaps = {
            name: check_precision(config, paths, quant=quant, prompts=prompts) for name, quant in precisions.items()
        }
        rows = judge(gaps, thresholds=config.parity, pinned=len(quant.recordable()) == 3)
        metrics = {
            "format": str(quant.format),
            "gaps": gaps,
            "rows": rows,
            "passed": all(row["verdict"] != "FAILED" for row in rows),
            "engine": config.engine.name,
            "seconds": time.perf_counter() - started,
        }
        write_json(paths.parity(quant.format.slug), finite_or_none(metrics))
        tracker.log_metrics(gaps)
    require_parity(rows)
    print(verdict_table(rows))
    return metrics


def check_precision(
    config: ExperimentConfig, paths: RunPaths, *, quant: QuantSpec, prompts: Sequence[Sequence[int]]
) -> dict[str, Gaps]:
    """Gaps at the start and after update and refit of one precision; ``refit`` uses the updated trainer and engine."""
    validate_checkpoint(paths.checkpoint, quant=quant)
    scales = calibrated_scales(config, paths, quant=quant)
    model = AutoModelForCausalLM.from_pretrained(paths.checkpoint, dtype=torch.bfloat16, local_files_only=True).eval()
    pad = pad_id(AutoTokenizer.from_pretrained(paths.checkpoint, local_files_only=True))
    qat = attach(model, quant=quant, scales=scales)
    engine = open_engine(paths.checkpoint, quant=quant, scales=scales, config=config.engine)
    sampling = Sampling(
        temperature=config.sampling.temperature, max_new_tokens=config.sampling.max_new_tokens, seed=SEED
    )
    try:
        gaps = {"start": measure_gaps(engine, model, qat, prompts=prompts, sampling=sampling, pad=pad)}
        random_update(model, scale=config.parity.update_scale)
        engine.load_policy(model.state_dict().items(), 1)
        gaps["refit"] = measure_gaps(engine, model, qat, prompts=prompts, sampling=sampling, pad=pad)
    finally:
        engine.close()
    return gaps


def measure_gaps(
    engine: RolloutEngine,
    model: PreTrainedModel,
    qat: Qat,
    *,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    pad: int,
) -> Gaps:
    """Sample with the engine, recompute with the trainer: BF16 ``off``; FP4 ``guided``, ``rtn`` and ``off``."""
    recording = full_recording(engine.quant)
    batch = engine.generate(prompts, sampling, recording)
    modes: tuple[Mode, ...] = ("off",)
    if engine.quant.enabled:
        modes = ("rtn", "off") if recording is None else ("guided", "rtn", "off")
    gaps = {}
    for mode in modes:
        train = trainer_logprobs(model, qat, batch=batch, mode=mode, temperature=sampling.temperature, pad=pad)
        rollout = torch.cat([t.logprobs for t in batch.trajectories])
        gaps[mode] = logprob_gap(train, rollout) | {"num_tokens": rollout.numel()}
    return gaps


@torch.no_grad()
def trainer_logprobs(
    model: PreTrainedModel, qat: Qat, *, batch: RolloutBatch, mode: Mode, temperature: float, pad: int
) -> Tensor:
    """float32 [N] log-probs of all response tokens, with routing replay, in the order of the trajectories."""
    layout = None
    if batch.recording is not None:
        layout = qat.record_layout(batch.recording)
    parts = []
    for start in range(0, len(batch.trajectories), MICRO_BATCH):
        packed = pack(batch.trajectories[start : start + MICRO_BATCH], pad_id=pad)
        with qat.forward(
            mode=mode,
            guidance=(packed.record, layout) if mode == "guided" else None,
            valid=packed.valid,
            expert_ids=packed.expert_ids,
        ):
            logits = model(input_ids=packed.input_ids, attention_mask=packed.valid.long(), use_cache=False).logits
        # Greedy decoding reports log-probs at temperature 1.
        parts.append(response_logprobs(logits, batch=packed, temperature=temperature or 1.0)[0])
    return torch.cat(parts)


@torch.no_grad()
def random_update(model: PreTrainedModel, *, scale: float) -> None:
    """Add ``scale`` times its own root mean square, times a seeded normal, to every parameter; experts differ too."""
    generator = torch.Generator().manual_seed(UPDATE_SEED)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        size = parameter.float().square().mean().sqrt()
        parameter.copy_(parameter.float() + scale * size * noise)


def judge(
    gaps: dict[str, dict[str, Gaps]], *, thresholds: ParityConfig, pinned: bool = True
) -> list[dict[str, object]]:
    """One row per moment and forward: its gap, the BF16 control of the same moment, and the threshold if it has one.

    ``pinned``: guidance pins FC1 input, K and V; otherwise the BF16 trainer's gap is what rounding must not exceed.
    """
    rows = []
    for moment in MOMENTS:
        control = gaps["bf16"][moment]["off"]["gap_mean"]
        limits = {("bf16", "off"): thresholds.max_gap_bf16}
        if pinned:
            limits["fp4", "guided"] = thresholds.max_gap_ratio_fp4 * (control + thresholds.gap_floor)
        else:
            limits |= dict.fromkeys((("fp4", "guided"), ("fp4", "rtn")), gaps["fp4"][moment]["off"]["gap_mean"])
        for precision, by_moment in gaps.items():
            for mode, metrics in by_moment[moment].items():
                limit = limits.get((precision, mode))
                # Written so that a NaN gap or threshold fails.
                sound = all(math.isfinite(metrics[name]) for name in GAPS)
                if limit is not None:
                    sound = sound and metrics["gap_mean"] <= limit
                verdict = "FAILED" if not sound else "reported" if limit is None else "passed"
                rows.append(
                    {
                        "phase": moment,
                        "mode": f"{precision} rollout, {FORWARDS[mode]} trainer",
                        **{name: metrics[name] for name in GAPS},
                        "bf16_control": control,
                        "threshold": limit,
                        "verdict": verdict,
                    }
                )
    return rows


def require_parity(rows: list[dict[str, object]]) -> None:
    """Raise StageFailure with all numbers when a threshold is broken."""
    if any(row["verdict"] == "FAILED" for row in rows):
        raise StageFailure(f"parity gate: trainer and rollout engine differ\n{verdict_table(rows)}")


def verdict_table(rows: list[dict[str, object]]) -> str:
    """Every gap beside its threshold and its BF16 control."""
    lines = [f"{'mean |log pi_train - log pi_rollout|':42}{'gap':>10}{'threshold':>11}{'BF16':>10}"]
    for row in rows:
        limit = "-" if row["threshold"] is None else f"{row['threshold']:.5f}"
        name = f"{row['phase']}: {row['mode']}"
        lines.append(f"{name:42}{row['gap_mean']:10.5f}{limit:>11}{row['bf16_control']:10.5f}  {row['verdict']}")
    return "\n".join(lines)
