"""What each target of the workflow covers: its methods, variants expanded, and its seeds.

    all                  suite.methods, the first of suite.seeds: the core suite
    table1 ... ablations one field of `tables` each, over all of suite.seeds
    paper                the union of those
    stability            the grid of `stability`, over its own seeds

A grid (`staleness`, `stability`) becomes names of variants, and a change that the experiment makes anyway is left out
of the name: with ``staleness_steps: null`` ``trace`` at staleness 0 is the run that every other table shows.

Methods are loaded and checked when their target is asked for, before any job: a folder of methods of one's own need not
hold every method of the paper.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trace_rl.config.base import digest_of
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.load import check_method_formats, load_method
from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.config.overrides import SAMPLING, with_overrides
from trace_rl.config.training import TrainingConfig
from trace_rl.config.variants import JOIN, SEPARATOR, split_name
from trace_rl.errors import UserError

TABLES = (
    "table1",
    "table4",
    "table5",
    "table6",
    "table7",
    "dynamics",
    "mismatch",
    "storage",
    "staleness",
    "ablations",
)
"""Targets of the paper and of what it leaves open."""
PAPER, STABILITY = "paper", "stability"
TARGETS = (*TABLES, PAPER, STABILITY)
WITHOUT_EVALUATION = ("storage", "staleness")
"""Targets that show no accuracy, so that no policy is evaluated for them: bytes have none, and the reward of the last
steps of the staleness study, sampled in FP4, says as much of its short runs as an evaluation would."""
ANALYSES = {"gap_sources": ("mismatch", PAPER), "ratio": ("staleness", PAPER)}
"""Analysis stage -> the targets that show what it measured."""
ANALYSED = "trace"
"""The method whose trained policy the sources of the gap are measured on, beside the policy before RL."""

Change = int | float | str | None


def core_seeds(config: ExperimentConfig) -> tuple[int, ...]:
    """The one seed of the core suite; the tables of the paper take all of ``suite.seeds``."""
    return config.suite.seeds[:1]


def target_seeds(config: ExperimentConfig, target: str) -> tuple[int, ...]:
    """Seeds of a target."""
    return config.stability.seeds if target == STABILITY else config.suite.seeds


def target_names(config: ExperimentConfig, target: str) -> tuple[str, ...]:
    """Names of a target's methods in the order they are shown, each once."""
    if target == PAPER:
        names = [name for table in TABLES for name in target_names(config, table)]
    elif target == STABILITY:
        names = _stability(config)
    elif target == "staleness":
        names = _staleness(config)
    elif target in TABLES:
        names = list(getattr(config.tables, target))
    else:
        raise UserError(f"target {target!r} is unknown; choose one of {', '.join(TARGETS)}")
    return tuple(dict.fromkeys(names))


def evaluated_names(config: ExperimentConfig, target: str) -> tuple[str, ...]:
    """The methods of a target whose final policy is evaluated."""
    if target != PAPER:
        return () if target in WITHOUT_EVALUATION else target_names(config, target)
    shown = [name for table in TABLES for name in evaluated_names(config, table)]
    return tuple(dict.fromkeys(shown))


def target_methods(config: ExperimentConfig, target: str, *, root: Path = Path(".")) -> dict[str, RlMethod | PtqMethod]:
    """A target's methods by name.

    UserError for no methods, for one that does not exist or does not suit the experiment, for a PTQ method whose base
    is not trained, and for a method that is another one of the target under a second name.
    """
    folder = root / config.suite.methods_dir
    if not target_names(config, target):
        raise UserError(f"{target}: no methods; name some under tables.{target}")
    methods = {name: load_method(folder / f"{name}.yaml") for name in target_names(config, target)}
    for method in methods.values():
        base = load_method(folder / f"{method.base}.yaml") if isinstance(method, PtqMethod) else method
        if not isinstance(base, RlMethod):
            raise UserError(f"{target}: {method.name} quantizes the policy of {base.name}, which is not trained")
        check_method_formats(config, base)
        check_method_formats(config, method)
        with_overrides(config, base)
    _check_distinct(config, methods, target=target)
    return methods


