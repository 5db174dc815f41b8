"""The report's contents: which numbers stand where, and what is said of them."""

import json
from pathlib import Path
from typing import Any

import yaml

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.guidance.accounting import plan
from trace_rl.report import figures
from trace_rl.report.claims import Claim, average, claims, seed_mean, show
from trace_rl.report.document import Document, Figure, Section, Table

PAPER = Path(__file__).with_name("paper.yaml")
PAPER_MODEL = Path(__file__).with_name("qwen3_5_35b_a3b.json")
EXECUTION_NAMES = {"fp4": "FP4 (emulated)", "bf16": "BF16"}
TITLE = "TRACE in miniature"
Methods = dict[str, RlMethod | PtqMethod]

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
    ("Recorded tokens", "prompt and response; the last sampled token is never fed and has no record"),
    ("Gated guidance", "off (guidance.gate = 0.5)"),
    (
        "Optimizer constants",
        "AdamW betas and clipping as in the configuration; the accounts state the learning rate only",
    ),
)


def build(
    summary: dict[str, Any],
    *,
    config: ExperimentConfig,
    methods: Methods,
    runs: figures.Runs,
    artifacts: dict[str, dict[str, Any]],
    seconds: dict[str, float],
) -> Document:
    """The document. ``artifacts``: calibration, audit, parity, bench; ``seconds``: wall time by rule."""
    paper = yaml.safe_load(PAPER.read_text())
    tested = claims(summary, paper)
    return Document(
        title=f"{TITLE}: run {summary['run']}",
        lead=lead(summary, tested),
        sections=[
            claims_section(tested),
            accuracy_section(summary, methods),
            learning_section(summary, runs),
            mismatch_section(summary, runs),
            bytes_section(summary, paper),
            time_section(summary, artifacts["bench"], seconds),
            gates_section(artifacts),
            Section("Choices the paper does not state", [Table(("choice", "here"), CHOICES)]),
            provenance_section(summary, config, methods),
        ],
    )


def lead(summary: dict[str, Any], tested: list[Claim]) -> list[str]:
    """What a reader must know first: disagreements, then what is unresolved, then what this is."""
    against = [claim.statement for claim in tested if claim.verdict in ("opposite direction", "weaker")]
    open_ = [claim.statement for claim in tested if claim.verdict == "not resolved"]
    paragraphs = []
    if against:
        paragraphs.append("This run disagrees with the paper on: " + "; ".join(against) + ".")
    else:
        paragraphs.append("No claim tested here came out against the paper's direction.")
    if open_:
        paragraphs.append("Not resolved at this size (within two standard errors): " + "; ".join(open_) + ".")
    collapsed = [f"{n} seed {s}" for n, seeds in summary["methods"].items() for s, r in seeds.items() if r["collapsed"]]
    if collapsed:
        paragraphs.append("Collapsed runs, shown like all others: " + ", ".join(collapsed) + ".")
    paragraphs.append(
        "A small mixture-of-experts policy is trained by RL with FP4 rollouts. FP4 is emulated: values are rounded to "
        "FP4 bit for bit and multiplied in BF16, so accuracy, gaps and bytes carry over and speed does not. Every "
        "method has the same budget, starting policy and hyperparameters."
    )
    return paragraphs


def claims_section(tested: list[Claim]) -> Section:
    rows = tuple((c.statement, c.paper, c.here, c.verdict) for c in tested)
    note = (
        "The paper's numbers are for Qwen3.5-35B-A3B on LiveCodeBench v6, AIME24, AIME25 and HMMT25; here the mean "
        "over this run's tasks stands in their place. Directions compare, values do not."
    )
    return Section("Paper beside here", [note, Table(("claim", "paper", "here", "same direction?"), rows)])


