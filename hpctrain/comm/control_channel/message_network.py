"""Messages to ranks on other nodes, by MPI."""

from collections.abc import Container

from mpi4py import MPI

from hpctrain.comm.waiting import BY_MPI, Watch, wait_until

CHUNK_BYTES = 1 << 30
"""Largest message of MPI: its counts have 32 bits."""
_LAST, _MORE_FOLLOWS = 0, 1


class Network:
    """Sends and receives without waiting, and looks for messages only when asked to."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Take a communicator that nobody else uses; ``close`` frees it."""
        self._comm = comm
        self._status = MPI.Status()
        self._leaving: list[tuple[MPI.Request, memoryview, int]] = []
        self._coming: list[tuple[int, int, MPI.Request, bytearray]] = []
        self._parts: dict[int, bytes] = {}
        self.inbox: list[tuple[int, bytes]] = []
        """Messages that have come, with their senders; who takes them empties it."""

    def send(self, to: int, message: bytes) -> None:
        """Start to send."""
        rest = memoryview(message)
        while len(rest) > CHUNK_BYTES:
            self._start(to, rest[:CHUNK_BYTES], _MORE_FOLLOWS)
            rest = rest[CHUNK_BYTES:]
        self._start(to, rest, _LAST)

    def look(self) -> bool:
        """Move what is under way, and say whether the inbox holds anything."""
        if self._leaving:
            self._leaving = [one for one in self._leaving if not one[0].Test()]
        status = self._status
        while (found := self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            came = bytearray(status.Get_count(MPI.BYTE))
            request = found.Irecv([came, MPI.BYTE])
            self._coming.append((status.Get_source(), status.Get_tag(), request, came))
        if self._coming:
            self._sort()
        return bool(self.inbox)

    def is_sending(self, to: Container[int] | None) -> bool:
        """Say whether a message to one of these ranks, or any, had not left at the last look."""
        return any(to is None or one[2] in to for one in self._leaving)

    def close(self, watch: Watch) -> None:
        """Free the communicator once all ranks are here and nothing is under way. Collective."""
        wait_until(self._is_quiet, watch.look, BY_MPI)
        everyone_came = self._comm.Ibarrier()  # they receive until nobody sends any more
        wait_until(lambda: self._is_quiet() and everyone_came.Test(), watch.look, BY_MPI)
        self._comm.Free()

    def _is_quiet(self) -> bool:
        self.look()
        return not (self._leaving or self._coming)

    def _start(self, to: int, piece: memoryview, tag: int) -> None:
        request = self._comm.Isend([piece, MPI.BYTE], to, tag)
        if not request.Test():
            self._leaving.append((request, piece, to))

    def _sort(self) -> None:
        """Put what has come whole into the inbox; a message waits for those sent before it."""
        coming, late = [], set()
        for one in self._coming:
            source, tag, request, came = one
            if source in late or not request.Test():
                late.add(source)
                coming.append(one)
            elif tag == _MORE_FOLLOWS:
                self._parts[source] = self._parts.get(source, b"") + came
            else:
                self.inbox.append((source, self._parts.pop(source, b"") + came))
        self._coming = coming
