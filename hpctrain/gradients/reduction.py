"""The reduction of one step: an opening message, then the buckets, in one order on every rank."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator, Work
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.threaded import start_on
from hpctrain.compress.codec import Codec
from hpctrain.core import logs
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import CommError
from hpctrain.core.units import KIB
from hpctrain.gradients.gradient_buckets import (
    GradientBucket,
    Grouping,
    Slot,
    build_buckets,
    memory_of,
    require_same_parameters,
)
from hpctrain.gradients.parameter_names import NamedParameters
from hpctrain.gradients.sample_count import SampleCount
from hpctrain.gradients.sparse_gradients import SparseSlot
from hpctrain.gradients.step_header import (
    Announcement,
    Member,
    Opening,
    StepHeader,
    WeightSample,
    fingerprint,
)

_FIRST_BYTES = 64 * KIB
"""How much of each gradient is compared in the first step."""


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
    check_weights: str = "off"
    """What replicas that part lead to: ``error``, ``warn``, or ``off``: nothing is compared."""


class Reduction:
    """Fills the buckets of a fixed set of parameters and reduces them over all ranks."""

    def __init__(
        self,
        comm: Communicator,
        plan: Plan,
        codec: Codec,
        options: ReductionOptions,
        header: StepHeader | None = None,
    ) -> None:
        """Take what is needed; ``enter`` and ``build`` come next. Collective without a header.

        A communicator with a thread carries the buckets beside backward. The header opens the
        steps of all optimizers over these ranks; None for one of its own.
        """
        self.count = SampleCount(predivide=options.predivide)
        self.average = options.average
        self.flags = 0
        """Bits of this rank in the opening message of each step."""
        self.raised_flags = 0
        """Bits that any rank had in the last opening message; the same on every rank."""
        self.step: int | None = 0
        """Steps that were taken; None after state was loaded, until the next one tells."""
        self.exposed_seconds = 0.0
        self._header = header or StepHeader(comm)
        self._member = 0
        self._is_first = True
        self.slot_of: dict[Tensor, Slot | SparseSlot] = {}
        self.slot_by_id: dict[int, Slot | SparseSlot] = {}
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

    @property
    def keeps_result(self) -> bool:
        """Whether this rank adds what is reduced already to a further reduction.

        An average of it stays what it is; a sum counts it once, on one rank.
        """
        return self.average or self._comm.rank == 0

    def enter(self, member: Member) -> None:
        """Let the header know whose steps these are."""
        self._member = self._header.enter(member)

    def build(self, parameters: NamedParameters, results: Sequence[Tensor] = ()) -> None:
        """Lay the buckets out anew for all these parameters. Collective.

        ``results`` are those whose gradients are the same on all ranks, beside those known: they
        stay such. Ranks with other parameters all raise ``MismatchError``.
        """
        numbers = self._options.grouping.numbers([p for _, p in parameters])
        require_same_parameters(self._comm, parameters, numbers)
        results = [*results, *(p for p, slot in self.slot_of.items() if slot.holds_result)]
        self._parameters = parameters
        self._sample = WeightSample(parameters)
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
                mine = self._announce(new_sparse=self._filled_new_sparse)
                self._works.append(self._run(self._open, mine))
            self._launch_next()

    def changed_by_hand(self, today: NamedParameters | None) -> int | None:
        """Return a fingerprint of what was done to reduced gradients; None for nothing.

        What was put in their place becomes a copy: it may lie in the place of another. ``today``
        is all parameters, where they are no longer those of ``build``.
        """
        touched = [(s.name, s.parameter) for s in self.slot_of.values() if s.is_touched]
        touched += [named for named in today or () if named[1] not in self.slot_of]
        total = 0
        for name, parameter in touched:
            total = crc32(name.encode(), total)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()
                total = crc32(_bytes_of(parameter.grad), total)
        return fingerprint(total) if touched else None

    def _set_by_hand(self, today: NamedParameters) -> list[Tensor]:
        """Return the parameters whose gradients the program has put there."""
        return [
            p
            for _, p in today
            if p.grad is not None and ((slot := self.slot_of.get(p)) is None or slot.is_touched)
        ]

    def complete(
        self,
        changed: NamedParameters | None = None,
        *,
        by_hand: int | None = None,
        changed_early: bool = False,
        replaced_sum: str = "",
        opening: Opening | None = None,
    ) -> None:
        """Fill what is missing, send what is not sent, wait for all of it. Collective.

        Ranks that have done different things without a common result all raise ``MismatchError``.

        Args:
            changed: the parameters of today where they are no longer those of ``build``: the
                buckets are then laid out anew. All ranks give some, or none does.
            by_hand: of ``changed_by_hand``, where gradients were reduced in this step already.
                What all ranks have done alike stays as it is; else what is there is reduced.
            changed_early: see ``Announcement``, as ``replaced_sum``.
            replaced_sum: name of a sum that was replaced before backward added to it.
            opening: how the other ranks have begun, for one that only takes part.
        """
        if opening is not None:
            self._take(opening)
        elif not self.has_sent:
            mine = self._announce(
                outdated=changed is not None,
                new_sparse=self._has_new_sparse(),
                by_hand=by_hand,
                changed_early=changed_early,
                replaced_sum=replaced_sum,
            )
            self._clocked(self._run(self._open, mine).wait)
        is_kept = self._opening is not None and self._opening.changed_alike
        if changed is not None:
            self.build(changed, results=self._set_by_hand(changed) if is_kept else ())
        elif is_kept:
            self._keep_changes()
            return
        self._move()
        for slot in self._dense:
            slot.settle()
        if self._opening is not None and self._opening.new_sparse:
            self._learn_sparse()
        self.exposed_seconds = self._waited_s
        self._tell_once()
        self.forget()

    def end_step(self) -> None:
        """Count a step that was taken."""
        if self.step is not None:
            self.step += 1

    def drop(self) -> None:
        """Forget a reduction that has failed; wait for what is under way."""
        for work in self._works:
            with suppress(CommError):
                work.wait()
        self.forget()

    def forget(self) -> None:
        """Expect the gradients of another step; places that were filled count as empty."""
        self._next_bucket = 0
        self._opening: Opening | None = None
        self._is_refused = False
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
        self._memory = [memory_of(bucket.bucket.flat) for bucket in self._buckets]
        self._sparse = [SparseSlot(n, p, apart[p]) for n, p in self._parameters if p in apart]
        self.slot_of = {slot.parameter: slot for slot in self._dense}
        self.slot_of |= {slot.parameter: slot for slot in self._sparse}
        self.slot_by_id = {id(parameter): slot for parameter, slot in self.slot_of.items()}
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
            self._check_place(slot)
            with torch.no_grad():
                slot.fill(self._factor, keeps_result=self.keeps_result)
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

    def _is_full(self, index: int) -> bool:
        return self._buckets[index].num_empty == 0

    def _launch_next(self) -> None:
        index = self._next_bucket
        self._next_bucket += 1
        self._works.append(self._run(self._reduce, index))

    def _move(self) -> None:
        """Fill what is missing, send what is not sent, and wait for all of it."""
        for slot in self._dense:
            self._fill(slot)
        while self._next_bucket < len(self._buckets):
            self._launch_next()
        for sparse in self._sparse:
            self._works.append(self._run(self._gather, sparse))
        self._clocked(self._wait)

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

    def _announce(
        self,
        *,
        new_sparse: bool,
        outdated: bool = False,
        by_hand: int | None = None,
        changed_early: bool = False,
        replaced_sum: str = "",
    ) -> Announcement:
        compares = self._options.check_weights != "off" and self.step is not None and not outdated
        mine = Announcement(
            member=self._member,
            step=self.step,
            weight=self.count.weight,
            is_weighted=self.count.is_set,
            outdated=outdated,
            new_sparse=new_sparse,
            by_hand=by_hand,
            keeps_sums=by_hand is not None and not self.average and self._has_gradients(),
            changed_early=changed_early,
            replaced_sum=replaced_sum,
            weights=fingerprint(self._sample.checksum(self.step or 0)) if compares else None,
            first=self._first_fingerprint() if self._is_first else None,
            is_strict=self._options.check_weights == "error",
            flags=self.flags,
        )
        self._is_first = False
        return mine

    def _has_gradients(self) -> bool:
        return any(slot.parameter.grad is not None for slot in self.slot_of.values())

    def _first_fingerprint(self) -> int | None:
        """Return a fingerprint of this rank's own gradients, None if there are only zeros."""
        total, is_zero = 0, True
        for parameter in self.slot_of:
            grad = parameter.grad
            if grad is not None and not grad.is_sparse:
                start = grad.detach().reshape(-1)[: _FIRST_BYTES // grad.itemsize]
                total = crc32(_bytes_of(start), total)
                is_zero = is_zero and not start.any()
        return None if is_zero else fingerprint(total)

    def _open(self, mine: Announcement) -> None:
        try:
            opening = self._header.exchange(self._comm, mine, self._sample.by_name)
        except BaseException:
            self._is_refused = True  # what was to follow stays here, on every rank
            raise
        self._take(opening)

    def _take(self, opening: Opening) -> None:
        self._opening = opening
        self.count.total_weight = opening.total_weight
        self.raised_flags = opening.flags
        self.step = opening.step if self.step is None else self.step

    def _keep_changes(self) -> None:
        """Let what all ranks have made of their gradients be the result."""
        for slot in self.slot_of.values():
            if slot.is_touched:
                slot.adopt()
        self.exposed_seconds = self._waited_s
        self.forget()

    def _tell_once(self) -> None:
        if self._opening is not None and self._opening.first_alike and self._comm.rank == 0:
            text = (
                f"all {self._comm.size} ranks have found the same gradients in their first step: "
                f"do they read the same samples? hvd.shard(loader) gives each rank its own part"
            )
            logs.warn_merged([[text]])

    def _reduce(self, index: int) -> None:
        if self._is_refused:
            return
        with torch.no_grad():
            bucket = self._buckets[index]
            bucket.write_marks()
            self._codec.allreduce_(bucket.bucket, self._comm, scale=self._scale).wait()

    def _gather(self, slot: SparseSlot) -> None:
        if self._is_refused:
            return
        with torch.no_grad():
            slot.reduce(self._comm, self._factor, self._scale, keeps_result=self.keeps_result)


def _bytes_of(tensor: Tensor) -> bytes:
    """Return the elements of a tensor, in order, as bytes."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    flat = dense.resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()
