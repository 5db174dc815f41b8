"""The static scales of any quantization, from one calibration.

Calibration stores the largest magnitude of every FC1 input, FC2 input, K and V per layer, and the encode scales that
follow from them in the experiment's format. A method of the suite may use another format, whose scales follow from the
same magnitudes with the same headroom:

    G = encode_scale(margin * amax)          448*6 / (margin * amax) for NVFP4, 1 for formats without a global scale

Training, evaluation, export and benchmarks all ask here, so that a method has the same scales wherever it runs.
"""

import dataclasses
from collections.abc import Mapping

import torch

from trace_rl import formats
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import FormatChoice, QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import TENSORS, StaticScales
from trace_rl.models.checkpoint_io import read_json

Magnitudes = Mapping[str, Mapping[int, float]]
"""Largest magnitude by tensor and layer."""


def static_scales(amax: Magnitudes, *, names: Mapping[str, str], margin: float) -> StaticScales:
    """Encode scales from calibrated magnitudes with headroom ``margin``; ``names``: each tensor's format."""
    by_tensor: dict[str, dict[int, float]] = {}
    for tensor, layers in amax.items():
        fmt = formats.get(names[tensor])
        by_tensor[tensor] = {
            layer: float(fmt.encode_scale(torch.tensor(layers[layer] * margin))) for layer in sorted(layers)
        }
        for layer, scale in by_tensor[tensor].items():
            if not 0 < scale < float("inf"):
                raise UserError(
                    f"encode scale of {tensor} in layer {layer} is {scale}; look for NaN or Inf in the weights"
                )
    return StaticScales(**by_tensor)


def tensor_formats(choice: FormatChoice) -> dict[str, str]:
    """Format by tensor: fc1, fc2, k and v."""
    return {tensor: choice.of(tensor) for tensor in TENSORS}


def calibrated_scales(config: ExperimentConfig, paths: RunPaths, *, quant: QuantSpec) -> StaticScales | None:
    """The scales that ``quant`` runs with; None where it quantizes neither activations nor KV.

    UserError where the calibration has not run.
    """
    if not (quant.activations or quant.kv):
        return None
    stored = StaticScales.load(paths.scales)
    others = [tensor for tensor in TENSORS if quant.format.of(tensor) != config.format.of(tensor)]
    if not others:
        return stored
    calibrated = read_json(paths.calibration_metrics)
    amax = {t: {int(layer): value for layer, value in calibrated["amax"][t].items()} for t in others}
    own = static_scales(amax, names=tensor_formats(quant.format), margin=calibrated["margin"])
    return dataclasses.replace(stored, **{tensor: getattr(own, tensor) for tensor in others})
