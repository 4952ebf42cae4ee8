"""From ``.grad`` to the average over all ranks: by the time ``backward()`` returns, it is there.

autograd finishes a gradient     on_ready      copies it into its place in the bucket
the bucket's last one is there   take          starts its all-reduce (or waits for the end)
backward ends                    complete      waits; ``.grad`` is the average from here on
"""

import sys
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from hpctrain.comm.device import require_no_capture
from hpctrain.compress.codec import Codec
from hpctrain.compress.savings import Savings
from hpctrain.core.errors import CommError, ConfigError, MismatchError
from hpctrain.core.torch_compat import (
    BACKWARD,
    call_after_backward,
    dynamo_disable,
    graph_task_id,
    is_multithreading_enabled,
)
from hpctrain.gradients.gradient_bucket import Slot
from hpctrain.gradients.optimizer_exchange import Closure
from hpctrain.gradients.parameter_names import NamedParameters
from hpctrain.gradients.reduction import Reduction
from hpctrain.gradients.sample_count import SampleCount
from hpctrain.gradients.sparse_gradients import SparseSlot, writes_of
from hpctrain.gradients.step_counter import StepCounter
from hpctrain.gradients.step_header import AverageFacts, GradientFacts, StepAgreement, StepMessage

if TYPE_CHECKING:
    from types import FrameType

    from torch.utils.hooks import RemovableHandle


ParameterSource = Callable[[], NamedParameters]


