"""Operations that a benchmark measures: a table, and for each a function that makes its case.

The values are such that every operation is exact in every dtype, so that each element can be
checked. Those of a rank repeat after ``PERIOD`` elements: what all ranks make of them is worked
out for one period, in whole numbers, and compared bit by bit with all the others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator

PERIOD = 61
"""A prime: no slice, chunk or cache line of any size has the same values as the next one."""
_TILE_PERIODS = 1 << 14  # periods that are written or compared at once: 1 Mi elements


def values_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return a period of the values of ``rank``, one of ``size`` ranks, of ``dtype``."""
    return _whole(rank, size, dtype).to(dtype)


def combined(size: int, dtype: torch.dtype) -> Tensor:
    """Return a period of the sum of the values of all ranks, of ``dtype``."""
    return torch.stack([_whole(rank, size, dtype) for rank in range(size)]).sum(0).to(dtype)


def write(target: Tensor, period: Tensor, start: int = 0) -> None:
    """Fill flat ``target`` with repetitions of ``period``, from its element ``start`` on."""
    for chunk, tile in _tiles(target, period, start):
        chunk.copy_(tile)


def num_wrong(values: Tensor, period: Tensor, start: int = 0) -> int:
    """Count the elements of flat ``values`` that ``write`` would change."""
    return sum(
        int((chunk != tile).any(dim=1).sum()) for chunk, tile in _tiles(values, period, start)
    )


