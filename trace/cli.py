"""`trace-rl STAGE`: one command per stage of the workflow; a rule of the DAG runs exactly one of them.

A command reads the experiment, and hands it with the run's paths to `trace_rl.stages.<stage>.run`. Each imports its
stage inside the function body, so that `--help` of any command needs neither PyTorch nor vLLM, and answers at once.

Exit codes: 0; 2 for what a user can cause (`error: ...` on standard error); 1 for a check of the DAG that said no
(`failed: ...`) and for a fault, with its traceback; 130 for Ctrl-C.
"""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trace_rl.errors import UserError
from trace_rl.stages.failure import StageFailure

if TYPE_CHECKING:
    from trace_rl.config.experiment import ExperimentConfig
    from trace_rl.config.method import PtqMethod, RlMethod
    from trace_rl.config.paths import RunPaths
    from trace_rl.config.quant import FormatChoice

app = typer.Typer(
    name="trace-rl",
    help="FP4 reinforcement learning of mixture-of-experts models, with rounding aligned between rollout and trainer.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Benchmarks.", no_args_is_help=True, rich_markup_mode=None)
config_app = typer.Typer(help="What a configuration file may say.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")
app.add_typer(config_app, name="config")

Config = Annotated[str, typer.Option("--config", "-c", metavar="FILE", help="Experiment: a YAML file, or JSON text.")]
Results = Annotated[Path, typer.Option("--results", metavar="DIR", help="Results go to DIR/<run of the config>.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a key, e.g. training.steps=5; repeatable."),
]
Method = Annotated[
    str, typer.Option("--method", "-m", metavar="NAME", help="A method file's name, or a variant of it.")
]
Formats = Annotated[
    str | None, typer.Option("--format", metavar="NAME", help="Formats to check; without it, those of the experiment.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="A seed of suite.seeds.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result to FILE as JSON.")]

CONFIG = "config/config.yaml"
RESULTS = Path("results")

held = contextlib.ExitStack()
"""Locks of the running command; `main` lets go of them."""


def load(config: str, results: Path, overrides: list[str] | None) -> "tuple[ExperimentConfig, RunPaths]":
    """The validated experiment and where its run keeps artifacts; a rule passes its sections as JSON text."""
    from trace_rl.config.load import parse_experiment, read_yaml
    from trace_rl.config.paths import RunPaths

    inline = config.lstrip().startswith("{")
    data = read_json(config) if inline else read_yaml(Path(config))
    for item in overrides or []:
        override(data, item)
    experiment = parse_experiment(data, source="--config" if inline else config, whole=not inline)
    return experiment, RunPaths(run=experiment.run, root=results)


def open_run(
    config: str, results: Path, overrides: list[str] | None, *, job: str
) -> "tuple[ExperimentConfig, RunPaths]":
    """What `load` returns, with `job` locked until the command ends; UserError when another process has it."""
    from trace_rl.stages.run_lock import run_lock

    experiment, paths = load(config, results, overrides)
    held.enter_context(run_lock(paths, job))
    return experiment, paths


def read_json(text: str) -> dict:
    """The mapping written as JSON in `text`."""
    import json

    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--config: not valid JSON: {error}") from error


def find_method(experiment: "ExperimentConfig", name: str, *, kind: str | None = None) -> "RlMethod | PtqMethod":
    """The file of method `name`; UserError when it is of another kind than the stage works on."""
    from trace_rl.config.load import load_method

    method = load_method(Path(experiment.suite.methods_dir) / f"{name}.yaml")
    if kind is not None and method.kind != kind:
        stage = {"rl": "trained (trace-rl train)", "ptq": "quantized after training (trace-rl quantize)"}
        raise UserError(f"--method {name}: this method is {stage[method.kind]}; give one that is {stage[kind]}")
    return method


def find_formats(slug: str | None) -> "FormatChoice | None":
    """The formats named `slug`, None for None."""
    from pydantic import ValidationError

    from trace_rl.config.load import describe
    from trace_rl.config.quant import FormatChoice

    try:
        return None if slug is None else FormatChoice.from_slug(slug)
    except ValidationError as error:
        raise UserError(describe(error, source="--format")) from error
    except ValueError as error:
        raise UserError(f"--format: {error}") from error


def override(data: dict, item: str) -> None:
    """Set one dotted key of `data` from `key.subkey=value`; the value is read as YAML."""
    import yaml

    key, equals, text = item.partition("=")
    if not key or not equals:
        raise UserError(f"--set {item}: expected KEY=VALUE, for example --set training.steps=5")
    *parents, last = key.split(".")
    section = data
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise UserError(f"--set {item}: {parent} is a value, not a section")
    try:
        section[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {item}: the value is not valid YAML") from error


@app.command()
def checkpoint(config: Config = CONFIG, results: Results = RESULTS, overrides: Overrides = None) -> None:
    """Make the policy before RL.

    Trained from scratch, taken from a directory, downloaded from a hub, or upcycled from a packaged model, as
    checkpoint.source says.
    """
    experiment, paths = open_run(config, results, overrides, job="checkpoint")
    from trace_rl.stages import checkpoint

    checkpoint.run(experiment, paths)


@app.command()
def data(config: Config = CONFIG, results: Results = RESULTS, overrides: Overrides = None) -> None:
    """Write the problems of cold start, RL and evaluation.

    No problem is in two of them.
    """
    experiment, paths = open_run(config, results, overrides, job="data")
    from trace_rl.stages import data

    data.run(experiment.data, paths.data)


@app.command()
def calibrate(config: Config = CONFIG, results: Results = RESULTS, overrides: Overrides = None) -> None:
    """Measure static encode scales and format errors.

    Scales of activations and KV, experts that no token chose, and the error of each format on this policy.
    """
    experiment, paths = open_run(config, results, overrides, job="calibrate")
    from trace_rl.stages import calibrate

    calibrate.run(experiment, paths)


@app.command()
def audit(
    config: Config = CONFIG, formats: Formats = None, results: Results = RESULTS, overrides: Overrides = None
) -> None:
    """Compare every tensor's format across the DAG.

    Trainer, rollout engine and export must give each tensor the same format; any difference fails and is printed.
    """
    chosen = find_formats(formats)
    experiment, paths = open_run(config, results, overrides, job=f"audit {formats or 'own'}")
    from trace_rl.stages import audit

    audit.run(experiment, paths, formats=chosen)


@app.command()
def parity(
    config: Config = CONFIG, formats: Formats = None, results: Results = RESULTS, overrides: Overrides = None
) -> None:
    """Compare log-probs of trainer and engine.

    Before the first update and after one refit, in BF16 and in FP4; a breach fails with both numbers.
    """
    chosen = find_formats(formats)
    experiment, paths = open_run(config, results, overrides, job=f"parity {formats or 'own'}")
    from trace_rl.stages import parity

    parity.run(experiment, paths, formats=chosen)


@app.command()
def train(
    method: Method, config: Config = CONFIG, seed: Seed = 0, results: Results = RESULTS, overrides: Overrides = None
) -> None:
    """Train one method with one seed.

    Continues from its last checkpoint; a finished run is left as it is.
    """
    experiment, paths = open_run(config, results, overrides, job=f"train {method} seed{seed}")
    from trace_rl.stages import train

    train.run(experiment, paths, method=find_method(experiment, method, kind="rl"), seed=seed)


@app.command()
def quantize(
    method: Method, config: Config = CONFIG, seed: Seed = 0, results: Results = RESULTS, overrides: Overrides = None
) -> None:
    """Quantize and export a trained policy."""
    experiment, paths = open_run(config, results, overrides, job=f"quantize {method} seed{seed}")
    from trace_rl.stages import quantize

    quantize.run(experiment, paths, method=find_method(experiment, method, kind="ptq"), seed=seed)


@bench_app.command("rollout")
def bench_rollout(config: Config = CONFIG, results: Results = RESULTS, overrides: Overrides = None) -> None:
    """Time rollouts: bf16, fp4, fp4 + recording."""
    experiment, paths = open_run(config, results, overrides, job="bench_rollout")
    from trace_rl.stages import bench

    bench.run(experiment, paths)


@bench_app.command("step")
def bench_step(config: Config = CONFIG, results: Results = RESULTS, overrides: Overrides = None) -> None:
    """Time one RL step by phase.

    For each method of bench.step_methods, on the run's own policy and prompts; and what guidance adds over qat.
    """
    experiment, paths = open_run(config, results, overrides, job="bench_step")
    from trace_rl.stages import bench_step

    bench_step.run(experiment, paths)


@bench_app.command("kernels")
def bench_kernels(
    json_file: JsonFile = None,
    threads: Annotated[
        str, typer.Option("--threads", metavar="N,...", help="Numbers of threads, each in a process of its own.")
    ] = "1,2",
    rows: Annotated[int, typer.Option("--rows", metavar="N", help="Tokens of the large shape.")] = 4096,
    cols: Annotated[int, typer.Option("--cols", metavar="N", help="Columns of the large shape.")] = 2048,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu or cuda; without it, cuda where there is one.")
    ] = None,
) -> None:
    """Time the quantization kernels beside a copy.

    Against torchao, vLLM's reference and torch.compile; needs no checkpoint.
    """
    from trace_rl.stages import bench_kernels

    bench_kernels.run(json_file, threads=threads, rows=rows, cols=cols, device=device)


@bench_app.command("moe")
def bench_moe(json_file: JsonFile = None) -> None:
    """Time 4-bit expert weights against BF16.

    On memory-bound mixture-of-experts layers; needs no checkpoint.
    """
    from trace_rl.stages import bench_moe

    bench_moe.run(json_file)


@bench_app.command("model")
def bench_model(
    model: Annotated[
        list[Path] | None, typer.Option("--model", metavar="FILE", help="A model's config.json; repeatable.")
    ] = None,
    hardware: Annotated[
        list[str] | None, typer.Option("--hardware", metavar="NAME", help="A known device; repeatable.")
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option("--measured", metavar="FILE", help="JSON of another benchmark to compare with; repeatable."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Predict decoding speed from bytes and FLOPs."""
    from trace_rl.stages import bench_model

    bench_model.run(model, hardware, json_file, measured or [])


@app.command()
def evaluate(
    method: Annotated[
        str | None, typer.Option("--method", "-m", metavar="NAME", help="A method; without it, the policy before RL.")
    ] = None,
    config: Config = CONFIG,
    seed: Seed = 0,
    results: Results = RESULTS,
    overrides: Overrides = None,
) -> None:
    """Measure accuracy in BF16 and FP4 execution."""
    experiment, paths = open_run(config, results, overrides, job=f"evaluate {method or 'start'} seed{seed}")
    from trace_rl.stages import evaluate

    evaluate.run(experiment, paths, method=None if method is None else find_method(experiment, method), seed=seed)


@app.command("gap-sources")
def gap_sources(
    config: Config = CONFIG, seed: Seed = 0, results: Results = RESULTS, overrides: Overrides = None
) -> None:
    """Measure what the log-prob gap is made of.

    Many trainer forwards over one set of rollouts: of the policy before RL and, where it is trained, of trace.
    """
    experiment, paths = open_run(config, results, overrides, job=f"gap_sources seed{seed}")
    from trace_rl.stages import gap_sources

    gap_sources.run(experiment, paths, seed=seed)


@app.command()
def ratio(config: Config = CONFIG, seed: Seed = 0, results: Results = RESULTS, overrides: Overrides = None) -> None:
    """Measure importance ratios under staleness.

    The trainer's, guided and not, against the engine's own after each of some updates.
    """
    experiment, paths = open_run(config, results, overrides, job=f"ratio seed{seed}")
    from trace_rl.stages import ratio

    ratio.run(experiment, paths, seed=seed)


@app.command()
def report(config: Config = CONFIG, results: Results = RESULTS, overrides: Overrides = None) -> None:
    """Write the report page of the core suite."""
    experiment, paths = open_run(config, results, overrides, job="report")
    from trace_rl.config.load import load_suite
    from trace_rl.stages import report

    report.run(experiment, paths, methods=load_suite(experiment))


@app.command()
def tables(
    target: Annotated[
        str, typer.Option("--target", "-t", metavar="NAME", help="table1, ..., staleness, paper or stability.")
    ],
    config: Config = CONFIG,
    results: Results = RESULTS,
    overrides: Overrides = None,
) -> None:
    """Write the page of one of the paper's tables.

    Or of a figure, or of all (paper): its methods over all seeds, from what training, evaluation and analysis left.
    """
    experiment, paths = open_run(config, results, overrides, job=f"tables {target}")
    from trace_rl.config.targets import target_methods, target_seeds
    from trace_rl.stages import tables

    methods, seeds = target_methods(experiment, target), target_seeds(experiment, target)
    tables.run(experiment, paths, target=target, methods=methods, seeds=seeds)


@app.command()
def summary(config: Config = CONFIG, results: Results = RESULTS, overrides: Overrides = None) -> None:
    """Print one table of the core suite."""
    experiment, paths = open_run(config, results, overrides, job="summary")
    from trace_rl.config.load import load_suite
    from trace_rl.config.targets import core_seeds
    from trace_rl.stages import summary

    summary.run(experiment, paths, methods=load_suite(experiment), seeds=core_seeds(experiment))


@app.command()
def plan(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="Experiment (YAML).")] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FILE", help="Instead: a model's config.json.")
    ] = None,
) -> None:
    """Count guidance bytes before anything runs."""
    if (config is None) == (model is None):
        raise UserError("plan: give either an experiment (trace-rl plan config/config.yaml) or --model config.json")
    from trace_rl.stages import plan

    if model is not None:
        plan.run_model(model)
    else:
        plan.run(load(config, RESULTS, None)[0])


@app.command()
def verify(
    program: Annotated[Path, typer.Option("--program", metavar="FILE", help="Python file that defines solution(x).")],
    tests: Annotated[
        Path, typer.Option("--tests", metavar="FILE", help='JSON: [{"input": ..., "expected": ...}, ...].')
    ],
) -> None:
    """Judge a program in the sandbox.

    Prints {"passed": bool, "reason": str, "seconds": float}.
    """
    from trace_rl.stages import verify

    verify.run(program, tests=tests)


@config_app.command("schema")
def config_schema(
    method: Annotated[bool, typer.Option("--method", help="Of a method file instead of an experiment.")] = False,
) -> None:
    """Print the JSON schema of an experiment."""
    import json

    from trace_rl.config.generate import experiment_schema, method_schema

    print(json.dumps(method_schema() if method else experiment_schema(), indent=2))


@config_app.command("defaults")
def config_defaults() -> None:
    """Print every key with its default and meaning."""
    from trace_rl.config.generate import default_yaml

    print(default_yaml(), end="")


@config_app.command("write")
def config_write(
    root: Annotated[Path, typer.Option("--root", metavar="DIR", help="The repository.")] = Path("."),
) -> None:
    """Rewrite config.yaml, schemas and the table of keys."""
    from trace_rl.config.generate import write

    for path in write(root):
        print(f"wrote {path}")


def main() -> None:
    """Entry point of `trace-rl` and of `python -m trace_rl`."""
    try:
        with held:
            app(prog_name="trace-rl")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except StageFailure as failure:
        print(f"failed: {failure}", file=sys.stderr)
        sys.exit(1)
