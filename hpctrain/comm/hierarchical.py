"""Two-level communicator: shared memory within a node, MPI between nodes.

The all-reduce of a bucket has three steps. A codec calls the steps separately and replaces
the second step:

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
from hpctrain.comm.call_check import bucket_call, call_of, in_step, tensor_call
from hpctrain.comm.control_channel import mailbox
from hpctrain.comm.mpi import MakeGroup, MpiCommunicator
from hpctrain.comm.node.kernel import DIRECT, SLICES
from hpctrain.comm.node.shared_memory import SharedMemory
from hpctrain.comm.node.shared_slots import MAX_VIEWS, TensorSum
from hpctrain.comm.operation_result import FINISHED, Traffic, Work
from hpctrain.comm.ops import Combination, Op, combination, scaled_when
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.rail.rail import InFlight, Rail
from hpctrain.comm.tensor_arguments import check_scale, copy_back, flat_of, is_plain, name_of
from hpctrain.comm.waiting import Watch
from hpctrain.core.errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI

KINDS = {"direct": DIRECT, "slices": SLICES}
"""Kind of the kernel's sum, by algorithm of the plan."""


class HierarchicalCommunicator(MpiCommunicator):
    """Reduces tensors within nodes, then between nodes; other operations use flat MPI.

    The order of the ranks and the number of ranks per node are arbitrary. The algorithm of a
    tensor that is not a bucket depends on its size. The algorithms are ``direct`` and ``slices``
    for ranks of one node, ``levels`` for several nodes, and ``library``, which uses flat MPI.

    Args:
        world: MPI communicator of all ranks; ``close`` frees it.
        node: memory shared by the ranks of this node.
        rail: ranks of all nodes that own the same slice; None if this rank sends no slice.
        plan: algorithms by size.
        watch: performs all waits.
        make_group: creates the communicators of groups; by default flat communicators.
    """

    def __init__(
        self,
        world: "MPI.Intracomm",
        node: SharedMemory,
        rail: Rail | None,
        *,
        plan: Plan,
        watch: Watch,
        make_group: MakeGroup | None = None,
    ) -> None:
        super().__init__(world, watch=watch, make_group=make_group)
        self._rail = rail
        self.node: SharedMemory = node
        self.plan = plan  # replaced by ``use``
        self._sums: dict[tuple[object, ...], TensorSum] = {}
        """Sums of tensors, prepared for the plan, by dtype, number of elements, op and scale."""
        self.num_rails = plan.num_rails
        self._one_node = plan.num_rails == 0
        if self._one_node:
            self._watch.number = None  # ranks of one node read failures from node memory
        self._algorithms: dict[str, Callable[[Tensor, Combination, float | None], None]] = {
            "levels": self._levels_
        }
        if self._one_node:
            self._algorithms = {"direct": node.slots.direct_, "slices": node.slots.slices_}

    @property
    def internode(self) -> Rail | None:
        """Rail of this rank; None if this rank sends no slice."""
        return self._rail

    @property
    def node_ranks(self) -> Sequence[int]:
        """Ranks of this node in this communicator, by local rank."""
        return self.node.ranks_of(self._comm)

    def use(self, plan: Plan) -> None:
        """Replace the current plan by ``plan``, which must have the same number of rails.

        All ranks must call this method between the same two operations.
        """
        self.plan = plan
        self._sums.clear()
        if self._rail is not None:
            self._rail.use(plan)

    @in_step
    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Create a bucket in node memory."""
        self.check_call(f"new bucket of {numel} {name_of(dtype)}")
        return self.node.new_bucket(numel, dtype)

    @in_step
    def new_mailbox(self) -> mailbox.Mailbox:
        """Create a mailbox in node memory, with MPI messages between nodes."""
        self.check_call("new mailbox")
        return mailbox.by_node(self._comm, self.node, self._rail, self._watch, self.plan)

    @in_step
    def allreduce_(
        self, tensor: Tensor | Bucket, *, op: Op = Op.SUM, scale: float | None = None
    ) -> Work:
        """Reduce a bucket in place, or a tensor by the algorithm of the plan for its size."""
        if isinstance(tensor, Bucket):
            if scale is not None:
                check_scale(tensor.flat, scale)
            if tensor.owner is not self.node:
                raise _foreign(tensor)
            if self._one_node:
                self.node.allreduce_(tensor, op, scale)
            else:
                self._allreduce_bucket(tensor, combination(tensor.flat.dtype, op), scale)
            return FINISHED
        key = tensor.dtype, tensor.numel(), op, scale
        if (what := self._sums.get(key)) is not None and is_plain(tensor):
            self.node.sum_values(what, tensor)
            return FINISHED
        algorithm = self.plan.tensors.at(tensor.numel() * tensor.itemsize)
        work = self.allreduce_by(algorithm, tensor, op=op, scale=scale)
        if algorithm in KINDS:
            how = combination(tensor.dtype, op)
            what = self.node.slots.sum_of(KINDS[algorithm], how, how.numel(tensor), scale)
            if what.total is not None:
                if len(self._sums) >= MAX_VIEWS:
                    self._sums.clear()
                self._sums[key] = what
        return work

    def allreduce_by(
        self, algorithm: str, tensor: Tensor, *, op: Op = Op.SUM, scale: float | None = None
    ) -> Work:
        """Reduce a tensor by ``algorithm``, one of those in the docstring of the class."""
        check_scale(tensor, scale)
        how = combination(tensor.dtype, op)
        if algorithm == "library":
            if not self._one_node:  # a rank with another algorithm waits here, too
                call = tensor_call(op, how.storage_dtype, how.numel(tensor), scale)
                self.node.check_call(call)
            return super().allreduce_(tensor, op=op, scale=scale)
        values = flat_of(tensor)
        stored = values if values.dtype is how.storage_dtype else how.view(values)
        self._algorithms[algorithm](stored, how, scale)
        copy_back(values, tensor)
        return FINISHED

    def check_call(self, call: str = "barrier") -> None:
        """Wait until all ranks have begun the same ``call``; on one node, use node memory."""
        if self._one_node:
            self.node.check_call(call_of(call))
        else:
            super().check_call(call)

    @in_step
    def reduce_node(self, bucket: Bucket, *, scale: float | None = None) -> Tensor:
        """Sum this rank's slice over the buckets of the node."""
        if bucket.owner is not self.node:
            raise _foreign(bucket)
        return self._reduce_bucket(bucket, combination(bucket.flat.dtype, Op.SUM), scale)

    def part_of(self, bucket: Bucket) -> Tensor:
        """Return the slice of a bucket that this rank sends over its rail; empty if none."""
        if self._rail is None or not bucket.peers:
            return bucket.flat[:0]
        bounds = slice_bounds(bucket.numel, self.num_rails, self.node.local_rank)
        return bucket.peers[0][bounds]

    @in_step
    def publish(self, bucket: Bucket, *, scale: float | None = None) -> None:
        """Copy this rank's slice to all buckets of the node."""
        self._publish_bucket(bucket, combination(bucket.flat.dtype, Op.SUM), scale)

    def traffic(self) -> Traffic:
        """Return the counters of the node and of the rail."""
        moved = super().traffic()._replace(node_bytes=self.node.num_bytes)
        if self._rail is None:
            return moved
        over = self._rail.traffic()
        return moved._replace(rail_bytes=moved.rail_bytes + over.rail_bytes, rail_s=over.rail_s)

    def close(self) -> None:
        """Free the MPI communicators; buckets remain valid while they are referenced."""
        if self.is_open:
            if self._rail is not None:
                self._rail.close()
            self.node.close()
        super().close()

    def _allreduce_bucket(self, bucket: Bucket, how: Combination, scale: float | None) -> None:
        """All-reduce a bucket over all ranks of several nodes."""
        early, late = scaled_when(scale, how)
        aligned = self.num_rails == self.node.local_size
        if aligned and 0 < self.plan.chunk_bytes < self.part_of(bucket).nbytes:
            self._pipeline_bucket(bucket, how, early, late)
            return
        part = self._reduce_bucket(bucket, how, early)
        self._sum_over_rail(part, how)
        self._publish_bucket(bucket, how, late)

    def _reduce_bucket(self, bucket: Bucket, how: Combination, scale: float | None) -> Tensor:
        self.node.check_call(bucket_call(bucket.number, how.op, scale))
        return self._sum_on_node(bucket, how, scale)

    def _publish_bucket(self, bucket: Bucket, how: Combination, scale: float | None) -> None:
        if self.num_rails != self.node.local_size:
            self.node.barrier()
        self.node.publish(bucket, how, scale)

    def _pipeline_bucket(
        self, bucket: Bucket, how: Combination, early: float | None, late: float | None
    ) -> None:
        """All-reduce a bucket in chunks, so that sums overlap with messages of other chunks."""
        node = self.node
        node.check_call(bucket_call(bucket.number, how.op, early))
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
        """Reduce as ``_levels_`` does, with several chunks in flight on the rails."""
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
                leave()  # all ranks of the node had reduced these chunks when they synchronized
                entered.append((chunk, bucket))
                yield self._sum_on_node(bucket, how, early)

        node.check_call(tensor_call(how.op, values.dtype, values.numel(), scale))
        with InFlight(self._rail, how, self._watch) as in_flight, node.waits.busy(in_flight):
            for _ in in_flight.reduced(summed()):
                reduced.append(entered.popleft())
        self._watch.confirm()
        node.barrier()
        leave()
        node.barrier()  # before a rank overwrites slots

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
        """Size of the part of a tensor that gives one chunk to each rail."""
        return self.plan.chunk_bytes * self.num_rails

    def _sum_on_node(self, bucket: Bucket, how: Combination, scale: float | None) -> Tensor:
        self.node.sum_slice(bucket, how, scale)
        if self.num_rails != self.node.local_size:
            self.node.barrier()  # the rail sends slices that other ranks summed
        return self.part_of(bucket).view(how.storage_dtype)

    def _sum_over_rail(self, part: Tensor, how: Combination) -> None:
        if self._rail is not None and part.numel():
            self._rail.reduce_(part, how)


def _foreign(bucket: Bucket) -> CommError:
    return CommError(
        f"a bucket must be reduced by the communicator that created it, got a bucket of "
        f"{bucket.numel} elements of another communicator; create it with new_bucket() of this "
        f"communicator, or pass its tensor"
    )
