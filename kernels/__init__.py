"""Quantization kernels: each a Triton or C++ implementation beside the plain PyTorch twin that defines it.

`trace_rl.kernels.reference` is the definition; `trace_rl.kernels.dispatch` chooses an implementation by device and
explicit setting. A backend that cannot run is refused with the reason, never silently replaced.
"""
