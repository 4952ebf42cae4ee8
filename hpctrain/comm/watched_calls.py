"""Collectives of an MPI communicator that raise if a rank is lost or late.

A blocking MPI call would wait for such a rank forever. The calls here are nonblocking, and a
``Watch`` waits for them.
"""

import pickle
import threading
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar, cast

from hpctrain.comm import requests
from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.comm.mpi_start import MPI
from hpctrain.comm.waiting import Watch, wait_request
from hpctrain.core.pickles import unpickled

T = TypeVar("T")

Wait = Callable[[Callable[[], object]], object]
"""Waits until the given function returns true."""

MESSAGE_BYTES = 1 << 30  # largest message: counts of MPI-3 are 32-bit


_abandoned: list[threading.Thread] = []


def is_blocked() -> bool:
    """Return True if a thread is still in an MPI call for which the caller no longer waits."""
    return any(thread.is_alive() for thread in _abandoned)


class WatchedCalls:
    """Collectives of ``comm`` on Python objects and buffers, with waits by ``watch``.

    All methods are collective: all ranks make the same calls in the same order.
    """

    def __init__(self, comm: MPI.Intracomm, watch: Watch) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._comm, self._watch = comm, watch

    def run(
        self, call: Callable[..., MPI.Request], *arguments: object, memory: object = None
    ) -> None:
        """Start a nonblocking ``call`` of ``comm``, and wait until it is complete.

        ``memory`` is kept alive until then.
        """
        request = requests.start(self._comm, call, *arguments, memory=memory)
        wait_request(request, self._watch)
        self._watch.confirm()

    def block(self, call: Callable[[], T]) -> T:
        """Return the result of a blocking ``call``, for operations without a nonblocking form.

        The call runs on a separate thread, so that the caller can stop waiting; the thread then
        remains in MPI. If MPI does not support threads, the call runs on the caller's thread,
        which must have synchronized the ranks before.
        """
        if not calls_from_threads():
            return call()
        found: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                found.append(call())
            except BaseException as error:  # raised by the caller below
                errors.append(error)

        thread = threading.Thread(target=run, name="hpctrain-mpi", daemon=True)
        thread.start()
        try:
            self._watch.wait(lambda: not thread.is_alive())
        except BaseException:
            _abandoned.append(thread)
            raise
        if errors:
            raise errors[0]
        return found[0]

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        if self.size > 1:
            self.run(self._comm.Ibarrier)

    def duplicate(self) -> MPI.Intracomm:
        """Return a duplicate of the communicator, after all ranks have created it."""
        made: list[MPI.Intracomm] = []

        def start() -> MPI.Request:
            duplicate, request = self._comm.Idup()
            made.append(duplicate)
            return request

        wait_request(requests.start(self._comm, start), self._watch)
        return self._created_by_all(made[0])

    def split(self, color: int, key: int = 0) -> MPI.Intracomm | None:
        """Return a communicator of the ranks of one ``color``; None for ``MPI.UNDEFINED``."""
        self.barrier()  # sleeps until all ranks have arrived; ``Split`` spins
        made = self.block(lambda: self._comm.Split(color, key))
        return None if made == MPI.COMM_NULL else self._created_by_all(cast("MPI.Intracomm", made))

    def _created_by_all(self, made: MPI.Intracomm) -> MPI.Intracomm:
        """Return the communicator ``made`` after all of its ranks have created it.

        Open MPI crashes if a rank revokes a communicator that another rank has not yet created.
        """
        WatchedCalls(made, self._watch).barrier()
        return made

    def bcast(self, value: T, root: int = 0) -> T:
        """Return the object of rank ``root`` on every rank."""
        mine = _pickled(value) if self.rank == root else []
        num = array("q", [len(mine)])
        self.run(self._comm.Ibcast, num, root)
        sizes = array("q", map(len, mine) if mine else [0] * num[0])
        self.run(self._comm.Ibcast, sizes, root)
        parts = mine or [memoryview(bytearray(size)) for size in sizes]
        for part in parts:
            for piece in _pieces(part):
                self.run(self._comm.Ibcast, [piece, MPI.BYTE], root)
        result: T = unpickled(parts[0], parts[1:])  # also the root gets a copy
        return result

    def allgather(self, value: T) -> list[T]:
        """Return the objects of all ranks, by rank."""
        return self._gather(value, None)

    def gather(self, value: T, root: int = 0) -> list[T] | None:
        """Return the objects of all ranks, by rank, on rank ``root``; None on other ranks."""
        found = self._gather(value, root)
        return found if self.rank == root else None

    def _gather(self, value: T, root: int | None) -> list[T]:
        parts = gather_bytes(self._comm, _packed(value), self._watch.wait, root)
        self._watch.confirm()
        return [unpickled(part) for part in parts]

    def alltoall(self, values: Sequence[T]) -> list[T]:
        """Send ``values[r]`` to rank r; return the received objects. For small objects."""
        parts = alltoall_bytes(self._comm, [_packed(value) for value in values], self._watch.wait)
        self._watch.confirm()
        return [unpickled(part) for part in parts]


