"""Reductions between nodes, over MPI: the ranks of a rail reduce the same slice of a tensor."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm import requests
from hpctrain.comm.mpi_start import MPI
from hpctrain.comm.operation_result import FINISHED, Traffic, Work
from hpctrain.comm.ops import Combination, Op, combination, scale_
from hpctrain.comm.plan.plan import Plan, SizeTable
from hpctrain.comm.rail.algorithms import ALGORITHMS, allreduce_steps, schedule_name
from hpctrain.comm.rail.wire import Wire
from hpctrain.comm.requests import MpiRequest
from hpctrain.comm.tensor_arguments import check_scale, flattened
from hpctrain.comm.waiting import BY_MPI, Pace, Watch, wait_request
from hpctrain.core.errors import CommError
from hpctrain.core.python_compat import Self
from hpctrain.core.units import format_bytes

CHUNK_ELEMENTS = 1 << 26  # largest message in elements: counts of MPI-3 are 32-bit


_MPI_TYPE = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}


def library_sums(dtype: torch.dtype) -> bool:
    """Return whether the MPI library can sum this dtype.

    Returns False for 8 and 16 bits, because vectorized sums of Open MPI saturate: 245 + 245 gives
    255 instead of 234.
    """
    return dtype in _MPI_TYPE


def buffer_of(tensor: torch.Tensor) -> list[object]:
    """Return an mpi4py buffer for a contiguous tensor whose dtype MPI can sum."""
    return [_bytes_of(tensor), tensor.numel(), _MPI_TYPE[tensor.dtype]]


def bytes_of(tensor: torch.Tensor) -> list[object]:
    """Return an mpi4py buffer for the bytes of a contiguous tensor of any dtype."""
    return [_bytes_of(tensor), tensor.numel() * tensor.itemsize, MPI.BYTE]


def _bytes_of(tensor: torch.Tensor) -> MPI.buffer:
    # Not tensor.numpy(): that pins the storage, and bfloat16 has no numpy type.
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.itemsize)


@dataclass(slots=True, eq=False)
class Transfer:
    """A message in flight, sent or received in one or more MPI requests."""

    tensor: Tensor
    partner: int | None  # rank of the other end; None until it is known
    requests: list[MpiRequest]  # incomplete requests
    expected: int  # bytes still to be received; 0 for a sent message

    def cancel(self) -> None:
        """Cancel a receive that no message has matched."""
        for request in self.requests:
            request.cancel()


class MpiWire(Wire):
    """Sends and receives messages between ranks of an MPI communicator, and counts bytes.

    Args:
        comm: the ranks.
        watch: detects lost ranks while this rank waits.
        world_ranks: world rank of each rank; by default the ranks of ``watch``.
        name: name for error messages, such as ``rail 0``. A wire with a name is for collectives,
            each of which has its own tags.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        watch: Watch | None = None,
        world_ranks: Sequence[int] = (),
        name: str = "",
    ) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.num_bytes_sent = 0  # bytes that this rank has sent so far
        self._comm = comm
        self._watch = watch or Watch()
        self._world_ranks = world_ranks or self._watch.ranks or range(comm.size)
        self._name = name
        self._status = MPI.Status()

    def start_send(self, tensor: Tensor, dest: int, tag: int = 0) -> Transfer:
        """Start sending ``tensor``, which must not change until ``finish``."""
        self.count(tensor.numel() * tensor.itemsize)
        return Transfer(tensor, dest, self._start(self._comm.Isend, tensor, dest, tag), 0)

    def count(self, num_bytes: int) -> None:
        """Count bytes that this rank has sent to the ranks of this wire, by any method."""
        self.num_bytes_sent += num_bytes

    def start_receive(self, tensor: Tensor, source: int | None, tag: int = 0) -> Transfer:
        """Start receiving into ``tensor``, which must not be used until ``finish``.

        If ``source`` is None the message may be received from any rank, and ``partner`` of the
        transfer is then set to its sender.
        """
        if source is None and tensor.numel() > CHUNK_ELEMENTS:
            raise CommError(
                f"a message from any source must have at most {CHUNK_ELEMENTS} elements, because "
                f"larger ones are sent in parts, got {tensor.numel()}; give the source"
            )
        sender = MPI.ANY_SOURCE if source is None else source
        started = self._start(self._comm.Irecv, tensor, sender, tag)
        return Transfer(tensor, source, started, tensor.nbytes)

    def finish(self, transfer: Transfer) -> None:
        """Wait until ``transfer`` is complete; a long wait sleeps.

        Raises:
            RankLostError: a rank is lost, or the wait has lasted too long.
            CommError: the sender sent another number of bytes than this rank expects.
        """
        if not self.is_finished(transfer):
            self.wait_for(transfer, partial(self.is_finished, transfer))

    def wait_for(
        self, transfer: Transfer, done: Callable[[], object], pace: Pace = BY_MPI
    ) -> None:
        """Wait until ``done()`` is true; errors name the other rank of ``transfer``."""
        partner = None if transfer.partner is None else self._world_ranks[transfer.partner]
        self._watch.wait(done, pace, partner=partner, over=self._name)

    def withdraw_receives(self) -> None:
        """Cancel all receives, so that the caller can use their tensors after an error."""
        for request in requests.pending(self._comm):
            with suppress(MPI.Exception):  # complete, with an error
                request.cancel()

    def is_finished(self, transfer: Transfer) -> bool:
        """Return whether ``transfer`` is complete; raise ``CommError`` as ``finish`` does."""
        left, status = transfer.requests, self._status
        try:
            while left:
                if not left[0].Test(status):
                    return False
                del left[0]
                if transfer.partner is None:
                    transfer.partner = status.Get_source()
                if transfer.expected:
                    transfer.expected -= status.Get_count(MPI.BYTE)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            raise self._misfit(transfer, "more") from error
        if transfer.expected:
            raise self._misfit(transfer, format_bytes(transfer.tensor.nbytes - transfer.expected))
        return True

    def _misfit(self, transfer: Transfer, sent: str) -> CommError:
        sender = transfer.partner
        me, other = self._world_ranks[self.rank], sender and self._world_ranks[sender]
        return CommError(
            f"both ends of a message must give tensors of the same size and dtype, but rank {me} "
            f"expects {format_bytes(transfer.tensor.nbytes)} and rank {other} sends {sent}; make "
            f"the same calls in the same order on every rank"
        )

    def _start(
        self, call: Callable[..., MPI.Request], tensor: Tensor, partner: int, tag: int
    ) -> list[MpiRequest]:
        tag += self._watch.call_tag if self._name else 0
        return [
            requests.start(self._comm, call, bytes_of(part), partner, tag, memory=part)
            for part in tensor.split(CHUNK_ELEMENTS)
        ]


