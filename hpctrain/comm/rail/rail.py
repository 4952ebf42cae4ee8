"""The rail level: ranks that own the same slice on every node reduce it over the slow link."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.dtypes import buffer_of, library_sums
from hpctrain.comm.node.pipelining import Arrival, cut, num_segments, received
from hpctrain.comm.ops import Combination, Op
from hpctrain.comm.plan.size_table import SizeTable
from hpctrain.comm.rail.by_messages import DOUBLING_BYTES, allreduce_by_messages_
from hpctrain.comm.rail.double_tree import double_tree_allreduce_
from hpctrain.comm.rail.doubling import doubling_allreduce_
from hpctrain.comm.rail.halving import halving_allreduce_
from hpctrain.comm.rail.wire import CHUNK_ELEMENTS, Wire
from hpctrain.comm.rank_tree import tree_allreduce_
from hpctrain.comm.waiting import wait_request
from hpctrain.comm.watch import Watch
from hpctrain.core.units import KIB, MIB

SEGMENT_BYTES = MIB
"""Large parts travel in segments: one is combined while the next one is on its way."""


def ring_allreduce_(wire: Wire, tensor: Tensor, combination: Combination) -> None:
    """Replace a flat, contiguous ``tensor`` by its reduction over the ranks of ``wire``.

    Collective. Part p of N travels the ring from rank p on and is combined in that order (it
    ends complete on rank p-1), then travels once more to be copied. 2(N-1) rounds; the time is
    about 2(N-1) a + 2(N-1)/N m b for a message of m bytes, a seconds of latency and b seconds
    per byte. 16-bit floats are rounded at each of the N-1 combinations.

    Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", the ring for all-reduce.
    Differs: a rank passes each segment of a part on as soon as it is combined.
    """
    size, rank, numel = wire.size, wire.rank, tensor.numel()
    if size == 1 or numel == 0:
        return
    num_each = num_segments(-(-numel // size) * tensor.itemsize, SEGMENT_BYTES)
    pieces = cut(tensor, size * num_each)
    ahead = min(2, num_each)
    inboxes = torch.empty(ahead, -(-numel // len(pieces)), dtype=tensor.dtype)

    def segments_of(part: int) -> list[Tensor]:
        return pieces[part % size * num_each :][:num_each]

    # What arrives in turn: parts rank-1, rank-2, ..., rank+1 to be combined with those here,
    # then rank, rank-1, ..., rank+2, complete. Each is passed on, but for the last part.
    incoming = [
        segment for step in range(2 * size - 2) for segment in segments_of(rank - 1 - step)
    ]
    num_combined = (size - 1) * num_each

    def expected() -> Iterator[Arrival]:
        for turn, segment in enumerate(incoming):
            combined = turn < num_combined
            target = inboxes[turn % ahead, : segment.numel()] if combined else segment
            yield Arrival(target, (rank - 1) % size)

    leaving = deque(wire.start_send(segment, (rank + 1) % size) for segment in segments_of(rank))
    for turn, arrived in enumerate(received(wire, expected(), ahead)):
        segment = incoming[turn]
        if turn < num_combined:
            combination.into(segment, arrived)
        if turn < len(incoming) - num_each:
            leaving.append(wire.start_send(segment, (rank + 1) % size))
        # The receive that is posted next may overwrite what this send has read.
        wire.finish(leaving.popleft())


STEP_BYTES = 64 * KIB
"""A step of a ring that carries less costs mostly its latency."""

Algorithm = Callable[[Wire, Tensor, Combination], None]
"""Replaces a flat, contiguous tensor of dtype ``lane`` by its reduction over all ranks."""


ALGORITHMS: dict[str, Algorithm] = {
    "doubling": doubling_allreduce_,
    "halving": halving_allreduce_,
    "ring": ring_allreduce_,
    "tree": tree_allreduce_,
    "double_tree": double_tree_allreduce_,
    "library": allreduce_by_messages_,  # where the MPI library cannot; else Rail calls the library
}
"""By the name that a plan gives them."""


class Rail:
    """One rank of each node; every method but the counters is collective over them."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        table: SizeTable,
        watch: Watch | None = None,
        world_ranks: Sequence[int] = (),
        name: str = "",
    ) -> None:
        """Take the ranks and the choice of algorithms.

        Args:
            comm: nothing else may use it; ``close`` frees it.
            table: names of ``ALGORITHMS`` by bytes of the part.
            watch: looks at the others during waits.
            world_ranks: the world's number of each rank of ``comm``; empty where it is the same.
            name: such as ``rail 0``, for messages.
        """
        self.size: int = comm.size
        watch = watch or Watch()
        self.wire = Wire(comm, watch=watch, world_ranks=world_ranks, name=name)
        self._comm = comm
        self.table = table
        """Algorithms by bytes of the part; the same on all ranks."""
        self._watch = watch
        self._name = name
        self._library_bytes = 0
        self.seconds = 0.0
        """Spent in reductions so far, without waits."""

    @property
    def num_bytes_sent(self) -> int:
        """Bytes that this rank has sent so far; of calls to the library, their bytes."""
        return self.wire.num_bytes_sent + self._library_bytes

    def allreduce_(self, part: Tensor, combination: Combination) -> None:
        """Replace a flat, contiguous ``part`` by its reduction over the nodes.

        Args:
            part: of dtype ``combination.lane``; 16-bit numbers travel as such.
            combination: what to do with the values.
        """
        self.allreduce_by(self.table.at(part.numel() * part.itemsize), part, combination)

    def allreduce_by(self, name: str, part: Tensor, combination: Combination) -> None:
        """Do what ``allreduce_`` does by the algorithm of this name."""
        if self.size == 1:
            return
        start, waited_s = time.perf_counter(), self._watch.waited_s
        if name == "library" and combination.op is Op.SUM and library_sums(part.dtype):
            self._sum_by_library(part)
        else:
            ALGORITHMS[name](self.wire, part, combination)
        self.seconds += time.perf_counter() - start - (self._watch.waited_s - waited_s)

    def close(self) -> None:
        """Free the MPI communicator."""
        self._comm.Free()

    def _sum_by_library(self, part: Tensor) -> None:
        # Inside the library a rank that waits for a late one burns its core: meet asleep before.
        wait_request(self._comm.Ibarrier(), self._watch, over=self._name)
        for chunk in part.split(CHUNK_ELEMENTS):
            self._comm.Allreduce(MPI.IN_PLACE, buffer_of(chunk))
        self._library_bytes += part.numel() * part.itemsize


def default_table(num_nodes: int) -> SizeTable:
    """Return the algorithms for a rail over so many nodes, by rule, without measuring.

    A round costs ``a`` seconds of latency and ``b`` seconds per byte. For m bytes over N nodes
    doubling takes log2(N) (a + m b), halving 2 log2(N) a + 2(N-1)/N m b and the ring
    2(N-1) a + 2(N-1)/N m b, but the ring combines one segment while the next is on its way and
    asks each link for one stream. So: doubling while latency is all that counts, then halving,
    and the ring once each of its steps carries 64 KiB. Where N is no power of two halving pays
    for it with up to 3/2 m b, so with less than 8 nodes the ring follows doubling at once.
    """
    middle = "halving" if num_nodes >= 8 or num_nodes & (num_nodes - 1) == 0 else "ring"
    ring_from = num_nodes * STEP_BYTES
    if num_nodes <= 2:  # doubling sends two ranks no more than halving does, in half the rounds
        return SizeTable(((0, "doubling"), (ring_from, "ring")))
    if middle == "ring":
        return SizeTable(((0, "doubling"), (DOUBLING_BYTES, "ring")))
    return SizeTable(((0, "doubling"), (DOUBLING_BYTES, "halving"), (ring_from, "ring")))
