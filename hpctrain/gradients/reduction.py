"""The reduction of one step: where gradients lie, and when they travel, in buckets.

All ranks have the same buckets and send them in one order, behind the message of ``StepSync``.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.agreement import require_equal
from hpctrain.comm.bucket import Bucket, BucketPlan, TensorSpec, plan_buckets
from hpctrain.comm.bucket_storage import ReduceBackend, by_first_backend
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.operation_result import Work
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.threaded import start_on
from hpctrain.compress.codec import Codec, Identity, settings_of
from hpctrain.compress.savings import Savings, savings_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import CommError
from hpctrain.gradients.gradient_bucket import GradientBucket, Slot
from hpctrain.gradients.parameter_names import Grouping, NamedParameters
from hpctrain.gradients.sample_count import SampleCount
from hpctrain.gradients.sparse_gradients import SparseSlot
from hpctrain.gradients.step_counter import StepCounter
from hpctrain.gradients.step_header import StepAgreement, StepMessage
from hpctrain.gradients.weight_sample import checksum_of, due, sample_of


class Reduction:
    """Fills the buckets of a fixed set of parameters and reduces them over all ranks."""

    def __init__(
        self,
        comm: Communicator,
        plan: Plan,
        codec: Codec,
        grouping: Grouping,
        count: SampleCount,
        steps: StepCounter,
    ) -> None:
        """Take what is needed; a communicator with a thread carries buckets beside backward."""
        self.count, self.steps = count, steps  # the latter also compares what a step rests on
        self.exposed_seconds = 0.0
        self.looks = False
        """Whether sums are looked at for what is not finite; the same on all ranks."""
        self.is_finite: bool | None = None
        """Whether all sums of the last step are; None where nobody has looked at all of them."""
        self.around: Callable[..., AbstractContextManager[None]] = nullcontext  # of each sum
        self.slot_of: dict[Tensor, Slot | SparseSlot] = {}
        self.slot_by_id: dict[int, Slot | SparseSlot] = {}
        self._comm, self._plan, self.codec, self._grouping = comm, plan, codec, grouping
        self._parameters: NamedParameters = ()
        self._buckets: list[GradientBucket] = []
        self._dense: list[Slot] = []
        self._sparse: list[SparseSlot] = []
        self._sparse_dims: dict[Tensor, int] = {}
        self._filled_new_sparse = False
        self.forget()

    def over(self, comm: Communicator, plan: Plan, steps: StepCounter) -> "Reduction":
        """Return one that does the same over other ranks. Not collective; ``build`` is."""
        return Reduction(comm, plan, self.codec, self._grouping, self.count, steps)

    def is_over(self, comm: Communicator) -> bool:
        """Say whether it reduces over the ranks of ``comm``."""
        return self._comm is comm

    @property
    def num_ranks(self) -> int:
        """Ranks that gradients are reduced over."""
        return self._comm.size

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of them."""
        return self._comm.rank == 0

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank that travel in a step, sparse gradients left out."""
        return sum(self.codec.num_bytes(bucket.bucket) for bucket in self._buckets)

    @property
    def savings(self) -> Savings:
        """What the codec spares in a step."""
        return savings_of(self.codec, [b.bucket for b in self._buckets], self._comm, self._plan)

    @property
    def has_sent(self) -> bool:
        """Whether gradients of this step have begun to travel."""
        return self._next_bucket > 0

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self.slot_of)

    @property
    def keeps_result(self) -> bool:
        """Whether this rank adds what is reduced to a further reduction: one does of a sum."""
        return self.count.average or self.leads

    def build(self, parameters: NamedParameters, results: Sequence[Tensor] = ()) -> None:
        """Lay the buckets out for all these parameters, the same on every rank. Collective.

        Where ranks have other parameters or groups all raise ``MismatchError``. ``results`` are
        those whose gradients are alike on all ranks, beside those known.
        """
        self._groups = self._grouping.numbers([p for _, p in parameters])
        lines = [f"{n} {tuple(p.shape)} {p.dtype} strides {p.stride()}" for n, p in parameters]
        if len(places := device_numbers([p for _, p in parameters])) > 1:
            numbers = [places[p.device] for _, p in parameters]
            lines = [f"{line} device {n}" for line, n in zip(lines, numbers, strict=True)]
        if self._groups:
            pairs = zip(lines, self._groups, strict=True)
            lines = [f"{line} group {group}" for line, group in pairs]
        require_equal(self._comm, [f"compression {settings_of(self.codec)}", *lines], "parameters")
        results = [*results, *(p for p, slot in self.slot_of.items() if slot.holds_result)]
        self._parameters = parameters
        self._lay_out()
        for parameter in results:
            if parameter in self.slot_of:
                self.slot_of[parameter].adopt()

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
        if slot.is_filled and (self._next_bucket > slot.bucket or self.count.factor != 1.0):
            raise CommError(
                f"the gradient of {slot.name} came twice in one backward, and only once in the "
                f"first step; keep the graph as it is, or checkpoint with use_reentrant=False"
            )
        self._fill(slot)
        if self._plan.overlap == "end":
            return
        buckets = self._buckets
        while self._next_bucket < len(buckets) and not buckets[self._next_bucket].num_empty:
            if self._next_bucket == 0:
                mine = self._message(StepMessage(), new_sparse=self._filled_new_sparse)
                self._works.append(self._run(self._open, mine))
            self._launch_next()

    def changed_by_hand(self, today: NamedParameters | None) -> int | None:
        """Return a checksum of what was done to reduced gradients; None for nothing.

        What was put in their place becomes a copy: it may lie in the place of another. Of what
        was written in place a sample counts, since clipping does that in every step.
        """
        touched = [(s.name, s.parameter) for s in self.slot_of.values() if s.is_touched]
        touched += [named for named in today or () if named[1] not in self.slot_of]
        total = 0
        for name, parameter in touched:
            total = crc32(name.encode(), total)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()
                total = checksum_of(parameter.grad, total)
        written, step = [s for s in self._dense if s.is_written], self.steps.number or 0
        total ^= sample_of(due([s.view for s in written if s.view.is_cpu], step), step)
        for slot in written:  # where looking at values would keep the host waiting
            total = total if slot.view.is_cpu else crc32(slot.name.encode(), total)
        return total if touched or written else None

    def complete(
        self,
        changed: NamedParameters | None = None,
        told: StepMessage | None = None,
        agreement: StepAgreement | None = None,
    ) -> None:
        """Fill what is missing, send what is not sent, wait for all of it. Collective.

        What all ranks have done alike by hand stays as it is; else what is there is reduced, or
        all raise ``MismatchError``. ``changed`` are the parameters of today where they are no
        longer those of ``build``; ``told`` is what the program has done to gradients;
        ``agreement`` is how the others have begun, for a rank that only takes part.
        """
        if agreement is not None:
            self._take(agreement)
        elif not self.has_sent:
            mine = self._message(
                told or StepMessage(),
                outdated=changed is not None,
                new_sparse=self._filled_new_sparse or any(map(self._is_new_sparse, self._dense)),
            )
            self._clocked(self._run(self._open, mine).wait)
        is_kept = self._agreement is not None and self._agreement.changed_alike
        if changed is not None:
            self.build(changed, results=self._set_by_hand(changed) if is_kept else ())
        if changed is not None or not is_kept:
            self._move()
            for slot in self._dense:
                slot.settle()
            if self._agreement is not None and self._agreement.new_sparse:
                self._learn_sparse()
        else:  # what all ranks have made of their gradients is the result
            for changed_slot in self.slot_of.values():
                if changed_slot.is_touched:
                    changed_slot.adopt()
        self.exposed_seconds = self._waited_s
        has_all = not self._sparse and len(self._finite) == len(self._buckets)
        self.is_finite = all(self._finite) if has_all and self.looks else None
        self.forget()

    def confirm(self) -> None:
        """Raise ``MismatchError`` on all ranks that have taken other steps. Collective."""
        self.steps.confirm(self._comm)

    def require_equal_loss(self, loss: object) -> None:
        """Raise ``MismatchError`` on all ranks if their closures return other losses. Collective.

        Not while some have joined, who answer nothing else than averages of gradients.
        """
        if self.steps.num_active == self._comm.size:
            said = [repr(loss.detach().tolist() if isinstance(loss, Tensor) else loss)]
            way_out = (
                "LBFGS decides by it when a step ends, and ranks that decide otherwise part: let "
                "the closure return the mean over ranks, hvd.allreduce(loss.detach())"
            )
            require_equal(self._comm, said, "what the closure of LBFGS returns", way_out)

    def drop(self) -> None:
        """Forget a reduction that has failed; wait for what is under way."""
        for work in self._works:
            with suppress(CommError):
                work.wait()
        for bucket in self._buckets:
            bucket.place.arrive()
        self.forget()

    def forget(self) -> None:
        """Expect the gradients of another step; places that were filled count as empty."""
        self._next_bucket = 0
        self._agreement: StepAgreement | None = None
        self._is_refused = False
        self._works: list[Work] = []
        self._finite: list[bool] = []  # of each bucket that was looked at
        self._waited_s = 0.0
        for bucket in self._buckets:
            bucket.num_empty = len(bucket.slots)
        for slot in self.slot_of.values():
            slot.fires = 0
        for slot in self._dense:
            slot.is_filled = False

    def _lay_out(self) -> None:
        """Make buckets for all but the sparse gradients, last parameter first. Collective.

        Without memory enough all ranks raise ``NodeMemoryError``.
        """
        named, numbers = self._parameters, self._groups
        apart = {} if self._grouping.sparse_as_dense else self._sparse_dims
        order = [i for i in reversed(range(len(named))) if named[i][1] not in apart]
        dense = [named[i] for i in order]
        places = device_numbers([p for _, p in named])
        plans = plan_buckets(
            [
                TensorSpec(name=n, numel=p.numel(), dtype=p.dtype, device=places[p.device])
                for n, p in dense
            ],
            None if self._plan.overlap == "end" else self._plan.bucket_bytes,
            marks_per_tensor=1,
            groups=[numbers[i] for i in order] if numbers else (),
        )
        self._buckets = self._new_buckets(dense, plans)
        self._dense = [slot for bucket in self._buckets for slot in bucket.slots]
        self._memory = [bucket.memory for bucket in self._buckets]
        self._sparse = [SparseSlot(n, p, apart[p]) for n, p in named if p in apart]
        self.slot_of = {slot.parameter: slot for slot in self._dense}
        self.slot_of |= {slot.parameter: slot for slot in self._sparse}
        self.slot_by_id = {id(parameter): slot for parameter, slot in self.slot_of.items()}
        for slot in self._dense:
            slot.sparse_dim = self._sparse_dims.get(slot.parameter)
        self.codec.forget()
        for bucket in self._buckets:
            self.codec.prepare(bucket.bucket, [*bucket.parts, bucket.marks], self._comm)

    def _new_buckets(
        self, dense: NamedParameters, plans: Sequence[BucketPlan]
    ) -> list[GradientBucket]:
        """Make buckets, summed on accelerators where all ranks can do that. Collective."""

        def make(backend: ReduceBackend) -> list[GradientBucket]:
            return [
                GradientBucket(self._comm, dense, plan, index, backend=backend)
                for index, plan in enumerate(plans)
            ]

        refusal = "" if dense else "there are no parameters"
        if not isinstance(self.codec, Identity):
            refusal = f"the codec {type(self.codec).__name__} is there"
        return by_first_backend(self._comm, {p.device for _, p in dense}, make, refusal)

    def _set_by_hand(self, today: NamedParameters) -> list[Tensor]:
        """Return the parameters whose gradients the program has put there."""
        return [
            p
            for _, p in today
            if p.grad is not None and ((slot := self.slot_of.get(p)) is None or slot.is_touched)
        ]

    def _is_new_sparse(self, slot: Slot) -> bool:
        """Say whether the gradient is a sparse one that other ranks may not know of."""
        return slot.found_sparse_dim is not None and slot.parameter not in self._sparse_dims

    def _learn_sparse(self) -> None:
        """Let all ranks know whose gradients are sparse, and lay them out so. Collective."""
        own = [self.slot_of[p].found_sparse_dim for _, p in self._parameters]
        self._sparse_dims = {}
        for dims in reversed(self._comm.allgather_object(own)):  # the first rank's word counts
            pairs = zip(self._parameters, dims, strict=True)
            self._sparse_dims |= {p: dim for (_, p), dim in pairs if dim is not None}
        self._lay_out()
        for slot in self.slot_of.values():
            slot.adopt()
        self._filled_new_sparse = False

    def _fill(self, slot: Slot) -> None:
        if not slot.is_filled:
            self._buckets[slot.bucket].num_empty -= 1
            self._check_place(slot)
            makers = self._buckets[slot.bucket].place.makers
            if makers is not None:
                makers.note()
            else:
                with torch.no_grad():
                    slot.fill(self.count.factor, keeps_result=self.keeps_result)
            slot.is_filled = True  # on an accelerator it will be, with the others of its bucket
            self._filled_new_sparse |= self._is_new_sparse(slot)

    def _check_place(self, slot: Slot) -> None:
        """Refuse a gradient that lies in the place of another, which would overwrite it."""
        grad = slot.parameter.grad
        if grad is None or grad.is_sparse or slot.holds(grad):
            return
        address = grad.data_ptr()
        if any(first <= address < end for first, end in self._memory):
            raise CommError(
                f"{slot.name}.grad lies in the memory of an earlier gradient, in another place or "
                f"order; set a clone of it"
            )

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next_bucket]
        self._next_bucket += 1
        if bucket.place.makers is not None:
            with torch.no_grad():
                bucket.fill_at_once(self.count.factor, keeps_result=self.keeps_result)
        bucket.place.depart()
        self._works.append(self._run(self._reduce, bucket))

    def _move(self) -> None:
        """Fill what is missing, send what is not sent, and wait for all of it."""
        for slot in self._dense:
            self._fill(slot)
        while self._next_bucket < len(self._buckets):
            self._launch_next()
        for sparse in self._sparse:
            sparse.depart(self.count.factor, keeps_result=self.keeps_result)
            self._works.append(self._run(self._reduce, sparse))
        for work in self._works:
            self._clocked(work.wait)
        for sparse in self._sparse:
            sparse.arrive()
        for bucket in self._buckets:
            bucket.place.arrive()

    def _run(self, function: Callable[..., None], *args: object) -> Work:
        """Carry out what talks to other ranks; a wait of this thread for it is exposed."""
        work: Work = self._clocked(start_on, self._comm, function, *args)
        return work

    def _clocked(self, function: Callable[..., Any], *args: object) -> Any:
        start = time.perf_counter()
        result = function(*args)
        self._waited_s += time.perf_counter() - start
        return result

    def _message(
        self,
        told: StepMessage,
        *,
        new_sparse: bool,
        outdated: bool = False,
        needs_all: bool = False,
    ) -> StepMessage:
        facts = replace(
            told.gradients,
            is_weighted=self.count.is_set,
            outdated=outdated,
            new_sparse=new_sparse,
        )
        told, slots = told._replace(gradients=facts), self.slot_of.values()
        return self.steps.message(told, slots, weight=self.count.weight, needs_all=needs_all)

    def _open(self, mine: StepMessage) -> None:
        try:
            agreement = self.steps.open(self._comm, mine)
        except BaseException:
            self._is_refused = True  # what was to follow stays here, on every rank
            raise
        self._take(agreement)

    def _take(self, agreement: StepAgreement) -> None:
        self._agreement = agreement
        self.count.total_weight, self.count.exponent = agreement.total_weight, agreement.exponent
        self.steps.take(agreement)

    def _reduce(self, what: GradientBucket | SparseSlot) -> None:
        if self._is_refused:
            return
        count, rest = self.count, self.count.rest
        with torch.no_grad(), self.around(what):
            if isinstance(what, SparseSlot):
                what.reduce(self._comm, rest, count.scale)
            else:
                what.write_marks()
                if rest != 1.0:
                    what.place.weigh(rest)
                what.place.reduce(partial(self._sum_on_host, what.bucket), count.scale)

    def _sum_on_host(self, bucket: Bucket) -> None:
        def reduce() -> None:
            self.codec.allreduce_(bucket, self._comm, scale=self.count.scale).wait()

        node = self._comm.node if self.looks and isinstance(self.codec, Identity) else None
        if node is None:
            reduce()
        else:
            self._finite.append(node.is_finite_after(reduce))


def device_numbers(tensors: Sequence[Tensor]) -> dict[torch.device, int]:
    """Number the devices of tensors as they come: on other ranks others may have the numbers."""
    return {device: n for n, device in enumerate(dict.fromkeys(t.device for t in tensors))}
