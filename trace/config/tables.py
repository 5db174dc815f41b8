"""Which methods each of the paper's tables and figures compares; names may be those of variants.

The staleness study and the stability map name methods and a grid; `trace_rl.config.targets` expands them to variants.
"""

from pydantic import Field

from trace_rl.config.base import Section
from trace_rl.config.training import ProblemKind


class TablesConfig(Section):
    """Methods of the targets ``table1`` ... ``ablations``, each over all of ``suite.seeds``; shared runs are shared."""

    table1: tuple[str, ...] = (
        "bf16",
        "fp4_naive",
        "qat",
        "qarl",
        "quads",
        "resq",
        "sc",
        "triage",
        "trace",
        "trace_full",
    )
    """Every method of the comparison."""
    table4: tuple[str, ...] = (
        "bf16",
        "qat@format=mxfp4",
        "trace@format=mxfp4",
        "qat@format=mxfp4_w4a8",
        "trace@format=mxfp4_w4a8+guidance.tensors=k,v",
    )
    """MXFP4: W4A4 and W4A8, KV4 in both."""
    table5: tuple[str, ...] = (
        "trace",
        "trace@guidance.layers=last_quarter",
        "trace@guidance.layers=last_eighth",
        "trace@guidance.layers=all",
        "trace@guidance.layers=first_half",
        "trace@guidance.bits=2",
        "trace@guidance.bits=3",
        "trace@guidance.bits=4",
        "trace_full",
        "trace@guidance.scale_bits=2",
    )
    """Guidance: bits x layers, and cheaper scales."""
    table6: tuple[str, ...] = ("qat", "sc", "trace")
    """Score centering."""
    table7: tuple[str, ...] = ("bf16", "ptq_nvfp4", "ptq_4over6", "ptq_hscale", "trace")
    """Quantization of the BF16 policy after training; the policy that a method quantizes need not be listed."""
    mismatch: tuple[str, ...] = (
        "fp4_naive",
        "qat",
        "qat@router_replay=none",
        "trace",
        "trace@router_replay=none",
        "trace_full",
    )
    """Codeword mismatch by layer, with and without routing replay."""
    dynamics: tuple[str, ...] = ("bf16", "fp4_naive", "qat", "trace", "trace_full")
    """Curves over steps."""
    storage: tuple[str, ...] = ("trace", "trace_full", "trace@guidance.scale_bits=2")
    """Bytes of guidance."""
    ablations: tuple[str, ...] = (
        "bf16",
        "bf16@loss.tis_cap=null",
        "qat",
        "qat@loss.tis_cap=null",
        "qat@router_replay=none",
        "trace",
        "trace@loss.tis_cap=null",
        "trace@router_replay=none",
        "trace@guidance.tensors=fc1",
        "trace@guidance.tensors=k,v",
    )
    """One thing switched off at a time: routing replay, truncated importance weights, guidance of KV or activations."""
    staleness: tuple[str, ...] = ("bf16", "qat", "trace", "trace_unpinned", "trace_gated")
    """Training under staleness: each of these at all of ``staleness_levels`` and ``staleness_learning_rates``."""
    staleness_only: tuple[str, ...] = (
        "trace_anchored",
        "qat@ratio.old_policy=current",
        "trace@ratio.old_policy=current",
    )
    """Methods that are another one of the study where nothing is stale: at the levels above 0 only."""
    staleness_levels: tuple[int, ...] = Field(default=(0, 1, 3), min_length=1)
    """Policy versions between the generation of a batch and its use; at most ``training.max_version_diff``."""
    staleness_learning_rates: tuple[float, ...] = Field(default=(3e-4, 1e-3), min_length=1)
    """Learning rates of the staleness study."""
    staleness_steps: int | None = Field(default=60, ge=1)
    """Steps of the staleness study; null takes ``training.steps`` and shares runs with the other tables."""


class StabilityConfig(Section):
    """The target ``stability``: every method at every point of a grid, to see where training collapses."""

    methods: tuple[str, ...] = ("bf16", "fp4_naive", "qat", "trace")
    """Methods of the map."""
    learning_rates: tuple[float, ...] = Field(default=(3e-4, 1e-3, 3e-3), min_length=1)
    """Peak learning rates."""
    problems: tuple[ProblemKind | None, ...] = Field(default=("math", "code"), min_length=1)
    """Kinds of problems to train on, for the length of their answers (reference answers of the default data: 24 and 37
    tokens in the mean); null takes all."""
    updates_per_rollout: tuple[int, ...] = Field(default=(1, 4), min_length=1)
    """Optimizer steps per rollout batch."""
    steps: int | None = Field(default=60, ge=1)
    """Steps of each run; null takes ``training.steps``."""
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    """Seeds of each point."""
