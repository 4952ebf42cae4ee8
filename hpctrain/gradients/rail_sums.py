"""Sums between nodes for ``shard="node"``, started bucket by bucket during backward.

a gradient is final        ready     sends the next buckets whose gradients are all final
``step()`` begins          finish    sends the remaining buckets, and waits for all sums
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.bucket import CHUNK_BYTES, Bucket, slice_bounds
from hpctrain.comm.call_check import call_of
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.comm.ops import Op, combination, combine_to, scaled_when
from hpctrain.comm.threaded import ThreadedCommunicator, start_on
from hpctrain.core.errors import NodeMemoryError
from hpctrain.gradients.gradient_bucket import GradientBucket, Slot
from hpctrain.gradients.node_bucket import NodeTensor
from hpctrain.gradients.sample_count import SampleCount
from hpctrain.gradients.sparse_gradients import writes_of
from hpctrain.gradients.step_header import ShardedFacts

if TYPE_CHECKING:
    from hpctrain.comm.operation_result import Work

_LATE_STEPS = 64
"""Number of steps without early sums after a sum was void and had to be computed again."""


class RailSums:
    """Computes the sums of all ranks' gradients, and stores each sum once per node.

    A gradient counts as final when its hook has fired as often as in the previous step. If the
    hook fires again, or the gradient is dropped, the sums are void, and the step computes them
    again. The sums use a separate communicator, so that each rank starts them independently of
    other operations. In the step, all ranks finish the sums that any rank has started. The
    constructor is collective.

    Args:
        comm: ranks to sum over.
        count: weight of this rank's gradients.
        weights: bucket in node memory with the weights of all ranks of the node.
    """

    def __init__(self, comm: Communicator, count: SampleCount, weights: Bucket) -> None:
        self._count, self._weights = count, weights
        self._comm, self._is_concurrent = comm, False
        if isinstance(comm, ThreadedCommunicator) and all(
            comm.allgather_object(calls_from_threads())
        ):
            with suppress(NodeMemoryError):  # raised on all ranks
                self._comm, self._is_concurrent = comm.lend(self), True
        node = self._comm.node
        assert node is not None
        self._node = node
        self.totals: list[NodeTensor] = []
        self._gradients: Sequence[GradientBucket] = ()
        self._chunks: list[list[tuple[Tensor, tuple[Tensor, ...]]]] = []
        self._due: dict[Slot, int] = {}  # how often each hook fired in the previous step
        self._num_late = 0  # number of remaining steps without early sums
        self._missing: list[int] = []  # by bucket: number of gradients that are not final
        self._weight: float | None = None  # weight of this rank in the last sums
        self._reset()

    @property
    def is_void(self) -> bool:
        """Whether gradients or this rank's weight have changed since sums were started."""
        return self.num_sent > 0 and (
            self._is_repeated
            or self._weight != self._count.weight
            or any(_state(slot) != state for slot, state in self._sent)
        )

    def with_sums_in_flight(self, own_facts: ShardedFacts) -> ShardedFacts:
        """Return a copy of ``own_facts`` that includes the facts about sums in flight."""
        return replace(
            own_facts,
            is_early=self.num_sent > 0,
            is_void=self.is_void,
            is_new=own_facts.is_new or self._weight != self._count.weight,
        )

    def lay_out(self, gradients: Sequence[GradientBucket]) -> None:
        """Allocate node memory for the sums of the buckets ``gradients``. Collective."""
        made: list[NodeTensor] = []

        def make(flats: Sequence[Tensor]) -> None:
            made.extend(NodeTensor(self._node, f.numel(), f.dtype) for f in flats)

        start_on(self._comm, make, [one.bucket.flat for one in gradients]).wait()
        self.totals, self._gradients, self._due = made, gradients, {}
        self._chunks = [self._cut(*pair) for pair in zip(gradients, made, strict=True)]

    def _cut(
        self, gradients: GradientBucket, total: NodeTensor
    ) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
        bucket, how = gradients.bucket, combination(gradients.bucket.flat.dtype, Op.SUM)
        numel = bucket.numel - len(gradients.slots)  # the marks follow the gradients
        own = slice_bounds(numel, self._node.local_size, self._node.local_rank)
        step = CHUNK_BYTES // bucket.flat.itemsize
        bounds = [slice(at, min(at + step, own.stop)) for at in range(own.start, own.stop, step)]
        return [
            (how.view(total.shared[b]), tuple(how.view(peer[b]) for peer in bucket.peers))
            for b in bounds
        ]

    # -- during backward --------------------------------------------------------------------

    def expect(self) -> None:
        """Reset the counts of final gradients for another step; sums in flight become void."""
        self._is_repeated |= self.num_sent > 0
        of_buckets = [[self._due.get(slot, 1) for slot in one.slots] for one in self._gradients]
        self._missing = [sum(map(bool, due)) for due in of_buckets]

    def ready(self, slot: Slot, fill: Callable[[Slot], None]) -> None:
        """Count the gradient in ``slot``, and start the sums of buckets that are complete.

        Args:
            slot: slot of the gradient.
            fill: function that copies a gradient to its slot.
        """
        if slot.bucket < self.num_sent:
            self._is_repeated = True
        if not self._is_concurrent or not self._due or self._num_late or self._is_repeated:
            return
        if self._count.is_set and any(_is_scaled_first(one.bucket) for one in self._gradients):
            return  # these sums need the sum of all weights, which is exchanged in the step
        self._missing[slot.bucket] -= slot.fires == self._due.get(slot)
        while self.num_sent < len(self._missing) and not self._missing[self.num_sent]:
            for each in self._gradients[self.num_sent].slots:
                if not each.is_filled:
                    fill(each)
            self._send()

    def learn(self) -> None:
        """Record how often each hook has fired in a finished step."""
        fires = {slot: slot.fires for one in self._gradients for slot in one.slots}
        self._due = fires if any(fires.values()) else self._due
        self._num_late = max(self._num_late - 1, 0)

    # -- in the step ------------------------------------------------------------------------

    def finish(self) -> None:
        """Send the remaining buckets, and wait for all sums. Collective."""
        if self.is_void:
            self._num_late = _LATE_STEPS
        while self.num_sent < len(self._gradients):
            self._send()
        works = [*self._works, start_on(self._comm, self._node.barrier)]
        self._reset()
        for work in works:
            work.wait()

    def _reset(self) -> None:
        self.num_sent = 0  # number of buckets sent
        self._works: list[Work] = []
        self._is_repeated = False
        self._sent: list[tuple[Slot, tuple[int, int] | None]] = []
        """Slots whose sums are in flight, each with the ``writes_of`` of its sent gradient."""

    def _send(self) -> None:
        gradients = self._gradients[self.num_sent]
        gradients.write_marks()
        if not self.num_sent:
            self._weight = self._count.weight
            self._weights.flat.fill_(self._weight)
        self._sent += [(slot, _state(slot)) for slot in gradients.slots]
        self._works.append(start_on(self._comm, self._sum, self.num_sent))
        self.num_sent += 1

    @torch.no_grad()
    def _sum(self, number: int) -> None:
        """Sum a bucket inside the node and between nodes. Collective."""
        gradients, total = self._gradients[number], self.totals[number].shared
        bucket, node, comm = gradients.bucket, self._node, self._comm
        how = combination(total.dtype, Op.SUM)
        count = self._count
        # Sums in 32 and 64 bits can start before the largest weight of the step is known.
        exponent = count.exponent if _is_scaled_first(bucket) else 0
        early, _ = scaled_when(count.scale_of(exponent), how)
        node.check_call(call_of(f"sum of bucket {number} of {len(self._gradients)} between nodes"))
        factors = [count.factor_of(float(peer.item()), exponent) for peer in self._weights.peers]
        for out, parts in self._chunks[number]:
            combine_to(out, weighted(parts, factors), how, early)
        if node.local_rank == 0:
            marks = slice(bucket.numel - len(gradients.slots), None)
            total[marks] = sum(peer[marks] for peer in bucket.peers)
        node.barrier()
        own = slice_bounds(total.numel(), comm.num_rails, node.local_rank)
        part = total[own].view(how.storage_dtype)
        if comm.internode is not None and part.numel():
            comm.internode.allreduce_(part).wait()


def weighted(parts: Sequence[Tensor], factors: Sequence[float]) -> Sequence[Tensor]:
    """Multiply each rank's gradient by its factor; a factor of 0 gives zeros, also for NaN."""
    if all(factor == 1.0 for factor in factors):
        return parts
    return [
        part * factor if factor else torch.zeros_like(part)
        for part, factor in zip(parts, factors, strict=True)
    ]


def _is_scaled_first(bucket: Bucket) -> bool:
    first, _ = scaled_when(1.0, combination(bucket.flat.dtype, Op.SUM))
    return first is not None


def _state(slot: Slot) -> tuple[int, int] | None:
    grad = slot.parameter.grad
    return None if grad is None else writes_of(grad)
