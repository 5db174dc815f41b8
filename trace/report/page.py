"""Pages of the report: which sections each has, and what its first paragraphs say.

`build` is the page of the core suite; `build_target` that of one of the paper's tables, or of all of them (``paper``).
"""

from collections.abc import Callable

from trace_rl.config.targets import PAPER as WHOLE_PAPER
from trace_rl.config.targets import STABILITY
from trace_rl.errors import UserError
from trace_rl.report.context import Context
from trace_rl.report.document import Document, Section
from trace_rl.report.sections.accuracy import accuracy_section
from trace_rl.report.sections.dynamics import dynamics, learning_section
from trace_rl.report.sections.gaps import gap_sources
from trace_rl.report.sections.mismatch import mismatch, mismatch_section
from trace_rl.report.sections.opening import claims_table, paragraphs
from trace_rl.report.sections.provenance import choices_section, gates_section, provenance_section
from trace_rl.report.sections.stability import stability
from trace_rl.report.sections.staleness import staleness
from trace_rl.report.sections.storage import bytes_section, storage
from trace_rl.report.sections.tables import ablations, table1, table4, table5, table6, table7
from trace_rl.report.sections.time import time_section

TITLE = "TRACE in miniature"
ABOUT = (
    "A small mixture-of-experts policy is trained by RL with FP4 rollouts. FP4 is emulated: values are rounded to FP4 "
    "bit for bit and multiplied in BF16, so accuracy, gaps and bytes carry over and speed does not. Every method has "
    "the same budget, starting policy and hyperparameters, unless its name says what differs."
)
COMPARABLE = (
    "The paper's numbers are for Qwen3.5-35B-A3B on LiveCodeBench v6, AIME24, AIME25 and HMMT25; here the mean over "
    "this run's tasks stands in their place. Directions compare, values do not. With several seeds a difference is "
    "resolved beyond t standard errors of its paired mean (4.3 for three seeds), with one beyond two of the "
    "evaluation's; about one in twenty comparisons without an effect comes out resolved."
)
Build = Callable[[Context], Section | None]
TARGETS: dict[str, tuple[Build, ...]] = {
    "table1": (table1,),
    "table4": (table4,),
    "table5": (table5,),
    "table6": (table6,),
    "table7": (table7,),
    "dynamics": (dynamics,),
    "mismatch": (mismatch, gap_sources),
    "storage": (storage,),
    "staleness": (staleness,),
    "ablations": (ablations,),
}
TOPICS = {"table1": ("table1", "table2")}
"""Topics of a target's claims where they are not its name."""


def build(context: Context) -> Document:
    """The page of the core suite: all claims first, then every number."""
    sections = [
        claims_section(context),
        accuracy_section(context),
        learning_section(context),
        mismatch_section(context),
        bytes_section(context),
        time_section(context),
        *ending(context),
    ]
    return document(context, title=f"{TITLE}: run {context.summary['run']}", sections=sections)


def build_target(context: Context, *, target: str) -> Document:
    """The page of a target."""
    title = f"{TITLE}: {target} of run {context.summary['run']}"
    if target == WHOLE_PAPER:
        builds = [build for found in TARGETS.values() for build in found]
        first = [claims_section(context)]
    elif target == STABILITY:
        builds, first = [stability], []
    elif target in TARGETS:
        builds, first = list(TARGETS[target]), []
    else:
        known = ", ".join((*TARGETS, WHOLE_PAPER, STABILITY))
        raise UserError(f"report of {target!r}: unknown target; choose one of {known}")
    sections = [*first, *(section for build in builds if (section := build(context)) is not None)]
    sections += [time_section(context, with_claims=target == WHOLE_PAPER), *ending(context)]
    topics = None if target in (WHOLE_PAPER, STABILITY) else TOPICS.get(target, (target,))
    return document(context, title=title, sections=sections, topics=topics)


def document(
    context: Context, *, title: str, sections: list[Section], topics: tuple[str, ...] | None = None
) -> Document:
    """The document, led by what disagrees with the paper."""
    tested = context.claims if topics is None else context.about(*topics)
    lead = [*paragraphs(tested, collapsed=context.collapsed()), ABOUT]
    return Document(title=title, lead=lead, sections=sections)


def claims_section(context: Context) -> Section:
    """Every claim in one table."""
    return Section("Paper beside here", [COMPARABLE, claims_table(context.claims)])


def ending(context: Context) -> list[Section]:
    """What every page ends with."""
    gates = gates_section(context)
    return [*([gates] if gates else []), choices_section(context), provenance_section(context)]
