"""What the decode model says when asked: how much faster, what fits, and where the gain ends.

At equal batch FP4 gains at most the ratio of the bytes, 16/4.5 = 3.56 (where FP4 units are the limit, that of the
FLOP/s). A larger batch that only FP4 fits raises tokens/s by more; `at_capacity` is the one place that computes it,
and its ratio depends on the memory: near infinite where BF16 barely fits, back to that of the KV bytes where memory
is ample. Pure Python, no tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trace_rl.stages.decode_model import BF16, Architecture, Hardware, Precision, decode_step


def speedup(arch: Architecture, hardware: Hardware, precision: Precision, *, batch: int, context: int) -> float:
    """Seconds of a BF16 step over seconds of a step in `precision`, at the same batch and context."""
    plain = decode_step(arch, BF16, batch=batch, context=context).seconds(hardware)
    return plain / decode_step(arch, precision, batch=batch, context=context).seconds(hardware)


def largest_batch(arch: Architecture, hardware: Hardware, precision: Precision, *, context: int) -> int:
    """Sequences of `context` tokens that fit beside the weights; 0 when none does."""
    room = hardware.capacity - arch.weight_bytes(precision)
    return max(0, int(room // arch.sequence_bytes(context, precision)))


@dataclass(frozen=True)
class AtCapacity:
    """BF16 and another precision, each at the largest batch that fits."""

    batch_bf16: int
    batch: int
    tokens_per_s_bf16: float
    tokens_per_s: float

    @property
    def ratio(self) -> float:
        """Of tokens/s."""
        return self.tokens_per_s / self.tokens_per_s_bf16


def at_capacity(arch: Architecture, hardware: Hardware, precision: Precision, *, context: int) -> AtCapacity | None:
    """None when BF16 does not fit a single sequence: there is nothing to compare with."""
    plain, other = (largest_batch(arch, hardware, each, context=context) for each in (BF16, precision))
    if not plain:
        return None
    return AtCapacity(
        plain,
        other,
        decode_step(arch, BF16, batch=plain, context=context).tokens_per_s(hardware),
        decode_step(arch, precision, batch=other, context=context).tokens_per_s(hardware),
    )


def devices_to_fit(arch: Architecture, hardware: Hardware, precision: Precision, *, context: int) -> int:
    """Smallest power of two of devices that holds the weights and one sequence."""
    devices = 1
    while not largest_batch(arch, hardware.times(devices), precision, context=context):
        devices *= 2
    return devices


def compute_bound_batch(arch: Architecture, hardware: Hardware, precision: Precision, *, most: int) -> int | None:
    """Smallest batch at which the experts take longer to compute than to read; None when not up to `most`.

    FLOPs per byte grow with the batch (draws repeat), so the smallest one is found by bisection.
    """

    def bound(batch: int) -> bool:
        part = decode_step(arch, precision, batch=batch, context=0).part("experts")
        return part.compute_seconds(hardware) >= part.memory_seconds(hardware)

    if not bound(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) else (middle, high)
    return high


def kv_bound_batch(arch: Architecture, precision: Precision, *, context: int, most: int) -> int | None:
    """Smallest batch (power of two) at which KV moves more bytes than the experts; None when not up to `most`."""
    for batch in powers_of_two(most):
        step = decode_step(arch, precision, batch=batch, context=context)
        if step.part("KV").num_bytes > step.part("experts").num_bytes:
            return batch
    return None


def speedup_range(
    arch: Architecture, hardware: Hardware, precision: Precision, *, context: int, most: int
) -> tuple[float, int, float, int]:
    """(smallest speed-up at equal batch, its batch, largest, its batch) over the powers of two up to `most`."""
    found = [(speedup(arch, hardware, precision, batch=b, context=context), b) for b in powers_of_two(most)]
    return *min(found), *max(found)


def fading_batch(
    arch: Architecture, hardware: Hardware, precision: Precision, *, context: int, below: float, most: int
) -> int | None:
    """Smallest batch (power of two) past the best one at which the equal-batch speed-up is under `below`.

    Past the best one, because a batch of 1 may already be under it: there the dense BF16 weights take most of the time.
    """
    best = speedup_range(arch, hardware, precision, context=context, most=most)[3]
    for batch in powers_of_two(most):
        if batch > best and speedup(arch, hardware, precision, batch=batch, context=context) < below:
            return batch
    return None


def batch_for_ratio(
    arch: Architecture, hardware: Hardware, precision: Precision, *, context: int, target: float, most: int
) -> tuple[int, float] | None:
    """Most sequences BF16 may fit such that the ratio at capacity is still `target`, and that memory in bytes.

    The memory is what holds those sequences and no more. With more of it the weights matter less, and the ratio
    falls towards that of the KV bytes; so the answer is the last batch that reaches the target. None: no batch does.
    """
    answer = None
    room, per_sequence = arch.weight_bytes(BF16) - arch.weight_bytes(precision), arch.sequence_bytes(context, precision)
    for batch in range(1, most + 1):
        kv_bytes = batch * arch.sequence_bytes(context, BF16)
        fits = int((room + kv_bytes) // per_sequence)
        plain = decode_step(arch, BF16, batch=batch, context=context).tokens_per_s(hardware)
        if decode_step(arch, precision, batch=fits, context=context).tokens_per_s(hardware) / plain >= target:
            answer = (batch, arch.weight_bytes(BF16) + kv_bytes)
    return answer


def powers_of_two(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to `most`."""
    batch = 1
    while batch <= most:
        yield batch
        batch *= 2
