"""Mix named operations of all kinds, in a different order on every rank, from several threads."""

import random
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

import hpctrain as hvd
from hpctrain.collectives.operation import controller_of
from hpctrain.core.errors import OperationMismatchError


class At(NamedTuple):
    """Hold the place at which an operation is started."""

    step: int
    rank: int
    size: int
    in_place: bool = False

    def value(self, rank=None):
        """Return the argument that a rank has in this step; by default this rank."""
        return self.step % 17 + 2 * (self.rank if rank is None else rank) + 1

    def total(self):
        return sum(map(self.value, range(self.size)))


class Operation(NamedTuple):
    """Hold a name that is used repeatedly: the start of the operation, and its expected result."""

    start: Callable[[At], object]  # returns a handle
    expected: Callable[[At], list]
    is_of_set: bool = False


def _reduction(name, numel, dtype, op, expected, *, process_set=None, **factors):
    def start(at):
        function = hvd.allreduce_async_ if at.in_place else hvd.allreduce_async
        given = torch.full((numel,), at.value(), dtype=dtype)
        return function(given, name=name, op=op, process_set=process_set, **factors)

    def wanted(at):
        return [torch.full((numel,), expected(at), dtype=dtype)]

    return Operation(start, wanted, process_set is not None)


def _group(name, num_tensors):
    shapes = [(1 + number % 5, 3) for number in range(num_tensors)]

    def start(at):
        function = hvd.grouped_allreduce_async_ if at.in_place else hvd.grouped_allreduce_async
        given = [torch.full(shape, float(at.value())) for shape in shapes]
        return function(given, name=name, op=hvd.Sum)

    return Operation(start, lambda at: [torch.full(shape, float(at.total())) for shape in shapes])


def _broadcast(name, numel, root):
    def start(at):
        function = hvd.broadcast_async_ if at.in_place else hvd.broadcast_async
        return function(torch.full((numel,), at.value()), root % at.size, name=name)

    return Operation(start, lambda at: [torch.full((numel,), at.value(root % at.size))])


def _allgather(name, num_rows):
    def part(at, rank):
        return torch.full((num_rows(at, rank), 2), float(at.value(rank)))

    def wanted(at):
        return [torch.cat([part(at, rank) for rank in range(at.size)])]

    return Operation(lambda at: hvd.allgather_async(part(at, at.rank), name), wanted)


def _reducescatter(name, num_rows):
    def start(at):
        given = torch.full((num_rows, 2), float(at.value()))
        return hvd.reducescatter_async(given, name, op=hvd.Sum)

    def wanted(at):
        mine = num_rows // at.size + (at.rank < num_rows % at.size)
        return [torch.full((mine, 2), float(at.total()))]

    return Operation(start, wanted)


def _alltoall(name):
    def wanted(at):
        values = [at.value(rank) + at.rank for rank in range(at.size)]
        return [torch.tensor(values), torch.ones(at.size, dtype=torch.int32)]

    return Operation(
        lambda at: hvd.alltoall_async(torch.arange(at.size) + at.value(), name=name), wanted
    )


