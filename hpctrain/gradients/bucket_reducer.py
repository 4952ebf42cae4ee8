"""``Reducer``, which averages gradients over all ranks before ``backward()`` returns.

autograd accumulates a gradient   ``on_ready``   copies the gradient to its bucket
the last gradient of a bucket     ``take``       starts the all-reduce, except with overlap = "end"
backward ends                     ``complete``   sends the other buckets, waits, sets ``.grad``
"""

from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from hpctrain.comm.device import require_no_capture
from hpctrain.core.errors import CommError, ConfigError, MismatchError
from hpctrain.core.torch_compat import dynamo_disable, graph_task_id
from hpctrain.gradients.autograd_hooks import BackwardPass, ParameterHooks, is_outermost
from hpctrain.gradients.gradient_bucket import Slot
from hpctrain.gradients.optimizer_exchange import Closure
from hpctrain.gradients.parameter_names import NamedParameters
from hpctrain.gradients.reduction import Reduction
from hpctrain.gradients.sample_count import SampleCount
from hpctrain.gradients.sparse_gradients import SparseSlot, writes_of
from hpctrain.gradients.step_counter import StepCounter
from hpctrain.gradients.step_header import AverageFacts, GradientFacts, StepAgreement, StepMessage


class StepState(Enum):
    """State of the gradients of the current step in a reducer, with the next state per event.

    =========== ============ ========== =============
    from        backward()   reduction  zero_grad()
    =========== ============ ========== =============
    EMPTY       FILLING      REDUCED    EMPTY
    FILLING     FILLING      REDUCED    EMPTY
    REDUCED     REFILLING    REDUCED    CLEARED
    REFILLING   REFILLING    REDUCED    CLEARED
    CLEARED     REFILLING    REDUCED    CLEARED
    =========== ============ ========== =============

    The end of a step, ``load_state_dict`` and a change of the ranks lead to EMPTY.
    """

    EMPTY = auto()  # the step has no gradients yet
    FILLING = auto()  # backward computes gradients, or a reduction without a backward has begun
    REDUCED = auto()  # all ranks have the sum or average
    REFILLING = auto()  # like FILLING, after a reduction in this step
    CLEARED = auto()  # like EMPTY, after a reduction in this step

    def filled(self) -> "StepState":
        """Return the state after a backward pass has begun."""
        return FILLING if self in {EMPTY, FILLING} else StepState.REFILLING

    def cleared(self) -> "StepState":
        """Return the state after the program has called ``zero_grad()``."""
        return EMPTY if self in {EMPTY, FILLING} else StepState.CLEARED

    @property
    def is_begun(self) -> bool:
        """Whether the current step has gradients."""
        return self not in {EMPTY, StepState.CLEARED}

    @property
    def was_reduced(self) -> bool:
        """Whether gradients were reduced in this step and may have changed since."""
        return self in {StepState.REFILLING, StepState.CLEARED}


EMPTY, FILLING = StepState.EMPTY, StepState.FILLING


ParameterSource = Callable[[], NamedParameters]


