"""Readable names of variants: `trace@guidance.layers=last_quarter` is "trace, last quarter"."""

from collections.abc import Callable

from trace_rl.config.variants import split_name

FORMATS = {
    "nvfp4": "NVFP4",
    "mxfp4": "MXFP4 W4A4",
    "mxfp4_w4a4": "MXFP4 W4A4",
    "mxfp4_w4a8": "MXFP4 W4A8",
    "mxfp4_rceil": "MXFP4 rceil",
    "mxfp4_floor": "MXFP4 floor",
    "mxfp4_even": "MXFP4 even",
    "fouroversix": "Four-over-Six",
    "hif4": "HiF4",
    "hscale": "H-Scale",
}
TENSORS = {"fc1": "activations only", "k,v": "KV only", "fc1,k,v": "activations and KV"}
WORDS: dict[str, Callable[[str], str]] = {
    "format": lambda value: FORMATS.get(value, value),
    "guidance.layers": lambda value: {"all": "all layers"}.get(value, value.replace("_", " ")),
    "guidance.bits": lambda value: {"1": "1 bit", "4": "whole codes"}.get(value, f"{value} bits"),
    "guidance.scale_bits": lambda value: f"{value}-bit scales",
    "guidance.tensors": lambda value: TENSORS.get(value, f"guiding {value}"),
    "guidance.gate": lambda value: f"gate {value}",
    "router_replay": lambda value: "without R3" if value == "none" else "with R3",
    "loss.tis_cap": lambda value: "without TIS" if value == "null" else f"TIS cap {value}",
    "ratio.old_policy": lambda value: f"old policy {value}",
    "training.staleness": lambda value: f"staleness {value}",
    "training.learning_rate": lambda value: f"lr {float(value):g}",
    "training.updates_per_rollout": lambda value: f"{value} update{'' if value == '1' else 's'} per rollout",
    "training.problems": lambda value: {"math": "chains only", "code": "programs only"}.get(value, value),
    "training.max_new_tokens": lambda value: f"{value} tokens",
    "training.steps": lambda value: f"{value} steps",
}


def changes(name: str) -> dict[str, str]:
    """What a variant changes, {key: value as written}; empty for a method file."""
    pairs = (change.partition("=") for change in split_name(name)[1])
    return {key: value for key, _, value in pairs}


def base(name: str) -> str:
    """The method file behind a name."""
    return split_name(name)[0]


def label(name: str) -> str:
    """The name in words; a key without words of its own appears as ``key = value``."""
    varied = (WORDS.get(key, lambda value, key=key: f"{key} = {value}")(value) for key, value in changes(name).items())
    return ", ".join((base(name), *varied))


def without(name: str, *keys: str) -> str:
    """The label of a method without some of its changes: what a grid over those keys has in common."""
    varied = changes(name)
    kept = "+".join(f"{key}={value}" for key, value in varied.items() if key not in keys)
    return label(f"{base(name)}@{kept}" if kept else base(name))
