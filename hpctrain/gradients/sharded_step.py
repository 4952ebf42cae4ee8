"""The step of ``shard="node"``: each rank of a node sums and updates a part of the parameters.

backward     fills this rank's buckets; ``.grad`` lies there, and stays its own
step begins  a message compares the ranks; then all buckets of the node are full
chunk        its gradients are summed over the node, and the optimizer's own step updates it
step ends    one barrier; every rank sees all parameters, nothing was written back or gathered
"""

import math
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.core.checksum import crc32
from hpctrain.core.errors import (
    CommError,
    ConfigError,
    HpctrainError,
    MismatchError,
    RankLostError,
)
from hpctrain.core.torch_compat import dynamo_disable, unscale_, version_of
from hpctrain.gradients.bucket_reducer import ParameterSource, Reducer
from hpctrain.gradients.elementwise import PieceStep
from hpctrain.gradients.gradient_bucket import Slot
from hpctrain.gradients.node_bucket import Change
from hpctrain.gradients.optimizer_exchange import OptimizerExchange, exchange_of
from hpctrain.gradients.parameter_names import places_of
from hpctrain.gradients.sharded_reduction import ShardedReduction
from hpctrain.gradients.sparse_gradients import writes_of
from hpctrain.gradients.step_header import ShardedFacts
from hpctrain.gradients.step_state import EMPTY, FILLING
from hpctrain.runtime import world