def alltoall_bytes(comm: MPI.Intracomm, given: Sequence[bytes], wait: Wait) -> list[memoryview]:
    """Send ``given[r]`` to rank r; return the received bytes, by rank. Collective.

    A rank sends log2(N) messages, each with half of the bytes. With ``Ialltoallv`` of Open MPI
    each rank would send a message to each other rank.

    Args:
        comm: the ranks.
        given: bytes for each rank.
        wait: performs all waits.

    Source: Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport
    message-passing systems".
    """
    size, rank = comm.size, comm.rank
    # Part p is sent p ranks further, by one message for each binary digit of p.
    held = [memoryview(given[(rank + place) % size]) for place in range(size)]
    for distance in (1 << k for k in range((size - 1).bit_length())):
        places = [place for place in range(size) if place & distance]
        sent = _start_sends(comm, [held[place] for place in places], (rank + distance) % size)
        came = _received(comm, len(places), (rank - distance) % size, wait)
        for place, part in zip(places, came, strict=True):
            held[place] = part
        for request in sent:
            wait(request.Test)
    return [held[(rank - source) % size] for source in range(size)]


def gather_bytes(
    comm: MPI.Intracomm, mine: bytes, wait: Wait, root: int | None = None
) -> list[memoryview]:
    """Return the bytes of all ranks, by rank. Collective.

    A rank sends log2(N) messages, or one with ``root``. With ``Iallgatherv`` of Open MPI each rank
    would send a message to each other rank.

    Args:
        comm: the ranks.
        mine: bytes of this rank.
        wait: performs all waits.
        root: the only rank that receives the bytes; other ranks get an empty list. None: all ranks
            receive the bytes.

    Source: Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport
    message-passing systems"; with ``root``, a binomial tree.
    """
    size = comm.size
    place = 0 if root is None else (comm.rank - root) % size
    held = [memoryview(mine)]  # of this rank and of the ranks that follow
    for distance in (1 << k for k in range((size - 1).bit_length())):
        sent, is_last = list[requests.MpiRequest](), bool(place & distance)
        if root is None or is_last:
            sent = _start_sends(comm, held[: size - distance], (comm.rank - distance) % size)
        if not is_last and (num := min(distance, size - distance - place)) > 0:
            held += _received(comm, num, (comm.rank + distance) % size, wait)
        for request in sent:
            wait(request.Test)
        if is_last:
            return []
    return held[size - comm.rank :] + held[: size - comm.rank]


def _start_sends(
    comm: MPI.Intracomm, parts: Sequence[memoryview], dest: int
) -> list[requests.MpiRequest]:
    message = memoryview(b"".join([array("q", map(len, parts)).tobytes(), *parts]))
    return [
        requests.start(comm, comm.Isend, [piece, MPI.BYTE], dest) for piece in _pieces(message)
    ]


def _received(comm: MPI.Intracomm, num: int, source: int, wait: Wait) -> list[memoryview]:
    """Return the ``num`` parts that rank ``source`` sends."""
    head = num * array("q").itemsize
    message = _received_piece(comm, source, wait)
    sizes = array("q", bytes(message[:head]))
    while len(message) < head + sum(sizes):
        message += _received_piece(comm, source, wait)
    return _cut(memoryview(message)[head:], sizes)


def _received_piece(comm: MPI.Intracomm, source: int, wait: Wait) -> bytearray:
    status, found = MPI.Status(), list[MPI.Message]()

    def has_arrived() -> bool:
        message = comm.Improbe(source, 0, status)
        if message is not None:
            found.append(message)
        return bool(found)

    wait(has_arrived)
    piece = bytearray(status.Get_count(MPI.BYTE))
    wait(requests.start(comm, found[0].Irecv, [piece, MPI.BYTE]).Test)
    return piece


def _packed(value: object) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def _pickled(value: object) -> list[memoryview]:
    """Pickle ``value``; return the pickle and its out-of-band buffers, which are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return [memoryview(head), *(buffer.raw() for buffer in buffers)]


def _cut(joined: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    bounds = pairwise(accumulate(sizes, initial=0))
    return [joined[start:stop] for start, stop in bounds]


def _pieces(part: memoryview) -> list[memoryview]:
    starts = range(0, len(part), MESSAGE_BYTES)
    return [part[start : start + MESSAGE_BYTES] for start in starts]
