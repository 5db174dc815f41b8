"""Guidance: what the rollout rounded to, recorded in a few bits per value, and how the trainer follows it.

record.RecordLayout    where the bits of each layer and tensor sit in a token's byte row
bits, scales           packing of codes and of block scales
align                  the rule of METHOD.md section 3
accounting             bytes per token, the paper's figures
store                  guidance shards on disk

Re-exported is what needs torch alone: kernels import this package on hosts that have nothing else.
"""

from trace_rl.guidance.align import align, align_codes
from trace_rl.guidance.bits import pack_bits, unpack_bits
from trace_rl.guidance.scales import pack_scales, recover_scales

__all__ = [
    "align",
    "align_codes",
    "pack_bits",
    "pack_scales",
    "recover_scales",
    "unpack_bits",
]
