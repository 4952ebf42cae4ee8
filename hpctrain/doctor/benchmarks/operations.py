"""Measured operations: one class each, all of the same shape.

``Case(comm, setup)`` makes tensors for one message size; ``fill()`` writes the values, calling the
case carries the operation out once, ``num_wrong()`` counts what is wrong on this rank after that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.ops import Op
from hpctrain.doctor.benchmarks.benchmark_values import combined, num_wrong, values_of, write


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One message."""

    num_bytes: int
    """Size that was asked for; it is rounded down to whole elements for each rank, at least 1."""
    dtype: torch.dtype
    op: Op = Op.SUM
    in_bucket: bool = False
    """In a bucket in node memory instead of an ordinary tensor; for all-reduce."""

    @property
    def numel(self) -> int:
        """Elements of the whole message."""
        return max(self.num_bytes // self.dtype.itemsize, 1)


class Case(Protocol):
    """One operation on one message, on one rank."""

    numel: int
    """Elements of the message, as the bandwidth counts it."""

    def fill(self) -> None:
        """Write the values that are checked."""

    def __call__(self) -> object:
        """Carry the operation out once. Collective."""

    def num_wrong(self) -> int:
        """Count the wrong elements of the last result on this rank."""


class Allreduce:
    """``allreduce_``; the message is the tensor."""

    def __init__(self, comm: Communicator, setup: Setup) -> None:
        self._comm, self._op = comm, setup.op
        self.numel = setup.numel
        self._target: Tensor | Bucket = (
            comm.new_bucket(self.numel, setup.dtype)
            if setup.in_bucket
            else torch.empty(self.numel, dtype=setup.dtype)
        )
        self.flat = self._target.flat if isinstance(self._target, Bucket) else self._target
        self._mine = values_of(comm.rank, comm.size, setup.dtype, setup.op)
        self._expected = combined(comm.size, setup.dtype, setup.op)

    def fill(self) -> None:
        """Write this rank's values."""
        write(self.flat, self._mine)

    def __call__(self) -> None:
        """Reduce in place."""
        self._comm.allreduce_(self._target, op=self._op).wait()

    def num_wrong(self) -> int:
        """Compare with the sum, or whatever the operation is."""
        return num_wrong(self.flat, self._expected)


class ReduceScatter:
    """``reduce_scatter``; the message is the whole tensor that each rank gives."""

    def __init__(self, comm: Communicator, setup: Setup) -> None:
        self._comm, self._op = comm, setup.op
        self.numel = setup.numel
        self._given = torch.empty(self.numel, dtype=setup.dtype)
        self._got = self._given[:0]
        self._mine = values_of(comm.rank, comm.size, setup.dtype, setup.op)
        self._expected = combined(comm.size, setup.dtype, setup.op)

    def fill(self) -> None:
        """Write this rank's values."""
        write(self._given, self._mine)

    def __call__(self) -> None:
        """Take this rank's part of the result."""
        self._got = self._comm.reduce_scatter(self._given, op=self._op)

    def num_wrong(self) -> int:
        """Compare the part; a part of another length is wrong as a whole."""
        parts = [len(part) for part in torch.arange(self.numel).tensor_split(self._comm.size)]
        if self._got.numel() != parts[self._comm.rank]:
            return max(parts[self._comm.rank], 1)
        return num_wrong(self._got, self._expected, start=sum(parts[: self._comm.rank]))


class AllGather:
    """``all_gather``; the message is what every rank holds in the end."""

    def __init__(self, comm: Communicator, setup: Setup) -> None:
        self._comm = comm
        each = max(setup.numel // comm.size, 1)
        self.numel = each * comm.size
        self._given = torch.empty(each, dtype=setup.dtype)
        self._got: list[Tensor] = []
        self._values = [values_of(rank, comm.size, setup.dtype) for rank in range(comm.size)]

    def fill(self) -> None:
        """Write this rank's values."""
        write(self._given, self._values[self._comm.rank])

    def __call__(self) -> None:
        """Take the tensors of all ranks."""
        self._got = self._comm.all_gather(self._given)

    def num_wrong(self) -> int:
        """Compare the tensor of every rank."""
        return _num_wrong_of_each(self._got, self._values, self._given.numel())


class AllToAll:
    """``alltoall``; the message is all that one rank gives away."""

    def __init__(self, comm: Communicator, setup: Setup) -> None:
        self._comm = comm
        each = max(setup.numel // comm.size, 1)
        self.numel = each * comm.size
        self._given = [torch.empty(each, dtype=setup.dtype) for _ in range(comm.size)]
        self._got: list[Tensor] = []
        self._values = [values_of(rank, comm.size, setup.dtype) for rank in range(comm.size)]

    def fill(self) -> None:
        """Write this rank's values; those for rank r begin at the element r of the period."""
        for dest, tensor in enumerate(self._given):
            write(tensor, self._values[self._comm.rank], start=dest)

    def __call__(self) -> None:
        """Take what every rank has for this one."""
        self._got = self._comm.alltoall(self._given)

    def num_wrong(self) -> int:
        """Compare what came from every rank."""
        return _num_wrong_of_each(
            self._got, self._values, self._given[0].numel(), start=self._comm.rank
        )


class _FromRankZero:
    """A message that rank 0 has and others get; the message is the tensor."""

    def __init__(self, comm: Communicator, setup: Setup) -> None:
        self._comm = comm
        self.numel = setup.numel
        self._tensor = torch.zeros(self.numel, dtype=setup.dtype)
        self._period = values_of(0, comm.size, setup.dtype)

    def fill(self) -> None:
        """Write the values on rank 0 and zeros elsewhere."""
        is_root = self._comm.rank == 0
        write(self._tensor, self._period if is_root else torch.zeros_like(self._period))


class Broadcast(_FromRankZero):
    """``broadcast_`` from rank 0."""

    def __call__(self) -> None:
        """Take the tensor of rank 0."""
        self._comm.broadcast_(self._tensor).wait()

    def num_wrong(self) -> int:
        """Compare with the values of rank 0."""
        return num_wrong(self._tensor, self._period)


class Send(_FromRankZero):
    """``send`` from rank 0 to the last rank and back; a call is one of the two ways."""

    def __init__(self, comm: Communicator, setup: Setup) -> None:
        super().__init__(comm, setup)
        self._last = comm.size - 1

    def __call__(self) -> None:
        """Let the tensor go there and come back."""
        if self._comm.rank == 0:
            self._comm.send(self._tensor, self._last)
            self._comm.recv_(self._tensor, self._last)
        elif self._comm.rank == self._last:
            self._comm.recv_(self._tensor, 0)
            self._comm.send(self._tensor, 0)

    def num_wrong(self) -> int:
        """Compare with the values of rank 0, on the two that have them."""
        takes_part = self._comm.rank in (0, self._last)
        return num_wrong(self._tensor, self._period) if takes_part else 0


class Barrier:
    """``barrier``; there is no message."""

    numel = 0

    def __init__(self, comm: Communicator, setup: Setup) -> None:  # noqa: ARG002 - as the others
        self._comm = comm

    def fill(self) -> None:
        """Write nothing."""

    def __call__(self) -> None:
        """Meet."""
        self._comm.barrier()

    def num_wrong(self) -> int:
        """Nothing can be wrong."""
        return 0


@dataclass(frozen=True, slots=True)
class MeasuredOperation:
    """What a benchmark knows of an operation."""

    case: Callable[[Communicator, Setup], Case]
    bus_factor: Callable[[int], float]
    """Of the number of ranks: bytes that the busiest link must carry, by bytes of the message.
    Source: PERFORMANCE.md of nccl-tests."""
    ways: int = 1
    """Messages of one call that follow each other."""


def _reduced_and_spread(size: int) -> float:
    return 2 * (size - 1) / size


def _all_but_mine(size: int) -> float:
    return (size - 1) / size


def _once(size: int) -> float:
    return 1.0 if size > 1 else 0.0


OPERATIONS = {
    "allreduce": MeasuredOperation(Allreduce, _reduced_and_spread),
    "reduce_scatter": MeasuredOperation(ReduceScatter, _all_but_mine),
    "all_gather": MeasuredOperation(AllGather, _all_but_mine),
    "alltoall": MeasuredOperation(AllToAll, _all_but_mine),
    "broadcast": MeasuredOperation(Broadcast, _once),
    "barrier": MeasuredOperation(Barrier, _once),
    "send": MeasuredOperation(Send, _once, ways=2),
}
"""By the names of the command line."""


def _num_wrong_of_each(
    got: Sequence[Tensor], values: Sequence[Tensor], numel: int, start: int = 0
) -> int:
    """Count over all ranks; a tensor of another length is wrong as a whole."""
    return sum(
        num_wrong(tensor, period, start) if tensor.shape == (numel,) else numel
        for tensor, period in zip(got, values, strict=True)
    )
