"""Operations of the ranks that survive the death of others, by MPI's fault tolerance (ULFM)."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast
from weakref import ref

from hpctrain.comm.mpi_start import MPI, is_loss
from hpctrain.core.errors import CommError


def agree(ranks: MPI.Intracomm, *, am_well: bool) -> bool:
    """Return whether all of ``ranks`` exist and are well, the same on all that survive.

    Collective over the surviving ranks, also on a revoked communicator. For a world that recovers.
    """
    try:
        return bool(ranks.Agree(int(am_well)))
    except MPI.Exception as error:
        if not is_loss(error):
            raise
        return False


def revoke(ranks: MPI.Intracomm) -> None:
    """Fail all operations of ``ranks`` on every rank. Not collective; may be repeated."""
    if not ranks.Is_revoked():
        ranks.Revoke()


_in_use: "list[ref[MPI.Intracomm]]" = []


def use(comm: MPI.Intracomm) -> None:
    """Register a communicator in which calls of the library wait, for ``end_waits``."""
    _in_use[:] = [*(one for one in _in_use if one() is not None), ref(comm)]


def end_waits() -> None:
    """Fail all waits of all ranks. Not collective; for a world that recovers."""
    for one in _in_use:
        comm = one()
        if comm is not None and comm != MPI.COMM_NULL:
            revoke(comm)


def shrink(ranks: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks that survive. Collective over them."""
    return cast("MPI.Intracomm", ranks.Shrink())


def remake(left: MPI.Intracomm, make: Callable[[MPI.Intracomm], object]) -> None:
    """Call ``make`` on all surviving ranks, again with fewer ranks if some die meanwhile.

    Collective over the ranks that survive, which agree that ``make`` has succeeded on all of them.

    Raises:
        CommError: ``make`` has failed on another rank although no rank died; the rank on which it
            failed raises its own error.
    """
    while True:
        error: Exception | None = None
        # No rank revokes it until all have it: MPI crashes on a rank that is still creating it.
        if agree(left, am_well=True):
            try:
                make(left)
            except Exception as caught:
                error = caught
                revoke(left)
                end_waits()
            if agree(left, am_well=error is None):
                return
            end_waits()
        size, left = left.size, shrink(left)
        if left.size == size:
            raise error or CommError("making the world has failed on another rank, see its error")


def lost(before: MPI.Intracomm, left: MPI.Intracomm) -> list[int]:
    """Return the ranks of ``before`` that are not in ``left``. Not collective."""
    ours, theirs = before.Get_group(), left.Get_group()
    found = MPI.Group.Translate_ranks(ours, None, theirs)
    ours.Free()
    theirs.Free()
    return [rank for rank, number in enumerate(found) if number == MPI.UNDEFINED]


def failed(ranks: MPI.Intracomm) -> list[int]:
    """Return the ranks that this rank knows to have died, for a world that recovers."""
    ours, dead = ranks.Get_group(), ranks.Get_failed()
    numbers = MPI.Group.Translate_ranks(dead, None, ours)
    ours.Free()
    dead.Free()
    return sorted(numbers)


def knows_of_loss(ranks: MPI.Intracomm) -> bool:
    """Return whether this rank knows of a death, or of a revocation that follows one.

    Not collective. Repeats the question, because MPI detects a death only while it makes progress.
    """
    for _ in range(5):
        if ranks.Is_revoked() or failed(ranks):
            return True
        time.sleep(0.02)
        with suppress(MPI.Exception):  # of a rank that has died since
            ranks.Iprobe()
    return False