DEPTH = 8
"""Maximum number of parts in flight after the oldest one; less than ``TAGS_PER_CALL``."""


@dataclass(slots=True, eq=False)
class _Reduction:
    """An all-reduce in flight."""

    steps: Iterator[Any]
    transfer: Any  # must be finished before the next step; None if the reduction is complete


class InFlight:
    """Runs all-reduces of several parts concurrently, each with its own tag.

    If parts are still in flight at the end of the ``with`` block, the communicator fails.

    Args:
        rail: the rail; None if all parts are empty.
        combination: combines the parts, which are flat, contiguous and of ``storage_dtype``.
        watch: watch of the communicator.
    """

    def __init__(self, rail: "Rail | None", combination: Combination, watch: Watch) -> None:
        self._rail, self._watch = rail, watch
        self._combination = combination
        self._in_flight: deque[_Reduction] = deque()
        self._start_s = 0.0

    def __enter__(self) -> Self:
        self._start_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_flight:  # their messages could match messages of later calls
            self._watch.fail()

    def reduced(self, parts: Iterable[Tensor]) -> Iterator[None]:
        """Replace ``parts`` by their reductions; yield after each reduction, in order.

        At a yield, the next ``DEPTH`` parts are in flight on every rank. Collective over the
        rail.
        """
        for number, part in enumerate(parts):
            self._start(part, number % (DEPTH + 1))
            if len(self._in_flight) > DEPTH:
                self._finish_oldest()
                yield
        while self._in_flight:
            self._finish_oldest()
            yield

    def pace(self) -> Pace:
        """Return the pace of the next wait: slower if the parts have been in flight for long."""
        return BY_MPI.after(time.perf_counter() - self._start_s)

    def poll(self) -> None:
        """Advance all parts in flight as far as possible without waiting."""
        if self._rail is None:
            return
        is_finished = self._rail.wire.is_finished
        for each in self._in_flight:
            while each.transfer is not None and is_finished(each.transfer):
                each.transfer = next(each.steps, None)

    def _start(self, part: Tensor, tag: int) -> None:
        rail = self._rail
        if rail is None or not part.numel():
            self._in_flight.append(_Reduction(iter(()), None))
            return
        with rail.timed():
            name = schedule_name(rail.table.at(part.nbytes), part.nbytes)
            steps = allreduce_steps(name, rail.wire, part, self._combination, tag)
            self._in_flight.append(_Reduction(steps, next(steps, None)))
            self.poll()

    def _finish_oldest(self) -> None:
        oldest = self._in_flight[0]
        if oldest.transfer is not None:
            assert self._rail is not None
            with self._rail.timed():
                while oldest.transfer is not None:
                    self._rail.wire.wait_for(oldest.transfer, self._moves(oldest), self.pace())
        self._in_flight.popleft()

    def _moves(self, oldest: _Reduction) -> Callable[[], bool]:
        """Return a function that advances all parts and returns whether ``oldest`` advanced."""
        transfer = oldest.transfer

        def has_moved() -> bool:
            self.poll()
            return oldest.transfer is not transfer

        return has_moved