def accuracy_section(summary: dict[str, Any], methods: Methods) -> Section:
    tasks = list(summary["start"]["accuracy"])
    header = (
        "policy",
        *(f"{task}, {EXECUTION_NAMES[e]}" for e in ("fp4", "bf16") for task in tasks),
        "mean FP4",
        "mean BF16",
    )

    def cells(accuracy: list[dict[str, Any]]) -> list[str]:
        out = []
        for execution in ("fp4", "bf16"):
            for task in tasks:
                scores = [a[task][execution] for a in accuracy]
                mean = sum(s["mean"] for s in scores) / len(scores)
                stderr = sum(s["stderr"] ** 2 for s in scores) ** 0.5 / len(scores)
                out.append(f"{100 * mean:.1f} ± {100 * stderr:.1f}")
        return out

    start = [summary["start"]["accuracy"]]
    rows = [("before RL", *cells(start), "", "")]
    for name in methods:
        records = [record["accuracy"] for record in summary["methods"][name].values()]
        both = [average(summary, name, execution) for execution in ("fp4", "bf16")]
        rows.append((name, *cells(records), *(show(estimate) for estimate in both)))
    counts = {task: start[0][task]["fp4"]["n"] for task in tasks}
    caption = (
        "Greedy decoding through lm-eval; percent ± standard error; problems per task: "
        + ", ".join(f"{task} {n}" for task, n in counts.items())
        + f"; seeds: {len(next(iter(summary['methods'].values())))}."
    )
    return Section(
        "Final accuracy",
        [
            Table(header, tuple(rows), caption),
            Figure("accuracy_fp4", figures.accuracy(summary, execution="fp4"), "FP4 execution; dashed: before RL."),
            Figure("accuracy_bf16", figures.accuracy(summary, execution="bf16"), "BF16 execution; dashed: before RL."),
        ],
    )


def learning_section(summary: dict[str, Any], runs: figures.Runs) -> Section:
    rows = []
    for name, seeds in summary["methods"].items():
        for seed, record in seeds.items():
            if record["steps"] is None:
                continue
            rows.append(
                (
                    name,
                    seed,
                    str(record["steps"]),
                    f"{record['reward_start']:.3f}",
                    f"{record['reward_end']:.3f}",
                    f"{record['reward_gain']:+.3f}",
                    "yes" if record["collapsed"] else "no",
                )
            )
    window = next((r["reward_window_steps"] for s in summary["methods"].values() for r in s.values() if r["steps"]), 0)
    return Section(
        "Learning",
        [
            Table(
                ("method", "seed", "steps", "reward, first", "reward, last", "gain", "collapsed"),
                tuple(rows),
                f"Reward at the sampling temperature, averaged over the first and last {window} steps. Collapsed: the "
                "last below half of the first.",
            ),
            Figure("reward", figures.curve(runs, "reward", label="reward"), "Reward; moving average over raw values."),
            Figure(
                "entropy", figures.curve(runs, "entropy", label="entropy (nats)"), "Entropy of the trainer's policy."
            ),
            Figure(
                "length", figures.curve(runs, "response_length", label="response length (tokens)"), "Response length."
            ),
        ],
    )


def mismatch_section(summary: dict[str, Any], runs: figures.Runs) -> Section:
    rows = []
    for name in summary["methods"]:
        if seed_mean(summary, name, "logprob_gap_mean") is None:
            continue

        def percent(key: str, name: str = name) -> str:
            value = seed_mean(summary, name, "diagnostics", key)
            return "–" if value is None else f"{100 * value:.3f}"

        rows.append(
            (
                name,
                f"{seed_mean(summary, name, 'logprob_gap_mean'):.5f}",
                f"{seed_mean(summary, name, 'logprob_gap_p99'):.4f}",
                percent("diag/rtn/mismatch"),
                percent("diag/own/mismatch"),
                percent("diag/rtn/mismatch/deeper_half"),
                percent("diag/own/mismatch/deeper_half"),
                percent("diag/rtn/adjacent"),
                percent("diag/own/bracket_miss/deeper_half"),
                percent("diag/off/router_disagreement"),
            )
        )
    header = (
        "method",
        "gap mean",
        "gap p99",
        "mismatch, nearest (%)",
        "mismatch, method (%)",
        "deeper half, nearest (%)",
        "deeper half, method (%)",
        "one codeword apart (%)",
        "bracket misses, deeper half (%)",
        "router disagreement (%)",
    )
    blocks: list[str | Table | Figure] = [
        "Gap is |log pi_train - log pi_rollout| on the sampled tokens of every step. Codewords are compared on "
        "diagnostic batches with whole codes of all layers recorded: once with the trainer rounding to nearest, once "
        "as the method rounds. Router disagreement is counted before replay.",
        Table(header, tuple(rows)),
        Figure("gap", figures.curve(runs, "gap_mean", label="mean |Δ log p|", log=True), "Train-rollout gap by step."),
    ]
    for tensor, label in (("fc1", "FC1 input"), ("k", "K"), ("v", "V")):
        svg = figures.mismatch_by_layer(summary, tensor=tensor)
        if svg is not None:
            blocks.append(
                Figure(f"mismatch_{tensor}", svg, f"Codeword mismatch by layer, {label}, as each method rounds.")
            )
    return Section("Train-rollout mismatch", blocks)


