"""The step for ``shard="node"``, in which each rank updates a part of the parameters.

backward     fills this rank's buckets; ``.grad`` is a view of a bucket and is not averaged
step begins  a step message compares the ranks; all buckets of the node are full
each chunk   gradients are summed over the node, and the optimizer updates the chunk
step ends    one barrier; all ranks of the node read the parameters, without a gather
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
from hpctrain.gradients.bucket_reducer import EMPTY, FILLING, ParameterSource, Reducer
from hpctrain.gradients.elementwise import PieceStep
from hpctrain.gradients.gradient_bucket import Slot
from hpctrain.gradients.node_bucket import Change
from hpctrain.gradients.optimizer_exchange import OptimizerExchange, exchange_of
from hpctrain.gradients.parameter_names import places_of
from hpctrain.gradients.sharded_reduction import ShardedReduction
from hpctrain.gradients.sparse_gradients import writes_of
from hpctrain.gradients.step_header import ShardedFacts
from hpctrain.runtime import world


class ShardedStep(Reducer, OptimizerExchange):
    """Averages gradients and updates parameters in slices; each rank of a node has a slice.

    Collective, like ``Reducer``; gradients are sent in ``step()``. The constructor allocates the
    buckets and hooks the parameters.

    Args:
        reduction: reduction that sums the gradients of each slice.
        parameters: function that returns the current parameters with their names.
        optimizer: optimizer whose step is applied to the slices.
        master_dtype: dtype of additional copies of 16-bit parameters; the optimizer updates the
            copies. None for no copies.

    Raises:
        ConfigError: ``master_dtype`` is not supported, or ``PieceStep`` does not support the
            optimizer.
    """

    reduction: ShardedReduction

    def __init__(
        self,
        reduction: ShardedReduction,
        parameters: ParameterSource,
        optimizer: Optimizer,
        master_dtype: torch.dtype | None,
    ) -> None:
        if master_dtype not in (None, torch.float32, torch.float64):
            raise ConfigError(
                f"master_dtype must be torch.float32 or torch.float64, got {master_dtype}"
            )
        self._rule = PieceStep(optimizer)
        self.master_dtype = master_dtype
        self._optimizer = weakref.ref(optimizer)
        self._own: dict[Tensor, tuple[int, int, tuple[int, ...]]] = {}
        """Version, address and strides of each gradient after backward, by parameter."""
        self._changed_name = ""  # name of a parameter whose gradient is not usable, or empty
        self._changes: list[Change] = []
        self._is_new = True  # whether gradients were computed after the last step message
        self._old_weight: float | None = None
        """Weight of the gradients that remain from the last step; None without such gradients."""
        self._was_clipped = False  # whether the averages of the last step were clipped or unscaled
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self.is_spoilt = False  # whether a step has failed midway
        self._overflowed = False  # whether the last unscaling found NaN or infinity
        reduction.prepare(self._rule, master_dtype)
        super().__init__(reduction, parameters, world.current().last_call.note)
        optimizer.register_state_dict_pre_hook(_require_trusted)

    # -- during backward --------------------------------------------------------------------

    def on_ready(self, parameter: Tensor) -> None:
        """Copy one gradient to its bucket; autograd calls this after accumulating the gradient."""
        slot = self.reduction.layout.slot_of.get(parameter)
        if not self.is_on or self.superseded:
            return
        self.state, self._is_new = FILLING, True
        if slot is not None:
            slot.is_result = False
            slot.fires += 1
            try:
                if slot.fits(parameter):  # otherwise step() builds the buckets again
                    self.reduction.take(slot)
                    self.reduction.ready(slot)
            except (
                CommError
            ):  # the memory is shared with another slot; the step message reports it
                self._changed_name = slot.name
        self._note_own(parameter)

    def _note_own(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._own[parameter] = (*writes_of(parameter.grad), parameter.grad.stride())

    @property
    def _sees_sums(self) -> bool:
        """Whether hooks call ``before_sum`` before backward adds to an existing gradient."""
        return True

    def before_sum(self, parameter_id: int) -> None:
        """Check whether a gradient was changed before backward adds to it."""
        slot = self.reduction.layout.slot_by_id.get(parameter_id)
        if slot is None:
            return
        if self._changes:  # backward after clipping
            if any(p.grad is not None and p.grad.any() for p in self._own):
                self._changed_name = slot.name
            self._changes = []  # these were for gradients that the program has cleared
        if slot.parameter in self._own:
            if self._is_changed(slot.parameter):
                self._changed_name = slot.name
            self._note_own(slot.parameter)
        elif self._weight_has_changed and slot.holds_result and slot.has_values:
            # The gradient is from the previous step.
            self._changed_name = slot.name

    # -- the step ---------------------------------------------------------------------------

    def synchronize(self) -> bool:
        """Compare the ranks before ``step()``. Collective.

        A rank that does not call this method joins the comparison by its next call of ``open``.
        """
        self._open_once(synchronizes=True)
        return False

    def open(self) -> None:
        """Compare the ranks before a step. Collective."""
        while self._open_once():
            pass  # other ranks were in synchronize(), and call open() later

    @dynamo_disable
    def _open_once(self, *, synchronizes: bool = False) -> bool:
        """Exchange step messages; return whether any rank called ``synchronize``. Collective.

        After ``synchronize`` a rank may still clip gradients, so settings are compared in the next
        message only.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        self._check_owner()
        settings = f"{self._rule.read(optimizer)}; {self.master_dtype}; {self._changes}"
        slots = self.reduction.layout.slots
        is_written = not self.is_spoilt and self.reduction.is_written(optimizer)
        repeats = not self._own and any(
            # Zeros of zero_grad() are not gradients of the previous step.
            slot.holds_result and (_version_of(slot) == slot.version or slot.has_values)
            for slot in slots
            if isinstance(slot, Slot)
        )
        own_facts = ShardedFacts(
            synchronizes=synchronizes,
            settings=None if synchronizes else crc32(settings.encode()),
            own_changed=self._changed_name or self._find_changed(),
            is_written=is_written,
            is_stale=not self.is_spoilt and not is_written and self.reduction.is_stale,
            is_new=self._is_new,
            is_spoilt=self.is_spoilt,
        )
        changed = self._changed()
        agreement = self.reduction.open(changed, own_facts, optimizer, repeats=repeats)
        self.state, self._is_new = FILLING, False
        if changed is not None:
            self._rehook()
            for slot in self.reduction.layout.slots:  # zeros are not gradients of a step
                slot.is_result = slot.is_result and slot.has_values
        for parameter in self._own:
            self._note_own(parameter)
        self._note("gradients")
        return agreement.sharded.synchronizes

    @property
    def _weight_has_changed(self) -> bool:
        """Whether the previous step has clipped gradients, or the weight has changed since."""
        return self._was_clipped or self._old_weight not in (None, self.reduction.count.weight)

    def _find_changed(self) -> str:
        for each in self.reduction.layout.slots if self._weight_has_changed else ():
            if each.parameter not in self._own and each.holds_result and each.has_values:
                return each.name
        for parameter in self._own:
            if self._is_changed(parameter):
                slot = self.reduction.layout.slot_of.get(parameter)
                return "a parameter" if slot is None else slot.name
        return ""

    def _is_changed(self, parameter: Tensor) -> bool:
        """Return whether the program has changed a gradient after backward.

        Gradients that were dropped or set to zero do not count as changed.
        """
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
        """Average the gradients, update the parameters, and set ``.grad`` to None. Collective."""
        del is_skipped  # a sharded step cannot be skipped
        optimizer = self._optimizer()
        if not self.is_on or optimizer is None:
            return False
        self._learn()
        try:
            self.open()
        except BaseException as error:
            if not isinstance(error, HpctrainError) or isinstance(error, RankLostError):
                self._spoil()  # other ranks may have received the agreement and taken the step
            raise
        present: list[list[bool]] = []
        failure: BaseException | None = None
        try:
            present = self.reduction.update(self._rule, self._changes)
        except BaseException as error:  # ``close`` raises the error on all ranks
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
                slot.show()  # zeros, since a parameter has a gradient on all ranks or on none
            grad = slot.parameter.grad
            slot.is_result = grad is not None
            if grad is not None:
                slot.version = _version_of(slot)
                self._hidden.append((slot.parameter, grad))
                slot.parameter.grad = None
        return True

    def _spoil(self) -> None:
        """Set the parameters of this rank to NaN, so that no partial step is used."""
        self.is_spoilt = True
        for slot in self.reduction.layout.slots:
            slot.parameter.data = torch.full_like(slot.parameter, math.nan)

    def state_loaded(self, state_dict: dict[str, Any]) -> None:
        """Replace the optimizer state by copies of the tensors in ``state_dict``.

        torch has cast the loaded state to 16 bits. No-op without master copies.
        """
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
        """Restore ``.grad``, and reset the state for the next step."""
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
        """Reset the state for another step; count the current step if it was begun."""
        if self.is_in_step:
            self.steps.end()
        self.state = EMPTY
        self._own, self._changes, self._changed_name = {}, [], ""
        self._is_new = True
        self.reduction.forget()

    def _learn(self) -> None:
        if self.reduction.count.weight:
            slots = self.reduction.layout.slots
            self.steps.unreached.count(slot.name for slot in slots if not slot.fires)

    # -- clipping ---------------------------------------------------------------------------

    def clip_value(self, parameters: Sequence[Tensor], value: float) -> None:
        """Clamp the averaged gradients in the next step."""
        del parameters  # all averages are clipped
        self._changes.append(Change(bound=float(value)))

    def clip_norm(
        self,
        parameters: Sequence[Tensor],
        max_norm: float,
        norm_type: float,
        *,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """Clip the averaged gradients in the next step; return their norm. Collective."""
        norm = self._norm(float(norm_type))
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"the norm of order {norm_type} of the averaged gradients must be finite to clip "
                f"them, got {norm}; skip this step on all ranks"
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
        except MismatchError:  # ranks that do not clip may have taken the step
            self._spoil()
            raise

    @torch.no_grad()
    def unscale(self, inverse_scale: Tensor, *, allows_fp16: bool) -> bool | None:
        """Unscale the averaged gradients in the next step; return whether any is not finite.

        Collective. Returns None if no rank has a gradient; ``GradScaler`` then reads ``.grad``.
        """
        if self._overflowed:  # GradScaler has skipped that step, so drop its clipping
            self._changes = []
        self.open()
        dtypes = {bucket.step_dtype for bucket in self.reduction.values.buckets}
        if not allows_fp16 and torch.float16 in dtypes:
            raise ValueError("Attempting to unscale FP16 gradients.")  # torch's message
        one, found, own = torch.ones(()), torch.zeros(()), -1.0
        for grad in self.reduction.gradients(self._changes):
            unscale_([grad], found, one)
            own = found.item()
        of_all = self._norm_of_all(own, math.inf)
        self._overflowed = of_all > 0
        if of_all < 0:
            return None
        if (factor := inverse_scale.item()) != 1.0:
            self._changes.append(Change(factor=factor))
        return self._overflowed


def _require_trusted(optimizer: Optimizer) -> None:
    """Raise ``CommError`` if a step has failed midway; called by ``state_dict()``."""
    exchange = exchange_of(optimizer)
    if isinstance(exchange, ShardedStep) and exchange.is_spoilt:
        raise CommError(
            "shared parameters must not be used after a failed step, but a step has failed "
            "midway; restart from a checkpoint"
        )


def _version_of(slot: Slot) -> int:
    grad = slot.parameter.grad
    return -1 if grad is None else version_of(grad)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal values, dtype and shape."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
