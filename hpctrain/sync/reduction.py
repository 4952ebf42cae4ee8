"""The reduction of one step: an opening message, then the buckets, in one order on every rank."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan import Plan
from hpctrain.comm.threaded import start_on
from hpctrain.comm.work import Work
from hpctrain.compress.codec import Codec
from hpctrain.errors import CommError
from hpctrain.sync.gradient_buckets import (
    GradientBucket,
    Slot,
    build_buckets,
    require_same_parameters,
)
from hpctrain.sync.grouping import Grouping
from hpctrain.sync.parameter_names import NamedParameters
from hpctrain.sync.sample_count import SampleCount
from hpctrain.sync.sparse_gradients import SparseSlot


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionOptions:
    """What a reduction does to gradients; the same on every rank."""

    average: bool = True
    """Divide the sum by the number of ranks, weighted by samples."""
    predivide: float = 1.0
    """The part of the division that comes before the sum."""
    sparse_as_dense: bool = False
    """Let sparse gradients travel in buckets too; they are made sparse again."""
    grouping: Grouping = Grouping(None)  # noqa: RUF009 - has no state that changes
    """Which gradients share a bucket."""


class Reduction:
    """Fills the buckets of a fixed set of parameters and reduces them over all ranks."""

    def __init__(
        self, comm: Communicator, plan: Plan, codec: Codec, options: ReductionOptions
    ) -> None:
        """Take what is needed; ``build`` lays the buckets out.

        Args:
            comm: the ranks; one with a thread carries the buckets beside backward.
            plan: when buckets travel, and how large they are.
            codec: what a bucket travels as.
            options: what is done to gradients.
        """
        self.count = SampleCount(comm, predivide=options.predivide)
        self.average = options.average
        self.exposed_seconds = 0.0
        self.slot_of: dict[Tensor, Slot | SparseSlot] = {}
        self._comm, self._plan, self._codec, self._options = comm, plan, codec, options
        self._parameters: NamedParameters = ()
        self._buckets: list[GradientBucket] = []
        self._dense: list[Slot] = []
        self._sparse: list[SparseSlot] = []
        self._sparse_dims: dict[Tensor, int] = {}
        self._filled_new_sparse = False
        self.forget()

    @property
    def num_ranks(self) -> int:
        """Ranks that gradients are reduced over."""
        return self._comm.size

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank that travel in a step, sparse gradients left out."""
        return sum(self._codec.num_bytes(bucket.bucket) for bucket in self._buckets)

    @property
    def has_sent(self) -> bool:
        """Whether gradients of this step have begun to travel."""
        return self._next_bucket > 0

    def build(self, parameters: NamedParameters) -> None:
        """Lay the buckets out anew. Collective.

        Raises:
            MismatchError: the ranks do not have the same parameters; on every rank.
        """
        numbers = self._options.grouping.numbers([p for _, p in parameters])
        require_same_parameters(self._comm, parameters, numbers)
        self._parameters = parameters
        self._lay_out()

    def fits(self, parameters: NamedParameters) -> bool:
        """Say whether these are the parameters of ``build``, in the same dtypes and layouts."""
        slot_of = self.slot_of
        return len(parameters) == len(slot_of) and all(
            (slot := slot_of.get(p)) is not None and slot.fits(p) for _, p in parameters
        )

    def take(self, slot: Slot | SparseSlot) -> None:
        """Put a final gradient into its place, and send the buckets that are full."""
        if isinstance(slot, SparseSlot):
            return
        if slot.is_filled and (self._next_bucket > slot.bucket or self._factor != 1.0):
            raise CommError(
                f"the gradient of {slot.name} came twice in one backward, and only once in the "
                f"first step; keep the graph as it is, or checkpoint with use_reentrant=False"
            )
        self._fill(slot)
        if self._plan.overlap == "end":
            return
        while self._next_bucket < len(self._buckets) and self._is_full(self._next_bucket):
            if self._next_bucket == 0:
                self._works.append(self._run(self._open, False, self._filled_new_sparse))  # noqa: FBT003
            self._launch_next()

    def complete(self, changed: NamedParameters | None = None) -> None:
        """Fill what is missing, send what is not sent, wait for all of it. Collective.

        Args:
            changed: the parameters of today where they are no longer those of ``build``: the
                buckets are then laid out anew. All ranks give some, or none does.

        Raises:
            MismatchError: the parameters have changed on some ranks only; on every rank.
        """
        if not self.has_sent:
            new_sparse = self._has_new_sparse()
            self._clocked(self._run(self._open, changed is not None, new_sparse).wait)
            if changed is not None:
                self.build(changed)
        for slot in self._dense:
            self._fill(slot)
        while self._next_bucket < len(self._buckets):
            self._launch_next()
        for sparse in self._sparse:
            self._works.append(self._run(self._gather, sparse))
        self._clocked(self._wait)
        for slot in self._dense:
            slot.settle()
        if self.count.has_new_sparse:
            self._learn_sparse()
        self.exposed_seconds = self._waited_s
        self.forget()

    def forget(self) -> None:
        """Expect the gradients of another step; places that were filled count as empty."""
        self._next_bucket = 0
        self._works: list[Work] = []
        self._waited_s = 0.0
        for bucket in self._buckets:
            bucket.num_empty = len(bucket.slots)
        for slot in self.slot_of.values():
            slot.fires = 0
        for slot in self._dense:
            slot.is_filled = False

    # -- where gradients lie ----------------------------------------------------------------

    def _lay_out(self) -> None:
        """Make buckets for all but the sparse gradients. Collective."""
        options = self._options
        numbers = options.grouping.numbers([p for _, p in self._parameters])
        apart = {} if options.sparse_as_dense else self._sparse_dims
        dense = [i for i, (_, p) in enumerate(self._parameters) if p not in apart]
        self._buckets = build_buckets(
            self._comm,
            [self._parameters[i] for i in dense],
            None if self._plan.overlap == "end" else self._plan.bucket_bytes,
            [numbers[i] for i in dense] if numbers else (),
        )
        self._dense = [slot for bucket in self._buckets for slot in bucket.slots]
        self._sparse = [SparseSlot(n, p, apart[p]) for n, p in self._parameters if p in apart]
        self.slot_of = {slot.parameter: slot for slot in self._dense}
        self.slot_of |= {slot.parameter: slot for slot in self._sparse}
        for slot in self._dense:
            slot.sparse_dim = self._sparse_dims.get(slot.parameter)
        self._codec.forget()
        for bucket in self._buckets:
            self._codec.prepare(bucket.bucket, bucket.parts, self._comm)

    def _has_new_sparse(self) -> bool:
        """Say whether this rank has a sparse gradient that other ranks may not know of."""
        return self._filled_new_sparse or any(map(self._is_new_sparse, self._dense))

    def _is_new_sparse(self, slot: Slot) -> bool:
        return slot.found_sparse_dim is not None and slot.parameter not in self._sparse_dims

    def _learn_sparse(self) -> None:
        """Let all ranks know whose gradients are sparse, and lay them out so. Collective."""
        found = {
            index: slot.found_sparse_dim
            for index, (_, p) in enumerate(self._parameters)
            if isinstance(slot := self.slot_of[p], Slot)
        }
        for of_rank in self._comm.allgather_object(found):
            for index, sparse_dim in of_rank.items():
                if sparse_dim is not None:
                    self._sparse_dims.setdefault(self._parameters[index][1], sparse_dim)
        self._lay_out()
        for slot in self.slot_of.values():
            slot.adopt()
        self._filled_new_sparse = False

    # -- what talks to other ranks ----------------------------------------------------------

    @property
    def _factor(self) -> float:
        return self.count.factor if self.average else 1.0

    @property
    def _scale(self) -> float | None:
        return self.count.scale if self.average else None

    def _fill(self, slot: Slot) -> None:
        if not slot.is_filled:
            self._buckets[slot.bucket].num_empty -= 1
            with torch.no_grad():
                slot.fill(self._factor)
            self._filled_new_sparse |= self._is_new_sparse(slot)

    def _is_full(self, index: int) -> bool:
        return self._buckets[index].num_empty == 0

    def _launch_next(self) -> None:
        index = self._next_bucket
        self._next_bucket += 1
        self._works.append(self._run(self._reduce, index))

    def _run(self, function: Callable[..., None], *args: object) -> Work:
        """Carry out what talks to other ranks; a wait of this thread for it is exposed."""
        start = time.perf_counter()
        work = start_on(self._comm, function, *args)
        self._waited_s += time.perf_counter() - start
        return work

    def _clocked(self, wait: Callable[[], object]) -> None:
        start = time.perf_counter()
        wait()
        self._waited_s += time.perf_counter() - start

    def _wait(self) -> None:
        for work in self._works:
            work.wait()

    def _open(self, outdated: bool, new_sparse: bool) -> None:  # noqa: FBT001 - through a thread
        self.count.exchange(outdated=outdated, new_sparse=new_sparse)

    def _reduce(self, index: int) -> None:
        with torch.no_grad():
            bucket = self._buckets[index]
            bucket.write_marks()
            self._codec.allreduce_(bucket.bucket, self._comm, scale=self._scale).wait()

    def _gather(self, slot: SparseSlot) -> None:
        with torch.no_grad():
            slot.reduce(self._comm, self._factor, self._scale)