def _whole(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return the values as whole numbers; bool takes what is not 0 as true."""
    place = torch.arange(PERIOD)
    if dtype is torch.bool:
        # False everywhere in a few places only.
        return ((place + rank) % (size + 1) == 0).long()
    # Where the sum of all would not be exact, only one rank of every `stride` adds to it.
    limit = _largest_exact(dtype)
    stride = -(-size // limit)
    values = (3 * place + rank) % (limit // -(-size // stride) + 1)
    return values * ((place + rank) % stride == 0)


def _largest_exact(dtype: torch.dtype) -> int:
    """Return a whole number up to which ``dtype`` holds all others."""
    if dtype.is_floating_point or dtype.is_complex:
        return min(round(2 / torch.finfo(dtype).eps), 1 << 20)
    return min(torch.iinfo(dtype).max, 1 << 20)


def _tiles(flat: Tensor, period: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of ``flat`` and what belongs there, as bytes: a row per element."""
    rows = flat.view(torch.uint8).view(-1, flat.itemsize)
    tile = period.roll(-(start % PERIOD)).view(torch.uint8).view(PERIOD, flat.itemsize)
    tile = tile.repeat(min(_TILE_PERIODS, -(-len(rows) // PERIOD)), 1)
    for chunk in rows.split(max(len(tile), 1)):
        yield chunk, tile[: len(chunk)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One message."""

    num_bytes: int
    """Size that was asked for; it is rounded down to whole elements for each rank, at least 1."""
    dtype: torch.dtype
    in_bucket: bool = False
    """In a bucket in node memory instead of an ordinary tensor; for all-reduce."""

    @property
    def numel(self) -> int:
        """Elements of the whole message."""
        return max(self.num_bytes // self.dtype.itemsize, 1)


class ExpectedTensor(NamedTuple):
    """What a tensor should hold."""

    values: Tensor  # flat
    period: Tensor  # repeated all through it
    start: int = 0  # the place in the period where the tensor begins
    numel: int | None = None
    """Elements that a result should have; one of another length is wrong as a whole."""

    def num_wrong(self) -> int:
        """Count the wrong elements."""
        if self.numel is not None and self.values.shape != (self.numel,):
            return max(self.numel, 1)
        return num_wrong(self.values, self.period, self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One operation on one message, on one rank."""

    numel: int  # elements of the message, as the bandwidth counts it
    call: Callable[[], object]  # carry the operation out once. Collective
    given: list[ExpectedTensor] = field(default_factory=list)
    """What stands there before a call that is checked."""
    expected: Callable[[], list[ExpectedTensor]] = list  # what should stand there after it

    def num_wrong(self) -> int:
        """Carry the operation out on known values, and count what is wrong on this rank.

        Collective.
        """
        self.fill()
        self.call()
        return sum(part.num_wrong() for part in self.expected())

    def fill(self) -> None:
        """Write the known values."""
        for part in self.given:
            write(part.values, part.period, part.start)


def allreduce(comm: Communicator, setup: Setup) -> Case:
    """``allreduce_``; the message is the tensor."""
    target: Tensor | Bucket = (
        comm.new_bucket(setup.numel, setup.dtype)
        if setup.in_bucket
        else torch.empty(setup.numel, dtype=setup.dtype)
    )
    flat = target.flat if isinstance(target, Bucket) else target
    total = combined(comm.size, setup.dtype)
    return Case(
        numel=setup.numel,
        call=lambda: comm.allreduce_(target).wait(),
        given=[ExpectedTensor(flat, values_of(comm.rank, comm.size, setup.dtype))],
        expected=lambda: [ExpectedTensor(flat, total)],
    )


def reduce_scatter(comm: Communicator, setup: Setup) -> Case:
    """``reduce_scatter``; the message is the whole tensor that each rank gives."""
    given, got = torch.empty(setup.numel, dtype=setup.dtype), _Got()
    total = combined(comm.size, setup.dtype)
    sizes = [len(part) for part in torch.arange(setup.numel).tensor_split(comm.size)]
    start, mine = sum(sizes[: comm.rank]), sizes[comm.rank]
    return Case(
        numel=setup.numel,
        call=lambda: got.take([comm.reduce_scatter(given)]),
        given=[ExpectedTensor(given, values_of(comm.rank, comm.size, setup.dtype))],
        expected=lambda: [ExpectedTensor(got.tensors[0], total, start, mine)],
    )


def all_gather(comm: Communicator, setup: Setup) -> Case:
    """``all_gather``; the message is what every rank holds in the end."""
    each, got = max(setup.numel // comm.size, 1), _Got()
    given = torch.empty(each, dtype=setup.dtype)
    values = _of_all(comm, setup)
    return Case(
        numel=each * comm.size,
        call=lambda: got.take(comm.all_gather(given)),
        given=[ExpectedTensor(given, values[comm.rank])],
        expected=lambda: _from_all(got, values, 0, each),
    )


def alltoall(comm: Communicator, setup: Setup) -> Case:
    """``alltoall``; the message is all that one rank gives away."""
    each, got = max(setup.numel // comm.size, 1), _Got()
    given = [torch.empty(each, dtype=setup.dtype) for _ in range(comm.size)]
    values = _of_all(comm, setup)
    return Case(
        numel=each * comm.size,
        call=lambda: got.take(comm.alltoall(given)),
        # Those for rank r begin at the element r of the period.
        given=[
            ExpectedTensor(tensor, values[comm.rank], dest) for dest, tensor in enumerate(given)
        ],
        expected=lambda: _from_all(got, values, comm.rank, each),
    )


def broadcast(comm: Communicator, setup: Setup) -> Case:
    """``broadcast_`` from rank 0; the message is the tensor."""
    tensor, period = torch.zeros(setup.numel, dtype=setup.dtype), _of_root(comm, setup)
    return Case(
        numel=setup.numel,
        call=lambda: comm.broadcast_(tensor).wait(),
        given=[ExpectedTensor(tensor, period if comm.rank == 0 else torch.zeros_like(period))],
        expected=lambda: [ExpectedTensor(tensor, period)],
    )


def send(comm: Communicator, setup: Setup) -> Case:
    """``send`` from rank 0 to the last rank and back; a call is one of the two ways."""
    tensor, period = torch.zeros(setup.numel, dtype=setup.dtype), _of_root(comm, setup)
    last = comm.size - 1

    def there_and_back() -> None:
        if comm.rank == 0:
            comm.send(tensor, last)
            comm.recv_(tensor, last)
        elif comm.rank == last:
            comm.recv_(tensor, 0)
            comm.send(tensor, 0)

    return Case(
        numel=setup.numel,
        call=there_and_back,
        given=[ExpectedTensor(tensor, period if comm.rank == 0 else torch.zeros_like(period))],
        expected=lambda: [ExpectedTensor(tensor, period)] if comm.rank in (0, last) else [],
    )


def barrier(comm: Communicator, _: Setup) -> Case:
    """``barrier``; there is no message, and nothing can be wrong."""
    return Case(numel=0, call=comm.barrier)


class MeasuredOperation(NamedTuple):
    """What a benchmark knows of an operation."""

    case: Callable[[Communicator, Setup], Case]
    bus_factor: Callable[[int], float]
    """Of the number of ranks: bytes that the busiest link must carry, by bytes of the message.
    Source: PERFORMANCE.md of nccl-tests."""
    ways: int = 1  # messages of one call that follow each other


def _all_but_mine(size: int) -> float:
    return (size - 1) / size


def _once(size: int) -> float:
    return 1.0 if size > 1 else 0.0


OPERATIONS = {
    "allreduce": MeasuredOperation(allreduce, lambda size: 2 * _all_but_mine(size)),
    "reduce_scatter": MeasuredOperation(reduce_scatter, _all_but_mine),
    "all_gather": MeasuredOperation(all_gather, _all_but_mine),
    "alltoall": MeasuredOperation(alltoall, _all_but_mine),
    "broadcast": MeasuredOperation(broadcast, _once),
    "barrier": MeasuredOperation(barrier, _once),
    "send": MeasuredOperation(send, _once, ways=2),
}
"""By the names of the command line."""


class _Got:
    """Tensors that the last call has returned."""

    tensors: Sequence[Tensor] = ()

    def take(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors


def _from_all(got: _Got, values: list[Tensor], start: int, numel: int) -> list[ExpectedTensor]:
    """Return what each rank should have given, of its own values."""
    return [
        ExpectedTensor(one, own, start, numel)
        for one, own in zip(got.tensors, values, strict=True)
    ]


def _of_all(comm: Communicator, setup: Setup) -> list[Tensor]:
    return [values_of(rank, comm.size, setup.dtype) for rank in range(comm.size)]


def _of_root(comm: Communicator, setup: Setup) -> Tensor:
    return values_of(0, comm.size, setup.dtype)
