"""All ranks are looked at together, where launcher and MPI make one world of them."""

import sys
from pathlib import Path

from hpctrain.cluster import env
from hpctrain.cluster.env import Launched
from hpctrain.cluster.interface import expected_libmpi, mismatch, srun_type
from hpctrain.core.errors import LaunchError
from hpctrain.core.finding import Finding
from hpctrain.doctor.checks.facts import Facts
from hpctrain.doctor.checks.table import examine


def probe(facts: Facts, *, seconds: float = 5.0) -> list[Finding]:
    """Look at the world of all ranks that were started together. Collective.

    Where there is no world, because launcher and MPI do not fit together, each process finds that
    out for itself.

    Args:
        facts: of this process.
        seconds: what the measurements between many nodes may take, about; with few they take less.

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

    Speaks of libraries of wheels only, of which is known what they can do.

    Args:
        launched: what the launcher says.
        library: the MPI library that will be loaded.
        prefix: folder of this Python environment.
    """
    if launched is None or library is None or not library.is_relative_to(prefix):
        return None
    if not mismatch(launched, library):
        return None
    needed = srun_type(library)
    return Finding(
        "world",
        "error",
        f"srun --mpi={launched.pmi or 'none'} started {launched.size} ranks, but the MPI library "
        f"{library} finds its ranks by {needed} only: each would be alone, or MPI would stop",
        f"start again with `srun --mpi={needed} ...`, or in the job with `hpctrain launch ...`",
    )
