"""The rail level, and wires of MPI: owners of the same slice reduce it over the slow link."""

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
    """Say whether the MPI library may sum this dtype.

    Not 8 and 16 bits: Open MPI saturates vectorised sums, 245 + 245 is 255 there and not 234.
    """
    return dtype in _MPI_TYPE


def buffer_of(tensor: torch.Tensor) -> list[object]:
    """Describe a contiguous tensor that the library may sum to mpi4py, in place."""
    return [_bytes_of(tensor), tensor.numel(), _MPI_TYPE[tensor.dtype]]


def bytes_of(tensor: torch.Tensor) -> list[object]:
    """Describe a contiguous tensor of any dtype to mpi4py as plain bytes, in place."""
    return [_bytes_of(tensor), tensor.numel() * tensor.itemsize, MPI.BYTE]


def _bytes_of(tensor: torch.Tensor) -> MPI.buffer:
    # Not tensor.numpy(): that pins the storage, and bfloat16 has no numpy type.
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.itemsize)


@dataclass(slots=True, eq=False)
class Transfer:
    """A message under way."""

    tensor: Tensor
    partner: int | None  # rank of the communicator at the other end; None until it is known
    requests: list[MpiRequest]  # those that are not complete
    expected: int  # bytes that have still to come; none of a message that is sent

    def cancel(self) -> None:
        """Withdraw a receive of which nothing has arrived."""
        for request in self.requests:
            request.cancel()


