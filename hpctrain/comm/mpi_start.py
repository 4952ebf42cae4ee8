"""The module ``MPI`` of mpi4py, and what its objects are.

``MPI`` is loaded at its first use, with the settings of this host, and starts MPI. A world of one
does without: modules that it imports write ``mpi_start.MPI`` where they use it.
"""

import atexit
import sys
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from hpctrain.cluster.libraries import settings_of_mpi
from hpctrain.cluster.process import LEAVING, rename
from hpctrain.core.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

    MpiComm: TypeAlias = MPI.Intracomm

__all__ = ["MPI", "is_communicator", "is_loss", "is_of_mpi", "numbers_in"]

_MODULE = "mpi4py.MPI"


def __getattr__(name: str) -> Any:
    if name != "MPI":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The last of our handlers at exit: mpi4py calls MPI_Finalize when all handlers have run.
    atexit.register(rename, LEAVING)
    with settings_of_mpi():
        from mpi4py import MPI  # noqa: PLC0415 - this starts MPI
    globals()[name] = MPI
    return MPI


def is_communicator(value: object) -> bool:
    """Return whether this is an intracommunicator of mpi4py that this process is in."""
    here = sys.modules.get(_MODULE)
    return here is not None and isinstance(value, here.Intracomm) and value != here.COMM_NULL


def is_of_mpi(error: BaseException) -> "TypeGuard[MPI.Exception]":
    """Return whether MPI has raised an error."""
    here = sys.modules.get(_MODULE)
    return here is not None and isinstance(error, here.Exception)


def is_loss(error: BaseException) -> bool:
    """Return whether MPI has found that a rank died, or that others no longer wait for it."""
    if not is_of_mpi(error):
        return False
    here = sys.modules[_MODULE]
    signs = (here.ERR_PROC_FAILED, here.ERR_PROC_FAILED_PENDING, here.ERR_REVOKED)
    return error.Get_error_class() in signs


def numbers_in(world: "MpiComm | None", comm: "MpiComm") -> list[int]:
    """Return which ranks of ``world`` those of ``comm`` are, sorted. Not collective.

    ``ConfigError`` if one is not in ``world``.
    """
    here = sys.modules[_MODULE]
    theirs = comm.Get_group()
    ours = (world or here.COMM_SELF).Get_group()
    numbers = sorted(here.Group.Translate_ranks(theirs, None, ours))
    theirs.Free()
    ours.Free()
    if here.UNDEFINED in numbers:
        raise ConfigError(
            "a process set is made of ranks of the world, got a communicator with others; "
            "give init(comm=...) one that has them all"
        )
    return numbers
