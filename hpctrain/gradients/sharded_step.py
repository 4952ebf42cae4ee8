"""The step of ``shard="node"``: each rank of a node sums and updates a part of the parameters.

backward     fills this rank's buckets; ``.grad`` lies there, and stays its own
step begins  a message compares the ranks; then all buckets of the node are full
chunk        its gradients are summed over the node, and the optimizer's own step updates it
step ends    one barrier; every rank sees all parameters, nothing was written back or gathered
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.comm.call_check import call_of
from hpctrain.comm.eager import eager
from hpctrain.comm.hierarchical import scaled_when
from hpctrain.comm.node.shared_memory import combine_to
from hpctrain.comm.ops import Op
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import (
    CommError,
    ConfigError,
    HpctrainError,
    MismatchError,
    RankLostError,
)
from hpctrain.gradients.bucket_reducer import ParameterSource, Reducer
from hpctrain.gradients.elementwise import PieceStep
from hpctrain.gradients.gradient_bucket import Slot
from hpctrain.gradients.node_bucket import Change, Chunk, NodeBucket, NodeTensor, by_group
from hpctrain.gradients.node_values import NodeValues
from hpctrain.gradients.parameter_names import NamedParameters
from hpctrain.gradients.rail_sums import RailSums, weighted
from hpctrain.gradients.reduction import Reduction
from hpctrain.gradients.sparse_gradients import SparseSlot, writes_of
from hpctrain.gradients.step_check import Announcement, Opening


class ShardedReduction(Reduction):
    """Buckets whose sums go into the optimizer's step, chunk by chunk, and nowhere else."""

    _rails: RailSums | None = None  # between nodes, what sums there
    _has_values = False  # whether the node has the parameters

    def prepare(self, rule: PieceStep, master_dtype: torch.dtype | None) -> None:
        """Make what the steps need beside the buckets. Collective."""
        levels = self._comm.levels
        assert levels is not None
        self._node = levels.node
        self.values = NodeValues(self._comm, levels.node, rule, master_dtype)
        self._facts = self._comm.new_bucket(1, torch.float64)
        if levels.num_rails:
            self._rails = RailSums(self._comm, self.count, self._facts)
        share = torch.tensor([1.0 / levels.node.local_size], dtype=torch.float64)
        self.num_nodes = round(self._comm.allreduce(share).item())

    def open(
        self, changed: NamedParameters | None, told: Announcement, optimizer: Optimizer
    ) -> None:
        """Fill all buckets and let the ranks compare what they are about to do. Collective.

        Afterwards the buckets of all ranks of the node are full, until ``close``; between nodes
        the sums of all are there.
        """
        opening, rails = self._opened(changed, told), self._rails
        if rails is not None and opening.is_early:
            self._clocked(rails.finish)
        if changed is not None:
            self._has_values = False
            self.build(changed)
        is_void = opening.is_void or changed is not None
        if is_void:
            self._fill_all()
        if not self._has_values:
            self._lay_out_values()
        if not self._has_values or opening.is_written:
            self._has_values = False
            self.values.adopt(optimizer)
            self._has_values = True
        self._weights = [float(peer.item()) for peer in self._facts.peers]
        if rails is not None and (is_void or (opening.is_new and not opening.is_early)):
            self._clocked(rails.finish)

    def _opened(self, changed: NamedParameters | None, told: Announcement) -> Opening:
        if changed is None and not told.own_changed:
            try:
                self._fill_all()
            except CommError as error:  # it lies where another one belongs
                told = replace(told, own_changed=str(error).partition(".grad ")[0])
        if self._rails is not None:
            told = self._rails.announced(told)
        new_sparse = any(slot.found_sparse_dim is not None for slot in self._dense)
        mine = self._announced(told, new_sparse=new_sparse, outdated=changed is not None)
        self._clocked(self._run(self._open, mine).wait)
        opening = self._opening
        assert opening is not None
        if opening.new_sparse:
            raise ConfigError(
                'shard="node" takes dense gradients, and a rank has a sparse one; make the layer '
                "with sparse=False, or leave shard out"
            )
        return opening

    def _fill_all(self) -> None:
        """Fill what is not on its way already."""
        first = self._rails.num_sent if self._rails is not None else 0
        for bucket in self._buckets[first:]:
            for slot in bucket.slots:
                self.take(slot)
            bucket.write_marks()
        if not first:
            self._facts.flat.fill_(self.count.factor)

    def _lay_out_values(self) -> None:
        self.values.lay_out(self._buckets)
        if self._rails is not None:
            self._rails.lay_out(self._buckets)

    @property
    def _sums(self) -> list[NodeTensor]:
        """Between nodes, the sums of all buckets over all ranks."""
        return [] if self._rails is None else self._rails.totals

    def take(self, slot: Slot | SparseSlot) -> None:
        """Put a gradient of this rank into its place."""
        assert isinstance(slot, Slot)
        self._check_place(slot)
        with torch.no_grad():
            slot.fill(1.0, keeps_result=True)

    def ready(self, slot: Slot | SparseSlot) -> None:
        """Let a gradient that has come to its place travel between nodes, if that can begin."""
        if self._rails is not None and self._has_values and isinstance(slot, Slot):
            self._rails.ready(slot, self.take)

    def forget(self) -> None:
        """Expect the gradients of another step; places that were filled count as empty."""
        super().forget()
        if self._rails is not None:
            self._rails.expect()

    def update(self, rule: PieceStep, changes: Sequence[Change]) -> list[list[bool]]:
        """Step on the sums of all chunks of this rank, times the scale.

        Returns for each bucket which parameters have a gradient on some rank.
        """
        present = self._present()
        for bucket, are in zip(self.values.buckets, present, strict=True):
            have_all = all(are)
            for chunk in bucket.chunks:
                pieces, groups = chunk.pieces, chunk.groups
                if not have_all:
                    pieces = [piece for piece in pieces if are[piece.number]]
                    groups = by_group(pieces)
                if pieces:
                    self._sum(bucket, chunk)
                    for change, piece in product(changes, pieces):
                        change(piece.grad)
                    rule.step(groups)
                for piece in pieces:
                    bucket.keep(piece, rule.state[piece.values])
                    if bucket.has_masters:
                        piece.rounded.copy_(piece.values)
        return present

    def gradients(self, changes: Sequence[Change]) -> Iterator[Tensor]:
        """Yield averages of this rank's slice that are not empty, in memory used again."""
        for bucket, are in zip(self.values.buckets, self._present(), strict=True):
            for chunk in bucket.chunks:
                pieces = [p for p in chunk.pieces if are[p.number] and p.grad.numel()]
                if pieces:
                    self._sum(bucket, chunk)
                for piece in pieces:
                    for change in changes:
                        change(piece.grad)
                    yield piece.grad

    def _present(self) -> list[list[bool]]:
        """Say for each bucket which parameters have a gradient on some rank."""
        found = []
        for number, bucket in enumerate(self.values.buckets):
            rows = [self._sums[number].shared] if self._sums else bucket.peers
            marks = [row[bucket.num_elements :].tolist() for row in rows]
            found.append(
                [any(one.real > 0 for one in column) for column in zip(*marks, strict=True)]
            )
        return found

    def close(self, failure: BaseException | None) -> None:
        """Return when all ranks of the node have stepped; all raise if one has not. Collective."""
        call = call_of("end of a step" if failure is None else f"failed step: {failure!r:.300}")
        self._clocked(self._run(self._node.meet, call).wait)
        if failure is not None:  # on all ranks alike
            raise failure
        if self._rails is not None:
            self._rails.learn()
        self.exposed_seconds = self._waited_s

    def norm_of_all(self, own: float, order: float) -> float:
        """Return the norm of all slices; of this rank's its largest element or sum of powers."""
        total = torch.tensor([own], dtype=torch.float64)
        if math.isinf(order):
            return self._comm.allreduce(total, op=Op.MAX).item()
        powers = self._comm.allreduce(total).item() / self.num_nodes
        return float(powers ** (1.0 / order))

    def is_written(self, optimizer: Optimizer) -> bool:
        """Say whether this rank's program has changed what the node shares. Not collective."""
        step = self.steps.number or 0
        if not self._has_values:
            return False
        if self.values.is_written(optimizer, step):
            return True
        return self.values.looks_at_all and self.values.has_hidden_stores(step)

    @property
    def is_stale(self) -> bool:
        """Whether the program has written to parameters in a way that is found too late."""
        values, step = self.values, self.steps.number or 0
        return self._has_values and not values.looks_at_all and values.has_hidden_stores(step)

    def _sum(self, bucket: NodeBucket, chunk: Chunk) -> None:
        """Let ``chunk.total`` be the sum over all ranks, times the scale."""
        if not self._sums:
            for out, parts in chunk.blocks:
                combine_to(out, weighted(parts, self._weights), bucket.how, self.count.scale)
            return
        _, late = scaled_when(self.count.scale, bucket.how)
        number = self.values.buckets.index(bucket)
        total = self._sums[number].shared[chunk.bounds].view(bucket.how.lane)
        combine_to(chunk.total, (total,), bucket.how, late)


