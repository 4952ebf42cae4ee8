"""Functions that create findings of checks, and merge equal findings of several ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from hpctrain.core.finding import Finding
from hpctrain.core.units import shortened

SHOWN = 4  # maximum number of hosts, of values, or of findings of one kind in the output


Found = Finding | Iterable[Finding]
"""Result of a check: one or more findings; a finding of level ``ok`` if there is no fault."""


def named(check: str, found: Found) -> list[Finding]:
    """Return the findings of a check; findings without a name get the name of the check."""
    several = [found] if isinstance(found, Finding) else found
    return [replace(each, check=check or each.check) for each in several]


ok = partial(Finding, "", "ok")
note = partial(Finding, "", "note")  # good to know
warning = partial(Finding, "", "warning")  # slow or risky; needs a remedy
error = partial(Finding, "", "error")  # will fail; needs a remedy

listed = partial(shortened, most=SHOWN)  # text with the first ``SHOWN`` items


def few(findings: Sequence[Finding]) -> list[Finding]:
    """Return the first ``SHOWN`` findings, and a finding with the number of omitted findings."""
    rest = len(findings) - SHOWN
    if rest <= 0:
        return list(findings)
    return [*findings[:SHOWN], replace(findings[SHOWN], what=f"{rest} more findings of this kind")]


def merge(findings: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Return each distinct finding of the ranks once, in the order of the checks.

    A finding names its hosts unless all hosts have the finding. A finding of level ``ok`` is kept
    only from rank 0, and only if the check found no fault on any rank.
    """
    found: dict[Finding, dict[str, None]] = {}
    for of_rank, host in zip(findings, hosts, strict=True):
        for finding in of_rank:
            if finding.level != "ok":
                found.setdefault(finding, {})[host] = None
    faults = {finding.check for finding in found}
    first = [each for each in findings[0] if each.level == "ok" and each.check not in faults]
    num_hosts = len(set(hosts))
    named = [
        finding
        if len(own) == num_hosts
        else replace(finding, what=f"{listed(own)}: {finding.what}")
        for finding, own in found.items()
    ]
    order = {finding.check: index for index, finding in reversed(list(enumerate(findings[0])))}
    return sorted(first + named, key=lambda each: order.get(each.check, len(order)))
