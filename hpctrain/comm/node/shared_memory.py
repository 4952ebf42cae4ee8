"""Reductions within a node: buckets in memory that all ranks of the node map.

Each local rank sums one slice over the buckets of all ranks, in chunks that fit the cache, and
writes the sum to the bucket of every rank. No data are packed into messages, and every rank has
its own copy of the sum.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket, chunks_of
from hpctrain.comm.call_check import bucket_call, disagreement
from hpctrain.comm.flight_recorder import Call
from hpctrain.comm.node.kernel import BUCKET, DIFFERENT, Sum
from hpctrain.comm.node.node_barrier import NodeBarrier
from hpctrain.comm.node.node_memory import allocate, allocate_by, reserve
from hpctrain.comm.node.segments import LINE_BYTES, Region, map_in_a_row
from hpctrain.comm.node.shared_slots import MAX_VIEWS, SharedSlots, TensorSum
from hpctrain.comm.ops import Combination, Op, combination, combine, spread
from hpctrain.comm.owner import Owner
from hpctrain.comm.waiting import Watch
from hpctrain.comm.watched_calls import WatchedCalls
from hpctrain.core.checks import require_open
from hpctrain.core.errors import CommError, MismatchError, NodeMemoryError
from hpctrain.core.libc import Segment
from hpctrain.core.torch_compat import increment_version

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_CELLS = LINE_BYTES // 8  # int64 numbers in the cache line of each rank
_NONFINITE = 4
"""Index, in a cache line, of the number of chunks so far whose sum was not finite."""


class SharedMemory:
    """Shared memory of one node; methods are collective over the node unless noted.

    Args:
        node: MPI communicator of the ranks of the node; ``close`` frees it.
        spin: whether each rank has its own core, so that short waits may spin.
        watch: performs all waits.
        stage_bytes: size of ``stage`` per rank.

    Raises:
        NodeMemoryError: not enough memory; on every rank of the node.
    """

    def __init__(
        self, node: "MPI.Intracomm", *, spin: bool, watch: Watch, stage_bytes: int
    ) -> None:
        self.local_rank = node.rank
        self.local_size = node.size
        self.turn = 0
        """Index, alternately 0 and 1, of the cell and the slot that the next call uses. Other
        ranks may read a cell or slot until its owner begins the call after the next."""
        self.num_bytes = 0  # bytes read and written by this rank in node memory
        self._checks_finite = False  # whether sums of buckets are checked for non-finite values
        self._node, self._watched = node, WatchedCalls(node, watch)
        self._num_buckets = 0
        self._is_closed = False
        self._owner = Owner()
        cell_bytes = self.local_size * LINE_BYTES
        sign_byte = cell_bytes + NodeBarrier.num_bytes(self.local_size)
        head_bytes = sign_byte + LINE_BYTES
        segments = self.allocate(head_bytes + stage_bytes)
        # In the segment of the first rank, each rank has a cache line for numbers of its calls.
        cells = np.frombuffer(memoryview(segments[0])[:cell_bytes], np.int64)
        self._calls = cells.data
        self.waits = NodeBarrier(segments, self.local_rank, cell_bytes, watch, spin=spin)
        self._watched.barrier()
        self._watch = watch
        # A separate cache line: the sign is read after each barrier and written at most once.
        watch.sign = np.frombuffer(memoryview(segments[0]), np.int64, 1, sign_byte).data
        self.stage = tuple(
            torch.frombuffer(segment, dtype=torch.uint8, offset=head_bytes) for segment in segments
        )
        """Staging buffer of every rank, by local rank, for tensors that are not buckets."""
        slots = [stage.data_ptr() for stage in self.stage]
        memory = [cells.ctypes.data, cells.ctypes.data + sign_byte, *slots]
        self.waits.use_kernel(self.local_rank, memory, stage_bytes // 2)
        self.slots = SharedSlots(self)

    def barrier(self) -> None:
        """Wait until all ranks of the node have called this method. Calls ``require_usable``."""
        self.require_usable()
        self.waits.wait()

    def check_call(self, call: Call, *, of_node: bool = False) -> None:
        """Begin ``call``, then wait until all ranks of the node have begun the same call."""
        self.begin(call)
        self.await_others(call, of_node=of_node)

    def begin(self, call: Call) -> None:
        """Record ``call``, before this rank writes to node memory for this call. Not collective.

        Raises ``CommError`` if the communicator is closed or has failed on a rank, or in a forked
        child. In these cases this rank must not write to node memory, which other ranks may read.
        """
        self._owner.check()
        self.require_usable()
        self._watch.begin(call)

    def await_others(self, call: Call, *, of_node: bool = False) -> None:
        """Wait until all ranks of the node have begun the same ``call``.

        Raises ``MismatchError`` on every rank if the calls differ. Then the communicator also
        fails on other nodes, except with ``of_node``, which is for calls of this node only.
        """
        turn = self.turn
        self._calls[self.local_rank * _CELLS + turn] = call.number
        self.waits.wait()
        calls = self._calls[turn::_CELLS].tolist()
        self.turn = 1 - turn
        if calls.count(call.number) != self.local_size:
            raise self._disagreement(call, of_node=of_node)

    def switch_slots(self, num_bytes: int) -> None:
        """Make ``turn`` select the other cell and slot; count ``num_bytes``. Not collective.

        Called after all ranks of the node have synchronized.
        """
        self.turn = 1 - self.turn
        self.num_bytes += num_bytes

    def compare(self, call: Call, number: int) -> bool:
        """Begin ``call``, synchronize, and return whether ``number`` is equal on all ranks."""
        self.begin(call)
        place = 2 + self.turn  # after the two cells of calls
        self._calls[self.local_rank * _CELLS + place] = number
        self.await_others(call)
        return self._calls[place::_CELLS].tolist().count(number) == self.local_size

    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Create a bucket of ``numel`` zeros on every rank, mapped by all ranks of the node.

        Raises ``NodeMemoryError`` on every rank of the node if memory is short.
        """
        self._num_buckets += 1
        segments = self.allocate(max(numel * dtype.itemsize, 1))
        if numel == 0:
            return Bucket(torch.empty(0, dtype=dtype), number=self._num_buckets, owner=self)
        peers = tuple(torch.frombuffer(s, dtype=dtype, count=numel) for s in segments)
        chunks = chunks_of(peers, self.local_rank)
        return Bucket(peers[self.local_rank], peers, chunks, self._num_buckets, self)

    def allreduce_(self, bucket: Bucket, op: Op, scale: float | None) -> None:
        """Replace the bucket by its sum over the node, times ``scale``, in one pass."""
        call, total = bucket.sums.get((op, scale)) or self._prepare(bucket, op, scale)
        self.begin(call)
        if total is not None:
            if code := total(self.turn, self._checks_finite, bucket.addresses):
                self._finish(code, call)
            self.switch_slots(2 * bucket.flat.nbytes)
            return
        how = combination(bucket.flat.dtype, op)
        self.await_others(call)
        for parts in bucket.chunks:
            spread(combine(parts, how, scale), parts, how)
            self._count(parts, passes=2)
            self._count_nonfinite(how.view(parts[0]))
        self.barrier()

    def _prepare(self, bucket: Bucket, op: Op, scale: float | None) -> tuple[Call, Sum | None]:
        """Return the call and the kernel's sum, None without one; store both in the bucket."""
        how, call = combination(bucket.flat.dtype, op), bucket_call(bucket.number, op, scale)
        total = None
        # An empty bucket has no peers. The kernel adds numbers of ``storage_dtype``, of which a
        # complex number has two.
        if bucket.peers and how.storage_dtype.itemsize == bucket.flat.itemsize:
            total = self.waits.sum_of(BUCKET, call, how, bucket.numel, scale)
        if len(bucket.sums) >= MAX_VIEWS:
            bucket.sums.clear()
        bucket.sums[op, scale] = call, total
        return call, total

    def sum_values(self, what: TensorSum, values: Tensor) -> None:
        """Replace ``values`` by their sum with the compiled kernel, which ``what`` must have."""
        self.begin(what.call)
        assert what.total is not None
        if code := what.total(self.turn, 0, values.data_ptr()):
            self._finish(code, what.call)
        increment_version((values,))
        self.turn = (self.turn + what.num_chunks) % 2
        self.num_bytes += what.num_bytes

    def _finish(self, code: int, call: Call) -> None:
        """Wait until a call of the kernel that is not ``DONE`` is complete; raise its error."""
        if self.waits.finish(code) == DIFFERENT:
            self.turn = 1 - self.turn
            raise self._disagreement(call, of_node=False)

    def _disagreement(self, call: Call, *, of_node: bool) -> MismatchError:
        error = disagreement(self._node, call, self._watch)
        if not of_node:
            self._watch.mismatch = error
            if self._watch.number is not None:
                self._watch.fail(error)
        return error

    def is_finite_after(self, reduce: Callable[[], object]) -> bool:
        """Call ``reduce``; return whether all sums that ``reduce`` writes to buckets are finite.

        The result is the same on all ranks of the node: each rank checks its slice while the slice
        is in the cache, and the barrier that ends a reduction publishes the result.
        """
        before, self._checks_finite = self._calls[_NONFINITE::_CELLS].tolist(), True
        try:
            reduce()
        finally:
            self._checks_finite = False
        return self._calls[_NONFINITE::_CELLS].tolist() == before

    def sum_slice(self, bucket: Bucket, combination: Combination, scale: float | None) -> None:
        """Store the sum of this rank's slice, times ``scale``, in the first rank's bucket."""
        for parts in bucket.chunks:
            self.sum_chunk(parts, combination, scale)

    def sum_chunk(
        self, parts: Sequence[Tensor], combination: Combination, scale: float | None
    ) -> None:
        """Store the sum of one chunk in ``parts[0]``; ``parts`` has the chunk of each rank."""
        spread(combine(parts, combination, scale), parts[:1], combination)
        self._count(parts)

    def publish(self, bucket: Bucket, combination: Combination, scale: float | None) -> None:
        """Write this rank's slice of the sum, times ``scale``, to the bucket of every rank."""
        self.require_usable()
        for parts in bucket.chunks:
            self.publish_chunk(parts, combination, scale)
        self.barrier()

    def publish_chunk(
        self, parts: Sequence[Tensor], combination: Combination, scale: float | None
    ) -> None:
        """Write one chunk as ``publish`` does. A barrier must precede reads of the chunk."""
        spread(combine(parts[:1], combination, scale), parts, combination)
        self._count(parts)
        self._count_nonfinite(combination.view(parts[0]))

    def new_region(self, num_bytes: int, reserve: Callable[[int], int] = reserve) -> Region:
        """Create zeroed memory that all ranks of the node map as one contiguous range.

        Each rank allocates an equal part, on the NUMA node of its socket unless ``reserve``
        allocates differently. Raises ``NodeMemoryError`` on every rank of the node if memory is
        short.
        """
        share = -(-max(num_bytes, 1) // (self.local_size * mmap.PAGESIZE)) * mmap.PAGESIZE
        map_all = partial(map_in_a_row, num_bytes=share)
        return self._agreed(lambda: allocate_by(map_all, self._watched, share, reserve))

    def allocate(self, num_bytes: int) -> Sequence[Segment]:
        """Create a zeroed segment on every rank, and map all segments; return them by local rank.

        A segment exists while it is referenced. Raises ``NodeMemoryError`` as ``new_bucket`` does.
        """
        return self._agreed(lambda: allocate(self._watched, num_bytes))

    def gather(self, value: T) -> list[T]:
        """Return the picklable values of all ranks of the node, by local rank."""
        self.require_usable()
        return self._watched.allgather(value)

    def _agreed(self, make: Callable[[], T]) -> T:
        """Return the result of ``make``; if a call fails, raise on all ranks of the node."""
        refusal, made = None, None
        try:
            made = make()
        except (NodeMemoryError, OSError, MemoryError) as error:
            # The error is raised after the ranks have exchanged it.
            refusal = str(error) or type(error).__name__
        refusals = [text for text in self._watched.allgather(refusal) if text]
        if refusals or made is None:
            raise NodeMemoryError(refusals[0])
        return made

    def ranks_of(self, comm: "MPI.Intracomm") -> list[int]:
        """Return the rank in ``comm`` of each rank of this node, by local rank. Not collective."""
        found = self._node.group.Translate_ranks(None, comm.group)
        return list(found)

    def close(self) -> None:
        """Free the MPI communicator; buckets remain valid while they are referenced."""
        self._is_closed = True
        self._watch.free(self._node)

    def require_usable(self) -> None:
        """Raise ``CommError`` after ``close``, or after a failure on a rank. Not collective."""
        if self._is_closed:  # tested here, since each operation calls this method
            remedy = "after shutdown() call init() and create the buckets and optimizers again"
            require_open(not self._is_closed, "a communicator", CommError, remedy)
        self._watch.require_in_step()

    def _count_nonfinite(self, total: Tensor) -> None:
        """Count the chunk if it has non-finite values.

        The sum of a chunk is only a first test, since it may overflow for finite values.
        """
        if self._checks_finite:
            wide = torch.float32 if total.itemsize < 4 else None
            if not math.isfinite(total.sum(dtype=wide)) and not total.isfinite().all():
                self._calls[self.local_rank * _CELLS + _NONFINITE] += 1

    def count(self, num_bytes: int) -> None:
        """Add ``num_bytes`` to the counter of accesses to node memory. Not collective."""
        self.num_bytes += num_bytes

    def _count(self, parts: Sequence[Tensor], passes: int = 1) -> None:
        """Count the bytes of ``passes`` passes over the chunks ``parts`` of all ranks."""
        self.count(passes * len(parts) * parts[0].nbytes)