class ShardedStep(Reducer):
    """Steps an optimizer on averages whose slices the ranks of a node sum and use themselves.

    Collective, as ``Reducer``; what travels does so in ``step()``.
    """

    reduction: ShardedReduction

    def __init__(
        self,
        reduction: ShardedReduction,
        parameters: ParameterSource,
        note: Callable[[str], object],
        optimizer: Optimizer,
        master_dtype: torch.dtype | None,
    ) -> None:
        """Lay out the buckets and hook the parameters. Collective."""
        if master_dtype not in (None, torch.float32, torch.float64):
            raise ConfigError(f"master_dtype is torch.float32 or float64, got {master_dtype}")
        self._rule = PieceStep(optimizer)
        self.master_dtype = master_dtype
        self._optimizer = weakref.ref(optimizer)
        self._own: dict[Tensor, tuple[int, int, tuple[int, ...]]] = {}
        """Gradients that backward has left, by what changes when they are written or turned."""
        self._changed_name = ""  # of a gradient that was changed between two backwards
        self._changes: list[Change] = []
        self._is_new = True  # whether gradients have come since the last message
        self._old_weight: float | None = None
        """By what the gradients count that the last step has left; None if there are none."""
        self._was_clipped = False  # whether what they were averaged to was, which they are not
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._is_spoilt = False  # whether a step has failed in the middle
        self._overflowed = False  # whether what was unscaled last was not finite
        reduction.prepare(self._rule, master_dtype)
        super().__init__(reduction, parameters, note)

    # -- while backward runs ----------------------------------------------------------------

    def _on_ready(self, parameter: Tensor) -> None:
        """Take one gradient; autograd calls this as soon as it is accumulated."""
        slot = self.reduction.slot_of.get(parameter)
        if not self.is_on or self._superseded:
            return
        self.is_in_step = self._is_new = True
        if slot is not None:
            slot.is_result = False
            slot.fires += 1
            try:
                if slot.fits(parameter):  # else buckets are laid out anew in step()
                    self.reduction.take(slot)
                    self.reduction.ready(slot)
            except CommError:  # it lies where another one belongs; all ranks hear of it
                self._changed_name = slot.name
        self._note_own(parameter)

    def _note_own(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._own[parameter] = (*writes_of(parameter.grad), parameter.grad.stride())

    @property
    def _is_told_before(self) -> bool:
        """Whether ``_before_sum`` is called before a gradient is added to another."""
        return True

    def _before_sum(self, parameter_id: int) -> None:
        """See whether a gradient was changed to which backward is about to add."""
        slot = self.reduction.slot_by_id.get(parameter_id)
        if slot is None:
            return
        if slot.parameter in self._own:
            if self._is_changed(slot.parameter):
                self._changed_name = slot.name
            self._note_own(slot.parameter)
        elif self._weighs_anew and slot.has_values:  # it was kept from the step before
            self._changed_name = slot.name

    # -- the step ---------------------------------------------------------------------------

    @eager
    def open(self) -> None:
        """Let the ranks compare what they are about to step on. Collective."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._check_owner()
        settings = f"{self._rule.read(optimizer)}; {self.master_dtype}; {self._changes}"
        slots = self.reduction.slot_of.values()
        is_written = not self._is_spoilt and self.reduction.is_written(optimizer)
        is_first_time = not self._own and any(slot.holds_result for slot in slots)
        told = Announcement(
            needs_all=True,
            settings=crc32(settings.encode()),
            own_changed=self._changed_name or self._find_changed(),
            repeats=is_first_time,
            is_written=is_written,
            is_stale=not self._is_spoilt and not is_written and self.reduction.is_stale,
            is_new=self._is_new,
            is_spoilt=self._is_spoilt,
        )
        changed = self._changed()
        self.reduction.open(changed, told, optimizer)
        self.is_in_step, self._is_new = True, False
        if changed is not None:
            self._hook_anew()
        for parameter in self._own:
            self._note_own(parameter)
        self._note("gradients")

    @property
    def _weighs_anew(self) -> bool:
        """Whether gradients of the step before would count by another weight now, or unclipped."""
        return self._was_clipped or self._old_weight not in (None, self.reduction.count.weight)

    def _find_changed(self) -> str:
        for each in self.reduction.slot_of.values() if self._weighs_anew else ():
            if each.parameter not in self._own and each.has_values:
                return each.name
        for parameter in self._own:
            if self._is_changed(parameter):
                slot = self.reduction.slot_of.get(parameter)
                return "a parameter" if slot is None else slot.name
        return ""

    def _is_changed(self, parameter: Tensor) -> bool:
        """Say whether a gradient is not what backward has left: dropped and zeros are none."""
        grad, slot = parameter.grad, self.reduction.slot_of.get(parameter)
        if grad is None or (*writes_of(grad), grad.stride()) == self._own[parameter]:
            return False
        place = slot.view if isinstance(slot, Slot) else grad
        is_elsewhere = grad.data_ptr() != place.data_ptr()
        was_moved = is_elsewhere and grad._version == self._own[parameter][0]  # noqa: SLF001
        return not (was_moved and same(grad, place)) and bool(grad.any())

    @eager
    @torch.no_grad()
    def finish(self, *, is_skipped: bool = False) -> bool:  # noqa: ARG002 - of others
        """Average and step; the optimizer finds no gradients then. Collective."""
        optimizer = self._optimizer()
        if not self.is_on or optimizer is None:
            return False
        self._learn()
        try:
            self.open()
        except BaseException as error:
            if not isinstance(error, HpctrainError) or isinstance(error, RankLostError):
                self._spoil()  # the others may have heard all they need to step
            raise
        present: list[list[bool]] = []
        failure: BaseException | None = None
        try:
            present = self.reduction.update(self._rule, self._changes)
        except BaseException as error:  # the others hear of it
            failure = error
        try:
            self.reduction.close(failure)
        except BaseException as error:
            self._spoil()
            raise (failure or error) from None
        self.reduction.values.show_new_state(optimizer, present)
        for slot in self.reduction.slot_of.values():
            grad = slot.parameter.grad
            slot.is_result = grad is not None
            if grad is not None:
                self._hidden.append((slot.parameter, grad))
                slot.parameter.grad = None
        return True

    def _spoil(self) -> None:
        """Let nobody take half a step for a model: the parameters of this rank become NaN."""
        self._is_spoilt = True
        for slot in self.reduction.slot_of.values():
            slot.parameter.data = torch.full_like(slot.parameter, math.nan)

    def require_trusted(self) -> None:
        """Raise ``CommError`` if a step has failed in the middle."""
        if self._is_spoilt:
            raise CommError(
                "a step has failed in the middle, and the parameters that the ranks of this node "
                "share are not to be trusted; start again from a checkpoint"
            )

    @eager
    def end_step(self) -> None:
        """Give the gradients back, and expect another step."""
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._old_weight = self.reduction.count.weight if self._hidden else None
        self._was_clipped = bool(self._hidden and self._changes)
        self._hidden = []
        self.is_in_step = False
        self.steps.end()
        self.new_step()

    @eager
    def new_step(self) -> None:
        """Expect the gradients of another step; one that was begun counts as taken."""
        if self.is_in_step:
            self.steps.end()
        self.is_in_step = self._is_reduced = False
        self._own, self._changes, self._changed_name = {}, [], ""
        self._is_new = True
        self.reduction.forget()

    def _learn(self) -> None:
        if self.reduction.count.weight:
            slots = self.reduction.slot_of.values()
            self.steps.count_reached(slot.name for slot in slots if not slot.fires)

    # -- clipping ---------------------------------------------------------------------------

    def clip_value(self, value: float) -> None:
        """Clamp the average in the step to come."""
        self._changes.append(Change(bound=value))

    @torch.no_grad()
    def norm(self, order: float) -> float:
        """Return the norm of the average. Collective."""
        self.open()
        reduction, is_max = self.reduction, math.isinf(order)
        norms = [
            torch.linalg.vector_norm(grad, order, dtype=torch.float64).item()
            for grad in reduction.gradients(self._changes)
        ]
        found = torch.tensor(norms or [0.0], dtype=torch.float64)
        own = float(found.max() if is_max else found.pow(order).sum())  # which keep NaN
        return self._norm_of_all(own, order)

    def _norm_of_all(self, own: float, order: float) -> float:
        try:
            return self.reduction.norm_of_all(own, order)
        except MismatchError:  # others do not clip: they may have stepped already
            self._spoil()
            raise

    def scale_by(self, factor: float) -> None:
        """Multiply the average in the step to come."""
        self._changes.append(Change(factor=factor))

    @torch.no_grad()
    def unscale(self, factor: float, *, allows_fp16: bool) -> bool:
        """Multiply the average in the step to come; say whether it is not finite. Collective."""
        if self._overflowed:  # then the step was left out, and clipped for nothing
            self._changes = []
        self.open()
        if not allows_fp16 and torch.float16 in self.reduction.values.step_dtypes:
            raise ValueError("Attempting to unscale FP16 gradients.")  # as torch says it
        one, found = torch.ones(()), torch.zeros(())
        for grad in self.reduction.gradients(self._changes):
            torch._amp_foreach_non_finite_check_and_unscale_([grad], found, one)
        self._overflowed = self._norm_of_all(found.item(), math.inf) > 0
        if factor != 1.0:
            self.scale_by(factor)
        return self._overflowed


def same(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors hold the same values, if only in different places."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
