"""Operations of the benchmark: a table, and for each operation a function that returns its case.

The values are chosen so that every operation is exact in every dtype, and each element of a result
can be checked. The values of a rank repeat after ``PERIOD`` elements. The expected result of one
period is computed in integers, and compared bitwise with all periods of the actual result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator

PERIOD = 61
"""A prime number, so that adjacent slices, chunks and cache lines have different values."""
_TILE_PERIODS = 1 << 14  # periods that are written or compared at once: 1 Mi elements


def values_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return one period of the values of ``rank``, among ``size`` ranks, as ``dtype``."""
    return _whole(rank, size, dtype).to(dtype)


def combined(size: int, dtype: torch.dtype) -> Tensor:
    """Return one period of the sum of the values of all ranks, as ``dtype``."""
    return torch.stack([_whole(rank, size, dtype) for rank in range(size)]).sum(0).to(dtype)


def write(target: Tensor, period: Tensor, start: int = 0) -> None:
    """Fill the flat ``target`` with repetitions of ``period``; begin at ``period[start]``."""
    for chunk, tile in _tiles(target, period, start):
        chunk.copy_(tile)


def num_wrong(values: Tensor, period: Tensor, start: int = 0) -> int:
    """Return the number of elements of ``values`` that ``write`` would write differently."""
    return sum(
        int((chunk != tile).any(dim=1).sum()) for chunk, tile in _tiles(values, period, start)
    )