def _changing(name):
    """Return an operation whose shape changes every hundred steps."""

    def start(at):
        given = torch.full((1 + at.step // 100, 2), float(at.value()))
        return hvd.allreduce_async(given, name=name, op=hvd.Sum)

    return Operation(start, lambda at: [torch.full((1 + at.step // 100, 2), float(at.total()))])


def operations(some):
    """Return all operations; ``some`` is a process set that lacks the last rank, or None."""
    f32, f64, total = torch.float32, torch.float64, At.total
    factors = {"prescale_factor": 2.0, "postscale_factor": 2.0}
    found = [
        _reduction("eight bytes", 2, f32, hvd.Sum, total),
        _reduction("average", 100, f64, hvd.Average, lambda at: at.total() / at.size),
        _reduction("integers", 7, torch.int64, hvd.Average, lambda at: at.total() // at.size),
        _reduction("bytes", 5, torch.uint8, hvd.Max, lambda at: at.value(at.size - 1)),
        _reduction("scaled", 3, f64, hvd.Sum, lambda at: 4.0 * at.total(), **factors),
        _reduction("half", 9, torch.bfloat16, hvd.Min, lambda at: at.value(0)),
        _reduction("64 KiB", 1 << 14, f32, hvd.Sum, total),
        _reduction("more than a slot", 300_000, f32, hvd.Sum, total),
        _group("group", 5),
        _group("large group", 200),
        _broadcast("from the first", 4, 0),
        _broadcast("from the last", 1000, -1),
        _allgather("as many rows", lambda *_: 3),
        _allgather("other rows", lambda at, rank: (at.step + rank) % 3),
        _reducescatter("rows", 9),
        _alltoall("exchange"),
        _changing("changing"),
    ]
    if some is not None:
        found.append(_reduction("of a set", 2, f32, hvd.Sum, total, process_set=some))
    return found


class Steps:
    """Draw the operations of a step equally on all ranks, and their order and times per rank."""

    def __init__(self, seed, some=None):
        self.size, self.rank, self.some = hvd.size(), hvd.rank(), some
        self._alike, self._own = random.Random(seed), random.Random((seed, self.rank).__hash__())
        self._operations = operations(some)
        self._failures = []

    def take(self, num_steps):
        """Run the steps; raise if a result is wrong on this rank."""
        for step in range(num_steps):
            kind = self._alike.random()
            num = 1 if kind < 0.6 else self._alike.randint(2, 6)
            chosen = self._alike.sample(self._operations, num)
            if num == 1 and kind < 0.3:  # in a loop, as programs do
                for again in range(4):
                    self._check(chosen[0], self._start(chosen[0], step + again), step + again)
            elif num == 1 and kind > 0.55:
                self._disagree(step)
            else:
                self._together(chosen, step)
            assert not self._failures, self._failures[:3]

    def _together(self, chosen, step):
        mine = self._own.sample(chosen, len(chosen))
        if self._own.random() < 0.3 and len(mine) > 1:
            cut = self._own.randrange(1, len(mine))
            other = threading.Thread(target=self._some, args=(mine[:cut], step))
            other.start()
            self._some(mine[cut:], step)
            other.join()
        else:
            self._some(mine, step)

    def _some(self, operations, step):
        try:
            handles = [(each, self._start(each, step)) for each in operations]
            self._dawdle()
            self._own.shuffle(handles)
            for each, handle in handles:
                self._check(each, handle, step)
        except Exception as error:
            self._failures.append(repr(error))

    def _start(self, operation, step):
        if operation.is_of_set and not self.some.included():
            return None
        self._dawdle()
        return operation.start(self._at(operation, step, in_place=self._own.random() < 0.5))

    def _at(self, operation, step, *, in_place=False):
        size = self.some.size() if operation.is_of_set else self.size
        return At(step, self.rank, size, in_place)

    def _check(self, operation, handle, step):
        if handle is None:
            return
        found = hvd.synchronize(handle)
        found = list(found) if isinstance(found, list | tuple) else [found]
        wanted = operation.expected(self._at(operation, step))
        for one, other in zip(found, wanted, strict=True):
            if one.shape != other.shape or not torch.equal(one, other):
                self._failures.append(f"step {step}: {one}, not {other}")

    def _disagree(self, step):
        """Use one name with two shapes: every rank raises an error, and later operations work."""
        odd = step % self.size
        numel = 3 if self.rank == odd else 2
        try:
            hvd.allreduce(torch.ones(numel), name="at odds", op=hvd.Sum)
        except OperationMismatchError:
            pass
        else:
            self._failures.append(f"step {step}: no error")
        hvd.allreduce(torch.ones(2), name="at odds", op=hvd.Sum)

    def _dawdle(self):
        chance = self._own.random()
        if chance < 0.03:
            time.sleep(self._own.random() * 0.003)
        elif chance < 0.1:
            time.sleep(0)


def num_commits(process_set=None):
    """Return the number of operations that needed no control message."""
    return controller_of(process_set)._progress.fast_path.commit.num_commits
