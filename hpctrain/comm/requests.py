"""Nonblocking operations of MPI, with buffers that exist until the operation is complete.

MPI reads and writes the memory of an operation until the operation is complete, also after the
caller has stopped waiting: a timeout, an interrupt, an error between start and wait. A request of
mpi4py refers to its buffer only as long as Python refers to the request, and never to a tensor. So
every operation starts here. This module refers to the operation and its memory from before the
start until completion, and frees a communicator only when none of its operations is pending.
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress

from hpctrain.comm.mpi_start import MPI

_SWEEP = 128
"""Number of pending operations after which abandoned ones are tested."""

_pending: "set[MpiRequest]" = set()
# Not freed while Python exits: MPI_Finalize, which comes later, may still complete operations.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_pending))


class MpiRequest:
    """A nonblocking operation in flight, and the memory that it reads or writes.

    The constructor starts the operation ``call(*arguments)``. The arguments and ``memory`` are
    kept alive until the operation is complete, whether or not the caller waits for it.

    Args:
        comm: communicator of the operation.
        call: nonblocking method of ``comm``.
        arguments: arguments of ``call``.
        memory: objects whose memory the arguments refer to by address.
    """

    __slots__ = ("_call", "_comm", "_memory", "_request")

    def __init__(
        self,
        comm: MPI.Comm,
        call: Callable[..., MPI.Request],
        *arguments: object,
        memory: object = None,
    ) -> None:
        self._comm, self._call, self._memory = comm, call, (arguments, memory)
        self._request: MPI.Request | None = None
        _pending.add(self)  # before the start: an interrupt may arrive during the call
        if not len(_pending) % _SWEEP:
            _sweep()
        try:
            self._request = call(*arguments)
        except MPI.Exception:  # the operation was not started
            _pending.discard(self)
            raise

    def Test(self, status: MPI.Status | None = None) -> bool:  # noqa: N802 - the name in MPI
        """Return whether the operation is complete, without waiting. Not collective.

        Two threads must not test a request at the same time.

        Raises:
            MPI.Exception: the operation has failed.
        """
        request = self._request
        if request is None:  # an interrupt occurred before the handle was stored
            return False
        try:
            is_complete = request.Test(status)
        except MPI.Exception:
            if not request:  # complete, with an error
                _pending.discard(self)
            raise
        if is_complete:
            _pending.discard(self)
        return is_complete

    def cancel(self) -> None:
        """Cancel a receive that no message has matched; a no-op for other operations."""
        if self._request and self._call.__name__ == "Irecv":
            self._request.Cancel()
            self.Test()


start = MpiRequest
"""An alias and not a function, which would add a call to operations of a few microseconds."""


def _sweep() -> None:
    """Test abandoned operations: only this module refers to them, so no other code tests them."""
    operations = tuple(_pending)
    for operation, references in zip(operations, _references(operations), strict=True):
        if references == _ALONE:
            with suppress(MPI.Exception):
                operation.Test()


def _references(objects: tuple[object, ...]) -> list[int]:
    return [sys.getrefcount(one) for one in objects]


_PROBE = {object()}
_ALONE = _references(tuple(_PROBE))[0]
"""Reference count of an object that only a set and a tuple hold, which depends on Python."""


def pending(comm: MPI.Comm) -> list[MpiRequest]:
    """Return the operations of ``comm`` that are not known to be complete. Not collective."""
    return [operation for operation in tuple(_pending) if operation._comm == comm]  # noqa: SLF001


def free(comm: MPI.Comm) -> None:
    """Free a communicator that no thread uses. Every rank must call this function.

    Pending receives are cancelled first. A communicator with other pending operations, which other
    ranks may complete later, is not freed: Open MPI crashes if a nonblocking collective makes
    progress on a freed communicator.
    """
    is_complete = True
    for operation in pending(comm):
        with suppress(MPI.Exception):  # complete, with an error
            operation.cancel()
            is_complete &= operation.Test()
    if is_complete:
        comm.Free()