class MpiWire(Wire):
    """Point to point, by rank of an MPI communicator: counted, and waited for asleep."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        watch: Watch | None = None,
        world_ranks: Sequence[int] = (),
        name: str = "",
    ) -> None:
        """Take the ranks and how they are called.

        ``world_ranks`` are the world's numbers of the ranks, empty where they are the same;
        ``name``, such as ``rail 0``, is for messages, and makes this a wire of collectives, each
        of which has tags that no other one has.
        """
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.num_bytes_sent = 0  # bytes that this rank has sent so far
        self._comm = comm
        self._watch = watch or Watch()
        self._world_ranks = world_ranks or range(comm.size)
        self._name = name
        self._status = MPI.Status()

    def start_send(self, tensor: Tensor, dest: int, tag: int = 0) -> Transfer:
        """Begin to send ``tensor``, which stays as it is until ``finish``."""
        self.count(tensor.numel() * tensor.itemsize)
        return Transfer(tensor, dest, self._start(self._comm.Isend, tensor, dest, tag), 0)

    def count(self, num_bytes: int) -> None:
        """Count bytes that this rank has sent, here or by other messages to the same ranks."""
        self.num_bytes_sent += num_bytes

    def start_receive(self, tensor: Tensor, source: int | None, tag: int = 0) -> Transfer:
        """Begin to replace ``tensor``; nobody reads or writes it until ``finish``.

        It may come from any rank where ``source`` is None; the transfer's partner is then who has
        sent it.
        """
        if source is None and tensor.numel() > CHUNK_ELEMENTS:
            raise CommError(
                f"a message of more than {CHUNK_ELEMENTS} elements travels in several, and needs "
                f"a source, got any source and {tensor.numel()}; name the rank that sends it"
            )
        sender = MPI.ANY_SOURCE if source is None else source
        started = self._start(self._comm.Irecv, tensor, sender, tag)
        return Transfer(tensor, source, started, tensor.nbytes)

    def finish(self, transfer: Transfer) -> None:
        """Return when ``transfer`` is complete; sleep meanwhile.

        ``RankLostError`` if a rank is lost, or the wait has lasted too long; ``CommError`` if the
        other end sent more or less than this one takes.
        """
        if not self.is_finished(transfer):
            self.wait_for(transfer, partial(self.is_finished, transfer))

    def wait_for(
        self, transfer: Transfer, done: Callable[[], object], pace: Pace = BY_MPI
    ) -> None:
        """Return when it is ``done``, which the other end of ``transfer`` has to do with."""
        partner = None if transfer.partner is None else self._world_ranks[transfer.partner]
        self._watch.wait(done, pace, partner=partner, over=self._name)

    def withdraw_receives(self) -> None:
        """Withdraw all receives: after an error the caller may use their memory again."""
        for request in requests.pending(self._comm):
            with suppress(MPI.Exception):  # complete, with an error
                request.cancel()

    def is_finished(self, transfer: Transfer) -> bool:
        """Say whether ``transfer`` is complete; ``CommError`` as for ``finish``."""
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
            f"both ends of a message must give tensors of the same size and dtype, rank {me} "
            f"takes {format_bytes(transfer.tensor.nbytes)} and rank {other} sends {sent}; let "
            f"every rank make the same calls in the same order"
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
"""Parts in flight at once in addition to one that is waited for; less than ``TAGS_PER_CALL``."""


@dataclass(slots=True, eq=False)
class _Reduction:
    """An all-reduce under way."""

    steps: Iterator[Any]
    transfer: Any  # what must be finished before the next step; None when it is over


class InFlight:
    """All-reduces of parts, begun one after the other, each under a tag of its own.

    A context: what it leaves under way is no longer in step with the other ranks.
    """

    def __init__(self, rail: "Rail | None", combination: Combination, watch: Watch) -> None:
        """Take how flat, contiguous parts of dtype ``storage_dtype`` are combined.

        Without a rail all parts are empty.
        """
        self._rail, self._watch = rail, watch
        self._combination = combination
        self._under_way: deque[_Reduction] = deque()
        self._start_s = 0.0

    def __enter__(self) -> Self:
        self._start_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._under_way:  # their messages would meet those of what comes next
            self._watch.fail()

    def reduced(self, parts: Iterable[Tensor]) -> Iterator[None]:
        """Replace ``parts`` by their reductions; yield when the next one, in order, is there.

        The next ``DEPTH`` are begun by then, or all that are left, on every rank alike.
        Collective over the rail.
        """
        for number, part in enumerate(parts):
            self._start(part, number % (DEPTH + 1))
            if len(self._under_way) > DEPTH:
                self._finish_oldest()
                yield
        while self._under_way:
            self._finish_oldest()
            yield

    def pace(self) -> Pace:
        """Return that of the next wait: what is under way needs no haste where it takes long."""
        return BY_MPI.after(time.perf_counter() - self._start_s)

    def poll(self) -> None:
        """Go on with all that is under way as far as that needs no waiting."""
        if self._rail is None:
            return
        is_finished = self._rail.wire.is_finished
        for each in self._under_way:
            while each.transfer is not None and is_finished(each.transfer):
                each.transfer = next(each.steps, None)

    def _start(self, part: Tensor, tag: int) -> None:
        rail = self._rail
        if rail is None or not part.numel():
            self._under_way.append(_Reduction(iter(()), None))
            return
        with rail.timed():
            name = schedule_name(rail.table.at(part.nbytes), part.nbytes)
            steps = allreduce_steps(name, rail.wire, part, self._combination, tag)
            self._under_way.append(_Reduction(steps, next(steps, None)))
            self.poll()

    def _finish_oldest(self) -> None:
        oldest = self._under_way[0]
        if oldest.transfer is not None:
            assert self._rail is not None
            with self._rail.timed():
                while oldest.transfer is not None:
                    self._rail.wire.wait_for(oldest.transfer, self._moves(oldest), self.pace())
        self._under_way.popleft()

    def _moves(self, oldest: _Reduction) -> Callable[[], bool]:
        """Return what goes on with everything, and says whether this one has got anywhere."""
        transfer = oldest.transfer

        def has_moved() -> bool:
            self.poll()
            return oldest.transfer is not transfer

        return has_moved


class Rail:
    """One rank of each node; every method but the counters is collective over them.

    It is what a codec needs of a communicator to reduce what it has made of a slice. Messages of
    different collectives do not match, so that their ranks wait, and compare them. Not found are
    sums by the MPI library, which has no tags, of different sizes, dtypes or scales.
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
        """Take the ranks of ``comm``, which ``close`` frees.

        ``table`` has names of ``ALGORITHMS`` by bytes of the part, ``chunk_bytes`` is as in a
        plan; the rest as for ``MpiWire``.
        """
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
        """Choose algorithms by ``plan`` from now on."""
        self.table, self.chunk_bytes = plan.rail, plan.chunk_bytes

    def allreduce_(self, tensor: Tensor, *, op: Op = Op.SUM, scale: float | None = None) -> Work:
        """Replace ``tensor`` by its sum over the nodes, times ``scale``.

        16-bit numbers travel as such, and are rounded whenever two are combined.
        """
        check_scale(tensor, scale)
        how = combination(tensor.dtype, op)
        with flattened(tensor) as values:
            self.reduce_(how.view(values), how)
        if scale is not None:
            scale_(tensor.detach(), scale)
        return FINISHED

    def reduce_(self, part: Tensor, combination: Combination) -> None:
        """Replace a flat, contiguous ``part`` of ``storage_dtype`` by its reduction."""
        if 0 < self.chunk_bytes < part.nbytes:
            chunks = part.split(self.chunk_bytes // part.itemsize)
            with InFlight(self, combination, self._watch) as in_flight:
                for _ in in_flight.reduced(chunks):
                    pass
            self._watch.confirm()
        else:
            self.allreduce_by(self.table.at(part.nbytes), part, combination)

    def allreduce_by(self, name: str, part: Tensor, combination: Combination) -> None:
        """Do what ``reduce_`` does by the algorithm of this name."""
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
        """Count what happens meanwhile, without waits, as work of the rail."""
        start, waited_s = time.perf_counter(), self._watch.waited_s
        yield
        self._seconds += time.perf_counter() - start - (self._watch.waited_s - waited_s)

    def start_alltoall(
        self, tensors: Sequence[Tensor], numels: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        """Begin to send flat ``tensors[r]`` to rank r, to all at once.

        All are of one dtype. Several may be under way, if all ranks begin them in one order.

        Returns:
            What waits, and gives what came from each rank r, ``numels[r]`` elements.
        """
        arrived = [tensors[0].new_empty(numel) for numel in numels]
        arrived[self.rank] = tensors[self.rank]
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        with self.timed():
            under_way = [self.wire.start_receive(arrived[r], r) for r in reversed(others)]
            under_way += [self.wire.start_send(tensors[r], r) for r in others]

        def finish() -> list[Tensor]:
            with self.timed():
                for transfer in under_way:
                    self.wire.finish(transfer)
            self._watch.confirm()
            return arrived

        return finish

    def traffic(self) -> Traffic:
        """Return what this rank has moved so far; of calls to the library, their bytes."""
        sent = self.wire.num_bytes_sent + self._library_bytes
        return Traffic(rail_bytes=sent, waited_s=self._watch.waited_s, rail_s=self._seconds)

    def close(self) -> None:
        """Free the MPI communicator."""
        self._watch.free(self._comm)

    def _sum_by_library(self, part: Tensor) -> None:
        # Not blocking: the library would keep a core busy, and wait without an end.
        for chunk in part.split(CHUNK_ELEMENTS):
            arguments = MPI.IN_PLACE, buffer_of(chunk)
            request = requests.start(self._comm, self._comm.Iallreduce, *arguments, memory=chunk)
            wait_request(request, self._watch, over=self._name)
        self._library_bytes += part.numel() * part.itemsize
