"""The node level: buckets in memory that all ranks of the node map, summed by plain loads.

Each local rank sums one slice of the bucket over all ranks' buckets, in chunks that stay in the
cache, and writes the sum back into every rank's own bucket. So every byte crosses the memory bus
once per reader instead of being packed into messages, and every rank owns its copy of the sum.
"""

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket, chunks_of
from hpctrain.comm.call_check import bucket_call, disagreement, tensor_call
from hpctrain.comm.flight_recorder import Call
from hpctrain.comm.node import node_memory
from hpctrain.comm.node.segments import LINE_BYTES, Region, Semaphore, map_in_a_row
from hpctrain.comm.ops import Combination, scale_
from hpctrain.comm.owner import Owner
from hpctrain.comm.waiting import IN_NODE, Watch
from hpctrain.comm.watched_calls import WatchedCalls
from hpctrain.core.errors import CommError, NodeMemoryError
from hpctrain.core.libc import Segment

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.rail.rail import InFlight

T = TypeVar("T")

_CELLS = LINE_BYTES // 8  # numbers in the cache line of each rank
_UNFINITE = 4
"""Place among them, behind those of meetings: pieces of sums that were not finite so far."""

IN_TURNS = IN_NODE._replace(spin_s=0.0, yield_s=200e-6)
"""Where ranks outnumber cores: a core that is given away, and not asleep, is back at once."""


