"""The rail level: ranks that own the same slice on every node reduce it over the slow link."""

import time
from collections.abc import Sequence

from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.communicator import FINISHED, Traffic, Work
from hpctrain.comm.ops import Combination, Op, combination, scale_
from hpctrain.comm.plan.plan import SizeTable
from hpctrain.comm.rail.algorithms import ALGORITHMS
from hpctrain.comm.rail.mpi_wire import CHUNK_ELEMENTS, MpiWire, buffer_of, library_sums
from hpctrain.comm.tensor_arguments import check_scale, flattened
from hpctrain.comm.waiting import Watch, wait_request


class Rail:
    """One rank of each node; every method but the counters is collective over them.

    It is what a codec needs of a communicator to reduce what it has made of a slice.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        table: SizeTable,
        watch: Watch | None = None,
        world_ranks: Sequence[int] = (),
        name: str = "",
    ) -> None:
        """Take the ranks of ``comm``, which ``close`` frees.

        ``table`` has names of ``ALGORITHMS`` by bytes of the part; the rest as for ``MpiWire``.
        """
        self.rank: int = comm.rank
        self.size: int = comm.size
        watch = watch or Watch()
        self.wire = MpiWire(comm, watch=watch, world_ranks=world_ranks, name=name)
        self._comm = comm
        self.table = table
        """Algorithms by bytes of the part; the same on all ranks."""
        self._watch = watch
        self._name = name
        self._library_bytes = 0
        self._seconds = 0.0

    def allreduce_(self, tensor: Tensor, *, op: Op = Op.SUM, scale: float | None = None) -> Work:
        """Replace ``tensor`` by its sum over the nodes, times ``scale``.

        16-bit numbers travel as such, and are rounded whenever two are combined.
        """
        check_scale(tensor, scale)
        how = combination(tensor.dtype, op)
        with flattened(tensor) as values:
            self.reduce_(values.view(how.lane), how)
        if scale is not None:
            scale_(tensor.detach(), scale)
        return FINISHED

    def reduce_(self, part: Tensor, combination: Combination) -> None:
        """Replace a flat, contiguous ``part`` of dtype ``combination.lane`` by its reduction."""
        self.allreduce_by(self.table.at(part.numel() * part.itemsize), part, combination)

    def allreduce_by(self, name: str, part: Tensor, combination: Combination) -> None:
        """Do what ``reduce_`` does by the algorithm of this name."""
        if self.size == 1:
            return
        start, waited_s = time.perf_counter(), self._watch.waited_s
        if name == "library" and combination.op is Op.SUM and library_sums(part.dtype):
            self._sum_by_library(part)
        else:
            ALGORITHMS[name](self.wire, part, combination)
        self._seconds += time.perf_counter() - start - (self._watch.waited_s - waited_s)

    def traffic(self) -> Traffic:
        """Return what this rank has moved so far; of calls to the library, their bytes."""
        sent = self.wire.num_bytes_sent + self._library_bytes
        return Traffic(rail_bytes=sent, waited_s=self._watch.waited_s, rail_s=self._seconds)

    def close(self) -> None:
        """Free the MPI communicator."""
        self._comm.Free()

    def _sum_by_library(self, part: Tensor) -> None:
        # Inside the library a rank that waits for a late one burns its core: meet asleep before.
        wait_request(self._comm.Ibarrier(), self._watch, over=self._name)
        for chunk in part.split(CHUNK_ELEMENTS):
            self._comm.Allreduce(MPI.IN_PLACE, buffer_of(chunk))
        self._library_bytes += part.numel() * part.itemsize
