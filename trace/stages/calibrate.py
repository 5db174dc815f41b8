"""Stage ``calibrate``: the static encode scales of activations and KV, and what the numbers look like before FP4.

The BF16 policy samples ``calibrate.num_prompts`` responses at the sampling temperature; the transformers model then
runs over prompts and responses, and the operand tap takes the largest magnitude of each FC1 input, FC2 input, K (after
its norm and RoPE) and V, per layer:

    G = encode_scale(margin * amax)          448*6 / (margin * amax) for NVFP4

``margin`` is headroom for what training moves; larger values saturate. Sequences of equal length form a batch, so no
padding is ever measured. The scales are those of the experiment's format; methods with another have theirs from the
same magnitudes (`trace_rl.stages.calibrated_scales`). A second pass measures every format's relative error,
sum (x - xhat)^2 / sum x^2, with scales made in this way (weights: one scale per expert, no margin). The first pass also
sums the squares of each expert's input columns, which H-Scale weighs rounding errors with.

Another pass orders the experts' input channels by mean |X - Q(X)|, for rollouts that compensate the largest
(`trace_rl.formats.residual_channels`).

Experts that no token was routed to are reported as idle: they receive no gradient, and their weights go untested.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from trace_rl import formats, tracking
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import BF16, FormatName, QuantSpec
from trace_rl.formats.residual_channels import ResidualMagnitude
from trace_rl.formats.static_scales import TENSORS, StaticScales
from trace_rl.guidance.record import ModelDims
from trace_rl.models.checkpoint_io import iterate_tensors, validate_checkpoint, write_json
from trace_rl.models.families import moe_layers
from trace_rl.models.operands import operand_tap
from trace_rl.qat.attach import Qat, attach
from trace_rl.rollout.engine import Sampling, open_engine
from trace_rl.stages.calibrated_scales import static_scales, tensor_formats
from trace_rl.stages.input_importance import measured_importance
from trace_rl.stages.rl_prompts import rl_prompts
from trace_rl.trajectory import Trajectory

SEED = 1 << 40
"""Sampling seed of the calibration responses, apart from those of training."""
FORMATS: tuple[FormatName, ...] = ("nvfp4", "mxfp4", "fouroversix", "hif4", "mxfp8")
"""Formats whose errors are measured, of every tensor alike."""
MICRO_BATCH = 16

OnOperand = Callable[[int, str, Tensor], None]
"""Called with (layer, tensor in ``TENSORS``, rows [..., cols])."""


def run(config: ExperimentConfig, paths: RunPaths) -> dict[str, object]:
    """Write ``scales.json`` and ``metrics.json``; returns the metrics."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    started = time.perf_counter()
    with tracking.stage_run(config, stage="calibrate", paths=paths) as tracker:
        validate_checkpoint(paths.checkpoint, quant=QuantSpec(format=config.format))
        scan_weights(iterate_tensors(paths.checkpoint))
        trajectories = sample(config, paths)
        model = AutoModelForCausalLM.from_pretrained(paths.checkpoint, dtype=torch.bfloat16, local_files_only=True)
        qat = attach(model, quant=BF16)
        with measured_importance(model) as importance:
            amax = measure_amax(model, qat, trajectories=trajectories)
        scales = static_scales(amax, names=tensor_formats(config.format), margin=config.calibrate.margin)
        scales = with_residual_channels(scales, model, qat, trajectories=trajectories, config=config)
        metrics = {
            "format": str(config.format),
            "margin": config.calibrate.margin,
            "num_sequences": len(trajectories),
            "num_tokens": sum(t.num_tokens - 1 for t in trajectories),
            "amax": {tensor: dict(sorted(by_layer.items())) for tensor, by_layer in amax.items()},
            **describe_routing(trajectories, dims=qat.dims),
            "format_relative_mse": format_errors(model, qat, trajectories=trajectories, amax=amax, config=config),
            "seconds": time.perf_counter() - started,
        }
        paths.scales.parent.mkdir(parents=True, exist_ok=True)
        scales.save(paths.scales)
        save_file(importance, paths.importance)
        write_json(paths.calibration_metrics, metrics)
        tracker.log_metrics(metrics)
        tracker.log_artifact(paths.scales)
    print(format_table(metrics))
    return metrics


