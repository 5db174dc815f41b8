"""What is FP4, and in which format (METHOD.md sections 1 and 2).

One ``QuantSpec`` travels with every checkpoint, rollout batch, guidance shard, MLflow run and result; its hash keeps
artifacts of different quantization apart.
"""

from typing import Literal

from trace_rl.config.base import Section

FormatName = Literal["nvfp4", "mxfp4", "fouroversix"]


class QuantSpec(Section):
    """The format and the three scopes that may be FP4; everything else is BF16."""

    format: FormatName = "nvfp4"
    """Number format of every quantized tensor."""
    weights: bool = True
    """Quantize the routed experts' gate, up and down projections; scales follow the weights at every refit."""
    activations: bool = True
    """Quantize the routed experts' inputs (FC1 and FC2) with the calibrated static encode scale of the layer."""
    kv: bool = True
    """Quantize K (after its norm and RoPE) and V as they enter the cache, with the layer's static encode scale."""

    @property
    def enabled(self) -> bool:
        """Whether anything at all is quantized."""
        return self.weights or self.activations or self.kv

    def hash(self) -> str:
        """16 hex digits; all-BF16 specs share one hash whatever their format."""
        return self.digest() if self.enabled else BF16.digest()


BF16 = QuantSpec(format="nvfp4", weights=False, activations=False, kv=False)