class Reducer:
    """Averages (or sums) the gradients of a set of parameters over all ranks, once per step.

    Collective: every rank takes the same number of steps. A rank may skip ``backward`` in a step.
    A rank without a gradient of a parameter adds zeros; if no rank has a gradient, ``.grad`` stays
    None. The constructor allocates the buckets and hooks the parameters; the hooks are removed
    when the reducer is deleted.

    Args:
        reduction: reduction that sends the gradients.
        parameters: function that returns the current parameters with their names; called in every
            step.
        note: function that is called once per step with the name of the collective operation, for
            messages.
        passes: backward passes that are accumulated before one reduction.
        is_exclusive: whether a later exclusive reducer of the same parameter replaces this
            reducer.
    """

    def __init__(
        self,
        reduction: Reduction,
        parameters: ParameterSource,
        note: Callable[[str], object],
        *,
        passes: int = 1,
        is_exclusive: bool = True,
    ) -> None:
        self.reduction = reduction
        self.is_exclusive, self.superseded = is_exclusive, ""
        self.is_on = True
        """Whether gradients are reduced; changed between the same two steps on all ranks."""
        self._note = note
        self._parameters = parameters
        self._num_passes, self._passes_done = passes, 0
        self.state = StepState.EMPTY
        self._seen: dict[Tensor, tuple[Tensor, tuple[int, int]]] = {}
        """For each parameter, the gradient and its ``writes_of`` after the last pass."""
        self._replaced_sum = ""
        """Name of a parameter whose reduced sum the program has replaced; empty if none."""
        self._backward = BackwardPass()
        kind = type(self)
        before_sum = kind.before_sum if self._sees_sums else None
        self._hooks = ParameterHooks(self, kind.on_ready, before_sum)
        reduction.steps.enter(self)
        reduction.layout.build(self._current_parameters())
        self._rehook()

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes that are accumulated before one reduction."""
        self._num_passes = passes
        self._passes_done = 0

    def switch(self, *, is_on: bool) -> None:
        """Start or stop reducing gradients, from the next step on. Stopping is collective."""
        if self.is_on and not is_on:
            self.reduction.confirm()
        self.is_on = is_on

    @property
    def steps(self) -> StepCounter:
        """Step counter, which compares the ranks before a step and exchanges their flags."""
        return self.reduction.steps

    @property
    def count(self) -> SampleCount:
        """Weights of the ranks' gradients."""
        return self.reduction.count

    @property
    def exposed_seconds(self) -> float:
        """Seconds for which the last step waited for other ranks."""
        return self.reduction.exposed_seconds

    @property
    def is_in_step(self) -> bool:
        """Whether this rank has gradients of the current step."""
        return self.state.is_begun

    @property
    def _sees_sums(self) -> bool:
        """Whether hooks call ``before_sum`` before backward adds to an existing gradient."""
        return not self.count.average

    @property
    def has_begun(self) -> bool:
        """Whether a backward of this step has run, or gradients of this step are reduced."""
        return self.state is StepState.REDUCED or self._has_backward

    @property
    def _has_backward(self) -> bool:
        return bool(self._backward.num_fires or self._passes_done)

    def set_num_samples(self, num_samples: float, nominal: float) -> None:
        """Set the number of samples by which this rank's gradient is weighted."""
        if not self.count.average:
            raise ConfigError(
                "sample counts can only be set with op=Average, but op is Sum; scale the loss "
                "instead"
            )
        before = self.count.weight
        self.count.set(num_samples, nominal)
        if self._passes_done and self.count.weight != before:
            raise ConfigError(
                f"num_samples must be the same for all {self._num_passes} backward passes of a "
                f"step, got num_samples={num_samples} after pass {self._passes_done}; call "
                f"set_num_samples before the first pass"
            )

    @dynamo_disable
    def finish(self, *, is_skipped: bool = False) -> bool:
        """Reduce the gradients that ``backward()`` has not reduced in this step. Collective.

        The program may have replaced or dropped reduced gradients. If all ranks have made the same
        changes, the changes are kept. If the changes differ, the gradients are averaged again. The
        same rule applies after a ``zero_grad()`` without a later backward.

        Args:
            is_skipped: whether this rank skips the step. Gradients of the previous step are then
                dropped, and the weight of this rank is 0 unless a backward has run.

        Returns:
            Whether gradients were reduced.
        """
        if not self.is_on:
            return False
        self._check_owner()
        has_begun, is_reduced = self._has_backward, self.state is StepState.REDUCED
        if is_reduced or has_begun:
            old = []
        else:  # without a backward, the gradients are from the previous step
            old = [slot for slot in self.reduction.layout.slots if slot.holds_result]
        for slot in old if is_skipped else ():
            slot.parameter.grad = None
        changed = self._changed()
        may_be_kept = is_reduced or (self.state.was_reduced and not has_begun)
        program_changes = self.reduction.program_changes(changed) if may_be_kept else None
        is_due = not is_reduced or program_changes is not None or changed is not None
        if is_due:
            count, slot_of = self.count, self.reduction.layout.slot_of
            keeps_sums = is_reduced and program_changes is not None and not count.average
            averages = AverageFacts(
                program_changes=program_changes,
                keeps_sums=keeps_sums and any(p.grad is not None for p in slot_of),
                changed_early=self._were_changed_early(),
                replaced_sum=self._replaced_sum,
            )
            repeats = any(slot.has_values for slot in old)
            weight = count.weight
            if is_skipped and count.is_set and not has_begun:
                count.weight = 0.0
            self._complete(changed, averages, repeats=repeats)
            count.weight = weight
        return is_due

    def begin_step(self, stepping: Optimizer, closure: Closure) -> Closure:
        """Average the remaining gradients, or, with ``closure``, return a closure that does so.

        The returned closure calls ``closure``, averages the gradients that this call has computed,
        and returns the loss. Collective.
        """
        if closure is None:
            self.finish()
            return None

        def averaging() -> Any:
            loss = closure()
            self.finish()
            if isinstance(stepping, LBFGS):  # LBFGS ends a step depending on the loss
                self.reduction.require_equal_loss(loss)
            return loss

        return averaging

    @dynamo_disable
    def new_step(self) -> None:
        """Reset the state; called before the program clears the gradients."""
        self.reduction.is_finite = None
        self.state = self.state.cleared()
        self._passes_done = 0
        self._replaced_sum = ""
        if self._backward.tasks:  # a backward raised an error
            self._discard_failed_backward()

    @dynamo_disable
    def end_step(self) -> None:
        """Count the finished step, and reset the state for the next step."""
        self.steps.end()
        self.new_step()
        self.state = StepState.EMPTY

    @dynamo_disable
    def start_again(self) -> None:
        """Discard the gradients of a failed backward; called when a state is loaded.

        Collective if a backward raised an error after some of its gradients were sent. In this
        case, the ranks send the remaining gradients, so that the order of messages stays the same
        on all ranks.
        """
        if self._backward.tasks and self.reduction.has_sent:
            with suppress(MismatchError):
                self.reduction.complete()
        self.reduction.drop()
        self.steps.number = None
        self._forget_step()

    def move_to(self, reduction: Reduction) -> None:
        """Use another reduction, with other ranks, from the next step on.

        Collective over the ranks of ``reduction``. Gradients in flight are discarded.
        """
        reduction.around, reduction.steps.flags = self.reduction.around, self.steps.flags
        reduction.looks = self.reduction.looks
        self._forget_step()
        self.reduction = reduction
        reduction.steps.enter(self)
        reduction.layout.build(self._current_parameters())
        self._rehook()

    def _forget_step(self) -> None:
        self._passes_done, self.state, self._replaced_sum = 0, StepState.EMPTY, ""
        self._backward.forget()

    def contribute_zeros(self, agreement: StepAgreement) -> None:
        """Contribute zeros to a step of the other ranks, on a joined rank. Collective."""
        for parameter in self.reduction.layout.slot_of:
            parameter.grad = None
        changed = self._current_parameters() if agreement.outdated else None
        self.reduction.complete(changed, agreement=agreement)
        if changed is not None:
            self._rehook()
        self.steps.end(is_own=False)

    def hook(self) -> None:
        """Hook the parameters that are not hooked yet. Local."""
        self._hooks.hook(self._parameters())

    def _rehook(self) -> None:
        self.hook()
        self.steps.watch(self._parameters())  # frozen parameters are part of the replica
        self._backward.relearn()

    def _check_owner(self) -> None:
        if self.superseded:
            raise ConfigError(
                "only the last DistributedOptimizer of a parameter can step, but a later "
                f"optimizer reduces the gradient of {self.superseded}; step the later one, or "
                "delete it and wrap this optimizer again"
            )

    # -- during backward --------------------------------------------------------------------

    def on_ready(self, parameter: Tensor) -> None:
        """Copy a gradient to its bucket; autograd calls this after accumulating the gradient."""
        if not self.is_on or self.superseded:
            return
        backward, task = self._backward, graph_task_id()
        if task not in backward.tasks:
            require_no_capture(parameter.device)
            self._enter_graph_task(task, is_outermost=is_outermost(parameter))
        backward.num_fires += 1
        slot = self.reduction.layout.slot_of.get(parameter)
        if slot is None:  # a frozen parameter
            return
        slot.fires += 1
        slot.is_result = False
        if backward.takes_early:
            self.reduction.take(slot)

    def before_sum(self, parameter_id: int) -> None:
        """Clear a reduced sum on all ranks but one, before backward adds a gradient to the sum.

        All ranks have the same sum, and the next reduction must add the sum only once.
        """
        slot = self.reduction.layout.slot_by_id.get(parameter_id)
        if not self.is_on or self.superseded or slot is None or not slot.is_result:
            return
        if _is_replaced(slot):
            self._replaced_sum = slot.name
        if slot.holds_result and not self.reduction.keeps_result:
            slot.forget_result()
        slot.is_result = False

    def _enter_graph_task(self, task: int, *, is_outermost: bool) -> None:
        backward = self._backward
        if is_outermost and backward.has_outer_end:
            self._discard_failed_backward()
        if not backward.tasks:
            self.state = self.state.filled()
            self._replaced_sum = self._replaced_sum or self._find_replaced_sum()
            last_pass = self._passes_done + 1 >= self._num_passes
            may_take = backward.fires_once and last_pass and not self._replaced_sum
            backward.takes_early = may_take and self._changed() is None
        end = self._on_backward_end if is_outermost else self._on_nested_end
        backward.enter(task, end, is_outermost=is_outermost)

    @dynamo_disable
    def _on_nested_end(self) -> None:
        if self._backward.is_over(self._have_all_fired):
            self._on_backward_end()

    def _have_all_fired(self) -> bool:
        """Return whether the hooks of all trained parameters have fired in this backward."""
        return all(
            slot.fires > self._passes_done
            for slot in self.reduction.layout.slots
            if slot.parameter.requires_grad
        )

    @dynamo_disable
    def _on_backward_end(self) -> None:
        self._passes_done += 1
        if self._passes_done >= self._num_passes:
            changed = None if self._backward.takes_early else self._changed()
            self._complete(changed, AverageFacts(replaced_sum=self._replaced_sum))
        else:
            grads = ((p, p.grad) for p in self.reduction.layout.slot_of)
            self._seen = {p: (g, writes_of(g)) for p, g in grads if g is not None}
            self._backward.forget()

    def _discard_failed_backward(self) -> None:
        """Discard the gradients of a backward that raised an error."""
        if self.reduction.has_sent:
            raise CommError(
                "the last backward raised an error after some of its gradients were sent, so the "
                "ranks may differ; restart from a checkpoint, or set HPCTRAIN_OVERLAP=end"
            )
        self.reduction.forget()
        self._passes_done = 0
        self._backward.forget()

    # -- the reduction ----------------------------------------------------------------------

    def _current_parameters(self) -> NamedParameters:
        """Return the parameters that a step may change: not frozen, or with a gradient."""
        return [
            named
            for named in self._parameters()
            if named[1].requires_grad or named[1].grad is not None
        ]

    def _changed(self) -> NamedParameters | None:
        """Return the current parameters if buckets or hooks do not match them, else None."""
        current = self._current_parameters()
        is_hooked = all(self._hooks.has(p) or not p.requires_grad for _, p in current)
        return None if is_hooked and self.reduction.layout.fits(current) else current

    def _were_changed_early(self) -> bool:
        """Return whether the program has changed an accumulated gradient between two passes."""
        if not self._passes_done:
            return False
        for parameter in self.reduction.layout.slot_of:
            grad = parameter.grad
            seen, writes = self._seen.get(parameter, (None, None))
            if grad is not None and (grad is not seen or writes_of(grad) != writes):
                return True
        return False

    def _find_replaced_sum(self) -> str:
        """Return the name of a parameter whose reduced sum was replaced, or an empty string.

        The reducer cannot separate the contributions of the ranks in such a gradient.
        """
        if not self.count.average:
            for slot in self.reduction.layout.slots:
                if _is_replaced(slot):
                    return slot.name
        return ""

    def _complete(
        self, changed: NamedParameters | None, averages: AverageFacts, *, repeats: bool = False
    ) -> None:
        if not self.state.is_begun:
            self.state = self.state.filled()
        self._learn()
        gradients = GradientFacts(repeats=repeats)
        self.reduction.complete(changed, StepMessage(gradients=gradients, averages=averages))
        self._note("gradients")
        if changed is not None:
            self._rehook()
        self._passes_done = 0
        self._seen = {}
        self._replaced_sum = ""
        self.state = StepState.REDUCED
        self._backward.forget()

    def _learn(self) -> None:
        slots = self.reduction.layout.slots
        # A rank without samples runs no backward.
        if self.count.weight and self.state is not StepState.REDUCED:
            self.steps.unreached.count(slot.name for slot in slots if not slot.fires)
        self._backward.learn((slot.fires for slot in slots), self._num_passes)


def _is_replaced(slot: Slot | SparseSlot) -> bool:
    """Return whether a reduced gradient was replaced by a tensor with nonzero values.

    Zeros are ignored: ``zero_grad(set_to_none=False)`` of a converted parameter replaces the
    gradient by zeros.
    """
    return slot.is_result and slot.is_touched and slot.has_values
