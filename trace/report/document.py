"""A report as data: sections of paragraphs, tables and figures, rendered once to HTML and once to Markdown."""

from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


@dataclass(frozen=True)
class Table:
    """A header and rows of text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    folded: str = ""
    """What a reader opens to see the table; empty: the table is open."""


@dataclass(frozen=True)
class Figure:
    """An inline SVG with its file name for the Markdown version."""

    name: str
    svg: str
    caption: str


@dataclass
class Section:
    """A heading and its blocks in order."""

    title: str
    blocks: list[str | Table | Figure] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return "-".join("".join(c for c in self.title.lower() if c.isalnum() or c == " ").split())


@dataclass
class Document:
    """The whole report."""

    title: str
    lead: list[str]
    """Opening paragraphs: what disagrees with the paper comes first."""
    sections: list[Section]

    def figures(self) -> list[Figure]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Figure)]


def environment() -> Environment:
    """Templates of this package; undefined names are errors."""
    env = Environment(
        loader=PackageLoader("trace_rl.report"),
        autoescape=select_autoescape(("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.tests |= {
        "table": lambda block: isinstance(block, Table),
        "figure": lambda block: isinstance(block, Figure),
    }
    return env


def write(document: Document, out: Path) -> None:
    """Write ``index.html`` (self-contained), ``report.md`` and the figures it shows."""
    env = environment()
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("*.svg"):
        stale.unlink()
    for figure in document.figures():
        (out / f"{figure.name}.svg").write_text(figure.svg)
    for template, name in (("index.html.j2", "index.html"), ("report.md.j2", "report.md")):
        temporary = out / f"{name}.tmp"
        temporary.write_text(env.get_template(template).render(document=document))
        temporary.replace(out / name)
