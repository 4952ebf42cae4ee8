"""Compare random collectives, the same on all ranks, with numpy.

The tests use this module, and all ranks can run it: ``mpirun -n 4 python -m tests.comm.fuzz -n
5000``.
"""

import argparse
import itertools
import random
import sys
import time
import warnings
from dataclasses import dataclass, field

import torch

from hpctrain.comm.factory import connect
from hpctrain.comm.mpi_world import find_world
from hpctrain.comm.ops import Op
from hpctrain.core.config import Settings
from tests.comm import fuzz_values as fv

KINDS = {
    "allreduce_": 30,
    "bucket": 14,
    "allreduce": 8,
    "reduce_scatter": 12,
    "all_gather": 10,
    "alltoall": 10,
    "broadcast_": 8,
    "objects": 4,
    "ring": 4,
}
"""How often each kind of operation is drawn, in percent."""
BATCH = 100  # operations between two comparisons of checksums, each with a new group
BUCKETS = (0, 1, 1000, 70_001)


@dataclass(frozen=True)
class Case:
    """Hold one random operation, identical on all ranks."""

    number: int
    kind: str
    draw: fv.Draw
    op: Op
    scale: float | None
    shape: tuple[int, ...]
    layout: str
    luck: float = field(repr=False)  # from 0 to 1, for choices of some kinds

    @property
    def numel(self):
        return torch.Size(self.shape).numel()

    def shape_of(self, *ranks):
        """Return a shape that differs between ranks."""
        source = random.Random(repr((self.draw.seed, ranks)))
        return tuple(source.randrange(5) for _ in range(source.randrange(4)))

    def numels(self, size):
        """Return the sizes of the parts, or None for equal parts."""
        if self.luck < 0.5:
            return None
        cuts = sorted(int(self.numel * self.luck * k) % (self.numel + 1) for k in range(1, size))
        bounds = [0, *cuts, self.numel]
        return [end - start for start, end in itertools.pairwise(bounds)]


def draw_case(source, seed, number):
    kind = source.choices(list(KINDS), list(KINDS.values()))[0]
    dtype = source.choice(fv.DTYPES)
    op = source.choice(fv.ops_of(dtype) if source.random() < 0.5 else (Op.SUM,))
    may_scale = dtype.is_floating_point or dtype.is_complex
    scale = source.choice((0.5, 1 / 3, 3.0)) if may_scale and source.random() < 0.4 else None
    return Case(
        number=number,
        kind=kind,
        draw=fv.Draw((seed, number), dtype, specials=source.random() < 0.1),
        op=op,
        scale=scale,
        shape=draw_shape(source, dtype),
        layout=source.choice(fv.LAYOUTS),
        luck=source.random(),
    )


