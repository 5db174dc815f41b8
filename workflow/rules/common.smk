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

from trace_rl.config import stages, targets
from trace_rl.config.load import load_method, load_suite, parse_experiment
from trace_rl.config.method import NAME, PtqMethod, RlMethod
from trace_rl.config.paths import RunPaths
from trace_rl.errors import UserError


def stated(function, *arguments):
    """The answer of ``function``; what a user can mend stops Snakemake with one message and no traceback."""
    try:
        return function(*arguments)
    except UserError as error:
        raise WorkflowError(str(error)) from None


def read_experiment(config):
    """The validated experiment; the types are asked before the schema because their messages say the remedy."""
    source = ", ".join(map(str, workflow.configfiles)) or "--config"
    experiment = stated(lambda: parse_experiment(config, source=source))
    validate(experiment.model_dump(mode="json"), schema="../schemas/config.schema.yaml", set_default=False)
    return experiment


EXPERIMENT = read_experiment(config)
PATHS = RunPaths(EXPERIMENT.run)
CORE = stated(load_suite, EXPERIMENT)
CORE_SEEDS = targets.core_seeds(EXPERIMENT)
CORE_TRAINED = [name for name, method in CORE.items() if isinstance(method, RlMethod)]

# Any method file and any variant of one is a job that can be asked for; which are asked for, the targets say.
METHOD = NAME.strip("^$")

# These outlive the Python objects that make them: path patterns, and where logs and benchmark files of jobs are.
AUDIT = str(PATHS.audit("{format}"))
PARITY = str(PATHS.parity("{format}"))
TRAIN = str(PATHS.base / "train" / "{method}" / "seed{seed}")
QUANTIZED = str(PATHS.base / "quantize" / "{method}" / "seed{seed}")
EVALUATED = str(PATHS.base / "evaluate" / "{method}" / "seed{seed}")
PAGE = str(PATHS.target_report("{target}"))
ANALYSES = {"gap_sources": str(PATHS.gap_sources("{seed}")), "ratio": str(PATHS.ratio("{seed}"))}
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


@functools.cache
def method_named(name):
    """The method or variant of this name."""
    return stated(load_method, Path(EXPERIMENT.suite.methods_dir) / f"{name}.yaml")


def method_settings(wildcards):
    """What the method file of a job says, without its descriptions."""
    return stages.method_json(method_named(wildcards.method))


def gates(methods):
    """Audit and parity in the formats of those methods that are trained."""
    return expand([AUDIT, PARITY], format=stated(targets.gated_formats, EXPERIMENT, methods))


def base_policy(wildcards):
    """The trained policy that a method quantizes."""
    method = method_named(wildcards.method)
    if not isinstance(method, PtqMethod):
        raise WorkflowError(f"{method.name} is trained, not quantized after training; ask for its train job")
    return f"{PATHS.train(method.base, wildcards.seed)}/policy"


def evaluated_policy(wildcards):
    """The policy of a method; for one that is exported after training, its base (the BF16 execution) and the export."""
    if isinstance(method_named(wildcards.method), PtqMethod):
        return [base_policy(wildcards), PATHS.quantized(wildcards.method, wildcards.seed)]
    return f"{PATHS.train(wildcards.method, wildcards.seed)}/policy"


@functools.cache
def target_methods(target):
    """Methods of a target by name."""
    return stated(targets.target_methods, EXPERIMENT, target)


def trainings(target, methods):
    """What the trainings of a target measured, those of the trained ones among some methods."""
    trained = [method.name for method in methods.values() if isinstance(method, RlMethod)]
    seeds = targets.target_seeds(EXPERIMENT, target)
    return expand([rules.train.output.steps, rules.train.output.metrics], method=trained, seed=seeds)


def evaluations(target):
    """Accuracies of a target's methods and of the policy before RL; none for a target that shows no accuracy."""
    names = targets.evaluated_names(EXPERIMENT, target)
    seeds = targets.target_seeds(EXPERIMENT, target)
    return [PATHS.evaluation_start, *expand(rules.evaluate.output, method=names, seed=seeds)] if names else []


def analyses(target):
    """What the analysis stages measured, for a target that shows it."""
    shown = [name for name, pages in targets.ANALYSES.items() if target in pages]
    return expand([ANALYSES[name] for name in shown], seed=targets.target_seeds(EXPERIMENT, target))


def runs_behind(target):
    """What the page of a target is made from, and the trainings that its quantized methods start from.

    Snakemake makes a missing file again when it is asked for, not when only something already made depended on it. So a
    target asks for its runs by name, and a deleted one comes back with everything that depends on it.
    """
    methods = target_methods(target)
    bases = {method.base: method_named(method.base) for method in methods.values() if isinstance(method, PtqMethod)}
    return trainings(target, methods | bases) + evaluations(target) + analyses(target)


def target_settings(wildcards):
    """What the methods of a target say, descriptions included: the page shows them."""
    return [method.model_dump_json() for method in target_methods(wildcards.target).values()]


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
    """What a run ends with on the screen: the pages of the targets that were asked for, else the core suite."""
    asked = [target for target in targets.TARGETS if target in workflow.dag_settings.targets]
    table = PATHS.base / "summary.txt"
    if not asked and table.is_file():
        print(table.read_text())
    for folder in [PATHS.target_report(target) for target in asked] or [PATHS.report]:
        print(f"report: {folder / 'index.html'}")
    print("compare runs in MLflow: make ui")
