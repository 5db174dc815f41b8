"""Pages of the targets: one of the paper's tables or figures, or all of them (``paper``), or the stability map."""

from collections.abc import Callable

from trace_rl.config.targets import PAPER, STABILITY
from trace_rl.errors import UserError
from trace_rl.report.context import Context
from trace_rl.report.document import Document, Section
from trace_rl.report.page import ABOUT, TITLE, claims_section, document, ending
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
    STABILITY: (stability,),
}


def build_target(context: Context, *, target: str) -> Document:
    """The page of a target; that of one table opens with its section, which says itself what disagrees."""
    title = f"{TITLE}: {target} of run {context.summary['run']}"
    if target not in (*TARGETS, PAPER):
        raise UserError(f"report of {target!r}: unknown target; choose one of {', '.join((*TARGETS, PAPER))}")
    targets = [name for name in TARGETS if name != STABILITY] if target == PAPER else [target]
    built = [build(context) for name in targets for build in TARGETS[name]]
    found = [section for section in built if section is not None]
    if target == PAPER:
        sections = [claims_section(context), *found, time_section(context, with_claims=True), *ending(context)]
        return document(context, title=title, sections=sections)
    return Document(title=title, lead=[ABOUT], sections=[*found, time_section(context), *ending(context)])
