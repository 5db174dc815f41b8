"""The diagnostic batch: where trainer and rollout disagree, and what guidance leaves of it (METHOD.md section 7).

Every few steps a few prompts are rolled out with *whole* codes of *all* layers recorded, whatever the method records.
The same trajectories then go through the trainer three times: in BF16 (``off``), rounding to nearest (``rtn``: plain
QAT), and as the method does (``own``). Codewords are compared with the rollout's in each. Nothing here touches weights.
"""

import torch

from trace_rl.config.guidance import GuidanceSpec, full_recording
from trace_rl.guidance.record import RecordLayout
from trace_rl.qat.collector import Collector, TensorCounts
from trace_rl.qat.context import Mode
from trace_rl.rl.batch import PackedBatch, pack
from trace_rl.rl.mismatch import logprob_gap
from trace_rl.rl.trainer import Trainer
from trace_rl.rollout.engine import Sampling

SEED_OFFSET = 1 << 48
"""Keeps diagnostic sampling seeds apart from training's."""


def diagnose(trainer: Trainer) -> dict[str, float]:
    """Flat metrics ``diag/...`` of the current policy, trainer and engine."""
    recording = full_recording(trainer.engine.quant)
    problems = trainer.prompts.batch(trainer.step_index)[: trainer.training.diagnose_prompts]
    rollout = trainer.engine.generate(
        [trainer.prompts.token_ids(problem) for problem in problems],
        Sampling(
            temperature=trainer.temperature,
            max_new_tokens=trainer.max_new_tokens,
            seed=SEED_OFFSET + (trainer.seed << 32) + trainer.step_index,
        ),
        recording,
        record_experts=True,  # to compare routing, whether the method replays it or not
    )
    batch = pack(rollout.trajectories, pad_id=trainer.pad_id)
    layout = None if recording is None else trainer.record_layout(recording)
    reference = None if layout is None else (batch.record, layout)
    modes: dict[str, Mode] = {"off": "off", "own": trainer.mode}
    if trainer.engine.quant.enabled:
        modes["rtn"] = "rtn"
    metrics: dict[str, float] = {}
    for name, mode in modes.items():
        collector = Collector(reference=reference)
        run = batch if mode != "guided" else with_layout(batch, source=layout, target=trainer.layout)
        with torch.no_grad():
            logprobs, _ = trainer.forward(run, mode=mode, collect=collector)
        gap = logprob_gap(logprobs, batch.rollout_logprobs)
        metrics |= {f"diag/{name}/{key}": value for key, value in gap.items()}
        metrics[f"diag/{name}/router_disagreement"] = collector.router_disagreement()
        metrics |= describe_codes(collector, prefix=f"diag/{name}", trainer=trainer)
    return metrics


def with_layout(batch: PackedBatch, *, source: RecordLayout, target: RecordLayout) -> PackedBatch:
    """The batch with its full record reduced to what ``target`` would have recorded."""
    rows = batch.record.reshape(-1, source.row_bytes)
    reduced = torch.zeros(rows.shape[0], target.row_bytes, dtype=torch.uint8)
    slots = torch.arange(rows.shape[0])
    for field in target.fields:
        codes, block_scale = source.read(rows, field.layer, field.tensor)
        target.write(reduced, slots, field.layer, field.tensor, codes, block_scale)
    shape = (*batch.record.shape[:2], target.row_bytes)
    return PackedBatch(**{**vars(batch), "record": reduced.view(shape)})


def describe_codes(collector: Collector, *, prefix: str, trainer: Trainer) -> dict[str, float]:
    """Mismatch, adjacency, direction and scale statistics: in total, of the guided tensors, per tensor and per layer.

    ``deeper_half`` is what the paper's default guides; it is there for every method, so that methods compare.
    """
    guided = {(f.layer, f.tensor) for f in trainer.layout.fields} if trainer.layout else set()
    deeper = set(GuidanceSpec(layers="deeper_half").layer_ids(trainer.engine.dims.num_layers))
    groups: dict[str, list[tuple[int, str]]] = {"": list(collector.tensors)}
    for layer, tensor in collector.tensors:
        names = [f"/{tensor}", f"/{tensor}/{layer}"]
        names += ["/guided"] if (layer, tensor) in guided else []
        names += ["/deeper_half"] if layer in deeper else []
        for name in names:
            groups.setdefault(name, []).append((layer, tensor))
    metrics: dict[str, float] = {}
    for name, keys in groups.items():
        counts = TensorCounts()
        for key in keys:
            counts.add(collector.tensors[key])
        if not counts.values:
            continue
        metrics[f"{prefix}/mismatch{name}"] = counts.mismatch_rate
        metrics[f"{prefix}/adjacent{name}"] = counts.adjacent_share
        metrics[f"{prefix}/lower{name}"] = counts.lower / counts.values
        metrics[f"{prefix}/higher{name}"] = counts.higher / counts.values
        metrics[f"{prefix}/bracket_miss{name}"] = counts.bracket_misses / counts.values
        metrics[f"{prefix}/scale_mismatch{name}"] = counts.scale_mismatches / counts.blocks
        metrics[f"{prefix}/scale_unrecovered{name}"] = counts.scale_recovery_failures / counts.blocks
    return metrics