def _whole(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return one period of the values as integers; for bool, nonzero means True."""
    place = torch.arange(PERIOD)
    if dtype is torch.bool:
        # In each size + 1 positions all ranks have False once, so a sum contains True and False.
        return ((place + rank) % (size + 1) == 0).long()
    # If a sum over all ranks would not be exact, only each `stride`-th rank has nonzero values.
    limit = _largest_exact(dtype)
    stride = -(-size // limit)
    values = (3 * place + rank) % (limit // -(-size // stride) + 1)
    return values * ((place + rank) % stride == 0)


def _largest_exact(dtype: torch.dtype) -> int:
    """Return a limit up to which ``dtype`` represents every integer exactly."""
    if dtype.is_floating_point or dtype.is_complex:
        return min(round(2 / torch.finfo(dtype).eps), 1 << 20)
    return min(torch.iinfo(dtype).max, 1 << 20)


def _tiles(flat: Tensor, period: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of ``flat`` and their expected content, both as bytes, a row per element."""
    rows = flat.view(torch.uint8).view(-1, flat.itemsize)
    tile = period.roll(-(start % PERIOD)).view(torch.uint8).view(PERIOD, flat.itemsize)
    tile = tile.repeat(min(_TILE_PERIODS, -(-len(rows) // PERIOD)), 1)
    for chunk in rows.split(max(len(tile), 1)):
        yield chunk, tile[: len(chunk)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Message of a benchmark: size, type and memory."""

    num_bytes: int
    """Requested size, rounded down to whole elements per rank, at least one element."""
    dtype: torch.dtype
    in_bucket: bool = False
    """Whether the message is a bucket in node memory instead of a tensor; only for all-reduce."""

    @property
    def numel(self) -> int:
        """Number of elements of the message."""
        return max(self.num_bytes // self.dtype.itemsize, 1)


class ExpectedTensor(NamedTuple):
    """A tensor and its expected content."""

    values: Tensor  # flat
    period: Tensor  # repeated over the whole tensor
    start: int = 0  # index of the first element in the period
    numel: int | None = None
    """Expected number of elements, or None; if the number differs, all elements are wrong."""

    def num_wrong(self) -> int:
        """Return the number of elements that differ from the expected content."""
        if self.numel is not None and self.values.shape != (self.numel,):
            return max(self.numel, 1)
        return num_wrong(self.values, self.period, self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Operation on a message: its call and the expected values on this rank."""

    numel: int  # elements of the message, from which the bandwidth is computed
    call: Callable[[], Any]  # runs the operation once; collective
    given: list[ExpectedTensor] = field(default_factory=list)
    """Tensors that the operation reads, with the content that ``fill`` writes."""
    expected: Callable[[Any], list[ExpectedTensor]] = lambda _: []
    """Takes the result of a call and returns the tensors to check."""

    def num_wrong(self) -> int:
        """Run the operation on known values; return the number of wrong elements of this rank.

        Collective.
        """
        self.fill()
        return sum(part.num_wrong() for part in self.expected(self.call()))

    def fill(self) -> None:
        """Write the known values into the tensors that the operation reads."""
        for part in self.given:
            write(part.values, part.period, part.start)


def allreduce(comm: Communicator, setup: Setup) -> Case:
    """Return the case of ``allreduce_``; the message is the tensor."""
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
        expected=lambda _: [ExpectedTensor(flat, total)],
    )


def reduce_scatter(comm: Communicator, setup: Setup) -> Case:
    """Return the case of ``reduce_scatter``; the message is the input tensor of a rank."""
    given = torch.empty(setup.numel, dtype=setup.dtype)
    total = combined(comm.size, setup.dtype)
    sizes = [len(part) for part in torch.arange(setup.numel).tensor_split(comm.size)]
    start, mine = sum(sizes[: comm.rank]), sizes[comm.rank]
    return Case(
        numel=setup.numel,
        call=lambda: comm.reduce_scatter(given),
        given=[ExpectedTensor(given, values_of(comm.rank, comm.size, setup.dtype))],
        expected=lambda got: [ExpectedTensor(got, total, start, mine)],
    )


def all_gather(comm: Communicator, setup: Setup) -> Case:
    """Return the case of ``all_gather``; the message is the result on each rank."""
    each = max(setup.numel // comm.size, 1)
    given = torch.empty(each, dtype=setup.dtype)
    values = _of_all(comm, setup)
    return Case(
        numel=each * comm.size,
        call=lambda: comm.all_gather(given),
        given=[ExpectedTensor(given, values[comm.rank])],
        expected=lambda got: _from_all(got, values, 0, each),
    )


def alltoall(comm: Communicator, setup: Setup) -> Case:
    """Return the case of ``alltoall``; the message is the complete input of a rank."""
    each = max(setup.numel // comm.size, 1)
    given = [torch.empty(each, dtype=setup.dtype) for _ in range(comm.size)]
    values = _of_all(comm, setup)
    return Case(
        numel=each * comm.size,
        call=lambda: comm.alltoall(given),
        # The values for rank r start at element r of the period.
        given=[
            ExpectedTensor(tensor, values[comm.rank], dest) for dest, tensor in enumerate(given)
        ],
        expected=lambda got: _from_all(got, values, comm.rank, each),
    )


def broadcast(comm: Communicator, setup: Setup) -> Case:
    """Return the case in which rank 0 broadcasts a tensor; the message size is its size."""
    tensor, period = torch.zeros(setup.numel, dtype=setup.dtype), _of_root(comm, setup)
    return Case(
        numel=setup.numel,
        call=lambda: comm.broadcast_(tensor).wait(),
        given=[ExpectedTensor(tensor, period if comm.rank == 0 else torch.zeros_like(period))],
        expected=lambda _: [ExpectedTensor(tensor, period)],
    )


def send(comm: Communicator, setup: Setup) -> Case:
    """Return the case of ``send`` from rank 0 to the last rank and back."""
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
        expected=lambda _: [ExpectedTensor(tensor, period)] if comm.rank in (0, last) else [],
    )


def barrier(comm: Communicator, _: Setup) -> Case:
    """Return the case of ``barrier``, which has no message and no values to check."""
    return Case(numel=0, call=comm.barrier)


class MeasuredOperation(NamedTuple):
    """Properties of an operation of the benchmark."""

    case: Callable[[Communicator, Setup], Case]
    bus_factor: Callable[[int], float]
    """Takes the number of ranks; returns the minimum number of bytes that the busiest link sends
    per byte of the message. Source: PERFORMANCE.md of nccl-tests."""
    messages: int = 1  # consecutive messages of one call


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
    "send": MeasuredOperation(send, _once, messages=2),
}
"""Operations by their names on the command line."""


def _from_all(
    got: Sequence[Tensor], values: list[Tensor], start: int, numel: int
) -> list[ExpectedTensor]:
    """Return the received tensors; the expected content of each is what its sender sent."""
    return [ExpectedTensor(one, own, start, numel) for one, own in zip(got, values, strict=True)]


def _of_all(comm: Communicator, setup: Setup) -> list[Tensor]:
    return [values_of(rank, comm.size, setup.dtype) for rank in range(comm.size)]


def _of_root(comm: Communicator, setup: Setup) -> Tensor:
    return values_of(0, comm.size, setup.dtype)
