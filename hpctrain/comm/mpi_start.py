"""The module ``MPI`` of mpi4py, loaded at first use, and tests of its objects.

Loading ``MPI`` applies the MPI settings for this host and initializes MPI. A world of one rank
does not need MPI, so modules that such a world imports access ``mpi_start.MPI`` only where they
use it.
"""

import atexit
import signal
import sys
import threading
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
    # Runs after handlers registered later; mpi4py calls MPI_Finalize after all handlers.
    atexit.register(rename, LEAVING)
    with settings_of_mpi():
        from mpi4py import MPI  # noqa: PLC0415 - this starts MPI
    _restore_hangup()
    globals()[name] = MPI
    return MPI


def _restore_hangup() -> None:
    """Restore the handler of SIGHUP, which MPI may have replaced.

    A process must end when its terminal closes.
    """
    handler = signal.getsignal(signal.SIGHUP)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, handler)


def is_communicator(value: object) -> bool:
    """Return whether ``value`` is an mpi4py intracommunicator that contains this process."""
    here = sys.modules.get(_MODULE)
    return here is not None and isinstance(value, here.Intracomm) and value != here.COMM_NULL


def is_of_mpi(error: BaseException) -> "TypeGuard[MPI.Exception]":
    """Return whether ``error`` is an ``MPI.Exception``."""
    here = sys.modules.get(_MODULE)
    return here is not None and isinstance(error, here.Exception)


def is_loss(error: BaseException) -> bool:
    """Return whether ``error`` is an MPI error for a dead rank or a revoked communicator."""
    if not is_of_mpi(error):
        return False
    here = sys.modules[_MODULE]
    signs = (here.ERR_PROC_FAILED, here.ERR_PROC_FAILED_PENDING, here.ERR_REVOKED)
    return error.Get_error_class() in signs


def numbers_in(world: "MpiComm | None", comm: "MpiComm") -> list[int]:
    """Translate the ranks of ``comm`` to ranks of ``world``; return them sorted. Not collective.

    Raises:
        ConfigError: a rank of ``comm`` is not in ``world``.
    """
    here = sys.modules[_MODULE]
    theirs = comm.Get_group()
    ours = (world or here.COMM_SELF).Get_group()
    numbers = sorted(here.Group.Translate_ranks(theirs, None, ours))
    theirs.Free()
    ours.Free()
    if here.UNDEFINED in numbers:
        raise ConfigError(
            "ranks of a process set must be in the world, got a communicator with other ranks; "
            "pass a communicator with all of them to init(comm=...)"
        )
    return numbers
