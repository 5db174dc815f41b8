"""Which methods each of the paper's tables and figures compares; names may be those of variants."""

from pydantic import Field

from trace_rl.config.base import Section


class TablesConfig(Section):
    """Methods of the targets ``table1`` ... ``storage``, each over all of ``suite.seeds``; shared runs are shared."""

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
    """Quantization of the BF16 policy after training."""
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
    staleness: tuple[str, ...] = ()
    """Importance ratios under staleness: each of these at staleness 0, 1 and 3 and at ``staleness_learning_rates``."""
    staleness_learning_rates: tuple[float, ...] = Field(default=())
    """Learning rates of the staleness study; empty takes ``training.learning_rate``."""
