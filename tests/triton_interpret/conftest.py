"""Kernels on CPU tensors, interpreted. TRITON_INTERPRET=1 must be set before triton is imported, and a process that has
imported triton without it cannot change its mind: these tests run in a process of their own, which
tests/test_triton_quantize.py starts. A run without the variable does not collect them."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
