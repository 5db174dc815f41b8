"""The page of the core suite, and what every page opens and ends with."""

from trace_rl.report.context import Context
from trace_rl.report.document import Document, Section
from trace_rl.report.estimate import resolution_rule
from trace_rl.report.sections.accuracy import accuracy_section
from trace_rl.report.sections.dynamics import learning_section
from trace_rl.report.sections.mismatch import mismatch_section
from trace_rl.report.sections.opening import claims_table, paragraphs
from trace_rl.report.sections.provenance import choices_section, gates_section, provenance_section
from trace_rl.report.sections.storage import bytes_section
from trace_rl.report.sections.tables import COMPARABLE
from trace_rl.report.sections.time import time_section

TITLE = "TRACE in miniature"
ABOUT = (
    "A small mixture-of-experts policy is trained by RL with FP4 rollouts. FP4 is emulated: values are rounded to FP4 "
    "bit for bit and multiplied in BF16. Bytes and the rounding of given values are those of FP4 hardware; speed is "
    "not, and gaps depend on the order of operations of this processor's programs. Every method has the same budget "
    "and starting policy; hyperparameters differ where its name or its file says so (cap and clipping of some losses)."
)


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


def document(context: Context, *, title: str, sections: list[Section]) -> Document:
    """A page of many sections, led by what disagrees with the paper."""
    lead = [*paragraphs(context.claims, collapsed=context.collapsed(), evidence=False), ABOUT]
    return Document(title=title, lead=lead, sections=sections)


def claims_section(context: Context) -> Section:
    """Every claim in one table."""
    rule = resolution_rule(context.num_seeds)
    return Section("Paper beside here", [f"{COMPARABLE} {rule}", claims_table(context.claims)])


def ending(context: Context) -> list[Section]:
    """What every page ends with."""
    gates = gates_section(context)
    return [*([gates] if gates else []), choices_section(context), provenance_section(context)]
