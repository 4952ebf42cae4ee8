"""Packages are there, and the same on all ranks."""

from hpctrain.core.finding import Finding
from hpctrain.doctor.checks.check import check, error, note, ok
from hpctrain.doctor.checks.facts import Facts, WorldFacts, differences


@check("versions")
def check_versions(facts: Facts) -> list[Finding]:
    """Name what is missing."""
    found = [_missing(name) for name, version in facts.versions.items() if version is None]
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


def _missing(name: str) -> Finding:
    if name == "hpctrain":
        what = "hpctrain runs from a folder and is not installed: ranks elsewhere may not find it"
        return note(what, "pip install -e .")
    return error(f"{name} is not installed in this environment", f"pip install {name}")
