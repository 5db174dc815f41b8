"""What each stage depends on: the settings it reads and the code it runs, both as values a workflow rule can compare.

Snakemake reruns a job when its ``params`` change, but cannot see edits inside an imported package, and a rule that
carried the whole configuration would retrain after a change of the evaluation. So a rule carries

- ``stage_config``: canonical JSON of exactly the sections in ``SECTIONS`` (the stage gets no other settings), and
- ``code_digest``: a digest over the modules that ``trace_rl.stages.<stage>`` imports, directly or not. Imports inside
  functions count, and so does a module or a package data file (template, task YAML) that is named in a string.

Comments, docstrings and layout do not enter the digest. Neither do modules that cannot change a result: settings
(their values are in ``stage_config``), tracking, errors. Everything here is torch-free and parses the package once per
process (about half a second), because Snakemake evaluates it at every start.
"""

import ast
import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from trace_rl.config.base import digest_of
from trace_rl.config.experiment import BenchConfig, ExperimentConfig
from trace_rl.config.load import load_method
from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.config.targets import core_seeds
from trace_rl.errors import UserError

PACKAGE = "trace_rl"

# Sections of ExperimentConfig that a stage reads; `section.field` is one field of a section. `sampling` and `engine`
# travel together because a validator compares them. `train` carries what its inputs were made with, too, because a
# training run is identified by it.
_ROLLOUT = ("run", "format", "engine", "sampling")
_BENCH_STEP = tuple(f"bench.{name}" for name in BenchConfig.model_fields if name.startswith("step_"))
_BENCH_ROLLOUT = tuple(f"bench.{name}" for name in BenchConfig.model_fields if not name.startswith("step_"))
SECTIONS: dict[str, tuple[str, ...]] = {
    "data": ("run", "data"),
    "checkpoint": ("run", "checkpoint", "data"),
    "calibrate": (*_ROLLOUT, "calibrate"),
    "audit": _ROLLOUT,
    "parity": (*_ROLLOUT, "parity"),
    "train": (*_ROLLOUT, "checkpoint", "data", "calibrate", "training", "suite.methods_dir"),
    "quantize": ("run", "format", "suite.methods_dir"),
    "bench": (*_ROLLOUT, "data", *_BENCH_ROLLOUT),
    "bench_step": (*_ROLLOUT, "training", "suite.methods_dir", *_BENCH_STEP),
    "evaluate": (*_ROLLOUT, "evaluate", "suite.methods_dir"),
    "gap_sources": (*_ROLLOUT, "analysis"),
    "ratio": (*_ROLLOUT, "training", "suite.methods_dir", "analysis"),
    "summary": ("run", "suite"),
    "report": ("run", "format", "training", "suite"),
    "tables": (*_ROLLOUT, "training", "suite", "tables", "stability", "evaluate"),
}

# Stages of the core suite, which takes the first seed only: another one must not run them again.
CORE = ("summary", "report")

# Settings are compared by value; tracking and errors never change a result. Some modules of `config` compute.
_COMPUTES = "guidance|loss|method|overrides|paths|quant"
_WITHOUT_EFFECT = re.compile(rf"{PACKAGE}\.(cli|errors|tracking|config(\.(?!({_COMPUTES})$)\w+)?)$")
_DATA_SUFFIXES = {".yaml", ".yml", ".json", ".j2", ".html", ".css", ".txt", ".jinja", ".cpp", ".h"}


def stage_config(config: ExperimentConfig, stage: str) -> dict[str, Any]:
    """The settings of ``stage`` as a mapping that `parse_experiment` accepts; defaults are written out."""
    if stage not in SECTIONS:
        raise UserError(f"stage {stage!r} is unknown; choose one of {', '.join(SECTIONS)}")
    values = config.model_dump(mode="json")
    chosen: dict[str, Any] = {}
    for name in SECTIONS[stage]:
        section, _, field = name.partition(".")
        if field:
            chosen.setdefault(section, {})[field] = values[section][field]
        else:
            chosen[section] = values[section]
    if stage in CORE:
        chosen["suite"]["seeds"] = list(core_seeds(config))
    return chosen


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no white space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def method_json(method: RlMethod | PtqMethod) -> str:
    """A method's content without what no stage computes with, so that rewording a description retrains nothing."""
    return canonical_json(method.model_dump(mode="json", exclude={"description", "source", "departures"}))


