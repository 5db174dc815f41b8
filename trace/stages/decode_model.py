"""Analytic decode model: how long one decode step takes, from an architecture, a precision and a hardware line.

One step makes one token for each of B sequences that hold C tokens each. It is split into components, each a roofline:

    seconds = max(bytes / (bandwidth * memory_efficiency), flops / (rate * compute_efficiency))
    step    = sum of the components (they run one after another)

| component    | bytes                                                           | FLOPs                        |
|--------------|-----------------------------------------------------------------|------------------------------|
| dense        | 2 per weight: projections, router, shared experts, head         | 2 per weight and sequence    |
| experts      | E * (1 - (1 - K/E)^B) distinct experts a layer, at weight_bits  | 2 per weight of K experts    |
| KV           | B * C * 2 * kv_heads * head_dim * kv_bits / 8 a full attention  | 4 * heads * head_dim * B * C |
| linear state | recurrent and convolution state of B sequences, read, written   | 7 per state value            |
| activations  | input and output of every matrix, written once and read once    | 0                            |
| recording    | guidance, written once and read once when the sequence ends     | 0                            |

What is FP4 follows METHOD.md section 2: routed experts and the KV cache; all else is BF16. NVFP4 costs 4 + 8/16 = 4.5
bits a value, so at equal batch no memory-bound step gains more than 16/4.5 = 3.56.

Easy to get wrong:
- The expert term is not top_k * B experts: draws repeat. Routing is taken as uniform and independent; skewed routing
  and samples of one prompt touch fewer experts, which makes FP4 gain less than predicted.
- Hardware without FP4 units computes FP4 operands at the BF16 rate: FP4 then saves bytes and no FLOPs.
- Sparse attention reads at most its budget of tokens: its KV *traffic* stops growing with the context, while its KV
  *memory* does not.
- The speed-up at equal batch is one number, that of the largest batches that fit is another (`decode_limits`).

Left out: kernel launches, the engine's host code, sampling, communication between devices, imbalance of experts, and
whatever stays in a cache. So seconds are a lower bound, and nearly exact only where weights and KV stream from memory.
Nothing here is fitted to a measurement. Pure Python, no tensors.
"""

from dataclasses import dataclass, replace
from typing import Literal

Math = Literal["bf16", "fp8", "fp4"]

STATE_FLOPS = 7
"""Per value of a gated delta rule state: decay 1, read by key 2, rank-one update 2, read by query 2."""


@dataclass(frozen=True)
class Precision:
    """Bits per value of what may be FP4 (block scales included), and the arithmetic of the experts' matrices."""

    name: str
    weight_bits: float
    activation_bits: float
    kv_bits: float
    math: Math


BF16 = Precision("bf16", weight_bits=16, activation_bits=16, kv_bits=16, math="bf16")
W4A16 = Precision("w4a16", weight_bits=4.5, activation_bits=16, kv_bits=16, math="bf16")
W4A8_KV4 = Precision("w4a8+kv4", weight_bits=4.25, activation_bits=8.25, kv_bits=4.25, math="fp8")
"""MXFP4 weights and KV, MXFP8 activations: blocks of 32 with one byte of scale."""
W4A4_KV4 = Precision("w4a4+kv4", weight_bits=4.5, activation_bits=4.5, kv_bits=4.5, math="fp4")
MXFP4_W4A16 = Precision("mxfp4 w4a16", weight_bits=4.25, activation_bits=16, kv_bits=16, math="bf16")
FP4_PRECISIONS = (W4A4_KV4, W4A8_KV4, W4A16)


@dataclass(frozen=True)
class Hardware:
    """`devices` equal devices among which weights, KV and work are split evenly, at no cost of communication."""

    name: str
    bandwidth: float
    """Bytes/s of one device's memory."""
    bf16_flops: float
    """Dense FLOP/s of one device, without structured sparsity; so the next two. None: no such units."""
    fp8_flops: float | None
    fp4_flops: float | None
    memory_bytes: float
    """Of one device."""
    memory_efficiency: float
    """Share of `bandwidth` that kernels reach; 1 where `bandwidth` was itself measured."""
    compute_efficiency: float
    """Share of the FLOP/s that kernels reach; 1 where they were measured."""
    usable_memory: float
    """Share of the memory for weights, KV and state; the rest is the engine's."""
    devices: int = 1

    def times(self, devices: int) -> "Hardware":
        """As many devices of this kind."""
        return replace(self, devices=devices)

    def rate(self, math: Math) -> float:
        """FLOP/s reached by all devices; FP4 and FP8 operands are multiplied in BF16 where there are no such units."""
        flops = {"bf16": self.bf16_flops, "fp8": self.fp8_flops, "fp4": self.fp4_flops}[math] or self.bf16_flops
        return flops * self.compute_efficiency * self.devices

    @property
    def rate_of_memory(self) -> float:
        """Bytes/s reached by all devices."""
        return self.bandwidth * self.memory_efficiency * self.devices

    @property
    def capacity(self) -> float:
        """Bytes of all devices that weights, KV and state may take."""
        return self.memory_bytes * self.usable_memory * self.devices


