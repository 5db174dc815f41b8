"""What `w4a16_moe` should gain over BF16 experts: a prediction from bytes and instructions, not a measurement.

Decoding reads every expert that some token chose once. With T tokens that choose K of E experts at random, that is
E * (1 - (1 - K/E)^T) experts. Their weights, 3*H*I values each, take 16 bits in BF16 and 4 + 8/16 in NVFP4 (4 + 8/32 in
MXFP4), so bytes alone promise 3.56 (3.76). Two things take from it:

* Activations, which both layers move: x, the hidden vectors, one FP32 output vector per pair, the sum.
* Decoding. Each value costs INSTRUCTIONS_PER_VALUE issue slots of a multiprocessor (counted in the machine code of the
  inner loop for sm_90, every instruction of it), and there are 32 lanes in 4 slots per cycle. At full memory speed H200
  would have to decode faster than it can issue, so this bound, not the bytes, is the predicted time.

Left out, and therefore optimistic for both at small T: launches, the sorting of the pairs, how evenly programs fill the
device, skewed routing (fewer experts). `achieved` is the share of the memory bandwidth that kernels are assumed to
reach.

Legend: T tokens, H hidden, I expert width, E experts, K experts per token.
"""

from dataclasses import dataclass

INSTRUCTIONS_PER_VALUE = {"nvfp4": 5.9, "mxfp4": 5.5}
"""In the loop of w4a16_moe's kernels, Triton 3.9, sm_90."""

BITS_PER_VALUE = {"bf16": 16.0, "nvfp4": 4.5, "mxfp4": 4.25}


@dataclass(frozen=True)
class Device:
    """Peak rates."""

    name: str
    bandwidth: float
    """Bytes per second."""
    lane_instructions: float
    """Multiprocessors * 4 schedulers * 32 lanes * clock."""


H200 = Device("H200", bandwidth=4.8e12, lane_instructions=132 * 4 * 32 * 1.98e9)


@dataclass(frozen=True)
class Prediction:
    """One call of the layer."""

    experts: float
    """Expected number of experts read."""
    bf16_bytes: float
    w4a16_bytes: float
    bf16_s: float
    w4a16_s: float

    @property
    def speedup(self) -> float:
        """Predicted time of BF16 over that of W4A16."""
        return self.bf16_s / self.w4a16_s


def expected_distinct_experts(tokens: int, num_experts: int, top_k: int) -> float:
    """Experts that `tokens` tokens reach together if each chooses `top_k` different ones uniformly at random."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)


def layer_bytes(tokens: int, *, hidden: int, width: int, num_experts: int, top_k: int, bits_per_value: float) -> float:
    """Bytes that one call reads and writes: used experts once, x, hidden vectors, outputs of pairs and of tokens."""
    weights = expected_distinct_experts(tokens, num_experts, top_k) * 3 * hidden * width * bits_per_value / 8
    pairs = tokens * top_k
    activations = tokens * hidden * 2 + pairs * width * 2 * 2 + pairs * hidden * 4 * 2 + tokens * hidden * 2
    return weights + activations


def predict(
    tokens: int,
    *,
    hidden: int = 2048,
    width: int = 768,
    num_experts: int = 128,
    top_k: int = 8,
    weights: str = "nvfp4",
    device: Device = H200,
    achieved: float = 0.85,
) -> Prediction:
    """Predicted time of one MoE layer (default: Qwen3-30B-A3B on an H200) in BF16 and with packed weights."""
    experts = expected_distinct_experts(tokens, num_experts, top_k)
    shape = {"hidden": hidden, "width": width, "num_experts": num_experts, "top_k": top_k}
    bf16, packed = (layer_bytes(tokens, **shape, bits_per_value=BITS_PER_VALUE[name]) for name in ("bf16", weights))
    bandwidth = achieved * device.bandwidth
    decode_s = experts * 3 * hidden * width * INSTRUCTIONS_PER_VALUE[weights] / device.lane_instructions
    return Prediction(experts, bf16, packed, bf16 / bandwidth, max(packed / bandwidth, decode_s))