def step_methods_json(config: ExperimentConfig) -> list[str]:
    """What the methods say whose RL step is timed; they need not be in the suite."""
    folder = Path(config.suite.methods_dir)
    return [method_json(load_method(folder / f"{name}.yaml")) for name in config.bench.step_methods]


@cache
def code_digest(stage: str) -> str:
    """16 hex digits over the modules and data files that ``stage`` uses."""
    sources = package_sources()
    return digest_of({name: sources[name].digest for name in sorted(closure(f"{PACKAGE}.stages.{stage}"))})


@cache
def closure(module: str) -> frozenset[str]:
    """``module`` and everything it imports inside the package that can change a result, data files included."""
    sources = package_sources()
    if module not in sources:
        raise UserError(f"module {module} is not in the package; reinstall it with `make setup`")
    found: set[str] = set()
    queue = [module]
    while queue:
        name = queue.pop()
        if name in found or _WITHOUT_EFFECT.match(name):
            continue
        found.add(name)
        queue += sources[name].uses
    return frozenset(found)


class Source:
    """One file of the package: its digest and the names of package files it uses."""

    def __init__(self, digest: str, uses: tuple[str, ...]) -> None:
        self.digest, self.uses = digest, uses


@cache
def package_sources() -> dict[str, Source]:
    """Every module (by import name) and data file (by package and path) of the installed package."""
    return scan(module_files())


def module_files() -> dict[str, Path]:
    """Import name -> file of every module of the installed package."""
    return {_module_name(file, base=base, prefix=prefix): file for file, base, prefix in _python_files()}


def scan(modules: dict[str, Path]) -> dict[str, Source]:
    """Sources of ``modules`` (import name -> file) and of the data files beside them."""
    sources: dict[str, Source] = {}
    for name, file in modules.items():
        tree = ast.parse(file.read_text(), filename=str(file))
        _drop_docstrings(tree)
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        uses = _imported(tree, package=package, modules=modules) | _named(texts, modules=modules)
        uses.discard(name)
        for data in _data_files(file.parent, texts=texts):
            key = f"{package}/{data.relative_to(file.parent).as_posix()}"
            uses.add(key)
            sources.setdefault(key, Source(hashlib.sha256(data.read_bytes()).hexdigest(), ()))
        sources[name] = Source(hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(sorted(uses)))
    return sources


def _python_files() -> list[tuple[Path, Path, str]]:
    """(file, folder, import name of the folder); in a source tree `kernels` lies beside the package."""
    root = Path(__file__).resolve().parents[1]
    folders = [(root, PACKAGE)]
    beside = root.parent / "kernels"
    if not (root / "kernels").is_dir() and beside.is_dir():
        folders.append((beside, f"{PACKAGE}.kernels"))
    return [(file, base, prefix) for base, prefix in folders for file in sorted(base.rglob("*.py"))]


def _module_name(file: Path, *, base: Path, prefix: str) -> str:
    parts = file.relative_to(base).with_suffix("").parts
    return ".".join((prefix, *(part for part in parts if part != "__init__")))


def _drop_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]


def _imported(tree: ast.Module, *, package: str, modules: dict[str, Path]) -> set[str]:
    """Package modules that the import statements of ``tree`` run, parents' ``__init__`` included."""
    targets: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (parent, node.module) if part)
            targets += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return {found for target in targets for found in _with_parents(target) if found in modules}


def _named(texts: list[str], *, modules: dict[str, Path]) -> set[str]:
    """Package modules that strings name, as in ``worker_extension_cls="trace_rl.rollout.vllm_plugin.worker.X"``."""
    found: set[str] = set()
    for text in texts:
        for target in re.findall(rf"\b{PACKAGE}(?:\.\w+)+", text):
            found |= {name for name in _with_parents(target) if name in modules}
    return found


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(2, len(parts) + 1)]


def _data_files(folder: Path, *, texts: list[str]) -> list[Path]:
    """Data files under ``folder`` whose name, folder or suffix a module there mentions."""
    mentioned = set(texts)
    return [
        file
        for file in _data_under(folder)
        if file.name in mentioned
        or file.relative_to(folder).parts[0] in mentioned
        or any(
            text.endswith(file.suffix) and "/" not in text and len(text) <= len(file.suffix) + 1 for text in mentioned
        )
        or any(text.endswith("/" + file.name) for text in mentioned)
    ]


@cache
def _data_under(folder: Path) -> tuple[Path, ...]:
    return tuple(file for file in sorted(folder.rglob("*")) if file.suffix in _DATA_SUFFIXES and file.is_file())