def bytes_section(summary: dict[str, Any], paper: dict[str, Any]) -> Section:
    rows = tuple(
        (name, f"{value:.0f}")
        for name in summary["methods"]
        if (value := seed_mean(summary, name, "guidance_bytes_per_token"))
    )
    return Section(
        "Guidance bytes",
        [
            Table(("method", "bytes per token, here"), rows, "Length of one token's guidance row as recorded."),
            Table(
                ("Qwen3.5-35B-A3B, computed", "value", "paper"),
                paper_bytes(paper),
                "The same accounting for the paper's model.",
            ),
        ],
    )


def paper_bytes(paper: dict[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """The byte table of the paper's 35B model beside the figures the paper gives."""
    guidance = paper["guidance"]
    reported = {
        "full, activations": f"{guidance['full_activation_kib_per_token']} KiB",
        "full, KV": f"{guidance['full_kv_kib_per_token']} KiB",
        "compact, activations": f"{guidance['compact_kib_per_token']} KiB",
        "full / compact": f"{guidance['ratio']}x",
        "one RL step, full activations + KV": f"{guidance['step_tib']} TiB",
    }
    model = json.loads(PAPER_MODEL.read_text())
    return tuple((row.name, row.text, reported.get(row.name, "–")) for row in plan(model))


def time_section(summary: dict[str, Any], bench: dict[str, Any], seconds: dict[str, float]) -> Section:
    blocks: list[str | Table | Figure] = []
    svg = figures.step_time(summary)
    if svg is not None:
        blocks.append(
            Figure("step_time", svg, "Median seconds per step by phase. Two runs share the machine side by side.")
        )
    blocks += [quantization_table(summary), bench_table(bench), recording_table(bench)]
    if seconds:
        rows = tuple((rule, f"{value:.0f}") for rule, value in sorted(seconds.items(), key=lambda item: -item[1]))
        blocks.append(
            Table(("rule", "wall seconds"), rows, "From the workflow's benchmark files; runs go side by side.")
        )
    return Section("Time", blocks)


def quantization_table(summary: dict[str, Any]) -> Table:
    """How much of a training step goes into rounding."""
    rows = []
    for name in summary["methods"]:
        activations, weights, step = (
            seed_mean(summary, name, *keys)
            for keys in (("quantize_s", "activations"), ("quantize_s", "weights"), ("step_s", "step"))
        )
        if step is not None:
            share = 100 * (activations + weights) / step
            rows.append(
                (name, f"{1000 * activations:.0f}", f"{1000 * weights:.0f}", f"{1000 * step:.0f}", f"{share:.1f}")
            )
    return Table(
        ("method", "activations and KV, ms", "weights, ms", "whole step, ms", "share of the step (%)"),
        tuple(rows),
        "Fake quantization in the trainer's forward, guided or not; medians over steps. FC2 inputs are not counted "
        "where the experts are one operator, which rounds them inside.",
    )


def bench_table(bench: dict[str, Any]) -> Table:
    rows = tuple(
        (
            row["mode"],
            str(row["num_sequences"]),
            str(row["output_length"]),
            f"{row['tokens_per_s']['median']:.0f} ({row['tokens_per_s']['min']:.0f}–{row['tokens_per_s']['max']:.0f})",
            f"{row['ratio_to_bf16']:.2f}",
            f"{row['guidance_bytes_per_token']:.0f}",
        )
        for row in bench["rows"]
    )
    return Table(
        (
            "rollout",
            "sequences",
            "output tokens",
            "tokens/s, median (min–max)",
            "ratio to BF16",
            "guidance bytes per token",
        ),
        rows,
        "Rollout engine, one thread; FP4 is emulated, so it costs time here and saves it on FP4 hardware. BF16 is the "
        "same engine with quantization off; stock vLLM prepacks its weights, which is faster, and cannot be refitted.",
    )


def recording_table(bench: dict[str, Any]) -> Table:
    """What recording adds to a rollout, from repetitions side by side."""
    rows = tuple(
        (
            row["workload"],
            row["mode"],
            str(row["num_sequences"]),
            *(percent_with_interval(row[clock]) for clock in ("wall_percent", "cpu_percent")),
        )
        for row in bench["recording_cost"]
    )
    return Table(
        ("rollout", "recording", "sequences", "added time (%)", "added CPU time (%)"),
        rows,
        f"Over FP4 without recording, medians of paired repetitions with 95 % interval, or smallest and largest of "
        f"fewer than 6; the paper's whole guidance costs 7.4 % of a step. Load of the machine: "
        f"{bench['environment']['load']:.1f}.",
    )


def percent_with_interval(cost: dict[str, Any]) -> str:
    """Median and interval of a paired cost."""
    low, high = (cost["min"], cost["max"]) if cost["low"] is None else (cost["low"], cost["high"])
    return f"{cost['median']:+.1f} ({low:+.1f} to {high:+.1f}, n {cost['n']})"


def gates_section(artifacts: dict[str, dict[str, Any]]) -> Section:
    parity = artifacts["parity"]
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
    audit = artifacts["audit"]
    calibration = artifacts["calibration"]
    return Section(
        "Gates",
        [
            Table(
                ("when", "forward", "gap mean", "threshold", "verdict"),
                rows,
                "Parity of trainer and engine on the same tokens, before the first update and after one update and "
                "refit.",
            ),
            f"Scope audit: {audit['num_checked']} parameters and KV tensors compared, "
            f"{len(audit['differences'])} differ.",
            f"Calibration: {calibration['num_tokens']} tokens; idle experts: {calibration['num_idle_experts']}.",
            format_error_table(calibration),
        ],
    )


def format_error_table(calibration: dict[str, Any]) -> Table:
    errors = calibration["format_relative_mse"]
    names = list(next(iter(errors.values())))
    rows = tuple(
        (kind, *("–" if by[name] is None else f"{100 * by[name]:.3f}" for name in names)) for kind, by in errors.items()
    )
    return Table(("tensor", *(f"{name} (%)" for name in names)), rows, "Relative squared error by tensor and format.")


def provenance_section(summary: dict[str, Any], config: ExperimentConfig, methods: Methods) -> Section:
    hardware, commit = summary["hardware"], summary["commit"]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores"
    if hardware["accelerators"]:
        machine += ", " + ", ".join(hardware["accelerators"])
    dirty = {True: " with uncommitted changes", False: "", None: ""}[commit["dirty"]]
    rows = (
        ("commit", f"{commit['id'] or 'not a git checkout'}{dirty}"),
        ("machine", machine),
        ("format", f"{config.format}, emulated"),
        *((name, value) for name, value in summary["versions"].items()),
    )
    described = tuple((m.name, m.description, m.source, "; ".join(m.departures) or "–") for m in methods.values())
    return Section(
        "Provenance",
        [
            Table(("what", "value"), rows),
            Table(("method", "what it is", "source", "departs from its source"), described),
        ],
    )
