"""``Reduction``, which copies gradients to buckets and sums the buckets over ranks.

All ranks have the same buckets and send them in the same order, after the message of ``StepSync``.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.agreement import require_equal
from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.operation_result import Work
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.threaded import start_on
from hpctrain.compress.codec import Codec, Identity, Savings, savings_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import CommError
from hpctrain.gradients.bucket_layout import BucketLayout
from hpctrain.gradients.gradient_bucket import GradientBucket, Slot
from hpctrain.gradients.parameter_names import Grouping, NamedParameters
from hpctrain.gradients.sample_count import SampleCount
from hpctrain.gradients.sparse_gradients import SparseSlot
from hpctrain.gradients.step_counter import StepCounter
from hpctrain.gradients.step_header import StepAgreement, StepMessage
from hpctrain.gradients.weight_sample import checksum_of, due, sample_of


@dataclass(slots=True)
class StepProgress:
    """Progress of the reduction in one step."""

    num_sent: int = 0  # number of buckets sent
    agreement: StepAgreement | None = None
    is_refused: bool = False  # whether the step message raised an error, so that no bucket is sent
    works: list[Work] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    """For each checked bucket, whether its sum is finite."""
    waited_s: float = 0.0


class Reduction:
    """Copies gradients of a fixed set of parameters to buckets, and sums buckets over ranks.

    Args:
        comm: ranks to reduce over; with a progress thread, buckets are sent during backward.
        plan: provides the bucket size, and whether buckets are reduced during backward.
        codec: compression of the buckets.
        grouping: groups of parameters that are sent in one message.
        count: weight of this rank's gradients.
        steps: counts steps, and compares the ranks before each step.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: Plan,
        codec: Codec,
        grouping: Grouping,
        count: SampleCount,
        steps: StepCounter,
    ) -> None:
        self.count, self.steps = count, steps
        self.exposed_seconds = 0.0
        self.looks = False
        """Whether sums are checked for NaN and infinity; the same on all ranks."""
        self.is_finite: bool | None = None
        """Whether all sums of the last step are finite; None if a sum was not checked."""
        self.around: Callable[..., AbstractContextManager[None]] = (
            nullcontext  # context manager around each sum
        )
        self._comm, self._plan, self.codec = comm, plan, codec
        self.layout = BucketLayout(comm, plan, codec, grouping)
        self.forget()

    def over(self, comm: Communicator, plan: Plan, steps: StepCounter) -> "Reduction":
        """Return a reduction with the same settings over the ranks of ``comm``. Not collective.

        The caller then calls ``layout.build``, which is collective.
        """
        return Reduction(comm, plan, self.codec, self.layout.grouping, self.count, steps)

    def is_over(self, comm: Communicator) -> bool:
        """Return whether gradients are reduced over ``comm``."""
        return self._comm is comm

    @property
    def num_ranks(self) -> int:
        """Number of ranks to reduce over."""
        return self._comm.size

    @property
    def leads(self) -> bool:
        """Whether this rank is rank 0 of the communicator."""
        return self._comm.rank == 0

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends per step, without sparse gradients."""
        return sum(self.codec.num_bytes(bucket.bucket) for bucket in self.layout.buckets)

    @property
    def savings(self) -> Savings:
        """Traffic between nodes with and without the codec, per step."""
        return savings_of(
            self.codec, [b.bucket for b in self.layout.buckets], self._comm, self._plan
        )

    @property
    def has_sent(self) -> bool:
        """Whether a bucket of this step was sent."""
        return self._step.num_sent > 0

    @property
    def keeps_result(self) -> bool:
        """Whether this rank contributes an earlier result to the next reduction.

        An earlier sum must be counted once, so only rank 0 contributes the sum.
        """
        return self.count.average or self.leads

    def take(self, slot: Slot | SparseSlot) -> None:
        """Copy a final gradient to its bucket, and send the buckets that are full."""
        if isinstance(slot, SparseSlot):
            return
        if slot.is_filled and (self._step.num_sent > slot.bucket or self.count.factor != 1.0):
            raise CommError(
                "a parameter must be used equally often in every backward, but the gradient of "
                f"{slot.name} was accumulated twice in one backward, and once in the first step; "
                "keep the graph unchanged, or use activation checkpoints with use_reentrant=False"
            )
        self._fill(slot)
        if self._plan.overlap == "end":
            return
        buckets = self.layout.buckets
        while self._step.num_sent < len(buckets) and not buckets[self._step.num_sent].num_empty:
            if self._step.num_sent == 0:
                mine = self._message(StepMessage(), new_sparse=self.layout.found_new_sparse)
                self._step.works.append(self._run(self._open, mine))
            self._launch_next()

    def program_changes(self, current: NamedParameters | None) -> int | None:
        """Return a checksum of reduced gradients that the program has changed; None if unchanged.

        A replaced gradient is copied, because its memory may be part of another slot. If gradients
        were changed in place, only a sample of their values is hashed, because clipping changes
        all gradients in every step.
        """
        touched = [(s.name, s.parameter) for s in self.layout.slots if s.is_touched]
        touched += [named for named in current or () if named[1] not in self.layout.slot_of]
        total = 0
        for name, parameter in touched:
            total = crc32(name.encode(), total)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()
                total = checksum_of(parameter.grad, total)
        written, step = [s for s in self.layout.dense if s.is_written], self.steps.number or 0
        total ^= sample_of(due([s.view for s in written if s.view.is_cpu], step), step)
        for slot in written:  # only names for an accelerator: values would require a wait
            total = total if slot.view.is_cpu else crc32(slot.name.encode(), total)
        return total if touched or written else None

    def complete(
        self,
        changed: NamedParameters | None = None,
        message: StepMessage | None = None,
        agreement: StepAgreement | None = None,
    ) -> None:
        """Fill and send the remaining buckets, and wait for all sums. Collective.

        If all ranks have made the same changes to reduced gradients, these gradients are kept.
        Otherwise the current gradients are reduced, or all ranks raise ``MismatchError``.

        Args:
            changed: current parameters if they do not match the buckets; else None.
            message: facts of this rank for the step message.
            agreement: result of the step message, on a joined rank that contributes zeros to a
                step of other ranks.
        """
        if agreement is not None:
            self._take(agreement)
        elif not self.has_sent:
            mine = self._message(
                message or StepMessage(),
                outdated=changed is not None,
                new_sparse=self.layout.found_new_sparse
                or any(map(self.layout.is_new_sparse, self.layout.dense)),
            )
            self._clocked(self._run(self._open, mine).wait)
        is_kept = self._step.agreement is not None and self._step.agreement.changed_equally
        if changed is not None:
            self.layout.build(changed, results=self._set_by_program(changed) if is_kept else ())
        if changed is not None or not is_kept:
            self._move()
            for slot in self.layout.dense:
                slot.settle()
            if self._step.agreement is not None and self._step.agreement.new_sparse:
                self.layout.learn_sparse()
        else:  # all ranks have made the same changes
            for changed_slot in self.layout.slots:
                if changed_slot.is_touched:
                    changed_slot.adopt()
        self.exposed_seconds = self._step.waited_s
        has_all = not self.layout.sparse and len(self._step.finite) == len(self.layout.buckets)
        self.is_finite = all(self._step.finite) if has_all and self.looks else None
        self.forget()

    def confirm(self) -> None:
        """Raise ``MismatchError`` unless all ranks have taken the same steps. Collective."""
        self.steps.confirm(self._comm)

    def require_equal_loss(self, loss: object) -> None:
        """Raise ``MismatchError`` unless the closures of all ranks return the same loss.

        Collective, but a no-op if some ranks have joined: joined ranks answer only step messages.
        """
        if self.steps.num_active == self._comm.size:
            lines = [repr(loss.detach().tolist() if isinstance(loss, Tensor) else loss)]
            remedy = (
                "LBFGS ends a step depending on this loss; return the mean over ranks, "
                "hvd.allreduce(loss.detach()), from the closure"
            )
            require_equal(self._comm, lines, "the result of the LBFGS closure", remedy)

    def drop(self) -> None:
        """Discard a failed reduction; wait for operations in flight."""
        for work in self._step.works:
            with suppress(CommError):
                work.wait()
        for bucket in self.layout.buckets:
            bucket.storage.arrive()
        self.forget()

    def forget(self) -> None:
        """Reset the state for the gradients of another step; all buckets become empty."""
        self._step = StepProgress()
        for bucket in self.layout.buckets:
            bucket.num_empty = len(bucket.slots)
        for slot in self.layout.slots:
            slot.fires = 0
        for slot in self.layout.dense:
            slot.is_filled = False

    def _set_by_program(self, current: NamedParameters) -> list[Tensor]:
        """Return the parameters whose gradients the program has replaced or added."""
        return [
            p
            for _, p in current
            if p.grad is not None
            and ((slot := self.layout.slot_of.get(p)) is None or slot.is_touched)
        ]

    def _fill(self, slot: Slot) -> None:
        if not slot.is_filled:
            self.layout.buckets[slot.bucket].num_empty -= 1
            self.layout.check_place(slot)
            makers = self.layout.buckets[slot.bucket].storage.makers
            if makers is not None:
                makers.note()
            else:
                with torch.no_grad():
                    slot.fill(self.count.factor, keeps_result=self.keeps_result)
            slot.is_filled = True  # on an accelerator the bucket is filled by one call later
            self.layout.found_new_sparse |= self.layout.is_new_sparse(slot)

    def _launch_next(self) -> None:
        bucket = self.layout.buckets[self._step.num_sent]
        self._step.num_sent += 1
        if bucket.storage.makers is not None:
            with torch.no_grad():
                bucket.fill_at_once(self.count.factor, keeps_result=self.keeps_result)
        bucket.storage.depart()
        self._step.works.append(self._run(self._reduce, bucket))

    def _move(self) -> None:
        """Fill and send the remaining buckets, and wait for all sums. Collective."""
        for slot in self.layout.dense:
            self._fill(slot)
        while self._step.num_sent < len(self.layout.buckets):
            self._launch_next()
        for sparse in self.layout.sparse:
            sparse.depart(self.count.factor, keeps_result=self.keeps_result)
            self._step.works.append(self._run(self._reduce, sparse))
        for work in self._step.works:
            self._clocked(work.wait)
        for sparse in self.layout.sparse:
            sparse.arrive()
        for bucket in self.layout.buckets:
            bucket.storage.arrive()

    def _run(self, function: Callable[..., None], *args: object) -> Work:
        """Start a collective, on the communicator's thread if there is one; measure the time."""
        work: Work = self._clocked(start_on, self._comm, function, *args)
        return work

    def _clocked(self, function: Callable[..., Any], *args: object) -> Any:
        start = time.perf_counter()
        result = function(*args)
        self._step.waited_s += time.perf_counter() - start
        return result

    def _message(
        self,
        message: StepMessage,
        *,
        new_sparse: bool,
        outdated: bool = False,
        needs_all: bool = False,
    ) -> StepMessage:
        facts = replace(
            message.gradients,
            is_weighted=self.count.is_set,
            outdated=outdated,
            new_sparse=new_sparse,
        )
        message, slots = message._replace(gradients=facts), self.layout.slots
        return self.steps.message(message, slots, weight=self.count.weight, needs_all=needs_all)

    def _open(self, mine: StepMessage) -> None:
        try:
            agreement = self.steps.open(self._comm, mine)
        except BaseException:
            self._step.is_refused = True  # later buckets are not sent, on every rank
            raise
        self._take(agreement)

    def _take(self, agreement: StepAgreement) -> None:
        self._step.agreement = agreement
        self.count.total_weight, self.count.exponent = agreement.total_weight, agreement.exponent
        self.steps.take(agreement)

    def _reduce(self, what: GradientBucket | SparseSlot) -> None:
        if self._step.is_refused:
            return
        count, rest = self.count, self.count.rest
        with torch.no_grad(), self.around(what):
            if isinstance(what, SparseSlot):
                what.reduce(self._comm, rest, count.scale)
            else:
                what.write_marks()
                what.send(self._sum_on_host, factor=rest, scale=count.scale)

    def _sum_on_host(self, bucket: Bucket) -> None:
        def reduce() -> None:
            self.codec.allreduce_(bucket, self._comm, scale=self.count.scale).wait()

        node = self._comm.node if self.looks and isinstance(self.codec, Identity) else None
        if node is None:
            reduce()
        else:
            self._step.finite.append(node.is_finite_after(reduce))
