"""Variants: a method file with some keys changed, named after the change.

    trace@guidance.layers=last_quarter            the file trace.yaml with guidance.layers: last_quarter
    qat@format=mxfp4+training.staleness=3         two keys of qat.yaml
    bf16@loss.tis_cap=null

The name is the whole definition, so an ablation needs no file of its own, two tables that ask for the same variant
share its run, and a result says what it is. Values are read as YAML scalars; `k,v` is a list. A variant is a method
like any other: its keys are checked by the same types, and a variant that changes nothing is refused, because it would
be the same run under two names.
"""

from typing import Any

import yaml

from trace_rl.errors import UserError

SEPARATOR, JOIN = "@", "+"


def split_name(name: str) -> tuple[str, tuple[str, ...]]:
    """(name of the method file, changes) of a method's name; no changes for a plain name."""
    base, separator, changes = name.partition(SEPARATOR)
    return base, tuple(changes.split(JOIN)) if separator else ()


def vary(data: dict[str, Any], changes: tuple[str, ...], *, name: str) -> dict[str, Any]:
    """The mapping of a method file with ``changes`` applied and its name and description to match."""
    data = yaml.safe_load(yaml.safe_dump(data))  # a deep copy of plain values
    for change in changes:
        _apply(data, change, variant=name)
    return data | {"name": name, "description": f"{data.get('description')}; with {', '.join(changes)}"}


def _apply(data: dict[str, Any], change: str, *, variant: str) -> None:
    key, equals, text = change.partition("=")
    if not key or not equals or not text:
        raise UserError(f"variant {variant}: {change!r} is not key=value, as in trace@guidance.bits=2")
    *parents, last = key.split(".")
    if key.partition(".")[0] in ("name", "kind", "description", "source", "departures"):
        raise UserError(f"variant {variant}: {key} says what a method is and cannot be varied")
    section = data
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise UserError(f"variant {variant}: {parent} is a value, not a section")
    section[last] = [_scalar(part) for part in text.split(",")] if "," in text else _scalar(text)


def _scalar(text: str) -> Any:
    """A YAML scalar, except that `on`, `off`, `yes`, `no` are words and exponents need no point (YAML 1.2)."""
    if text.lower() in ("on", "off", "yes", "no", "y", "n"):
        return text
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # "=", "*x", the 45th of a month: words, which the types then judge
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