class SharedMemory:
    """What the ranks of one node can do together; every method is collective over the node."""

    def __init__(
        self,
        node: "MPI.Intracomm",
        *,
        spin: bool,
        watch: Watch,
        stage_bytes: int,
    ) -> None:
        """Take what the levels need in one piece: cells to compare, semaphores, the stage.

        With ``spin`` each rank has a core of its own, so that a short wait may keep it.
        ``stage_bytes`` are of each rank, for ``stage``. ``NodeMemoryError``, on every rank of the
        node, if there is too little.
        """
        self.local_rank = node.rank
        self.local_size = node.size
        self.pace = IN_NODE if spin else IN_TURNS  # of waits inside the node
        self.turn = 0
        """Which of two places the next meeting uses: 0 or 1, in turns. What a rank wrote into the
        place of one meeting may be read until that rank comes to the next but one."""
        self.num_bytes = 0  # bytes that this rank has read and written in node memory so far
        self._looks = False  # at sums of buckets, for what is not finite
        self._meanwhile: InFlight | None = None
        self._node, self._watched = node, WatchedCalls(node, watch)
        self._num_buckets = 0
        self._is_closed = False
        self._owner = Owner()
        num_rounds = (self.local_size - 1).bit_length()
        cell_bytes = self.local_size * LINE_BYTES
        sign_byte = cell_bytes + num_rounds * LINE_BYTES
        head_bytes = sign_byte + LINE_BYTES
        self._segments = self.allocate(head_bytes + stage_bytes)
        # What each rank is about to do: one cache line each, in the first rank's segment.
        cells = np.frombuffer(memoryview(self._segments[0])[:cell_bytes], np.int64)
        self._calls = cells.data
        self._rounds = self._make_rounds(num_rounds, cell_bytes)
        """Of a barrier: the semaphore to wait for, and the one to post."""
        self._watch = watch
        # In a cache line that is written once, when a rank fails, and read after each barrier.
        watch.sign = np.frombuffer(memoryview(self._segments[0]), np.int64, 1, sign_byte).data
        self.stage = tuple(
            torch.frombuffer(segment, dtype=torch.uint8, offset=head_bytes)
            for segment in self._segments
        )
        """Bytes of every rank, by local rank, for what passes through."""
        self.slots = SharedSlots(self)

    def barrier(self) -> None:
        """Return when all ranks of the node are here; ``CommError`` if closed or failed on a rank.

        Dissemination: in round k each rank wakes the one 2^k further on and waits for the one 2^k
        before it, so ceil(log2 n) posts per rank. Counting semaphores make it reusable at once: a
        post of the next barrier is counted and not lost.

        Source: Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization".
        """
        self.require_usable()
        self._pass_barrier()

    def meet(self, call: Call, *, of_node: bool = False) -> None:
        """Return when all ranks of the node are about to make the same ``call``.

        As ``begin`` and ``await_others`` together.
        """
        self.begin(call)
        self.await_others(call, of_node=of_node)

    def begin(self, call: Call) -> None:
        """Begin a ``call``, before this rank writes into node memory for it. Not collective.

        ``CommError`` if the communicator is closed or has failed on a rank, and in a forked child
        of a rank: then nothing may be written that another rank could still read.
        """
        self._owner.check()
        self.require_usable()
        self._watch.begin(call)

    def await_others(self, call: Call, *, of_node: bool = False) -> None:
        """Return when all ranks of the node have begun the same ``call``.

        ``MismatchError``, on every rank, if another has begun a different one; ``CommError`` if
        the communicator has failed on a rank. A difference fails the communicator for the ranks of
        other nodes, unless the call is ``of_node``, which they do not wait for.
        """
        turn = self.turn
        self._calls[self.local_rank * _CELLS + turn] = call.number
        self._pass_barrier()
        calls = self._calls[turn::_CELLS].tolist()
        self.turn = 1 - turn
        if calls.count(call.number) != self.local_size:
            error = disagreement(self._node, call, self._watch)
            if self._watch.number is not None and not of_node:
                self._watch.fail(error)
            raise error

    def end_turn(self, num_bytes: int) -> None:
        """Use the other place from now on, after ``num_bytes``: all ranks of the node were here.

        Not collective.
        """
        self.turn = 1 - self.turn
        self.num_bytes += num_bytes

    def compare(self, call: Call, number: int) -> bool:
        """Meet for ``call``, and say whether all ranks of the node tell the same number."""
        self.begin(call)
        place = 2 + self.turn  # behind those of calls
        self._calls[self.local_rank * _CELLS + place] = number
        self.await_others(call)
        return self._calls[place::_CELLS].tolist().count(number) == self.local_size

    @contextmanager
    def busy(self, work: "InFlight") -> Iterator[None]:
        """Go on with ``work``, at its pace, whenever this rank waits for others of the node."""
        self._meanwhile = work
        try:
            yield
        finally:
            self._meanwhile = None

    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Make a bucket of ``numel`` zeros on every rank of the node, mapped by all of them.

        ``NodeMemoryError``, on every rank of the node, if there is too little.
        """
        self._num_buckets += 1
        segments = self.allocate(max(numel * dtype.itemsize, 1))
        if numel == 0:
            return Bucket(torch.empty(0, dtype=dtype), number=self._num_buckets, owner=self)
        peers = tuple(torch.frombuffer(s, dtype=dtype, count=numel) for s in segments)
        chunks = chunks_of(peers, self.local_rank)
        return Bucket(peers[self.local_rank], peers, chunks, self._num_buckets, self)

    def allreduce_(self, bucket: Bucket, combination: Combination, scale: float | None) -> None:
        """Sum the bucket over the node and write the sum back in the same pass."""
        self.meet(bucket_call(bucket.number, combination.op, scale))
        for parts in bucket.chunks:
            spread(combine(parts, combination, scale), parts, combination)
            self._count(parts, passes=2)
            self._look(combination.view(parts[0]))
        self.barrier()

    def is_finite_after(self, reduce: Callable[[], object]) -> bool:
        """Say whether all sums that ``reduce`` writes into buckets are finite; alike everywhere.

        Each rank looks at its slice while that is in the cache, and tells the others of the node
        by the barrier that ends a reduction anyway.
        """
        before, self._looks = self._calls[_UNFINITE::_CELLS].tolist(), True
        try:
            reduce()
        finally:
            self._looks = False
        return self._calls[_UNFINITE::_CELLS].tolist() == before

    def sum_slice(self, bucket: Bucket, combination: Combination, scale: float | None) -> None:
        """Sum this rank's slice over the node, times ``scale``, into the first rank's bucket."""
        for parts in bucket.chunks:
            self.sum_chunk(parts, combination, scale)

    def sum_chunk(
        self, parts: Sequence[Tensor], combination: Combination, scale: float | None
    ) -> None:
        """Sum one of the pieces of ``sum_slice``, of which there is one per rank."""
        spread(combine(parts, combination, scale), parts[:1], combination)
        self._count(parts)

    def publish(self, bucket: Bucket, combination: Combination, scale: float | None) -> None:
        """Write this rank's slice of the sum into every rank's bucket, times ``scale``."""
        self.require_usable()
        for parts in bucket.chunks:
            self.publish_chunk(parts, combination, scale)
        self.barrier()

    def publish_chunk(
        self, parts: Sequence[Tensor], combination: Combination, scale: float | None
    ) -> None:
        """Write one of the pieces of ``publish``; a barrier comes before it is read."""
        spread(combine(parts[:1], combination, scale), parts, combination)
        self._count(parts)
        self._look(combination.view(parts[0]))

    def new_region(
        self, num_bytes: int, reserve: Callable[[int], int] = node_memory.reserve
    ) -> Region:
        """Make zeroed memory that the node has once; every rank brings an equal part of it.

        Each rank's part lies on the memory of its own socket, or where ``reserve`` makes it.
        ``NodeMemoryError``, on every rank of the node, if there is too little.
        """
        share = -(-max(num_bytes, 1) // (self.local_size * mmap.PAGESIZE)) * mmap.PAGESIZE
        map_all = partial(map_in_a_row, num_bytes=share)
        return self._agreed(
            lambda: node_memory.allocate_by(map_all, self._watched, share, reserve)
        )

    def allocate(self, num_bytes: int) -> Sequence[Segment]:
        """Make a zeroed segment on every rank, and map those of all; return them by local rank.

        Each lives as long as something refers to it. ``NodeMemoryError``, on every rank of the
        node, if there is too little.
        """
        return self._agreed(lambda: node_memory.allocate(self._watched, num_bytes))

    def _agreed(self, make: Callable[[], T]) -> T:
        """Return what all ranks of the node have made, else all raise ``NodeMemoryError``."""
        refusal, made = None, None
        try:
            made = make()
        except (NodeMemoryError, OSError, MemoryError) as error:  # the others wait for an answer
            refusal = str(error) or type(error).__name__
        refusals = [text for text in self._watched.allgather(refusal) if text]
        if refusals or made is None:
            raise NodeMemoryError(refusals[0])
        return made

    def ranks_of(self, comm: "MPI.Intracomm") -> list[int]:
        """Return the numbers of this node's ranks in ``comm``, by local rank. Not collective."""
        found = self._node.group.Translate_ranks(None, comm.group)
        return list(found)

    def close(self) -> None:
        """Free the MPI communicator; buckets live as long as something refers to them."""
        self._is_closed = True
        self._watch.free(self._node)

    def require_usable(self) -> None:
        """Raise ``CommError`` if this is closed or has failed on a rank. Not collective."""
        if self._is_closed:
            raise CommError(
                "this communicator was closed, or its world shut down; call init() and make its "
                "buckets and optimizers again"
            )
        self._watch.require_in_step()

    def _pass_barrier(self) -> None:
        meanwhile = self._meanwhile
        for mine, next_one in self._rounds:
            next_one.post()
            if mine.try_wait():
                continue
            if meanwhile is None:
                self._watch.wait(mine.try_wait, self.pace, nap=mine.wait)
            else:
                poll = partial(_polled, meanwhile, mine)
                self._watch.wait(poll, meanwhile.pace(), nap=mine.wait)
        # A rank that came to the barrier and failed there may have changed its bucket since.
        if self._watch.sign[0]:
            self._watch.require_in_step()

    def _look(self, total: Tensor) -> None:
        """Count a piece of a sum that is not finite; of one that is, a sum may be too large."""
        if self._looks:
            wide = torch.float32 if total.itemsize < 4 else None
            if not math.isfinite(total.sum(dtype=wide)) and not total.isfinite().all():
                self._calls[self.local_rank * _CELLS + _UNFINITE] += 1

    def count(self, num_bytes: int) -> None:
        """Count bytes that this rank has read or written in node memory. Not collective."""
        self.num_bytes += num_bytes

    def _count(self, parts: Sequence[Tensor], passes: int = 1) -> None:
        """Count passes in which this rank touched the pieces of all ranks."""
        self.count(passes * len(parts) * parts[0].nbytes)

    def _make_rounds(
        self, num_rounds: int, first_byte: int
    ) -> tuple[tuple[Semaphore, Semaphore], ...]:
        places = [first_byte + k * LINE_BYTES for k in range(num_rounds)]
        mine = [Semaphore(self._segments[self.local_rank], place) for place in places]
        for semaphore in mine:
            semaphore.initialise()
        self._watched.barrier()
        next_ones = [
            Semaphore(self._segments[(self.local_rank + (1 << k)) % self.local_size], place)
            for k, place in enumerate(places)
        ]
        return tuple(zip(mine, next_ones, strict=True))