class Rail:
    """Reduces slices over ranks of different nodes, one rank per node.

    Methods are collective over these ranks, except ``timed`` and ``traffic``. Codecs use a rail
    to reduce encoded slices. Messages of different collectives do not match, so ranks in
    different collectives wait, and their watches compare the collectives. Differences of size,
    dtype or scale are not detected if the MPI library computes the sum, because its collectives
    have no tags.

    Args:
        comm: the ranks; ``close`` frees it.
        table: names of ``ALGORITHMS`` by size of the slice.
        chunk_bytes: see ``Plan``.
        watch: detects lost ranks while this rank waits.
        world_ranks: world rank of each rank; by default the ranks of ``watch``.
        name: name for error messages, such as ``rail 0``.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        table: SizeTable,
        chunk_bytes: int = 0,
        watch: Watch | None = None,
        world_ranks: Sequence[int] = (),
        name: str = "",
    ) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        watch = watch or Watch()
        self.wire = MpiWire(comm, watch=watch, world_ranks=world_ranks, name=name)
        watch.on_fail.append(self.wire.withdraw_receives)
        self._comm = comm
        self.table = table  # algorithms by bytes of the part; the same on all ranks
        self.chunk_bytes = chunk_bytes
        self._watch = watch
        self._name = name
        self._library_bytes = 0
        self._seconds = 0.0

    def use(self, plan: Plan) -> None:
        """Select the algorithms of later reductions by ``plan``."""
        self.table, self.chunk_bytes = plan.rail, plan.chunk_bytes

    def allreduce_(self, tensor: Tensor, *, op: Op = Op.SUM, scale: float | None = None) -> Work:
        """Replace ``tensor`` by its sum over the nodes, times ``scale``.

        16-bit numbers are sent as 16 bits, and rounded after each addition.
        """
        check_scale(tensor, scale)
        how = combination(tensor.dtype, op)
        with flattened(tensor) as values:
            self.reduce_(how.view(values), how)
        if scale is not None:
            scale_(tensor.detach(), scale)
        return FINISHED

    def reduce_(self, part: Tensor, combination: Combination) -> None:
        """Replace a flat, contiguous ``part`` of ``storage_dtype`` by its reduction over nodes."""
        if 0 < self.chunk_bytes < part.nbytes:
            chunks = part.split(self.chunk_bytes // part.itemsize)
            with InFlight(self, combination, self._watch) as in_flight:
                for _ in in_flight.reduced(chunks):
                    pass
            self._watch.confirm()
        else:
            self.allreduce_by(self.table.at(part.nbytes), part, combination)

    def allreduce_by(self, name: str, part: Tensor, combination: Combination) -> None:
        """Reduce ``part`` as ``reduce_`` does, by the algorithm ``name``."""
        if self.size == 1:
            return
        with self.timed():
            if name == "library" and combination.op is Op.SUM and library_sums(part.dtype):
                self._sum_by_library(part)
            else:
                ALGORITHMS[name](self.wire, part, combination)
        self._watch.confirm()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time in this context, without waits, to the time counter of the rail."""
        start, waited_s = time.perf_counter(), self._watch.waited_s
        yield
        self._seconds += time.perf_counter() - start - (self._watch.waited_s - waited_s)

    def start_alltoall(
        self, tensors: Sequence[Tensor], numels: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        """Start an exchange that sends flat ``tensors[r]`` to rank r; empty tensors are not sent.

        All tensors have one dtype. Several exchanges may be in flight if all ranks start them in
        the same order.

        Returns:
            A function that waits, and returns a tensor of ``numels[r]`` elements from each rank r.
        """
        arrived = [tensors[0].new_empty(numel) for numel in numels]
        arrived[self.rank] = tensors[self.rank]
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        with self.timed():
            under_way = [
                self.wire.start_receive(arrived[r], r) for r in reversed(others) if numels[r]
            ]
            under_way += [self.wire.start_send(tensors[r], r) for r in others if len(tensors[r])]

        def finish() -> list[Tensor]:
            with self.timed():
                for transfer in under_way:
                    self.wire.finish(transfer)
            self._watch.confirm()
            return arrived

        return finish

    def traffic(self) -> Traffic:
        """Return bytes sent by messages or passed to MPI collectives, and seconds."""
        sent = self.wire.num_bytes_sent + self._library_bytes
        return Traffic(rail_bytes=sent, waited_s=self._watch.waited_s, rail_s=self._seconds)

    def close(self) -> None:
        """Free the MPI communicator."""
        self._watch.free(self._comm)

    def _sum_by_library(self, part: Tensor) -> None:
        # Not a blocking call, which would keep a core busy and wait without a limit.
        for chunk in part.split(CHUNK_ELEMENTS):
            arguments = MPI.IN_PLACE, buffer_of(chunk)
            request = requests.start(self._comm, self._comm.Iallreduce, *arguments, memory=chunk)
            wait_request(request, self._watch, over=self._name)
        self._library_bytes += part.numel() * part.itemsize
