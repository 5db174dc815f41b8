"""How a section opens: where this run disagrees with the paper, with the evidence, then what is not resolved."""

from collections import Counter
from collections.abc import Sequence

from trace_rl.report.claim import Claim
from trace_rl.report.document import Table
from trace_rl.report.estimate import (
    COMPUTED,
    OPEN,
    OPPOSITE,
    OPPOSITE_BARE,
    SAME,
    SAME_BARE,
    UNMEASURED,
    UNTIMED,
    WEAKER,
    WEAKER_BARE,
)

HEADER = ("claim", "paper", "here", "same direction?")
BARE = (SAME_BARE, WEAKER_BARE, OPPOSITE_BARE)


def opening(tested: Sequence[Claim], *, collapsed: Sequence[str] = (), silent: bool = False) -> list[str | Table]:
    """Paragraphs and the table of a section's claims; collapsed runs are named whatever the claims say.

    ``silent``: the paper's accounts say nothing about this section.
    """
    blocks: list[str | Table] = list(paragraphs(tested, collapsed=collapsed, silent=silent))
    if tested:
        blocks.append(claims_table(tested))
    return blocks


def paragraphs(
    tested: Sequence[Claim], *, collapsed: Sequence[str] = (), evidence: bool = True, silent: bool = False
) -> list[str]:
    """Disagreement first; without ``evidence`` only what it is about."""

    def listed(*verdicts: str) -> str:
        found = [claim for claim in tested if claim.verdict in verdicts]
        return "; ".join(claim.evidence if evidence else claim.statement for claim in found)

    found = []
    measured = [claim for claim in tested if claim.verdict not in UNMEASURED]
    if against := listed(OPPOSITE, WEAKER):
        found.append(f"This run disagrees with the paper, in direction or in size: {against}.")
    if bare := listed(OPPOSITE_BARE):
        found.append(f"Against the paper's direction in one seed, error unknown: {bare}.")
    if short := listed(WEAKER_BARE):
        found.append(f"Short of the paper's number in one seed, error unknown: {short}.")
    if measured:
        count = Counter(claim.verdict for claim in measured)
        parts = [f"same direction {count[SAME]}", f"disagreeing {count[OPPOSITE] + count[WEAKER]}"]
        parts.append(f"not resolved {count[OPEN]}")
        if bare_count := sum(count[verdict] for verdict in BARE):
            parts.append(f"one seed without an error {bare_count}")
        found.append(f"Of {len(measured)} claims measured here: {', '.join(parts)}.")
    elif silent:
        found.append("The public accounts of the paper give no number that this section could be held against.")
    elif untimed := listed(UNTIMED):
        found.append(f"Seconds without a verdict, because the trainings were timed beside other jobs: {untimed}.")
    elif not any(claim.verdict == COMPUTED for claim in tested):
        found.append("No claim of the paper was measured here: methods or tasks that it compares were not run.")
    if unresolved := listed(OPEN):
        found.append(f"Not resolved: {unresolved}.")
    if collapsed:
        found.append(f"Collapsed runs, shown like all others: {', '.join(collapsed)}.")
    return found


def claims_table(tested: Sequence[Claim], caption: str = "") -> Table:
    """Paper | here | same direction?"""
    return Table(HEADER, tuple((c.statement, c.paper, c.here, c.verdict) for c in tested), caption)
