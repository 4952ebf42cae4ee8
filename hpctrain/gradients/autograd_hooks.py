"""Autograd hooks, on parameters and at the end of a backward pass.

Several optimizers may share a parameter.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from hpctrain.core.torch_compat import (
    BACKWARD,
    accumulation_hooks_of,
    call_after_backward,
    dynamo_disable,
    identity_of,
    is_multithreading_enabled,
    rearm_hooks,
)
from hpctrain.gradients.parameter_names import NamedParameters


class HookOwner(Protocol):
    """Object that reduces the gradients of hooked parameters."""

    is_exclusive: bool  # whether only the last of several owners reduces a gradient
    superseded: str  # name of a parameter that a later owner reduces; empty if none


class ParameterHooks:
    """Calls functions of an owner when autograd computes gradients.

    The hooks are removed when the owner is deleted.

    Args:
        owner: first argument of both functions; a weak reference is stored.
        on_ready: function that is called with a parameter after its gradient was accumulated.
        before_sum: function that is called with the ``id`` of a parameter before its new gradient
            is added to an existing gradient; None for no calls.
    """

    def __init__(
        self,
        owner: HookOwner,
        on_ready: Callable[[Any, Tensor], None],
        before_sum: Callable[[Any, int], None] | None,
    ) -> None:
        self._owner, self._before_sum = weakref.ref(owner), before_sum
        self._ready = _Hook(owner, on_ready, None)
        self._handles: list[RemovableHandle] = []
        self._hooked: dict[int, int] = {}
        """Maps the ``id`` of a parameter to its ``identity_of`` when the parameter was hooked.

        A conversion of the parameter changes its ``identity_of``.
        """
        weakref.finalize(owner, _remove, self._handles)

    def hook(self, parameters: NamedParameters) -> None:
        """Hook the parameters that are not hooked yet. Local.

        Frozen parameters are hooked, too, because they may be trained later.
        """
        for name, parameter in parameters:
            if self.has(parameter) or not _can_have_gradient(parameter):
                continue
            self._hooked[id(parameter)] = identity_of(parameter)
            if self._ready in accumulation_hooks_of(parameter):
                rearm_hooks(parameter)
                continue
            owner = self._owner()
            assert owner is not None
            for hook in accumulation_hooks_of(parameter):
                other = hook.owner() if isinstance(hook, _Hook) else None
                if other is not None and owner.is_exclusive and other.is_exclusive:
                    other.superseded = name
            is_trained = parameter.requires_grad
            parameter.requires_grad_()  # torch rejects hooks on frozen parameters
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._ready))
            if self._before_sum is not None:
                hook = _Hook(owner, self._before_sum, id(parameter))
                self._handles.append(parameter.register_hook(hook))
            parameter.requires_grad_(is_trained)

    def has(self, parameter: Parameter) -> bool:
        """Return whether ``parameter`` has a hook of this object that autograd still calls."""
        is_armed = self._hooked.get(id(parameter)) == identity_of(parameter)
        return is_armed and self._ready in accumulation_hooks_of(parameter)


class _Hook:
    """Hook that calls a function of an owner, without keeping the owner alive.

    Args:
        owner: first argument of the function.
        call: function to call.
        about: second argument of the function; None to pass the argument of autograd.
    """

    __slots__ = ("about", "call", "owner")
    __torch_unserializable__ = True  # no warning when a model is sent to a worker process

    def __init__(self, owner: HookOwner, call: Callable[[Any, Any], None], about: Any) -> None:
        self.owner, self.call, self.about = weakref.ref(owner), call, about

    @dynamo_disable
    def __call__(self, given: Tensor) -> None:
        if (owner := self.owner()) is not None:
            self.call(owner, given if self.about is None else self.about)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _can_have_gradient(parameter: Tensor) -> bool:
    return parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex())


class BackwardPass:
    """State of the current backward pass, including the backward passes nested in it.

    The object also records how often the hooks have fired in earlier backward passes.
    """

    def __init__(self) -> None:
        self.forget()
        self.relearn()

    def forget(self) -> None:
        """Reset the state for another backward pass."""
        self.tasks: set[int] = set()  # ids of the graph tasks of autograd
        self.has_outer_end = False  # whether the outermost backward reports its end
        self.takes_early = False  # whether gradients are final when their hook fires
        self.num_fires = 0  # number of calls of hooks

    def relearn(self) -> None:
        """Discard the counts of hook calls; the next backward sends gradients only at its end."""
        self._is_first, self.fires_once = True, False
        self._nested_fires = -1

    def enter(self, task: int, on_end: Callable[[], None], *, is_outermost: bool) -> None:
        """Register a graph task of autograd; ``on_end`` is called when the task ends."""
        self.tasks.add(task)
        self.has_outer_end |= is_outermost
        call_after_backward(on_end)

    def is_over(self, have_all_fired: Callable[[], bool]) -> bool:
        """Return whether the end of a nested backward is also the end of the outer backward.

        Reentrant activation checkpoints run backward passes inside a backward pass. If no hook has
        fired in the outer backward itself, its end is detected by counting the hooks that have
        fired in nested passes: either all hooks, or as many as in an earlier backward of this
        kind. If neither holds, ``step()`` reduces the gradients.
        """
        if self.has_outer_end:
            return False
        return self.num_fires == self._nested_fires or have_all_fired()

    def learn(self, fires: Iterable[int], num_passes: int) -> None:
        """Record how often each hook has fired in the backward passes of a step."""
        if self.num_fires:
            once = all(number <= num_passes for number in fires)
            self.fires_once = once and (self._is_first or self.fires_once)
            self._is_first = False
            if not self.has_outer_end:
                self._nested_fires = self.num_fires // num_passes


def is_outermost(parameter: Tensor) -> bool:
    """Return whether the current ``backward()`` is not nested in another ``backward()``.

    Autograd has no such query: a callback that is queued in a nested backward runs at the end of
    the nested backward. All backward passes enter the engine through one Python function, whose
    frames on the stack are counted here. Gradients on an accelerator are computed by an engine
    thread, whose stack does not have the frame of the outermost backward.
    """
    is_in_thread = not parameter.is_cpu and is_multithreading_enabled()
    frame, depth = inspect.currentframe(), 0
    while frame is not None:
        depth += frame.f_code is BACKWARD
        frame = frame.f_back
    return depth <= (0 if is_in_thread else 1)