@dataclass(frozen=True)
class LinearAttention:
    """A gated delta rule layer: its state is constant in the context."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_kernel: int
    state_bytes_per_value: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def recurrent_values(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def state_bytes(self) -> int:
        """Of one layer and sequence."""
        return self.recurrent_values * self.state_bytes_per_value + 2 * self.conv_channels * (self.conv_kernel - 1)


@dataclass(frozen=True)
class SparseAttention:
    """An indexer scores blocks of `compress` tokens by one key each and attends to the best `budget` tokens."""

    heads: int
    head_dim: int
    budget: int
    compress: int


@dataclass(frozen=True)
class Architecture:
    """What a step's bytes and FLOPs depend on. Weights are matrices only: norms and biases are left out."""

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_layers: int
    """Layers with a KV cache."""
    linear_layers: int
    moe_layers: int
    dense_mlp_layers: int
    num_experts: int
    top_k: int
    expert_size: int
    shared_expert_size: int
    """0: none."""
    dense_mlp_size: int
    vocab_size: int
    tied_embeddings: bool
    output_gate: bool
    """Full attention whose query projection also makes a gate, so is twice as wide."""
    linear: LinearAttention | None = None
    sparse: SparseAttention | None = None
    other_weights: int = 0
    """Dense weights of parts that only some architectures have (residual streams)."""
    lookup_weights: int = 0
    """Tables beside the token embedding of which a token reads a few rows; kept in the memory of the host."""

    @property
    def num_layers(self) -> int:
        return self.attention_layers + self.linear_layers

    @property
    def attention_weights(self) -> int:
        """Of one full attention layer."""
        query = self.hidden_size * self.num_heads * self.head_dim
        key_value = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        index = 0
        if self.sparse is not None:
            index = self.hidden_size * (self.sparse.heads + 1) * self.sparse.head_dim
        return query * (3 if self.output_gate else 2) + key_value + index

    @property
    def linear_weights(self) -> int:
        """Of one linear attention layer: q, k, v, gate, two values per head, convolution, output."""
        if self.linear is None:
            return 0
        values = self.linear.value_heads * self.linear.value_dim
        inputs = self.hidden_size * (self.linear.conv_channels + values + 2 * self.linear.value_heads)
        return inputs + self.linear.conv_channels * self.linear.conv_kernel + values * self.hidden_size

    @property
    def expert_weights(self) -> int:
        """Of one expert of one layer."""
        return 3 * self.hidden_size * self.expert_size

    @property
    def routed_weights(self) -> int:
        """All routed experts of all layers: what FP4 covers."""
        return self.moe_layers * self.num_experts * self.expert_weights

    @property
    def dense_weights(self) -> int:
        """What every step reads once whatever the batch: all but routed experts and tables."""
        shared = 3 * self.hidden_size * self.shared_expert_size + (self.hidden_size if self.shared_expert_size else 0)
        return (
            self.attention_layers * self.attention_weights
            + self.linear_layers * self.linear_weights
            + self.moe_layers * (self.hidden_size * self.num_experts + shared)
            + self.dense_mlp_layers * 3 * self.hidden_size * self.dense_mlp_size
            + self.vocab_size * self.hidden_size
            + self.other_weights
        )

    @property
    def embedding_weights(self) -> int:
        """The token embedding, where it is not the head's own matrix."""
        return 0 if self.tied_embeddings else self.vocab_size * self.hidden_size

    @property
    def active_weights(self) -> int:
        """Read for one token."""
        return self.dense_weights + self.moe_layers * self.top_k * self.expert_weights

    @property
    def total_weights(self) -> int:
        """All matrices, tables included."""
        return self.dense_weights + self.routed_weights + self.embedding_weights + self.lookup_weights

    def weight_bytes(self, precision: Precision) -> float:
        """What the devices hold; `lookup_weights` are the host's."""
        return 2 * (self.dense_weights + self.embedding_weights) + self.routed_weights * precision.weight_bits / 8

    def kv_bytes_per_token(self, precision: Precision) -> float:
        """Stored by all layers. Index keys of sparse attention are BF16, one per block."""
        values = 2 * self.num_kv_heads * self.head_dim
        index = 2 * self.sparse.head_dim / self.sparse.compress if self.sparse is not None else 0
        return self.attention_layers * (values * precision.kv_bits / 8 + index)

    @property
    def state_bytes(self) -> int:
        """Constant state of one sequence."""
        return self.linear_layers * self.linear.state_bytes if self.linear is not None else 0

    def sequence_bytes(self, context: int, precision: Precision) -> float:
        """What one sequence of `context` tokens keeps in memory."""
        return context * self.kv_bytes_per_token(precision) + self.state_bytes