def draw_shape(source, dtype):
    luck = source.random()
    if luck < 0.004:  # larger than one pass through node memory
        return (source.randrange(1 << 20, 10 << 20) // dtype.itemsize,)
    if luck < 0.06:
        return (source.randrange(3), source.randrange(300), source.randrange(100))
    num_dims = source.choice((0, 1, 1, 2, 2, 3))
    return tuple(source.randrange(1 + 100 // num_dims**2) for _ in range(num_dims))


class Checker:
    """Run cases on one communicator and compare each with numpy."""

    def __init__(self, comm):
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._buckets = {}

    def carry_out(self, case):
        """Run a case; return the checksum of a result with equal bits on all ranks, else None."""
        return getattr(self, f"_{case.kind.rstrip('_')}" + "_" * case.kind.endswith("_"))(case)

    def _mine(self, case):
        return fv.laid_out(case.draw.values(self.rank, case.numel), case.shape, case.layout)

    def _check(self, case, result, shape, part=slice(None)):
        assert result.dtype is case.draw.dtype
        assert tuple(result.shape) == shape
        expected, bound = fv.reduced(case.draw, case.op, case.scale, self.size, case.numel)
        fv.assert_close(result, expected[part], None if bound is None else bound[part])

    def _check_equal(self, draw, result, rank, shape):
        assert result.dtype is draw.dtype
        assert tuple(result.shape) == shape
        expected = draw.values(rank, torch.Size(shape).numel())
        assert torch.equal(fv.as_bytes(result), fv.as_bytes(expected))

    def _allreduce_(self, case):
        tensor = self._mine(case)
        self.comm.allreduce_(tensor, op=case.op, scale=case.scale).wait()
        self._check(case, tensor, case.shape)
        return fv.crc(tensor)

    def _allreduce(self, case):
        tensor = self._mine(case)
        result = self.comm.allreduce(tensor, op=case.op, scale=case.scale)
        assert result.is_contiguous()
        self._check(case, result, case.shape)
        self._check_equal(case.draw, tensor, self.rank, case.shape)
        return fv.crc(result)

    def _bucket(self, case):
        numel = BUCKETS[int(case.luck**2 * len(BUCKETS))]  # large ones less often
        key = case.draw.dtype, numel
        if key not in self._buckets:
            self._buckets[key] = self.comm.new_bucket(numel, case.draw.dtype)
        bucket = self._buckets[key]
        bucket.flat.copy_(case.draw.values(self.rank, numel))
        self.comm.allreduce_(bucket, op=case.op, scale=case.scale).wait()
        expected, bound = fv.reduced(case.draw, case.op, case.scale, self.size, numel)
        fv.assert_close(bucket.flat, expected, bound)
        return fv.crc(bucket.flat)

    def _reduce_scatter(self, case):
        tensor = self._mine(case)
        numels = case.numels(self.size)
        part = self.comm.reduce_scatter(tensor, op=case.op, scale=case.scale, numels=numels)
        if numels is None:
            numels = [len(range(r, case.numel, self.size)) for r in range(self.size)]
        start = sum(numels[: self.rank])
        end = start + numels[self.rank]
        self._check(case, part, (numels[self.rank],), slice(start, end))
        self._check_equal(case.draw, tensor, self.rank, case.shape)

    def _all_gather(self, case):
        shapes = [case.shape_of(rank) for rank in range(self.size)]
        if case.luck < 0.1:
            shapes[-1] = case.shape
        numel = torch.Size(shapes[self.rank]).numel()
        values = case.draw.values(self.rank, numel)
        tensor = fv.laid_out(values, shapes[self.rank], case.layout)
        gathered = self.comm.all_gather(tensor)
        assert len(gathered) == self.size
        for rank, result in enumerate(gathered):
            self._check_equal(case.draw, result, rank, shapes[rank])

    def _alltoall(self, case):
        tensors = []
        for rank in range(self.size):
            shape = case.shape_of(self.rank, rank)
            values = case.draw.values(self.rank, torch.Size(shape).numel())
            tensors.append(fv.laid_out(values, shape, case.layout))
        received = self.comm.alltoall(tensors)
        assert len(received) == self.size
        for rank, result in enumerate(received):
            self._check_equal(case.draw, result, rank, case.shape_of(rank, self.rank))

    def _broadcast_(self, case):
        root = int(case.luck * self.size)
        tensor = self._mine(case)
        self.comm.broadcast_(tensor, root).wait()
        self._check_equal(case.draw, tensor, root, case.shape)

    def _objects(self, case):
        root = int(case.luck * self.size)
        output = [f"{case.number} of {rank}" * (1 + rank) for rank in range(self.size)]
        mine = output[self.rank]
        assert self.comm.broadcast_object(mine, root) == output[root]
        assert self.comm.gather_object(mine, root) == (output if self.rank == root else None)
        assert self.comm.allgather_object(mine) == output
        self.comm.agree(True)
        self.comm.barrier()

    def _ring(self, case):
        if self.size == 1:
            return
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        tag = int(100 * case.luck)
        outgoing = self._mine(case)
        zeros = torch.zeros(case.numel, dtype=case.draw.dtype)
        incoming = fv.laid_out(zeros, case.shape, case.layout)
        if self.rank == 0:  # the first rank begins, so that ranks do not wait in a circle
            self.comm.send(outgoing, right, tag)
        self.comm.recv_(incoming, left, tag)
        if self.rank > 0:
            self.comm.send(outgoing, right, tag)
        self._check_equal(case.draw, incoming, left, case.shape)


def fuzz(comm, num_cases, seed):
    """Run ``num_cases`` operations. Collective.

    Raises:
        AssertionError: a result differs from numpy, or between ranks; the message names the case.
    """
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    source = random.Random(seed)
    whole = Checker(comm)
    for first in range(0, num_cases, BATCH):
        members = source.sample(range(comm.size), source.randint(1, comm.size))
        made = comm.group(members)
        part = None if made is None else Checker(made)
        checksums = {}
        for number in range(first, min(first + BATCH, num_cases)):
            case = draw_case(source, seed, number)
            checker = part if source.random() < 0.25 else whole
            if checker is not None:
                try:
                    checksums[number] = checker.carry_out(case)
                except Exception as error:
                    raise AssertionError(f"{case} on rank {comm.rank}: {error}") from error
        if made is not None and made is not comm:
            made.close()
        compare(comm.allgather_object(checksums))


def compare(by_rank):
    for number in sorted({number for checksums in by_rank for number in checksums}):
        found = {checksums[number] for checksums in by_rank if number in checksums}
        assert len(found) == 1, f"the bits of operation {number} differ between ranks"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=5000, help="operations")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other operations")
    asked = parser.parse_args()
    connection = connect(find_world(), Settings.from_env())
    start = time.perf_counter()
    fuzz(connection.comm, asked.n, asked.seed)
    seconds = time.perf_counter() - start
    if connection.comm.rank == 0:
        sys.stdout.write(
            f"{asked.n} operations, seed {asked.seed}: {connection.comm.size} ranks on "
            f"{connection.topology.num_nodes} nodes agree with numpy, {seconds:.1f} s\n"
        )
    if connection.presence is not None:
        connection.presence.wait_for_end()
    connection.comm.close()


if __name__ == "__main__":
    main()
