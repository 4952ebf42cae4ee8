"""One list for people from what the ranks of many hosts found."""

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.core.finding import Finding

_SHOWN = 3
"""Hosts named in a finding; a thousand would drown it."""


def merge(findings: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Keep each finding once; name its hosts unless it holds on all of them.

    Args:
        findings: of each rank.
        hosts: of each rank; several ranks may share one.

    Returns:
        The findings in the order of the first rank that has them. Of an ``ok`` that differs from
        rank to rank only the first rank's is kept, and none where the check found a fault.
    """
    found: dict[Finding, dict[str, None]] = {}
    for of_rank, host in zip(findings, hosts, strict=True):
        for finding in of_rank:
            if finding.level != "ok":
                found.setdefault(finding, {})[host] = None
    faults = {finding.check for finding in found}
    first = [each for each in findings[0] if each.level == "ok" and each.check not in faults]
    num_hosts = len(set(hosts))
    named = [_named(finding, list(own), num_hosts) for finding, own in found.items()]
    order = {finding.check: place for place, finding in reversed(list(enumerate(findings[0])))}
    return sorted(first + named, key=lambda each: order.get(each.check, len(order)))


def _named(finding: Finding, hosts: list[str], num_hosts: int) -> Finding:
    if len(hosts) == num_hosts:
        return finding
    names = ", ".join(hosts[:_SHOWN])
    if len(hosts) > _SHOWN:
        names += f" and {len(hosts) - _SHOWN} more"
    return replace(finding, what=f"{names}: {finding.what}")
