"""All ranks are looked at together, where launcher and MPI make one world of them."""

import sys
from pathlib import Path

from hpctrain.cluster import env
from hpctrain.cluster.env import Launched
from hpctrain.cluster.libraries import expected_libmpi, mismatch
from hpctrain.core.errors import LaunchError
from hpctrain.core.finding import Finding
from hpctrain.doctor.checks.facts import Facts
from hpctrain.doctor.checks.table import examine


def probe(facts: Facts, *, seconds: float = 5.0) -> list[Finding]:
    """Look at the world of all ranks that were started together. Collective.

    Where there is no world, because launcher and MPI do not fit together, each process finds that
    out for itself.

    Measurements between many nodes take ``seconds``, about; with few they take less.

    Returns:
        What each rank finds by itself, merged, then at least one finding for each check of all
        ranks; the same on every rank.
    """
    local = examine(facts)
    if refusal := wrong_interface(env.launched(), expected_libmpi()):
        return [*local, refusal]
    from hpctrain.doctor.ranks.compare import compare  # noqa: PLC0415 - loads torch

    try:
        return compare(facts, local, seconds)
    except LaunchError as error:
        what, _, way_out = str(error).partition("; ")
        return [*local, Finding("world", "error", what, way_out)]


def wrong_interface(
    launched: Launched | None, library: Path | None, prefix: str = sys.prefix
) -> Finding | None:
    """Refuse a step whose ranks cannot find each other, before MPI ends the process.

    Speaks of libraries below ``prefix``, a Python environment, only: of wheels is known what they
    can do.
    """
    if library is None or not library.is_relative_to(prefix):
        return None
    what, _, do = mismatch(launched, library).partition("; should MPI stop now, ")
    return Finding("world", "error", what, do) if what else None
