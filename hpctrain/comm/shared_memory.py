"""The node level: buckets in memory that all ranks of the node map, summed by plain loads.

Each local rank sums one slice of the bucket over all ranks' buckets, in chunks that stay in the
cache, and writes the sum back into every rank's own bucket. So every byte crosses the memory bus
once per reader instead of being packed into messages, and every rank owns its copy of the sum.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.mapping import Segment
from hpctrain.comm.node_memory import NodeMemory
from hpctrain.comm.semaphore import LINE_BYTES, Semaphore
from hpctrain.comm.waiting import NodeBarrier
from hpctrain.comm.work import Check
from hpctrain.errors import CommError, MismatchError, NodeMemoryError

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK_BYTES = 256 << 10
"""One chunk of every rank's bucket and the running sum stay in a core's L2 cache."""
ALIGN = 64
"""Slices begin at a multiple of so many elements: no cache line has two writers."""

LOW_PRECISION = (torch.float16, torch.bfloat16)
"""Added in float32 and rounded once."""


class SharedMemory:
    """What the ranks of one node can do together; every method is collective over the node."""

    def __init__(
        self, node: "MPI.Intracomm", memory: NodeMemory, *, spin: bool, check: Check
    ) -> None:
        self.local_rank = node.rank
        self.local_size = node.size
        self._node = node
        self._memory = memory
        self.memory_name = memory.name
        self._num_buckets = 0
        self._is_closed = False
        self._control = self._allocate(self.local_size * LINE_BYTES)
        # Which bucket each rank is at: one cache line each, in the first rank's segment.
        lines = np.frombuffer(memoryview(self._control[0]), np.int64).reshape(self.local_size, -1)
        self._at = lines[:, 0]
        self._barrier = self._make_barrier(spin=spin, check=check)

    def barrier(self) -> None:
        """Return when all ranks of the node are here.

        Raises:
            CommError: this node level was closed.
        """
        if self._is_closed:
            raise CommError(
                "the world of this bucket was shut down; call init() and wrap the optimizer again"
            )
        self._barrier.wait()

    def _meet_at(self, bucket: Bucket) -> None:
        """Return when all ranks of the node have filled this bucket.

        Raises:
            MismatchError: another rank is at another bucket; on every rank.
        """
        self._at[self.local_rank] = bucket.number
        self.barrier()
        if not (self._at == bucket.number).all():
            numbers = ", ".join(map(str, self._at.tolist()))
            raise MismatchError(
                f"ranks of a node must reduce the same buckets in the same order, they are at "
                f"number {numbers}; the order of collectives, or of the gradients of several "
                f"optimizers, differs between ranks"
            )

    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Make a bucket of ``numel`` zeros on every rank of the node, mapped by all of them.

        Raises:
            NodeMemoryError: there is not enough memory; on every rank of the node.
        """
        self._num_buckets += 1
        segments = self._allocate(max(numel * dtype.itemsize, 1))
        peers = (
            tuple(torch.frombuffer(s, dtype=dtype, count=numel) for s in segments) if numel else ()
        )
        if not peers:
            return Bucket(torch.empty(0, dtype=dtype), number=self._num_buckets)
        own = slice_bounds(numel, self.local_size, self.local_rank)
        of_peer = [peer[own].split(CHUNK_BYTES // dtype.itemsize) for peer in peers]
        chunks = tuple(parts for parts in zip(*of_peer, strict=True) if parts[0].numel())
        return Bucket(peers[self.local_rank], peers, chunks, self._num_buckets)

    def allreduce_(self, bucket: Bucket, scale: float | None) -> None:
        """Sum the bucket over the node and write the sum back in the same pass."""
        self._meet_at(bucket)
        for parts in bucket.chunks:
            total = _sum(parts)
            _publish(total, parts, scale)
        self.barrier()

    def node_sum(self, bucket: Bucket, scale: float | None) -> None:
        """Sum this rank's slice over the node, times ``scale``, into the first rank's bucket."""
        self._meet_at(bucket)
        for parts in bucket.chunks:
            _publish(_sum(parts), parts[:1], scale)

    def publish(self, bucket: Bucket, scale: float | None) -> None:
        """Write this rank's slice of the sum into every rank's bucket, times ``scale``."""
        for parts in bucket.chunks:
            _publish(parts[0], parts, scale)
        self.barrier()

    def close(self) -> None:
        """Free the MPI communicator; buckets live as long as something refers to them."""
        self._is_closed = True
        self._node.Free()

    def _allocate(self, num_bytes: int) -> Sequence[Segment]:
        refusal, segments = None, None
        try:
            segments = self._memory.allocate(self._node, num_bytes)
        except NodeMemoryError as error:
            refusal = str(error)
        refusals = [text for text in self._node.allgather(refusal) if text]
        if refusals or segments is None:
            raise NodeMemoryError(refusals[0])
        return segments

    def _make_barrier(self, *, spin: bool, check: Check) -> NodeBarrier:
        num_rounds = (self.local_size - 1).bit_length()
        self._semaphores = self._allocate(max(num_rounds, 1) * LINE_BYTES)
        rows = [_semaphores(segment, num_rounds) for segment in self._semaphores]
        for semaphore in rows[self.local_rank]:
            semaphore.initialise()
        self._node.Barrier()
        next_ones = [
            rows[(self.local_rank + (1 << k)) % self.local_size][k] for k in range(num_rounds)
        ]
        return NodeBarrier(rows[self.local_rank], next_ones, spin=spin, check=check)


def slice_bounds(numel: int, num_parts: int, part: int) -> slice:
    """Cut ``numel`` elements into ``num_parts`` slices that differ by at most one cache line."""
    lines = -(-numel // ALIGN)
    first, last = part * lines // num_parts, (part + 1) * lines // num_parts
    return slice(min(first * ALIGN, numel), min(last * ALIGN, numel))


def _semaphores(segment: Segment, count: int) -> list[Semaphore]:
    base = ctypes.addressof(segment)
    return [Semaphore(base + k * LINE_BYTES) for k in range(count)]


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Add the ranks' chunks in rank order; 16-bit floats are added in float32 and rounded once."""
    first, *others = parts
    total = first.float() if first.dtype in LOW_PRECISION else first
    for other in others:
        total.add_(other)
    return total


def _publish(total: Tensor, parts: Sequence[Tensor], scale: float | None) -> None:
    if scale is not None:
        total.mul_(scale)
    for part in parts:
        if part is not total:
            part.copy_(total)
