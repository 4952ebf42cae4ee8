"""A fault of a thousand nodes is told for a few of them."""

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.core.finding import Finding

SHOWN = 4


def few(findings: Sequence[Finding]) -> list[Finding]:
    """Return the first findings, and the number of the others.

    Args:
        findings: of one check, one for each host or so.
    """
    rest = len(findings) - SHOWN
    if rest <= 0:
        return list(findings)
    return [*findings[:SHOWN], replace(findings[SHOWN], what=f"the same {rest} times more")]