class Reducer:
    """Averages (or sums) the gradients of a set of parameters over all ranks, once per step.

    Collective: every rank goes through the same number of steps. A rank may skip ``backward`` in
    a step, and parameters may lack a gradient on some ranks (they add zeros) or on all of them
    (``.grad`` stays None). The hooks go when the reducer goes.
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
        """Lay out the buckets and hook the parameters. Collective.

        ``parameters`` returns all of today, by name; it is asked again in every step. ``note`` is
        told once per step what this rank has done with others. Of several reducers that are
        exclusive only the last one reduces a gradient.
        """
        self.reduction = reduction  # what moves the gradients
        self._is_exclusive = is_exclusive
        self.is_on = True
        """Whether gradients are reduced; while it is off they stay as this rank made them. It
        changes between two steps, on all ranks in the same one."""
        self._note = note
        self._parameters = parameters
        self._num_passes = passes
        self.is_in_step = False  # whether gradients of the present step have been begun with
        self._is_reduced = False
        self._was_reduced = False  # whether it was in this step, before a zero_grad() too
        self._passes_done = 0
        self._seen: dict[torch.Tensor, tuple[torch.Tensor, tuple[int, int]]] = {}
        """Gradients that wait for another pass, and what changes when they are written."""
        self._replaced_sum = ""
        """Name of a sum that was replaced before this backward, which adds to it."""
        self._forget_backward()
        self._superseded = ""  # why these gradients are no longer reduced here, if so
        self._gradient_hook = _Hook(self, type(self)._on_ready, None)  # noqa: SLF001
        self._hooks: list[RemovableHandle] = []
        self._hooked: dict[int, int] = {}
        """By parameter: what torch had hooked; a conversion may swap it for another."""
        reduction.steps.enter(self)
        reduction.build(self._today())
        self._hook_anew()
        weakref.finalize(self, _remove, self._hooks)

    def set_passes(self, passes: int) -> None:
        """Accumulate so many backward passes locally before one reduction, from the next on."""
        self._num_passes = passes
        self._passes_done = 0

    def switch(self, *, is_on: bool) -> None:
        """Reduce gradients from the next step on, or stop. Collective where that is a change."""
        if self.is_on and not is_on:
            self.reduction.confirm()
        self.is_on = is_on

    @property
    def steps(self) -> StepCounter:
        """What is compared before a step, with the flags of the ranks."""
        return self.reduction.steps

    @property
    def count(self) -> SampleCount:
        """How the gradients of the ranks are weighted."""
        return self.reduction.count

    @property
    def codec(self) -> Codec:
        """The codec of gradients, with a state of this rank."""
        return self.reduction.codec

    @property
    def savings(self) -> Savings:
        """Bytes that the codec saves between nodes."""
        return self.reduction.savings

    @property
    def exposed_seconds(self) -> float:
        """Time in which the last step waited for other ranks."""
        return self.reduction.exposed_seconds

    @property
    def _is_told_before(self) -> bool:
        """Whether ``_before_sum`` is called before a gradient is added to another."""
        return not self.count.average

    @property
    def has_begun(self) -> bool:
        """Whether a backward of this step has made gradients, or others have come in its place."""
        return self._is_reduced or bool(self._num_fires or self._passes_done)

    def set_num_samples(self, num_samples: float, nominal: float) -> None:
        """Let this rank's gradient count as the mean over ``num_samples``."""
        if not self.count.average:
            raise ConfigError("sample counts weight an average; this optimizer has op=Sum")
        before = self.count.weight
        self.count.set(num_samples, nominal)
        if self._passes_done and self.count.weight != before:
            raise ConfigError(
                f"all {self._num_passes} backward passes of a step count alike, got "
                f"num_samples={num_samples} after pass {self._passes_done}; set it before them"
            )

    @dynamo_disable
    def finish(self, *, is_skipped: bool = False) -> bool:
        """Reduce now what ``backward()`` has not reduced in this step. Collective.

        Gradients that the program has replaced or dropped since are the ranks' own: where all
        ranks have done the same they stay, else they are averaged; also behind a ``zero_grad()``
        that no backward has followed. Returns whether there was anything to do. In a step that is
        skipped, gradients of the step before add nothing, and samples count only if there was a
        backward.
        """
        if not self.is_on:
            return False
        self._check_owner()
        has_begun = bool(self._num_fires or self._passes_done)
        if self._is_reduced or has_begun:
            old = []
        else:  # no backward, so these are the gradients of the step before
            old = [slot for slot in self.reduction.slot_of.values() if slot.holds_result]
        for slot in old if is_skipped else ():
            slot.parameter.grad = None
        changed = self._changed()
        may_be_kept = self._is_reduced or (self._was_reduced and not has_begun)
        by_hand = self.reduction.changed_by_hand(changed) if may_be_kept else None
        is_due = not self._is_reduced or by_hand is not None or changed is not None
        if is_due:
            count = self.count
            keeps_sums = self._is_reduced and by_hand is not None and not count.average
            averages = AverageFacts(
                by_hand=by_hand,
                keeps_sums=keeps_sums and self.reduction.has_gradients,
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
        """Average what is not averaged yet, inside of the closure if there is one. Collective."""
        if closure is None:
            self.finish()
            return None

        def averaging() -> Any:
            loss = closure()
            self.finish()
            if isinstance(stepping, LBFGS):  # which decides by the loss when a step ends
                self.reduction.require_equal_loss(loss)
            return loss

        return averaging

    @dynamo_disable
    def new_step(self) -> None:
        """Expect the gradients of another step."""
        self.reduction.is_finite = None
        self.is_in_step = self._is_reduced = False
        self._passes_done = 0
        self._replaced_sum = ""
        if self._graph_tasks:  # a backward has raised
            self._break_off()

    @dynamo_disable
    def end_step(self) -> None:
        """Count a step that was taken, and expect another."""
        self.steps.end()
        self.new_step()
        self._was_reduced = False

    @dynamo_disable
    def start_again(self) -> None:
        """Forget what a backward that raised has left: parameters and state were replaced.

        Collective if one has raised after some of its gradients had travelled: then every rank
        calls this, and the rest travels too, so that the ranks meet again.
        """
        if self._graph_tasks and self.reduction.has_sent:
            with suppress(MismatchError):
                self.reduction.complete()
        self.reduction.drop()
        self.steps.number = None
        self._passes_done = 0
        self._is_reduced = self._was_reduced = False
        self._forget_backward()

    def move_to(self, reduction: Reduction) -> None:
        """Reduce over the ranks of another reduction from the next step on. Collective over those.

        What was under way is forgotten.
        """
        reduction.around, reduction.steps.flags = self.reduction.around, self.steps.flags
        reduction.looks = self.reduction.looks
        self._passes_done = 0
        self._is_reduced = self._was_reduced = self.is_in_step = False
        self._forget_backward()
        self.reduction = reduction
        reduction.steps.enter(self)
        reduction.build(self._today())
        self._hook_anew()

    def stand_in(self, agreement: StepAgreement) -> None:
        """Take part in a step of the others with nothing. Collective."""
        for parameter in self.reduction.slot_of:
            parameter.grad = None
        changed = self._today() if agreement.outdated else None
        self.reduction.complete(changed, agreement=agreement)
        if changed is not None:
            self._hook_anew()
        self.steps.end(is_own=False)

    def hook(self) -> None:
        """Hook the parameters that are not hooked yet, frozen ones too: one may thaw. Local."""
        for name, parameter in self._parameters():
            if self._is_hooked(parameter) or not _can_have_gradient(parameter):
                continue
            self._hooked[id(parameter)] = parameter._cdata  # noqa: SLF001 - of what torch hooks
            if self._gradient_hook in _hooks_of(parameter):
                _rearm(parameter)
                continue
            self._take_over(parameter, name)
            is_trained = parameter.requires_grad
            parameter.requires_grad_()  # torch hooks no frozen parameter
            hooks = [parameter.register_post_accumulate_grad_hook(self._gradient_hook)]
            if self._is_told_before:
                hook = _Hook(self, type(self)._before_sum, id(parameter))  # noqa: SLF001
                hooks.append(parameter.register_hook(hook))
            parameter.requires_grad_(is_trained)
            self._hooks += hooks

    def _watch(self) -> None:
        """Let all parameters be compared, frozen ones too: they are part of the replica."""
        self.steps.watch(self._parameters())

    def _hook_anew(self) -> None:
        self.hook()
        self._watch()
        # The first step keeps everything to its end and learns how often each hook fires.
        self._is_first, self._fires_once = True, False
        self._nested_fires = -1

    def _take_over(self, parameter: Parameter, name: str) -> None:
        """Tell an older optimizer that reduces this gradient that another does from now on."""
        for hook in _hooks_of(parameter):
            other = hook.reducer() if isinstance(hook, _Hook) else None
            if other is not None and self._is_exclusive and other._is_exclusive:  # noqa: SLF001
                other._superseded = name  # noqa: SLF001

    def _check_owner(self) -> None:
        if self._superseded:
            raise ConfigError(
                f"the gradient of {self._superseded} is reduced by a DistributedOptimizer that "
                f"was made later; step that one, or drop it and wrap this optimizer anew"
            )

    # -- while backward runs ----------------------------------------------------------------

    def _on_ready(self, parameter: torch.Tensor) -> None:
        """Take one gradient; autograd calls this as soon as it is accumulated."""
        if not self.is_on or self._superseded:
            return
        task = graph_task_id()
        if task not in self._graph_tasks:
            require_no_capture(parameter.device)
            self._enter_graph_task(task, _is_outermost_backward(parameter))
        self._num_fires += 1
        slot = self.reduction.slot_of.get(parameter)
        if slot is None:  # it was frozen
            return
        slot.fires += 1
        slot.is_result = False
        if self._takes_early:
            self.reduction.take(slot)

    def _before_sum(self, parameter_id: int) -> None:
        """Make room for a gradient that is about to be added to a sum: one rank keeps that."""
        slot = self.reduction.slot_by_id.get(parameter_id)
        if not self.is_on or self._superseded or slot is None or not slot.is_result:
            return
        if _is_replaced(slot):
            self._replaced_sum = slot.name
        if slot.holds_result and not self.reduction.keeps_result:
            slot.forget_result()
        slot.is_result = False

    def _enter_graph_task(self, task: int, outermost: bool) -> None:  # noqa: FBT001 - reads well
        if outermost and self._has_outer_end:
            self._break_off()
        if not self._graph_tasks:
            self.is_in_step, self._is_reduced = True, False
            self._replaced_sum = self._replaced_sum or self._find_replaced_sum()
            last_pass = self._passes_done + 1 >= self._num_passes
            self._takes_early = (
                self._fires_once
                and last_pass
                and not self._replaced_sum
                and self._changed() is None
            )
        self._graph_tasks.add(task)
        self._has_outer_end |= outermost
        end = self._on_backward_end if outermost else self._on_nested_end
        call_after_backward(end)

    @dynamo_disable
    def _on_nested_end(self) -> None:
        """A backward inside backward (reentrant checkpointing) is over.

        If no hook has fired in the outer one, the end is known by counting: all have fired, or as
        many as in an earlier backward in which none ever did. Else ``step()`` reduces.
        """
        if not self._has_outer_end and (
            self._num_fires == self._nested_fires or self._have_all_fired()
        ):
            self._on_backward_end()

    def _have_all_fired(self) -> bool:
        """Say whether every trained parameter has got a gradient in this backward."""
        return all(
            slot.fires > self._passes_done
            for slot in self.reduction.slot_of.values()
            if slot.parameter.requires_grad
        )

    @dynamo_disable
    def _on_backward_end(self) -> None:
        self._passes_done += 1
        if self._passes_done >= self._num_passes:
            changed = None if self._takes_early else self._changed()
            self._complete(changed, AverageFacts(replaced_sum=self._replaced_sum))
        else:
            grads = ((p, p.grad) for p in self.reduction.slot_of)
            self._seen = {p: (g, writes_of(g)) for p, g in grads if g is not None}
            self._forget_backward()

    def _break_off(self) -> None:
        """Forget a backward that raised: its gradients are not those of this step."""
        if self.reduction.has_sent:
            raise CommError(
                "the last backward raised after some of its gradients had travelled, so the ranks "
                "may differ; start again from a checkpoint, or set HPCTRAIN_OVERLAP=end"
            )
        self.reduction.forget()
        self._passes_done = 0
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._graph_tasks: set[int] = set()
        self._has_outer_end = False
        self._takes_early = False
        self._num_fires = 0

    # -- the reduction ----------------------------------------------------------------------

    def _today(self) -> NamedParameters:
        """Return the parameters that a step may change: trained, or frozen with a gradient."""
        return [
            named
            for named in self._parameters()
            if named[1].requires_grad or named[1].grad is not None
        ]

    def _changed(self) -> NamedParameters | None:
        """Return the parameters of today if buckets or hooks no longer fit them."""
        today = self._today()
        is_hooked = all(self._is_hooked(p) or not p.requires_grad for _, p in today)
        return None if is_hooked and self.reduction.fits(today) else today

    def _is_hooked(self, parameter: Parameter) -> bool:
        is_armed = self._hooked.get(id(parameter)) == parameter._cdata  # noqa: SLF001
        return is_armed and self._gradient_hook in _hooks_of(parameter)

    def _were_changed_early(self) -> bool:
        """Say whether a gradient that waits for another pass is not what backward has left."""
        if not self._passes_done:
            return False
        for parameter in self.reduction.slot_of:
            grad = parameter.grad
            seen, writes = self._seen.get(parameter, (None, None))
            if grad is not None and (grad is not seen or writes_of(grad) != writes):
                return True
        return False

    def _find_replaced_sum(self) -> str:
        """Name a sum that was replaced: nobody can tell what part of it is whose."""
        if not self.count.average:
            for slot in self.reduction.slot_of.values():
                if _is_replaced(slot):
                    return slot.name
        return ""

    def _complete(
        self, changed: NamedParameters | None, averages: AverageFacts, *, repeats: bool = False
    ) -> None:
        self.is_in_step = True
        self._learn()
        gradients = GradientFacts(repeats=repeats)
        self.reduction.complete(changed, StepMessage(gradients=gradients, averages=averages))
        self._note("gradients")
        if changed is not None:
            self._hook_anew()
        self._passes_done = 0
        self._seen = {}
        self._replaced_sum = ""
        self._is_reduced = self._was_reduced = True
        self._forget_backward()

    def _learn(self) -> None:
        slots = self.reduction.slot_of.values()
        if self.count.weight and not self._is_reduced:  # else it says: no samples
            self.steps.count_reached(slot.name for slot in slots if not slot.fires)
        if not self._num_fires:
            return
        once = all(slot.fires <= self._num_passes for slot in slots)
        self._fires_once = once and (self._is_first or self._fires_once)
        self._is_first = False
        if not self._has_outer_end:
            self._nested_fires = self._num_fires // self._num_passes


class _Hook:
    """Tells a reducer what autograd does to a gradient; does not keep the reducer."""

    __slots__ = ("about", "reducer", "tell")
    __torch_unserializable__ = True  # a worker that gets the model needs none, and no warning

    def __init__(self, reducer: Reducer, tell: Callable[..., None], about: int | None) -> None:
        """Take a method of the reducer, and what it is told; None for what autograd gives."""
        self.reducer, self.tell, self.about = weakref.ref(reducer), tell, about

    @dynamo_disable
    def __call__(self, given: torch.Tensor) -> None:
        if (reducer := self.reducer()) is not None:
            self.tell(reducer, given if self.about is None else self.about)


def _is_replaced(slot: Slot | SparseSlot) -> bool:
    """Say whether another tensor is where a result was, and holds something.

    There are zeros only after ``zero_grad(set_to_none=False)`` of a parameter that was converted.
    """
    return slot.is_result and slot.is_touched and slot.has_values


def _remove(hooks: "list[RemovableHandle]") -> None:
    while hooks:
        hooks.pop().remove()


def _hooks_of(parameter: Parameter) -> Collection[object]:
    return (parameter._post_accumulate_grad_hooks or {}).values()  # noqa: SLF001


def _rearm(parameter: Parameter) -> None:
    """Hook a parameter again whose inside was swapped: only the Python side knows its hooks."""
    for hooks in ("_post_accumulate_grad_hooks", "_backward_hooks"):
        setattr(parameter, hooks, getattr(parameter, hooks))


def _can_have_gradient(parameter: torch.Tensor) -> bool:
    return parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex())


def _is_outermost_backward(parameter: torch.Tensor) -> bool:
    """Say whether the ``backward()`` that made a gradient was not called by another one.

    Autograd does not tell: a callback queued in a nested backward runs at the nested one's end.
    All of them enter the engine through one Python function, so its frames are counted. Gradients
    of an accelerator are made by a thread of the engine, in which there is no frame of the first.
    """
    is_in_thread = not parameter.is_cpu and is_multithreading_enabled()
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    depth = 0
    while frame is not None:
        depth += frame.f_code is BACKWARD
        frame = frame.f_back
    return depth <= (0 if is_in_thread else 1)