def sample(config: ExperimentConfig, paths: RunPaths) -> list[Trajectory]:
    """One response of the BF16 policy per prompt, with its routing."""
    prompts = rl_prompts(
        paths.checkpoint, data=paths.data, count=config.calibrate.num_prompts, setting="calibrate.num_prompts"
    )
    engine = open_engine(paths.checkpoint, quant=BF16, scales=None, config=config.engine)
    try:
        sampling = Sampling(
            temperature=config.sampling.temperature, max_new_tokens=config.sampling.max_new_tokens, seed=SEED
        )
        return engine.generate(prompts, sampling, None).trajectories
    finally:
        engine.close()


def scan_weights(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse a checkpoint with NaN or Inf, naming the tensor."""
    for name, tensor in tensors:
        if tensor.is_floating_point():
            formats.check_finite(tensor, name)


def equal_length_batches(trajectories: Sequence[Trajectory]) -> Iterator[Tensor]:
    """int64 [B, T] batches of fed tokens (all but the last of each trajectory) without padding."""
    by_length: dict[int, list[Tensor]] = defaultdict(list)
    for trajectory in trajectories:
        by_length[trajectory.num_tokens].append(trajectory.token_ids[:-1].long())
    for length in sorted(by_length):
        rows = by_length[length]
        for start in range(0, len(rows), MICRO_BATCH):
            yield torch.stack(rows[start : start + MICRO_BATCH])


@torch.no_grad()
def tap_operands(
    model: PreTrainedModel, qat: Qat, *, trajectories: Sequence[Trajectory], on_operand: OnOperand
) -> None:
    """Run the BF16 model over the trajectories and report its FC1 inputs, FC2 inputs, K and V."""
    experts = {moe.experts_name: moe.layer for moe in moe_layers(model)}
    attention = {
        name: module.layer_idx for name, module in model.named_modules() if name.rsplit(".", 1)[-1] == "self_attn"
    }

    def on_product(module: str, index: int, left: Tensor, right: Tensor) -> None:
        if module in experts:
            on_operand(experts[module], ("fc1", "fc2")[index], left)
        elif module in attention and left.dim() == 3:
            on_operand(attention[module], ("k", "v")[index], right.transpose(1, 2) if index == 0 else right)

    with operand_tap(model, on_product):
        for input_ids in equal_length_batches(trajectories):
            with qat.forward(mode="off"):
                model(input_ids=input_ids, use_cache=False)


def measure_amax(
    model: PreTrainedModel, qat: Qat, *, trajectories: Sequence[Trajectory]
) -> dict[str, dict[int, float]]:
    """Largest magnitude by tensor and layer; UserError naming the first that is NaN or Inf."""
    amax: dict[str, dict[int, float]] = {tensor: {} for tensor in TENSORS}

    def on_operand(layer: int, tensor: str, x: Tensor) -> None:
        formats.check_finite(x, f"{tensor} of layer {layer} (calibration activations)")
        amax[tensor][layer] = max(amax[tensor].get(layer, 0.0), float(x.abs().amax()))

    tap_operands(model, qat, trajectories=trajectories, on_operand=on_operand)
    for tensor, layers in amax.items():
        expected = qat.dims.moe_layers if tensor in ("fc1", "fc2") else qat.dims.attention_layers
        assert sorted(layers) == list(expected), f"{tensor} was seen in layers {sorted(layers)}, expected {expected}"
    return amax


def with_residual_channels(
    scales: StaticScales,
    model: PreTrainedModel,
    qat: Qat,
    *,
    trajectories: Sequence[Trajectory],
    config: ExperimentConfig,
) -> StaticScales:
    """The scales with the experts' input channels ordered by the residual that the experiment's format leaves."""
    residual = ResidualMagnitude(fmt=formats.get(config.format.activations), scales=scales)
    tap_operands(model, qat, trajectories=trajectories, on_operand=residual.add)
    return replace(scales, residual=residual.order())


def describe_routing(trajectories: Sequence[Trajectory], *, dims: ModelDims) -> dict[str, object]:
    """Share of (token, expert) pairs by expert, and the experts no token was routed to, per MoE layer."""
    ids = torch.cat([t.expert_ids for t in trajectories]).long()
    load, idle = {}, {}
    for index, layer in enumerate(dims.moe_layers):
        counts = torch.bincount(ids[:, index].reshape(-1), minlength=dims.num_experts)
        load[layer] = [round(float(share), 6) for share in counts / counts.sum()]
        idle[layer] = (counts == 0).nonzero().squeeze(1).tolist()
    return {"expert_load": load, "idle_experts": idle, "num_idle_experts": sum(map(len, idle.values()))}


@dataclass
class RelativeError:
    """sum (x - xhat)^2 / sum x^2 over everything added."""

    error: float = 0.0
    power: float = 0.0
    parts: int = field(default=0, repr=False)

    def add(self, x: Tensor, xhat: Tensor) -> None:
        """Add one tensor and its quantized values."""
        self.error += float((x.double() - xhat.double()).square().sum())
        self.power += float(x.double().square().sum())
        self.parts += 1

    @property
    def value(self) -> float:
        return self.error / self.power if self.power else 0.0


def format_errors(
    model: PreTrainedModel,
    qat: Qat,
    *,
    trajectories: Sequence[Trajectory],
    amax: dict[str, dict[int, float]],
    config: ExperimentConfig,
) -> dict[str, dict[str, float | None]]:
    """Relative MSE by tensor kind and format; None where the format's block does not fit the dimension."""
    kinds = ("gate_up", "down", *TENSORS)
    errors = {kind: {name: RelativeError() for name in FORMATS} for kind in kinds}
    codecs = {name: formats.get(name) for name in FORMATS}
    margin = config.calibrate.margin
    scales = {name: static_scales(amax, names=dict.fromkeys(TENSORS, name), margin=margin) for name in FORMATS}

    def on_operand(layer: int, tensor: str, x: Tensor) -> None:
        x = x.contiguous()
        for name, codec in codecs.items():
            if x.shape[-1] % codec.block_size == 0:
                errors[tensor][name].add(x, codec.fake_quant(x, scales[name].get(tensor, layer)).to(torch.bfloat16))

    tap_operands(model, qat, trajectories=trajectories, on_operand=on_operand)
    for moe in moe_layers(model):
        for kind, weight in (("gate_up", moe.experts.gate_up_proj), ("down", moe.experts.down_proj)):
            for name, codec in codecs.items():
                if weight.shape[-1] % codec.block_size == 0:
                    encode_scale = codec.encode_scale(weight.detach().float().abs().amax(dim=(1, 2)))
                    xhat = codec.fake_quant(weight, encode_scale[:, None].expand(weight.shape[:-1]))
                    errors[kind][name].add(weight.detach(), xhat.to(torch.bfloat16))
    return {kind: {name: e.value if e.parts else None for name, e in by.items()} for kind, by in errors.items()}


def format_table(metrics: dict[str, object]) -> str:
    """What the stage prints."""
    lines = [f"calibrated on {metrics['num_sequences']} sequences, {metrics['num_tokens']} tokens; relative MSE:"]
    lines.append(f"{'tensor':10}" + "".join(f"{name:>13}" for name in FORMATS))
    for kind, by_format in metrics["format_relative_mse"].items():
        cells = (f"{value:13.5f}" if value is not None else f"{'-':>13}" for value in by_format.values())
        lines.append(f"{kind:10}" + "".join(cells))
    lines.append(f"idle experts: {metrics['num_idle_experts']}")
    return "\n".join(lines)
