"""How a section opens: where this run disagrees with the paper, with the evidence, then what is not resolved."""

from collections.abc import Sequence

from trace_rl.report.claim import Claim
from trace_rl.report.document import Table
from trace_rl.report.estimate import OPEN, OPPOSITE, SAME, UNTESTED, WEAKER

HEADER = ("claim", "paper", "here", "same direction?")


def opening(tested: Sequence[Claim], *, collapsed: Sequence[str] = ()) -> list[str | Table]:
    """Paragraphs and the table of a section's claims; collapsed runs are named whatever the claims say."""
    blocks: list[str | Table] = list(paragraphs(tested, collapsed=collapsed))
    if tested:
        blocks.append(claims_table(tested))
    return blocks


def paragraphs(tested: Sequence[Claim], *, collapsed: Sequence[str] = (), evidence: bool = True) -> list[str]:
    """Disagreement first; without ``evidence`` only what it is about."""

    def listed(verdict: str) -> str:
        found = [claim for claim in tested if claim.verdict == verdict]
        return "; ".join(claim.evidence if evidence else claim.statement for claim in found)

    decided = [claim for claim in tested if claim.verdict != UNTESTED]
    found = []
    if not decided:
        found.append("The public accounts of the paper give no number that this section could be held against.")
    elif against := listed(OPPOSITE):
        found.append(f"This run disagrees with the paper: {against}.")
    else:
        found.append("No claim tested here came out against the paper's direction.")
    if weaker := listed(WEAKER):
        found.append(f"The paper's direction, but short of its number: {weaker}.")
    if unresolved := listed(OPEN):
        found.append(f"Not resolved, because the difference lies within its error: {unresolved}.")
    if agreed := sum(claim.verdict == SAME for claim in tested):
        found.append(f"Same direction as the paper: {agreed} of {len(decided)}.")
    if collapsed:
        found.append(f"Collapsed runs, shown like all others: {', '.join(collapsed)}.")
    return found


def claims_table(tested: Sequence[Claim], caption: str = "") -> Table:
    """Paper | here | same direction?"""
    return Table(HEADER, tuple((c.statement, c.paper, c.here, c.verdict) for c in tested), caption)