@dataclass(frozen=True)
class Component:
    """A part of a step that moves `num_bytes` and computes `flops` in `math`."""

    name: str
    num_bytes: float
    flops: float
    math: Math = "bf16"

    def seconds(self, hardware: Hardware) -> float:
        return max(self.memory_seconds(hardware), self.compute_seconds(hardware))

    def memory_seconds(self, hardware: Hardware) -> float:
        return self.num_bytes / hardware.rate_of_memory

    def compute_seconds(self, hardware: Hardware) -> float:
        return self.flops / hardware.rate(self.math)


@dataclass(frozen=True)
class Step:
    """One decode step of `batch` sequences that hold `context` tokens each."""

    batch: int
    context: int
    components: tuple[Component, ...]

    @property
    def num_bytes(self) -> float:
        return sum(part.num_bytes for part in self.components)

    def seconds(self, hardware: Hardware) -> float:
        return sum(part.seconds(hardware) for part in self.components)

    def tokens_per_s(self, hardware: Hardware) -> float:
        return self.batch / self.seconds(hardware)

    def shares(self, hardware: Hardware) -> dict[str, float]:
        """Share of the step's seconds by component."""
        total = self.seconds(hardware)
        return {part.name: part.seconds(hardware) / total for part in self.components}

    def part(self, name: str) -> Component:
        return next(part for part in self.components if part.name == name)


def distinct_experts(num_experts: int, top_k: int, batch: int) -> float:
    """Expected number of experts that `batch` tokens touch, each choosing `top_k` different ones at random."""
    return num_experts * (1 - (1 - top_k / num_experts) ** batch)


def expert_part(
    *, layers: int, num_experts: int, top_k: int, hidden: int, inter: int, batch: int, precision: Precision
) -> Component:
    """Routed experts of `layers` layers for one token of each of `batch` sequences."""
    weights = 3 * hidden * inter
    touched = layers * distinct_experts(num_experts, top_k, batch)
    flops = 2.0 * layers * top_k * weights * batch
    return Component("experts", touched * weights * precision.weight_bits / 8, flops, precision.math)


def decode_step(
    arch: Architecture, precision: Precision, *, batch: int, context: int, recording_bytes: int = 0
) -> Step:
    """The components of a step; `recording_bytes` is the length of one token's guidance (0: none is recorded)."""
    experts = expert_part(
        layers=arch.moe_layers, num_experts=arch.num_experts, top_k=arch.top_k, hidden=arch.hidden_size,
        inter=arch.expert_size, batch=batch, precision=precision,
    )  # fmt: skip
    parts = [
        Component("dense", 2.0 * arch.dense_weights, 2.0 * arch.dense_weights * batch),
        experts,
        _kv_part(arch, precision, batch=batch, context=context),
        Component("activations", batch * _activation_bytes(arch, precision), 0.0),
    ]
    if arch.linear is not None:
        state_values = arch.linear_layers * arch.linear.recurrent_values
        parts.append(Component("linear state", 2.0 * batch * arch.state_bytes, STATE_FLOPS * batch * state_values))
    if recording_bytes:
        parts.append(Component("recording", 2.0 * batch * recording_bytes, 0.0))
    return Step(batch, context, tuple(parts))


def _kv_part(arch: Architecture, precision: Precision, *, batch: int, context: int) -> Component:
    """Attention itself: reads the tokens attended to, writes one; multiplies in BF16, also where KV is FP4."""
    value_bytes = 2 * arch.num_kv_heads * arch.head_dim * precision.kv_bits / 8
    read, index_bytes, index_flops = context, 0.0, 0.0
    if arch.sparse is not None:
        read = min(context, arch.sparse.budget)
        blocks = context / arch.sparse.compress
        index_bytes = blocks * 2 * arch.sparse.head_dim
        index_flops = blocks * 2 * arch.sparse.heads * arch.sparse.head_dim
    per_layer = (read + 1) * value_bytes + index_bytes
    flops = 4 * arch.num_heads * arch.head_dim * read + index_flops
    return Component("KV", batch * arch.attention_layers * per_layer, batch * arch.attention_layers * flops)


def _activation_bytes(arch: Architecture, precision: Precision) -> float:
    """Per token: input and output of every matrix, each written once and read once. Inputs of experts may be FP4."""
    hidden = arch.hidden_size
    attention = 2 * hidden + (arch.num_heads * (3 if arch.output_gate else 2) + 2 * arch.num_kv_heads) * arch.head_dim
    linear = 0
    if arch.linear is not None:
        linear = 2 * hidden + arch.linear.conv_channels + 2 * arch.linear.value_heads * arch.linear.value_dim
    shared = 2 * hidden + 3 * arch.shared_expert_size if arch.shared_expert_size else 0
    dense_mlp = 2 * hidden + 3 * arch.dense_mlp_size
    bf16_values = (
        arch.attention_layers * attention
        + arch.linear_layers * linear
        + arch.moe_layers * (shared + arch.num_experts + arch.top_k * (hidden + 2 * arch.expert_size))
        + arch.dense_mlp_layers * dense_mlp
        + hidden
        + arch.vocab_size
    )
    quantized_values = arch.moe_layers * (hidden + arch.top_k * arch.expert_size)
    return 2 * (2 * bf16_values + quantized_values * precision.activation_bits / 8)