def gated_formats(config: ExperimentConfig, methods: Iterable[RlMethod | PtqMethod]) -> tuple[str, ...]:
    """Slugs of the formats whose audit and parity come before the trainings of ``methods``; UserError if unsuited."""
    trained = [method for method in methods if isinstance(method, RlMethod)]
    return tuple(dict.fromkeys(method.formats(config.format).slug for method in trained))


def variant(name: str, changes: Mapping[str, Change]) -> str:
    """``name`` with ``training`` settings changed, as a variant's name; without changes, ``name``."""
    texts = [f"training.{key}={'null' if value is None else value}" for key, value in changes.items()]
    if not texts:
        return name
    return name + (JOIN if SEPARATOR in name else SEPARATOR) + JOIN.join(texts)


def _staleness(config: ExperimentConfig) -> list[str]:
    tables = config.tables
    grid: dict[str, Sequence[Change]] = {
        "staleness": tables.staleness_levels,
        "learning_rate": tables.staleness_learning_rates,
        "steps": (tables.staleness_steps,),
    }
    stale = {**grid, "staleness": tuple(level for level in tables.staleness_levels if level)}
    return _expand(config, tables.staleness, grid) + _expand(config, tables.staleness_only, stale)


def _stability(config: ExperimentConfig) -> list[str]:
    stability = config.stability
    grid: dict[str, Sequence[Change]] = {
        "learning_rate": stability.learning_rates,
        "problems": stability.problems,
        "updates_per_rollout": stability.updates_per_rollout,
        "steps": (stability.steps,),
    }
    return _expand(config, stability.methods, grid)


def _expand(config: ExperimentConfig, methods: Sequence[str], grid: Mapping[str, Sequence[Change]]) -> list[str]:
    """Every method at every point of the grid; None, and what the experiment says anyway, are no change."""
    own = {key: getattr(config.sampling if key in SAMPLING else config.training, key) for key in grid}
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    changes = [{k: v for k, v in point.items() if v is not None and v != own[k]} for point in points]
    return [variant(name, change) for name in methods for change in changes]


def _check_distinct(config: ExperimentConfig, methods: Mapping[str, RlMethod | PtqMethod], *, target: str) -> None:
    """Two tables that want the same run must call it the same, or it would be trained twice."""
    seen: dict[str, str] = {}
    for name in sorted(methods, key=lambda name: len(split_name(name)[1])):
        content = _content(config, methods[name])
        if content in seen:
            raise UserError(f"{target}: {name} is the same run as {seen[content]}; ask for {seen[content]}")
        seen[content] = name


def _content(config: ExperimentConfig, method: RlMethod | PtqMethod) -> str:
    """Digest of what a method does under the experiment, whatever its name and however it says so."""
    said = method.model_dump(mode="json", exclude={"name", "description", "source", "departures", "training"})
    if isinstance(method, RlMethod):
        own = with_overrides(config, method)
        said |= {"format": method.formats(config.format).model_dump(mode="json")}
        said |= {"ratio": _ratio(method, training=own.training)}
        said |= {"sampling": own.sampling.model_dump(mode="json"), "training": own.training.model_dump(mode="json")}
    return digest_of(said)


def _ratio(method: RlMethod, *, training: TrainingConfig) -> dict[str, str]:
    """The method's ratios without what makes no difference (`trace_rl.rl.ratios`), each forward by what it computes."""
    own = "guided" if method.guidance is not None else "rtn" if method.trainer.enabled else "bf16"
    said = {name: own if value == "own" else value for name, value in method.ratio.model_dump(mode="json").items()}
    fresh, once = training.staleness == 0, training.updates_per_rollout == 1
    if fresh:  # the version that sampled a batch is the one before its first update
        said["old_policy"] = "current"
    if once and said["old_policy"] == "current":  # pi_old is pi_theta, so the staleness ratio is 1
        said["staleness"] = own
    return said
