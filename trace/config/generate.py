"""Files that follow from the typed configuration: default YAML, JSON schemas and the table of keys.

`trace-rl config write` rewrites `config/config.yaml`, `workflow/schemas/*.yaml` and the table in `config/README.md`; a
test compares them with the types, so documentation, schema and program cannot drift apart.
"""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from trace_rl.config.base import Section
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.method import MethodConfig
from trace_rl.errors import UserError

WIDTH = 100
HEADER = """\
The miniature: what `snakemake --cores 2` runs. Every key with its default; another configuration file
(`--configfile config/smoke.yaml`) states only what differs. Written by `trace-rl config write`.
"""
TABLE_BEGIN = "<!-- keys: begin (written by `trace-rl config write`) -->"
TABLE_END = "<!-- keys: end -->"


def default_yaml() -> str:
    """Every key with its default value, its description above it."""
    lines = [f"# {line}" for line in HEADER.splitlines()]
    for name, field in ExperimentConfig.model_fields.items():
        lines += ["", *_entry(name, field, indent="")]
    return "\n".join(lines) + "\n"


def experiment_schema() -> dict[str, Any]:
    """JSON schema of an experiment file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **ExperimentConfig.model_json_schema()}


def method_schema() -> dict[str, Any]:
    """JSON schema of a method file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **TypeAdapter(MethodConfig).json_schema()}


def keys_table() -> str:
    """Markdown tables: the keys of an experiment file by section, then those of a method file."""
    parts = ["## Experiment", "", *_table(ExperimentConfig, prefix="", nested=False)]
    for name, field in ExperimentConfig.model_fields.items():
        for section in _sections(field.annotation):
            title = f"`{name}`"
            if len(_sections(field.annotation)) > 1:
                title += f", `source: {_constant(section, 'source')}`"
            parts += ["", f"### {title}", "", _first_paragraph(section), "", *_table(section, prefix=f"{name}.")]
    for section in _sections(MethodConfig):
        parts += ["", f"## Method file, `kind: {_constant(section, 'kind')}`", "", _first_paragraph(section)]
        parts += ["", *_table(section, prefix="")]
    return "\n".join(parts) + "\n"


def generated(root: Path) -> dict[Path, str]:
    """Path -> content of every generated file under the repository ``root``."""
    readme = root / "config/README.md"
    text = readme.read_text()
    before, begin, rest = text.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        raise UserError(f"{readme}: the markers of the key table are missing; restore them from version control")
    note = "# Written by `trace-rl config write` from the types in trace/config.\n"
    return {
        root / "config/config.yaml": default_yaml(),
        root / "workflow/schemas/config.schema.yaml": note + _dump(experiment_schema()),
        root / "workflow/schemas/method.schema.yaml": note + _dump(method_schema()),
        readme: f"{before}{TABLE_BEGIN}\n\n{keys_table()}\n{TABLE_END}{after}",
    }


def write(root: Path) -> list[Path]:
    """Rewrite the generated files that differ; returns them."""
    changed = [path for path, text in generated(root).items() if not path.is_file() or path.read_text() != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(generated(root)[path])
    return changed


def _entry(name: str, field: FieldInfo, *, indent: str) -> list[str]:
    comment = textwrap.wrap(field.description or "", WIDTH - len(indent) - 2)
    lines = [f"{indent}# {line}" for line in comment]
    default = field.get_default(call_default_factory=True)
    if not isinstance(default, Section) or not isinstance(default.model_dump(mode="json"), dict):
        return [*lines, f"{indent}{name}: {_inline(default)}"]
    lines.append(f"{indent}{name}:")
    for child, child_field in type(default).model_fields.items():
        lines += _entry(child, child_field, indent=indent + "  ")
    return lines


def _table(section: type[Section], *, prefix: str, nested: bool = True) -> list[str]:
    """Rows of a section; sections inside it follow as dotted keys when ``nested``."""
    lines = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field, inside in _rows(section, prefix=prefix, nested=nested):
        default = "required" if field.is_required() else "see below" if inside else f"`{_inline(field.default)}`"
        cells = (f"`{key}`", _values(field), default, (field.description or "").replace("\n", " "))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _rows(section: type[Section], *, prefix: str, nested: bool) -> Iterator[tuple[str, FieldInfo, bool]]:
    for name, field in section.model_fields.items():
        inner = _sections(field.annotation)
        yield f"{prefix}{name}", field, bool(inner)
        for part in inner if nested else ():
            yield from _rows(part, prefix=f"{prefix}{name}.", nested=True)


def _sections(annotation: Any) -> list[type[Section]]:
    """The section classes of an annotation: one, several for a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) in (tuple, list, dict):
        return []
    return [section for part in get_args(annotation) for section in _sections(part)]


def _constant(section: type[Section], field: str) -> str:
    return get_args(section.model_fields[field].annotation)[0]


def _first_paragraph(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def _values(field: FieldInfo) -> str:
    """What a key accepts, in words: type or choices, and bounds."""
    annotation, optional = field.annotation, False
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) not in (Literal, tuple) and len(parts) < len(get_args(annotation)):
        annotation, optional = parts[0] if len(parts) == 1 else annotation, True
    if _sections(annotation):
        text = "section"
    elif get_origin(annotation) is Literal:
        text = ", ".join(f"`{value}`" for value in get_args(annotation))
    elif get_origin(annotation) is tuple:
        inner = get_args(annotation)[0]
        choices = ", ".join(f"`{value}`" for value in get_args(inner))
        text = f"list of {choices}" if get_origin(inner) is Literal else f"list of {inner.__name__}"
    else:
        assert isinstance(annotation, type), annotation
        text = annotation.__name__
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "multiple_of": "multiple of"}
    bounds = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    ]
    return ", ".join([text, *bounds]) + (" or null" if optional else "")


def _inline(value: Any) -> str:
    if value is PydanticUndefined:
        return ""
    if isinstance(value, Section):
        value = value.model_dump(mode="json")
    plain = list(value) if isinstance(value, tuple) else value
    if isinstance(plain, float):
        return _float(plain)
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def _float(value: float) -> str:
    """YAML 1.1 reads ``1e-4`` as text and ``1.0e-04`` as a number."""
    text = repr(value)
    return text if "e" not in text or "." in text else text.replace("e", ".0e")


def _dump(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, width=120, allow_unicode=True)
