"""Read experiment and method files; every mistake is one `UserError` that says file, key and remedy."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.method import MethodConfig, PtqMethod, RlMethod
from trace_rl.config.variants import split_name, vary
from trace_rl.errors import UserError

_METHOD = TypeAdapter(MethodConfig)
LONGEST_NAME = 200
"""Characters of a method's name; file systems allow 255 bytes in a folder's."""


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in ``path``; raises UserError when the file is missing, not YAML or not a mapping."""
    if not path.is_file():
        raise UserError(f"{path}: no such configuration file; check the path")
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    return data


def describe(error: ValidationError, *, source: str) -> str:
    """One line per mistake: where, what, and what was given."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "(top level)"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key; remove it or correct its spelling"
        lines.append(f"{source}: {where}: {message}")
    return "\n".join(lines)


def parse_experiment(data: dict[str, Any], *, source: str, whole: bool = True) -> ExperimentConfig:
    """Validate a mapping as an experiment.

    ``whole``: what is left out has its default, also the model. Otherwise ``data`` are the sections of one stage.
    """
    if whole:
        data = {"checkpoint": {"source": "cold_start"}, **data}
    try:
        return ExperimentConfig.model_validate(data)
    except ValidationError as error:
        raise UserError(describe(error, source=source)) from error


def load_experiment(path: Path) -> ExperimentConfig:
    """Read and validate an experiment file."""
    return parse_experiment(read_yaml(path), source=str(path))


def load_method(path: Path) -> RlMethod | PtqMethod:
    """The method of ``path``, ``<folder>/<name>.yaml``, where the name may be that of a variant (`variants`)."""
    name = path.name.removesuffix(".yaml")
    if len(name) > LONGEST_NAME:
        raise UserError(
            f"method {name[:40]}...: {len(name)} characters, and results are folders of this name; give it a file of "
            f"its own in {path.parent}, with a name of at most {LONGEST_NAME}"
        )
    base, changes = split_name(name)
    file = path.with_name(f"{base}.yaml")
    data = read_yaml(file)
    plain = _validated(data, source=str(file))
    if plain.name != base:
        raise UserError(f"{file}: name is {plain.name!r}; a method file is named after its method")
    if not changes:
        return plain
    variant = _validated(vary(data, changes, name=name), source=f"variant {name}")
    same = {"name", "description"}
    if variant.model_dump(exclude=same) == plain.model_dump(exclude=same):
        raise UserError(f"variant {name}: changes nothing in {file}; ask for {base}")
    return variant


def check_method_formats(config: ExperimentConfig, method: RlMethod | PtqMethod) -> None:
    """UserError where the formats that a method runs with do not suit it, or their blocks not the miniature."""
    formats = method.format if isinstance(method, PtqMethod) else method.formats(config.format)
    config.check_formats(formats, where=f"method {method.name}")


def _validated(data: dict[str, Any], *, source: str) -> RlMethod | PtqMethod:
    try:
        return _METHOD.validate_python(data)
    except ValidationError as error:
        raise UserError(describe(error, source=source)) from error


def load_suite(config: ExperimentConfig, *, root: Path = Path(".")) -> dict[str, RlMethod | PtqMethod]:
    """Every method of the suite, in order; a PTQ method's base must be in the suite."""
    methods = {name: load_method(root / config.suite.methods_dir / f"{name}.yaml") for name in config.suite.methods}
    for method in methods.values():
        check_method_formats(config, method)
        if isinstance(method, PtqMethod) and not isinstance(methods.get(method.base), RlMethod):
            raise UserError(
                f"suite.methods: {method.name} quantizes the policy of {method.base}, which is not in the suite; add it"
            )
    return methods
