"""Operations of the ranks that survive when other ranks die, by MPI fault tolerance (ULFM)."""

import time
from contextlib import suppress
from typing import TYPE_CHECKING, cast
from weakref import ref

from hpctrain.comm import mpi_start
from hpctrain.comm.mpi_start import is_loss
from hpctrain.core.errors import CommError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.comm.mpi_start import MpiComm


def agree(ranks: "MpiComm", *, has_succeeded: bool) -> bool:
    """Return True, on all survivors, if no rank died and all ranks pass ``has_succeeded=True``.

    Collective over the surviving ranks, also on a revoked communicator. Only for a world that
    recovers.
    """
    try:
        return bool(ranks.Agree(int(has_succeeded)))
    except mpi_start.MPI.Exception as error:
        if not is_loss(error):
            raise
        return False


def revoke(ranks: "MpiComm") -> None:
    """Make all operations of ``ranks`` fail on every rank. Not collective; may be repeated."""
    if not ranks.Is_revoked():
        ranks.Revoke()


_in_use: "list[ref[MpiComm]]" = []


def use(comm: "MpiComm") -> None:
    """Register ``comm``, so that ``end_waits`` makes waits in ``comm`` fail."""
    _in_use[:] = [*(one for one in _in_use if one() is not None), ref(comm)]


def end_waits() -> None:
    """Make the waits in all registered communicators fail on every rank. Not collective.

    Only for a world that recovers.
    """
    for one in _in_use:
        comm = one()
        if comm is not None and comm != mpi_start.MPI.COMM_NULL:
            revoke(comm)


def shrink(ranks: "MpiComm") -> "MpiComm":
    """Return a communicator of the ranks that survive. Collective over these ranks."""
    return cast("MpiComm", ranks.Shrink())


def remake(left: "MpiComm", make: "Callable[[MpiComm], object]") -> None:
    """Call ``make`` on the surviving ranks; repeat the call with fewer ranks if some die.

    Collective over the surviving ranks, which agree whether ``make`` has succeeded on all.

    Raises:
        CommError: ``make`` has failed on another rank although no rank died; the rank on which it
            failed raises its own error.
    """
    while True:
        error: Exception | None = None
        # A rank must not revoke ``left`` before all ranks have created it: MPI would crash.
        if agree(left, has_succeeded=True):
            try:
                make(left)
            except Exception as caught:
                error = caught
                revoke(left)
                end_waits()
            if agree(left, has_succeeded=error is None):
                return
            end_waits()
        size, left = left.size, shrink(left)
        if left.size == size:
            raise error or CommError(
                "the surviving ranks must create a new world, but another rank failed; see the "
                "error of that rank"
            )


def lost(before: "MpiComm", left: "MpiComm") -> list[int]:
    """Return the ranks of ``before`` that are not in ``left``. Not collective."""
    ours, theirs = before.Get_group(), left.Get_group()
    found = mpi_start.MPI.Group.Translate_ranks(ours, None, theirs)
    ours.Free()
    theirs.Free()
    return [rank for rank, number in enumerate(found) if number == mpi_start.MPI.UNDEFINED]


def failed(ranks: "MpiComm") -> list[int]:
    """Return the ranks whose death this rank has detected. For a world that recovers."""
    ours, dead = ranks.Get_group(), ranks.Get_failed()
    numbers = mpi_start.MPI.Group.Translate_ranks(dead, None, ours)
    ours.Free()
    dead.Free()
    return sorted(numbers)


def has_detected_loss(ranks: "MpiComm") -> bool:
    """Return whether this rank has detected a dead rank, or that ``ranks`` was revoked.

    Not collective. The test is repeated, because MPI detects a death only during its calls.
    """
    for _ in range(5):
        if ranks.Is_revoked() or failed(ranks):
            return True
        time.sleep(0.02)
        with suppress(mpi_start.MPI.Exception):  # a rank has died since
            ranks.Iprobe()
    return False