def combine(parts: Sequence[Tensor], combination: Combination, scale: float | None) -> Tensor:
    """Combine the ranks' pieces in rank order, times ``scale``.

    Returns the first piece, which is overwritten; a wider tensor where one rounding wants it.
    """
    first, *others = (combination.view(part) for part in parts)
    dtype = combination.accumulate_dtype
    total = first if dtype is first.dtype else first.to(dtype)
    for other in others:
        combination.into(total, other)
    return total if scale is None else total.mul_(scale)


def combine_to(
    out: Tensor, parts: Sequence[Tensor], combination: Combination, scale: float | None
) -> None:
    """Combine the pieces in rank order, times ``scale``; ``out`` may be one of the first two.

    What ``out`` has more bits for is not rounded.
    """
    dtype = combination.accumulate_dtype
    if dtype is not combination.storage_dtype or len(parts) == 1:
        is_wide = out.dtype is dtype is not combination.storage_dtype
        total = out.copy_(parts[0]) if is_wide else parts[0].to(dtype, copy=True)
        for other in parts[1:]:
            combination.into(total, other)
        total = total if scale is None else total.mul_(scale)
        if not is_wide:
            out.copy_(total)
        return
    combination.function(parts[0], parts[1], out=out)
    for other in parts[2:]:
        combination.into(out, other)
    if scale is not None:
        out.mul_(scale)


