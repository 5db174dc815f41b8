"""What stands behind the numbers: gates, choices, settings, hardware, versions, commit, methods."""

from typing import Any

from trace_rl.report.context import COLLAPSE_RULE, Context
from trace_rl.report.document import Section, Table
from trace_rl.report.labels import label

CHOICES = (
    (
        "Guided tensors",
        "FC1 input (one vector per token and layer, before dispatch) and K, V; FC2 input is rounded to nearest on both "
        "sides",
    ),
    ("Encode scales of activations and KV", "static per layer, from calibration"),
    ("Tie between bracket members under full guidance", "the round-to-nearest choice"),
    ("PPO clip range", "0.2 / 0.27, from MiniRL (2512.01374)"),
    ("MXFP4 scale rule", "rceil"),
    ("MXFP8 activations of W4A8", "E4M3 in blocks of 32, shared exponent floor(log2 amax) - 8 as in OCP MX"),
    ("Guidance of W4A8", "K and V only: FP8 activations have no FP4 codeword to follow"),
    (
        "Which pi_old under staleness",
        "that of the version that sampled the batch, so that the clipped ratio carries the staleness; "
        "ratio.old_policy: current takes the trainer's before the batch's first update",
    ),
    (
        "FP4 execution at evaluation",
        "as the method rolls out, with its own format and residual; all scopes in the experiment's format for a method "
        "that rolls out in BF16",
    ),
    ("Residual channels of QUADS, column importance of H-Scale", "from calibration on the policy before RL"),
    ("Recorded tokens", "prompt and response; the last sampled token is never fed and has no record"),
    ("Gated guidance", "off (guidance.gate = 0.5)"),
    ("Optimizer constants", "AdamW betas and clipping as in the configuration"),
    ("Collapse", COLLAPSE_RULE.removeprefix("Collapsed: ")),
)


def gates_section(context: Context) -> Section | None:
    """Parity and audit by format, and calibration, as far as their artifacts are there."""
    artifacts = context.artifacts
    blocks: list[Any] = []
    for formats, parity in artifacts.get("parity", {}).items():
        rows = tuple(
            (
                row["phase"],
                row["mode"],
                f"{row['gap_mean']:.5f}",
                f"{row['threshold']:.5f}" if row["threshold"] else "–",
                row["verdict"],
            )
            for row in parity["rows"]
        )
        caption = (
            f"Parity of trainer and engine on the same tokens in {formats}, before the first update and after one "
            "update and refit."
        )
        blocks.append(Table(("when", "forward", "gap mean", "threshold", "verdict"), rows, caption))
    blocks += [
        f"Scope audit in {formats}: {audit['num_checked']} parameters and KV tensors compared, "
        f"{len(audit['differences'])} differ."
        for formats, audit in artifacts.get("audit", {}).items()
    ]
    if "calibration" in artifacts:
        calibration = artifacts["calibration"]
        blocks += [
            f"Calibration: {calibration['num_tokens']} tokens; idle experts: {calibration['num_idle_experts']}.",
            format_error_table(calibration),
        ]
    return Section("Gates", blocks) if blocks else None


def trained_at(summary: dict[str, Any]) -> str:
    """Commits of the trainings; a page may show runs that an older state of the code made, or began."""
    found: dict[str, int] = {}
    for made in makers(summary):
        commit = made["commit"]
        words = f"{commit['id']}{' with uncommitted changes' if commit['dirty'] else ''}" if commit["id"] else "unknown"
        found[words] = found.get(words, 0) + 1
    return counted(found)


def trained_on(summary: dict[str, Any]) -> str:
    """Machines of the trainings."""
    found: dict[str, int] = {}
    for made in makers(summary):
        machine = made["machine"]
        words = ", ".join([f"{machine['cpu']}, {machine['cores']} cores", *machine["accelerators"]])
        found[words] = found.get(words, 0) + 1
    return counted(found)


def makers(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Commit and machine of every process that trained; a resumed training has several."""
    records = (record for seeds in summary["methods"].values() for record in seeds.values())
    return [made for record in records for made in record.get("made_by") or ()]


def counted(found: dict[str, int]) -> str:
    """Each with the number of trainings where there are several."""
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{words} ({count})" for words, count in found.items()) or "not recorded"


def format_error_table(calibration: dict[str, Any]) -> Table:
    """Relative squared error of every format."""
    errors = calibration["format_relative_mse"]
    names = list(next(iter(errors.values())))
    rows = tuple(
        (kind, *("–" if by[name] is None else f"{100 * by[name]:.3f}" for name in names)) for kind, by in errors.items()
    )
    return Table(("tensor", *(f"{name} (%)" for name in names)), rows, "Relative squared error by tensor and format.")


def choices_section(context: Context) -> Section:
    """What the paper does not state, and what it states beside what is set here."""
    training, settings = context.config.training, context.paper["settings"]
    samples = settings["samples_per_step"]["Qwen3.5-35B-A3B"]
    rows = (
        ("optimizer", settings["optimizer"], "GRPO"),
        ("learning rate", "1e-6", f"{training.learning_rate:g}: a policy a ten-thousandth of the size"),
        (
            "advantage",
            settings["optimizer"],
            "(R - mean) / (std + 1e-6) over a prompt's responses" if training.advantage_std else "R - mean",
        ),
        ("router replay", settings["router_replay"], "R3, off in variants that say so"),
        ("importance ratio cap", str(settings["importance_ratio_cap"]), "5, or the cap of a method's own source"),
        ("largest version difference", str(settings["max_version_diff"]), str(training.max_version_diff)),
        ("quantized", ", ".join(settings["quantized"]), "routed experts' weights and inputs, KV cache"),
        (
            "samples per step (35B)",
            f"{samples[0]} x {samples[1]}",
            f"{training.prompts_per_step} x {training.samples_per_prompt}",
        ),
        ("steps (35B)", str(settings["steps"]["Qwen3.5-35B-A3B"]), str(training.steps)),
    )
    return Section(
        "Choices the paper does not state",
        [Table(("choice", "here"), CHOICES), Table(("setting the paper states", "paper", "here"), rows)],
    )


def provenance_section(context: Context) -> Section:
    """Machine, versions, commit, and the methods with their departures."""
    summary = context.summary
    hardware, commit = summary["hardware"], summary["commit"]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores"
    if hardware["accelerators"]:
        machine += ", " + ", ".join(hardware["accelerators"])
    dirty = {True: " with uncommitted changes", False: "", None: ""}[commit["dirty"]]
    seeds = sorted({seed for record in summary["methods"].values() for seed in record}, key=int)
    rows = (
        ("page written at commit", f"{commit['id'] or 'not a git checkout'}{dirty}"),
        ("trainings made at commit", trained_at(summary)),
        ("page written on", machine),
        ("trainings made on", trained_on(summary)),
        ("format", f"{context.config.format}, emulated, unless a method says otherwise"),
        ("seeds", ", ".join(seeds)),
        *((name, value) for name, value in summary["versions"].items()),
    )
    described = tuple(
        (label(name), method.description, method.source, "; ".join(method.departures) or "–")
        for name, method in context.methods.items()
    )
    return Section(
        "Provenance",
        [
            Table(("what", "value"), rows),
            Table(("method", "what it is", "source", "departs from its source"), described),
        ],
    )
