"""The rail level: ranks that own the same slice on every node all-reduce it over the slow link."""

from typing import TYPE_CHECKING

from torch import Tensor

from hpctrain.comm.mpi import CHUNK_ELEMENTS, MpiCommunicator
from hpctrain.comm.ring import ring_allreduce_
from hpctrain.comm.work import Check

if TYPE_CHECKING:
    from mpi4py import MPI


class Rail:
    """One rank of each node; every method is collective over them."""

    def __init__(self, comm: "MPI.Intracomm", *, ring_bytes: int, check: Check) -> None:
        self.size: int = comm.size
        self._comm = comm
        self._check = check
        self._ring_bytes = ring_bytes
        self._library = MpiCommunicator(comm, check=check)

    def allreduce_(self, part: Tensor) -> None:
        """Sum a flat, contiguous ``part`` over the nodes: by a ring, or by the library."""
        if self.size == 1:
            return
        # Two ranks only exchange halves, which every library does well. A ring's step must carry
        # enough to hide its latency, and counts of MPI-3 are 32-bit.
        step_bytes = part.numel() * part.itemsize // self.size
        if self.size == 2 or step_bytes < self._ring_bytes:
            self._library.allreduce_(part)
            return
        for chunk in part.split(CHUNK_ELEMENTS):
            ring_allreduce_(self._comm, chunk, self._check)

    def close(self) -> None:
        """Free the MPI communicator."""
        self._library.close()
