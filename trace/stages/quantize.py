"""Stage ``quantize``: a PTQ method exports the final policy of its base method as packed FP4.

Weights: one encode scale per expert and matrix, from the trained BF16 weights. Activations and KV use the static scales
of the calibration; for a format other than the experiment's they are recomputed from the calibrated magnitudes.
``hscale`` weighs rounding errors with the calibration's importance of each expert's input columns: of the policy before
RL, as everything the calibration measures. The result is a checkpoint directory that the vLLM engine loads as it is.
"""

import time
from dataclasses import asdict

from safetensors.torch import load_file
from torch import Tensor

from trace_rl import tracking
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.method import PtqMethod
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import QuantSpec
from trace_rl.errors import UserError
from trace_rl.models.checkpoint_io import (
    replaced_directory,
    validate_checkpoint,
    weights_digest,
    write_json,
)
from trace_rl.models.export import export_packed
from trace_rl.stages.calibrated_scales import calibrated_scales


def run(config: ExperimentConfig, paths: RunPaths, *, method: PtqMethod, seed: int) -> dict[str, object]:
    """Write the packed checkpoint of ``method`` with ``metrics.json``; returns the metrics."""
    started = time.perf_counter()
    policy = paths.train(method.base, seed) / "policy"
    if not policy.is_dir():
        raise UserError(f"{policy}: method {method.base} with seed {seed} is not trained; run its train stage first")
    quant = QuantSpec(format=method.format)
    wildcards = {"method": method.name, "seed": seed}
    with tracking.stage_run(config, stage="quantize", paths=paths, wildcards=wildcards) as tracker:
        validate_checkpoint(policy, quant=quant)
        with replaced_directory(paths.quantized(method.name, seed)) as target:
            reports = export_packed(
                policy,
                target=target,
                quant=quant,
                scales=calibrated_scales(config, paths, quant=quant),
                importance=importance_for(paths, quant=quant),
            )
            bf16_bytes = sum(report.bf16_bytes for report in reports)
            packed_bytes = sum(report.packed_bytes for report in reports)
            metrics = {
                "method": method.name,
                "seed": seed,
                "base": method.base,
                "base_weights_digest": weights_digest(policy),
                "weights_digest": weights_digest(target),
                "quant": quant.model_dump(mode="json"),
                "quant_hash": quant.hash(),
                "expert_bytes_bf16": bf16_bytes,
                "expert_bytes_packed": packed_bytes,
                "bytes_saved": bf16_bytes - packed_bytes,
                "bits_per_weight": 16 * packed_bytes / bf16_bytes,
                "tensors": [asdict(report) for report in reports],
                "max_relative_mse": max(report.relative_mse for report in reports),
                "read_back": "bitwise",
                "seconds": time.perf_counter() - started,
            }
            write_json(target / "metrics.json", metrics)
        tracker.log_metrics({key: value for key, value in metrics.items() if isinstance(value, int | float)})
    print(
        f"{method.name} seed {seed}: {len(reports)} expert tensors, {bf16_bytes / 2**20:.2f} MiB in BF16 -> "
        f"{packed_bytes / 2**20:.2f} MiB packed ({metrics['bits_per_weight']:.2f} bits per weight), "
        f"relative MSE up to {metrics['max_relative_mse']:.5f}"
    )
    return metrics


def importance_for(paths: RunPaths, *, quant: QuantSpec) -> dict[str, Tensor] | None:
    """The columns' importance from the calibration, for the format that searches its scales by it."""
    if quant.format.weights != "hscale":
        return None
    if not paths.importance.is_file():
        raise UserError(f"{paths.importance}: no such file; run the calibration stage, which writes it")
    return load_file(paths.importance)
