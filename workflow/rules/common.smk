# What the rules share: the validated experiment, where artifacts are, and what makes a job run again.
#
# Snakemake reruns a job when its `params` change, so a rule's params hold exactly what its result depends on:
#   config  the settings its stage reads (trace/config/stages.py), which is also all the stage is given
#   method  the content of the method file
#   code    a digest of the modules its stage imports
# Gates (audit, parity) are ordinary inputs of training: `ancient` ones would hide changed params of the jobs behind them.
# A training whose settings, data and code are unchanged only writes its outputs again.

import functools
import json
import shlex
import subprocess
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.utils import validate

from trace_rl.config import stages
from trace_rl.config.load import load_suite, parse_experiment
from trace_rl.config.method import RlMethod
from trace_rl.config.paths import RunPaths
from trace_rl.errors import UserError


def read_experiment(config):
    """The experiment and its methods; the types are asked before the schema because their messages say the remedy."""
    source = ", ".join(map(str, workflow.configfiles)) or "--config"
    try:
        experiment = parse_experiment(config, source=source)
        methods = load_suite(experiment)
    except UserError as error:
        raise WorkflowError(str(error)) from None
    validate(experiment.model_dump(mode="json"), schema="../schemas/config.schema.yaml", set_default=False)
    return experiment, methods


EXPERIMENT, METHODS = read_experiment(config)
PATHS = RunPaths(EXPERIMENT.run)
SEEDS = EXPERIMENT.suite.seeds
TRAINED = [name for name, method in METHODS.items() if isinstance(method, RlMethod)]
EXPORTED = [name for name in METHODS if name not in TRAINED]

# These three outlive the Python objects that make them: a path pattern, a log and a benchmark file of a job.
TRAIN = str(PATHS.base / "train" / "{method}" / "seed{seed}")
QUANTIZED = str(PATHS.base / "quantize" / "{method}" / "seed{seed}")
EVALUATED = str(PATHS.base / "evaluate" / "{method}" / "seed{seed}")
LOGS = str(PATHS.base / "logs")
BENCHMARKS = str(PATHS.base / "benchmarks")

TRACKING_SETUP = "{} -m trace_rl.tracking {} || echo 'tracking is off' >&2".format(
    shlex.quote(sys.executable),
    shlex.quote(stages.canonical_json(EXPERIMENT.model_dump(mode="json", include={"run", "tracking"}))),
)


def one_of(names):
    """A regular expression that matches exactly these names, and nothing when there are none."""
    return "|".join(names) or "(?!)"


def settings(stage):
    """The settings of a stage as one line of JSON."""
    return stages.canonical_json(stages.stage_config(EXPERIMENT, stage))


def method_settings(wildcards):
    """What the method file of a job says, without its descriptions."""
    return stages.method_json(METHODS[wildcards.method])


def base_policy(wildcards):
    """The trained policy that a method quantizes."""
    return f"{PATHS.train(METHODS[wildcards.method].base, wildcards.seed)}/policy"


def evaluated_policy(wildcards):
    """The policy of a method; for one that is exported after training, its base (the BF16 execution) and the export."""
    if wildcards.method in TRAINED:
        return f"{PATHS.train(wildcards.method, wildcards.seed)}/policy"
    return [base_policy(wildcards), PATHS.quantized(wildcards.method, wildcards.seed)]


@functools.cache
def moe_refusal():
    """Why this host cannot run bench_moe, or "". Asked in a process of its own: the answer needs torch and vLLM."""
    question = "from trace_rl.stages.bench_moe import unsupported; print(unsupported() or '')"
    asked = subprocess.run([sys.executable, "-P", "-c", question], capture_output=True, text=True)
    if asked.returncode != 0:
        raise WorkflowError(f"bench_moe: cannot ask whether this host can run it\n{asked.stderr}")
    reason = asked.stdout.splitlines()[-1]
    if reason:
        print(f"bench_moe is left out of the benchmarks: {reason}", file=sys.stderr)
    return reason


def moe_benchmark(wildcards):
    """What bench_moe writes, on a host that can run it."""
    return [] if moe_refusal() else PATHS.bench_moe


def measured_options(wildcards, input):
    """The benchmarks that the decode model is compared with, as options."""
    return " ".join(f"--measured {shlex.quote(path)}" for path in input)


def show_results():
    """What a run ends with on the screen."""
    table = PATHS.base / "summary.txt"
    if table.is_file():
        print(table.read_text())
    print(f"report: {PATHS.report / 'index.html'}")
    print("compare runs in MLflow: make ui")