class ShardedStep(Reducer, OptimizerExchange):
    """Steps an optimizer on averages whose slices the ranks of a node sum and use themselves.

    Collective, as ``Reducer``; what travels does so in ``step()``.
    """

    reduction: ShardedReduction

    def __init__(
        self,
        reduction: ShardedReduction,
        parameters: ParameterSource,
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
        self.is_spoilt = False  # whether a step has failed in the middle
        self._overflowed = False  # whether what was unscaled last was not finite
        reduction.prepare(self._rule, master_dtype)
        super().__init__(reduction, parameters, world.current().last_call.note)
        optimizer.register_state_dict_pre_hook(_require_trusted)

    # -- while backward runs ----------------------------------------------------------------

    def on_ready(self, parameter: Tensor) -> None:
        """Take one gradient; autograd calls this as soon as it is accumulated."""
        slot = self.reduction.layout.slot_of.get(parameter)
        if not self.is_on or self.superseded:
            return
        self.state, self._is_new = FILLING, True
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
    def _sees_sums(self) -> bool:
        """Whether ``before_sum`` is called before a gradient is added to another."""
        return True

    def before_sum(self, parameter_id: int) -> None:
        """See whether a gradient was changed to which backward is about to add."""
        slot = self.reduction.layout.slot_by_id.get(parameter_id)
        if slot is None:
            return
        if slot.parameter in self._own:
            if self._is_changed(slot.parameter):
                self._changed_name = slot.name
            self._note_own(slot.parameter)
        elif self._weighs_anew and slot.holds_result and slot.has_values:  # of the step before
            self._changed_name = slot.name

    # -- the step ---------------------------------------------------------------------------

    def synchronize(self) -> bool:
        """Let the ranks compare what they are about to step on, before ``step()``. Collective.

        Ranks that do not call this take part by their next ``open``.
        """
        self._open_once(synchronizes=True)
        return False

    def open(self) -> None:
        """Let the ranks compare what they are about to step on. Collective."""
        while self._open_once():
            pass  # only some ranks have called synchronize(), and come to this call next

    @dynamo_disable
    def _open_once(self, *, synchronizes: bool = False) -> bool:
        """Open the step; return whether a rank has done so in ``synchronize``. Collective.

        That rank may still clip, so its settings are compared in a later opening.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        self._check_owner()
        settings = f"{self._rule.read(optimizer)}; {self.master_dtype}; {self._changes}"
        slots = self.reduction.layout.slots
        is_written = not self.is_spoilt and self.reduction.is_written(optimizer)
        repeats = not self._own and any(
            # Zeros that zero_grad() has written are gradients of no step.
            slot.holds_result and (_version_of(slot) == slot.version or slot.has_values)
            for slot in slots
            if isinstance(slot, Slot)
        )
        told = ShardedFacts(
            synchronizes=synchronizes,
            settings=None if synchronizes else crc32(settings.encode()),
            own_changed=self._changed_name or self._find_changed(),
            is_written=is_written,
            is_stale=not self.is_spoilt and not is_written and self.reduction.is_stale,
            is_new=self._is_new,
            is_spoilt=self.is_spoilt,
        )
        changed = self._changed()
        agreement = self.reduction.open(changed, told, optimizer, repeats=repeats)
        self.state, self._is_new = FILLING, False
        if changed is not None:
            self._hook_anew()
            for slot in self.reduction.layout.slots:  # zeros are gradients of no step
                slot.is_result = slot.is_result and slot.has_values
        for parameter in self._own:
            self._note_own(parameter)
        self._note("gradients")
        return agreement.sharded.synchronizes

    @property
    def _weighs_anew(self) -> bool:
        """Whether gradients of the step before would count by another weight now, or unclipped."""
        return self._was_clipped or self._old_weight not in (None, self.reduction.count.weight)

    def _find_changed(self) -> str:
        for each in self.reduction.layout.slots if self._weighs_anew else ():
            if each.parameter not in self._own and each.holds_result and each.has_values:
                return each.name
        for parameter in self._own:
            if self._is_changed(parameter):
                slot = self.reduction.layout.slot_of.get(parameter)
                return "a parameter" if slot is None else slot.name
        return ""

    def _is_changed(self, parameter: Tensor) -> bool:
        """Say whether a gradient is not what backward has left: dropped and zeros are none."""
        grad, slot = parameter.grad, self.reduction.layout.slot_of.get(parameter)
        if grad is None or (*writes_of(grad), grad.stride()) == self._own[parameter]:
            return False
        place = slot.view if isinstance(slot, Slot) else grad
        is_elsewhere = grad.data_ptr() != place.data_ptr()
        was_moved = is_elsewhere and version_of(grad) == self._own[parameter][0]
        return not (was_moved and same(grad, place)) and bool(grad.any())

    @dynamo_disable
    @torch.no_grad()
    def finish(self, *, is_skipped: bool = False) -> bool:
        """Average and step; the optimizer finds no gradients then. Collective."""
        del is_skipped  # no step of these gradients is skipped
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
        slots = self.reduction.layout.slots
        for slot, is_on_any_rank in zip(slots, chain.from_iterable(present), strict=True):
            assert isinstance(slot, Slot)
            if is_on_any_rank and slot.parameter.grad is None:
                slot.show()  # zeros, so that a parameter has a gradient on all ranks or on none
            grad = slot.parameter.grad
            slot.is_result = grad is not None
            if grad is not None:
                slot.version = _version_of(slot)
                self._hidden.append((slot.parameter, grad))
                slot.parameter.grad = None
        return True

    def _spoil(self) -> None:
        """Let nobody take half a step for a model: the parameters of this rank become NaN."""
        self.is_spoilt = True
        for slot in self.reduction.layout.slots:
            slot.parameter.data = torch.full_like(slot.parameter, math.nan)

    def state_loaded(self, state_dict: dict[str, Any]) -> None:
        """Replace the loaded state where parameters have masters: torch casts their state."""
        optimizer = self._optimizer()
        if optimizer is None or not self.master_dtype:
            return
        places = [i for group in state_dict["param_groups"] for i in group["params"]]
        for place, (_, parameter) in zip(places, places_of(optimizer), strict=True):
            if saved := state_dict["state"].get(place):
                optimizer.state[parameter] = {
                    k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in saved.items()
                }

    @dynamo_disable
    def end_step(self) -> None:
        """Give the gradients back, and expect another step."""
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._old_weight = self.reduction.count.weight if self._hidden else None
        self._was_clipped = bool(self._hidden and self._changes)
        self._hidden = []
        self.state = EMPTY
        self.steps.end()
        self.new_step()

    @dynamo_disable
    def new_step(self) -> None:
        """Expect the gradients of another step; one that was begun counts as taken."""
        if self.is_in_step:
            self.steps.end()
        self.state = EMPTY
        self._own, self._changes, self._changed_name = {}, [], ""
        self._is_new = True
        self.reduction.forget()

    def _learn(self) -> None:
        if self.reduction.count.weight:
            slots = self.reduction.layout.slots
            self.steps.count_reached(slot.name for slot in slots if not slot.fires)

    # -- clipping ---------------------------------------------------------------------------

    def clip_value(self, parameters: Sequence[Tensor], value: float) -> None:
        """Clamp the averages in the step to come."""
        del parameters  # all are clipped
        self._changes.append(Change(bound=float(value)))

    def clip_norm(
        self,
        parameters: Sequence[Tensor],
        max_norm: float,
        norm_type: float,
        *,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """Clip the averages in the step to come; return their norm before that. Collective."""
        norm = self._norm(float(norm_type))
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"the norm of order {norm_type} of the averaged gradients must be finite to clip "
                f"them, got {norm}; leave this step out on all ranks"
            )
        if (factor := max_norm / (norm + 1e-6)) < 1.0 or math.isnan(factor):
            self._changes.append(Change(factor=factor))
        found = torch.tensor(norm, dtype=parameters[0].dtype)
        return found if found.isfinite() else torch.tensor(norm, dtype=torch.float64)

    @torch.no_grad()
    def _norm(self, order: float) -> float:
        self.open()
        norms = [
            torch.linalg.vector_norm(grad, order, dtype=torch.float64).item()
            for grad in self.reduction.gradients(self._changes)
        ]
        found = torch.tensor(norms or [0.0], dtype=torch.float64)
        own = float(found.max() if math.isinf(order) else found.pow(order).sum())  # keep NaN
        return self._norm_of_all(own, order)

    def _norm_of_all(self, own: float, order: float) -> float:
        try:
            return self.reduction.norm_of_all(own, order)
        except MismatchError:  # others do not clip: they may have stepped already
            self._spoil()
            raise

    @torch.no_grad()
    def unscale(self, inverse_scale: Tensor, *, allows_fp16: bool) -> bool:
        """Multiply the average in the step to come; say whether it is not finite. Collective."""
        if self._overflowed:  # then the step was left out, and clipped for nothing
            self._changes = []
        self.open()
        if not allows_fp16 and torch.float16 in self.reduction.values.step_dtypes:
            raise ValueError("Attempting to unscale FP16 gradients.")  # as torch says it
        one, found = torch.ones(()), torch.zeros(())
        for grad in self.reduction.gradients(self._changes):
            unscale_([grad], found, one)
        self._overflowed = self._norm_of_all(found.item(), math.inf) > 0
        if (factor := inverse_scale.item()) != 1.0:
            self._changes.append(Change(factor=factor))
        return self._overflowed


def _require_trusted(optimizer: Optimizer) -> None:
    """Raise ``CommError`` if a step has failed in the middle: torch asks for the state."""
    exchange = exchange_of(optimizer)
    if isinstance(exchange, ShardedStep) and exchange.is_spoilt:
        raise CommError(
            "a step has failed in the middle, and the parameters that the ranks of this node "
            "share are not to be trusted; start again from a checkpoint"
        )


def _version_of(slot: Slot) -> int:
    grad = slot.parameter.grad
    return -1 if grad is None else version_of(grad)


def same(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors hold the same values, if only in different places."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
