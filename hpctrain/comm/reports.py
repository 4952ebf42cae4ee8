"""Reports of one rank to others that do not wait for them."""

import threading
from collections.abc import Sequence
from contextlib import suppress

from hpctrain.comm import requests
from hpctrain.comm.mpi_start import MPI
from hpctrain.comm.owner import Owner
from hpctrain.comm.survivors import use

NEAR_SIZE = 64
"""Up to this many ranks, a rank reports to all others; in larger worlds to distances of 2^k."""
MAX_BYTES = 1000
LEFT, BROKE_OFF, AT_END, FAILED, CALL = 1, 2, 3, 4, 5  # tags of the reports


class Reports:
    """Reports that this rank sends; only its owner sends them, and only while it is open.

    Sends are synchronous, so that a barrier after their completion proves that none is in flight.

    Args:
        control: a duplicate of the world on which only this class sends.
    """

    def __init__(self, control: MPI.Intracomm) -> None:
        self._control = control
        use(control)
        self._owner = Owner()
        self._latest: dict[int, tuple[bytes, requests.MpiRequest]] = {}
        """By rank: the last report of ``update``, at most one of which is in flight."""
        self._updating = threading.Lock()
        self.is_open = True

    @property
    def may_send(self) -> bool:
        """Whether this process may send reports: a forked child must not."""
        return self.is_open and self._owner.is_here

    def send(self, tag: int, text: str = "", members: Sequence[int] = ()) -> None:
        """Send ``text``, cut to ``MAX_BYTES``, to some of ``members``, or of all ranks."""
        for rank in self.receivers(members):
            self._start(text.encode()[:MAX_BYTES], tag, rank)

    def update(self, tag: int, text: str, members: Sequence[int]) -> None:
        """Send ``text`` like ``send`` to ranks that have received the report before it.

        Threads may call this concurrently. A rank to which ``text`` was the last report is
        skipped.
        """
        message = text.encode()
        with self._updating, suppress(MPI.Exception):  # of a rank that has died
            for rank in self.receivers(members):
                last, request = self._latest.get(rank, (b"", None))
                if last != message and (request is None or request.Test()):
                    self._latest[rank] = message, self._start(message, tag, rank)

    def _start(self, message: bytes, tag: int, rank: int) -> requests.MpiRequest:
        return requests.start(self._control, self._control.Issend, message, rank, tag)

    def receivers(self, members: Sequence[int] = ()) -> list[int]:
        """Return the ranks that this one reports to, of ``members`` or of all ranks."""
        members = members or range(self._control.size)
        size, here = len(members), members.index(self._control.rank)
        distances: set[int] = set(range(1, size))
        if size > NEAR_SIZE:
            distances = {s << k for k in range(size.bit_length()) for s in (1, -1)}
        found = {members[(here + distance) % size] for distance in distances}
        return sorted(found - {self._control.rank})
