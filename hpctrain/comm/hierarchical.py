"""Two levels: inside the node through shared memory, then once over the slow link, by all cards.

A bucket's all-reduce is three steps in a row, each callable by a codec that replaces the middle:

    part = comm.reduce_node(bucket)          # each local rank sums its slice over the node
    comm.internode.allreduce_(part)          # each slice is all-reduced over its rail
    comm.publish(bucket, scale=scale)        # each local rank writes its slice into all buckets
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket, chunks_of, slice_bounds
from hpctrain.comm.call_check import bucket_call, call_of, tensor_call
from hpctrain.comm.control_channel import mailbox
from hpctrain.comm.mpi import MakeGroup, MpiCommunicator
from hpctrain.comm.node.shared_memory import SharedMemory
from hpctrain.comm.operation_result import FINISHED, Traffic, Work
from hpctrain.comm.ops import Combination, Op, combination, scaled_when
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.rail.rail import InFlight, Rail
from hpctrain.comm.tensor_arguments import check_scale, flat_of, name_of, put_back
from hpctrain.comm.waiting import Watch, in_step
from hpctrain.core.errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI


class HierarchicalCommunicator(MpiCommunicator):
    """Ranks on one or more nodes; what is reduced takes the levels, all else goes flat over MPI.

    Needs no particular order of ranks, nor equal numbers of ranks per node.
    """

    def __init__(  # noqa: PLR0913 - the levels, and what all communicators take
        self,
        world: "MPI.Intracomm",
        node: SharedMemory,
        rail: Rail | None,
        *,
        plan: Plan,
        watch: Watch,
        world_ranks: Sequence[int] = (),
        make_group: MakeGroup | None = None,
    ) -> None:
        """Take the levels.

        ``node`` shares memory with this rank; ``rail`` has the owners of the same slice, None
        where another rank's rail carries it. Ordinary tensors travel as ``plan`` says: ``direct``
        or ``slices`` through the memory of one node, ``levels`` between nodes, ``library`` flat
        over MPI.
        """
        super().__init__(world, watch=watch, world_ranks=world_ranks, make_group=make_group)
        self._rail = rail
        self.node: SharedMemory = node
        self.plan = plan  # what algorithms are chosen by; ``use`` changes it
        self.num_rails = plan.num_rails
        self._one_node = plan.num_rails == 0
        if self._one_node:
            self._watch.number = None  # the ranks see in node memory that one has failed
        self._ways: dict[str, Callable[[Tensor, Combination, float | None], None]] = {
            "levels": self._levels_
        }
        if self._one_node:
            self._ways = {"direct": node.slots.direct_, "slices": node.slots.slices_}

    @property
    def internode(self) -> Rail | None:
        """The rail of this rank."""
        return self._rail

    @property
    def node_ranks(self) -> Sequence[int]:
        """Numbers of the ranks of this node, by local rank."""
        return self.node.ranks_of(self._comm)

    def use(self, plan: Plan) -> None:
        """Choose algorithms by ``plan``, which has as many rails, from now on.

        All ranks call it between the same two operations.
        """
        self.plan = plan
        if self._rail is not None:
            self._rail.use(plan)

    @in_step
    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Make a bucket in node memory."""
        self.meet(f"new bucket of {numel} {name_of(dtype)}")
        return self.node.new_bucket(numel, dtype)

    @in_step
    def new_mailbox(self) -> mailbox.Mailbox:
        """Make mailboxes in node memory, and of MPI messages between nodes."""
        self.meet("new mailbox")
        return mailbox.by_node(self._comm, self.node, self._rail, self._watch, self.plan)

    @in_step
    def allreduce_(
        self, tensor: Tensor | Bucket, *, op: Op = Op.SUM, scale: float | None = None
    ) -> Work:
        """Sum a bucket where it lies, and a tensor by the way that the plan has for its size."""
        if isinstance(tensor, Bucket):
            check_scale(tensor.flat, scale)
            self._check_owned(tensor)
            self._allreduce_bucket(tensor, combination(tensor.flat.dtype, op), scale)
            return FINISHED
        way = self.plan.tensors.at(tensor.numel() * tensor.itemsize)
        return self.allreduce_by(way, tensor, op=op, scale=scale)

    def allreduce_by(
        self, way: str, tensor: Tensor, *, op: Op = Op.SUM, scale: float | None = None
    ) -> Work:
        """Sum an ordinary tensor by a way of this name, see ``__init__``."""
        check_scale(tensor, scale)
        how = combination(tensor.dtype, op)
        if way == "library":
            if not self._one_node:  # a rank that takes another way meets the others here
                numel = tensor.numel() * tensor.itemsize // how.storage_dtype.itemsize
                self.node.meet(tensor_call(op, how.storage_dtype, numel, scale))
            return super().allreduce_(tensor, op=op, scale=scale)
        values = flat_of(tensor)
        stored = values if values.dtype is how.storage_dtype else how.view(values)
        self._ways[way](stored, how, scale)
        put_back(values, tensor)
        return FINISHED

    def meet(self, call: str = "barrier") -> None:
        """Meet in the node's memory where there is only one node."""
        if self._one_node:
            self.node.meet(call_of(call))
        else:
            super().meet(call)

    @in_step
    def reduce_node(self, bucket: Bucket, *, scale: float | None = None) -> Tensor:
        """Sum this rank's slice over the buckets of the node."""
        self._check_owned(bucket)
        return self._reduce_bucket(bucket, combination(bucket.flat.dtype, Op.SUM), scale)

    def part_of(self, bucket: Bucket) -> Tensor:
        """Return the part of a bucket that this rank sends over its rail; empty without one."""
        if self._rail is None or not bucket.peers:
            return bucket.flat[:0]
        bounds = slice_bounds(bucket.numel, self.num_rails, self.node.local_rank)
        return bucket.peers[0][bounds]

    @in_step
    def publish(self, bucket: Bucket, *, scale: float | None = None) -> None:
        """Write this rank's slice into all buckets of the node."""
        self._publish_bucket(bucket, combination(bucket.flat.dtype, Op.SUM), scale)

    def traffic(self) -> Traffic:
        """Return the counters of all levels."""
        moved = super().traffic()._replace(node_bytes=self.node.num_bytes)
        if self._rail is None:
            return moved
        over = self._rail.traffic()
        return moved._replace(rail_bytes=moved.rail_bytes + over.rail_bytes, rail_s=over.rail_s)

    def close(self) -> None:
        """Free the MPI communicators; buckets live as long as something refers to them."""
        if self.is_open:
            if self._rail is not None:
                self._rail.close()
            self.node.close()
        super().close()

    def _check_owned(self, bucket: Bucket) -> None:
        if bucket.owner is not self.node:
            raise CommError(
                f"a bucket is reduced by the communicator whose new_bucket() made it, got one of "
                f"{bucket.numel} elements that is not ours; make one here, or pass its tensor"
            )

    def _allreduce_bucket(self, bucket: Bucket, how: Combination, scale: float | None) -> None:
        if self._one_node:
            self.node.allreduce_(bucket, how, scale)
            return
        early, late = scaled_when(scale, how)
        aligned = self.num_rails == self.node.local_size
        if aligned and 0 < self.plan.chunk_bytes < self.part_of(bucket).nbytes:
            self._pipeline_bucket(bucket, how, early, late)
            return
        part = self._reduce_bucket(bucket, how, early)
        self._sum_over_rail(part, how)
        self._publish_bucket(bucket, how, late)

    def _reduce_bucket(self, bucket: Bucket, how: Combination, scale: float | None) -> Tensor:
        self.node.meet(bucket_call(bucket.number, how.op, scale))
        return self._sum_on_node(bucket, how, scale)

    def _publish_bucket(self, bucket: Bucket, how: Combination, scale: float | None) -> None:
        if self.num_rails != self.node.local_size:
            self.node.barrier()
        self.node.publish(bucket, how, scale)

    def _pipeline_bucket(
        self, bucket: Bucket, how: Combination, early: float | None, late: float | None
    ) -> None:
        """Take the three steps for each chunk of this rank's slice, while others travel."""
        node = self.node
        node.meet(bucket_call(bucket.number, how.op, early))
        chunks = chunks_of(bucket.peers, node.local_rank, self.plan.chunk_bytes)

        def summed() -> Iterator[Tensor]:
            for parts in chunks:
                node.sum_chunk(parts, how, early)
                yield how.view(parts[0])

        with InFlight(self._rail, how, self._watch) as in_flight:
            for parts, _ in zip(chunks, in_flight.reduced(summed()), strict=True):
                node.publish_chunk(parts, how, late)
        self._watch.confirm()
        node.barrier()

    def _pipeline_(self, values: Tensor, how: Combination, scale: float | None) -> None:
        """Do what ``_levels_`` does, with several chunks on their way over the rails."""
        early, late = scaled_when(scale, how)
        node, slots = self.node, self.node.slots
        chunks = values.split(slots.chunk_numel(self._chunk_bytes, values.dtype))
        entered, reduced = deque[tuple[Tensor, Bucket]](), deque[tuple[Tensor, Bucket]]()

        def leave() -> None:
            while reduced:
                slots.leave(*reduced.popleft(), late)

        def summed() -> Iterator[Tensor]:
            for number, chunk in enumerate(chunks):
                bucket = slots.enter_at(number, chunk)
                leave()  # all ranks of the node came to the barrier with as much
                entered.append((chunk, bucket))
                yield self._sum_on_node(bucket, how, early)

        node.meet(tensor_call(how.op, values.dtype, values.numel(), scale))
        with InFlight(self._rail, how, self._watch) as in_flight, node.busy(in_flight):
            for _ in in_flight.reduced(summed()):
                reduced.append(entered.popleft())
        self._watch.confirm()
        node.barrier()
        leave()
        node.barrier()  # before slots are written again

    def _levels_(self, values: Tensor, how: Combination, scale: float | None) -> None:
        if 0 < self._chunk_bytes < values.nbytes:
            self._pipeline_(values, how, scale)
            return
        early, late = scaled_when(scale, how)
        call = tensor_call(how.op, values.dtype, values.numel(), scale)
        slots = self.node.slots
        for chunk in values.split(slots.numel(values.dtype)):
            bucket = slots.enter(chunk, call)
            part = self._sum_on_node(bucket, how, early)
            self._sum_over_rail(part, how)
            self.node.barrier()
            slots.leave(chunk, bucket, late)

    @property
    def _chunk_bytes(self) -> int:
        """Bytes of an ordinary tensor of which each rail carries a chunk of the plan."""
        return self.plan.chunk_bytes * self.num_rails

    def _sum_on_node(self, bucket: Bucket, how: Combination, scale: float | None) -> Tensor:
        self.node.sum_slice(bucket, how, scale)
        if self.num_rails != self.node.local_size:
            self.node.barrier()  # this rank's rail carries slices that other ranks summed
        return self.part_of(bucket).view(how.storage_dtype)

    def _sum_over_rail(self, part: Tensor, how: Combination) -> None:
        if self._rail is not None and part.numel():
            self._rail.reduce_(part, how)
