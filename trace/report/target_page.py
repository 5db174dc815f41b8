"""Pages of the targets: one of the paper's tables or figures, or all of them (``paper``), or the stability map."""

from collections.abc import Callable

from trace_rl.config.targets import PAPER, STABILITY
from trace_rl.errors import UserError
from trace_rl.report.context import Context
from trace_rl.report.document import Document, Section
from trace_rl.report.page import TITLE, claims_section, document, ending
from trace_rl.report.sections.dynamics import dynamics
from trace_rl.report.sections.gaps import gap_sources
from trace_rl.report.sections.mismatch import mismatch
from trace_rl.report.sections.stability import stability
from trace_rl.report.sections.staleness import staleness
from trace_rl.report.sections.storage import storage
from trace_rl.report.sections.tables import ablations, table1, table4, table5, table6, table7
from trace_rl.report.sections.time import time_section

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


def build_target(context: Context, *, target: str) -> Document:
    """The page of a target."""
    title = f"{TITLE}: {target} of run {context.summary['run']}"
    if target == PAPER:
        builds = [build for found in TARGETS.values() for build in found]
        first = [claims_section(context)]
    elif target == STABILITY:
        builds, first = [stability], []
    elif target in TARGETS:
        builds, first = list(TARGETS[target]), []
    else:
        known = ", ".join((*TARGETS, PAPER, STABILITY))
        raise UserError(f"report of {target!r}: unknown target; choose one of {known}")
    sections = [*first, *(section for build in builds if (section := build(context)) is not None)]
    sections += [time_section(context, with_claims=target == PAPER), *ending(context)]
    topics = None if target in (PAPER, STABILITY) else TOPICS.get(target, (target,))
    return document(context, title=title, sections=sections, topics=topics)