def spread(total: Tensor, parts: Sequence[Tensor], combination: Combination) -> None:
    """Write a sum into the pieces of all ranks."""
    for part in parts:
        stored = combination.view(part)
        if stored.data_ptr() != total.data_ptr():
            stored.copy_(total)


Slots = tuple[Tensor, ...]


NUM_PLACES = 11
"""Chunks of a tensor in the stage: those under way between nodes, one that is copied in, one that
is copied out, and one that another rank may still be copying out."""
_PLACE_ALIGN = 4096
MOST_SEEN = 256  # views that are kept: making one costs as much as a small sum


def _polled(work: "InFlight", mine: Semaphore) -> bool:
    work.poll()
    return mine.try_wait()


class SharedSlots:
    """Ordinary tensors pass through the stage of ``node``; every method is collective over it.

    Each rank writes its own slot, all read each other's. Two slots per rank, used in turns, keep
    one that writes for the next operation from one that still reads for this one, without a second
    barrier: before a slot is written again, its readers have come to the barrier between.
    """

    def __init__(self, node: SharedMemory) -> None:
        self._node = node
        self._num_bytes = len(node.stage[0]) // 2
        self._place_bytes = len(node.stage[0]) // NUM_PLACES // _PLACE_ALIGN * _PLACE_ALIGN
        self._seen: dict[tuple[torch.dtype, torch.Size, int], Slots] = {}
        self._buckets: dict[tuple[torch.dtype, torch.Size, int], Bucket] = {}

    def numel(self, dtype: torch.dtype) -> int:
        """Return how many elements a slot takes."""
        return self._num_bytes // dtype.itemsize

    def direct_(self, values: Tensor, combination: Combination, scale: float | None) -> None:
        """Replace ``values`` by the sum: every rank reads all slots, after a single barrier."""
        node, num_bytes = self._node, values.nbytes
        call = tensor_call(combination.op, values.dtype, values.numel(), scale)
        fits = num_bytes <= self._num_bytes  # a call less for what is small
        for chunk in (values,) if fits else values.split(self.numel(values.dtype)):
            parts = list(self.views(chunk.dtype, chunk.shape, node.turn))
            node.begin(call)
            parts[node.local_rank].copy_(chunk)
            node.await_others(call)
            if node.local_rank < 2:
                parts[node.local_rank] = chunk  # one stream less than from the slot
            combine_to(chunk, parts, combination, scale)
        node.count((1 + node.local_size) * num_bytes)

    def slices_(self, values: Tensor, combination: Combination, scale: float | None) -> None:
        """Replace ``values`` by the sum: every rank sums a slice, then reads those of all."""
        node = self._node
        call = tensor_call(combination.op, values.dtype, values.numel(), scale)
        for chunk in values.split(self.numel(values.dtype)):
            bucket = self.enter(chunk, call)
            node.sum_slice(bucket, combination, scale)
            node.barrier()
            self.leave(chunk, bucket, None)

    def enter(self, values: Tensor, call: Call) -> Bucket:
        """Copy flat ``values``, which must fit, into this rank's slot, and meet for ``call``.

        Returns the slots of all ranks, as a bucket.
        """
        bucket = self._bucket(values, self._node.turn * self._num_bytes)
        self._node.begin(call)
        bucket.flat.copy_(values)
        self._node.await_others(call)
        return bucket

    def chunk_numel(self, num_bytes: int, dtype: torch.dtype) -> int:
        """Return how many elements ``enter_at`` takes, of about ``num_bytes``."""
        return min(num_bytes, self._place_bytes) // dtype.itemsize

    def enter_at(self, number: int, values: Tensor) -> Bucket:
        """Copy a chunk, of ``chunk_numel``, into the next of ``NUM_PLACES``, and pass a barrier.

        Returns as ``enter``. To be used between two barriers of their own.
        """
        first_byte = number % NUM_PLACES * self._place_bytes
        bucket = self._bucket(values, first_byte)
        self._node.require_usable()
        bucket.flat.copy_(values)
        self._node.barrier()
        return bucket

    def _bucket(self, values: Tensor, first: int) -> Bucket:
        """Look at the slots from a byte on as a bucket of flat ``values``, which come there."""
        self._node.count(values.nbytes)
        key = values.dtype, values.shape, first
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= MOST_SEEN:
                self._buckets.clear()
            slots, rank = self._views(*key), self._node.local_rank
            bucket = self._buckets[key] = Bucket(slots[rank], slots, chunks_of(slots, rank))
        return bucket

    def leave(self, values: Tensor, bucket: Bucket, scale: float | None) -> None:
        """Copy the sum out of the first rank's slot, times ``scale``; a barrier comes before."""
        values.copy_(bucket.peers[0])
        if scale is not None:
            scale_(values, scale)
        self._node.count(values.nbytes)

    def views(self, dtype: torch.dtype, shape: torch.Size, turn: int) -> Slots:
        """Look at the slots of a turn as tensors of a shape; programs repeat a few."""
        return self._views(dtype, shape, turn * self._num_bytes)

    def _views(self, dtype: torch.dtype, shape: torch.Size, first: int) -> Slots:
        key = (dtype, shape, first)
        slots = self._seen.get(key)
        if slots is None:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            end = first + shape.numel() * dtype.itemsize
            # Made outside of inference mode: what is made inside it cannot be written later.
            with torch.inference_mode(mode=False):
                slots = tuple(raw[first:end].view(dtype).view(shape) for raw in self._node.stage)
            self._seen[key] = slots
        return slots
