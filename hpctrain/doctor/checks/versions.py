"""Packages are there, in versions that were tested together, and the same on all ranks."""

import re

from hpctrain.core.finding import Finding
from hpctrain.doctor.checks.check import check, error, note, ok, warning
from hpctrain.doctor.checks.facts import Facts, WorldFacts, differences

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^;()]*)\)?\s*(;.*)?")
_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*([\d.]+)")


@check("versions")
def check_versions(facts: Facts) -> list[Finding]:
    """Name what is missing and what is too old or too new."""
    found = [_missing(name) for name, version in facts.versions.items() if version is None]
    for line in facts.requirements:
        match = _REQUIREMENT.fullmatch(line)
        version = facts.versions.get(match[1]) if match else None
        if match and version and "extra" not in (match[3] or "") and not fits(version, match[2]):
            wanted = match[2].strip()
            what = f"{match[1]} is {version}, hpctrain was tested with {wanted}"
            found.append(warning(what, f"pip install '{match[1]}{wanted}'"))
    installed = [f"{name} {version}" for name, version in facts.versions.items() if version]
    return found or [ok(", ".join([f"python {facts.python}", *installed]))]


@check("versions")
def check_equal_versions(world: WorldFacts) -> list[Finding]:
    """Name packages and libraries of which the ranks have different versions."""
    versions = [{"python": each.python, **each.versions} for each in world.ranks]
    do = (
        "start all ranks from one environment, on a file system that all nodes see, or staged to "
        "each node from one archive; look for modules and PATH in the nodes' start files"
    )
    found = [error(f"{name} differs: {told}", do) for name, told in differences(versions)]
    told = ", ".join(f"{name} {version}" for name, version in versions[0].items())
    return found or [ok(f"the same on all ranks: {told}")]


def fits(version: str, clauses: str) -> bool:
    """Say whether a version is within ``>=2.13,<2.14``; other kinds of clauses are passed over."""
    mine = _numbers(version)
    for operator, text in _CLAUSE.findall(clauses):
        theirs = _numbers(text)
        width = max(len(mine), len(theirs))
        a, b = (each + (0,) * (width - len(each)) for each in (mine, theirs))
        holds = {
            ">=": a >= b,
            "<=": a <= b,
            "==": a == b,
            "!=": a != b,
            ">": a > b,
            "<": a < b,
        }
        if not holds[operator]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Read 2.13.0+cpu as (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _missing(name: str) -> Finding:
    if name == "hpctrain":
        what = "hpctrain runs from a folder and is not installed: ranks elsewhere may not find it"
        return note(what, "pip install -e .")
    return error(f"{name} is not installed in this environment", f"pip install {name}")
