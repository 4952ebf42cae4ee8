"""Control messages to ranks on other nodes, sent by MPI."""

from collections import defaultdict, deque
from collections.abc import Container

from hpctrain.comm import requests
from hpctrain.comm.mpi_start import MPI
from hpctrain.comm.waiting import BY_MPI, Watch, wait_until

_MAIL, _VOTE = 0, 1  # tags


class Network:
    """Sends and receives control messages between nodes, without waiting.

    Votes, the messages of ``negotiation.fast_path``, are stored separately from other messages.
    Each message must be smaller than 2 GiB.

    Args:
        comm: communicator that no other object uses; ``close`` frees it.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._status = MPI.Status()
        self._sending: list[tuple[requests.MpiRequest, int]] = []
        self._receiving: list[tuple[int, int, requests.MpiRequest, bytearray]] = []
        self.inbox: list[tuple[int, bytes]] = []
        """Received messages with their senders; the reader empties this list."""
        self.votes: dict[int, deque[bytes]] = defaultdict(deque)
        """Received votes by sender; see ``negotiation.fast_path``."""
        self.has_new_votes = False  # whether votes have arrived since ``read_votes``

    def send(self, to: int, message: bytes, *, is_vote: bool = False) -> None:
        """Start sending ``message`` to rank ``to``."""
        comm, tag = self._comm, _VOTE if is_vote else _MAIL
        request = requests.start(comm, comm.Isend, [message, MPI.BYTE], to, tag)
        if not request.Test():
            self._sending.append((request, to))

    def look(self) -> bool:
        """Advance messages in flight; return whether there are messages or new votes to read."""
        if self._sending:
            self._sending = [one for one in self._sending if not one[0].Test()]
        status = self._status
        while (found := self._comm.Improbe(status=status)) is not None:
            came = bytearray(status.Get_count(MPI.BYTE))
            request = requests.start(self._comm, found.Irecv, [came, MPI.BYTE])
            self._receiving.append((status.Get_source(), status.Get_tag(), request, came))
        if self._receiving:
            self._sort()
        return bool(self.inbox) or self.has_new_votes

    def read_votes(self) -> None:
        """Mark the received votes as read."""
        self.has_new_votes = False

    def is_sending(self, to: Container[int] | None) -> bool:
        """Return whether a message to a rank in ``to`` is in flight; None means all ranks."""
        return any(to is None or one[1] in to for one in self._sending)

    def close(self, watch: Watch) -> None:
        """Wait until no rank has messages in flight, then free the communicator. Collective."""
        wait_until(self._is_quiet, watch.look, BY_MPI)
        # Ranks receive until no rank sends any more.
        everyone_came = requests.start(self._comm, self._comm.Ibarrier)
        wait_until(lambda: self._is_quiet() and everyone_came.Test(), watch.look, BY_MPI)
        watch.free(self._comm)

    def _is_quiet(self) -> bool:
        self.look()
        return not (self._sending or self._receiving)

    def _sort(self) -> None:
        """Move received messages to ``inbox`` and ``votes``, in the order of each sender."""
        receiving, late = [], set()
        for one in self._receiving:
            source, tag, request, came = one
            if source in late or not request.Test():
                late.add(source)
                receiving.append(one)
            elif tag == _VOTE:
                self.votes[source].append(bytes(came))
                self.has_new_votes = True
            else:
                self.inbox.append((source, bytes(came)))
        self._receiving = receiving
