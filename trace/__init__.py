"""trace_rl: FP4 reinforcement learning of mixture-of-experts language models with rollout-guided quantization.

The import name is ``trace_rl`` although the folder is called ``trace``: the standard library owns the name ``trace``,
and site-packages comes after it on ``sys.path``. Importing this folder under its own name would load every module
twice (two copies of each registry), so it is refused.
"""

if __name__ == "trace":
    raise ImportError(
        "this folder is the source of the package `trace_rl`, not the standard library's `trace`: "
        "run `make setup` (or `pip install -e .`) and `import trace_rl`; if you wanted the standard library's "
        "tracer, run Python from outside the repository root"
    )

__version__ = "0.1.0"
