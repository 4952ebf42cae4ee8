"""Hooks of autograd on parameters, of which several optimizers may want the same one."""

import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.gradients.parameter_names import NamedParameters


class HookOwner(Protocol):
    """What reduces the gradients of hooked parameters."""

    is_exclusive: bool  # of several exclusive owners only the last one reduces a gradient
    superseded: str  # name of a parameter that a later owner has taken over


class ParameterHooks:
    """Calls functions of an owner when autograd makes gradients. The hooks go with the owner."""

    def __init__(
        self,
        owner: HookOwner,
        on_ready: Callable[[Any, Tensor], None],
        before_sum: Callable[[Any, int], None] | None,
    ) -> None:
        """Take functions of the owner and a parameter.

        ``on_ready`` gets a parameter whose gradient is accumulated; ``before_sum`` the id of one
        whose gradient is about to be added to another.
        """
        self._owner, self._before_sum = weakref.ref(owner), before_sum
        self._ready = _Hook(owner, on_ready, None)
        self._handles: list[RemovableHandle] = []
        self._hooked: dict[int, int] = {}
        """By parameter: what torch had hooked; a conversion may swap it for another."""
        weakref.finalize(owner, _remove, self._handles)

    def hook(self, parameters: NamedParameters) -> None:
        """Hook the parameters that are not hooked yet, frozen ones too: one may thaw. Local."""
        for name, parameter in parameters:
            if self.has(parameter) or not _can_have_gradient(parameter):
                continue
            self._hooked[id(parameter)] = parameter._cdata  # noqa: SLF001 - of what torch hooks
            if self._ready in _hooks_of(parameter):
                _rearm(parameter)
                continue
            owner = self._owner()
            assert owner is not None
            for hook in _hooks_of(parameter):
                other = hook.owner() if isinstance(hook, _Hook) else None
                if other is not None and owner.is_exclusive and other.is_exclusive:
                    other.superseded = name
            is_trained = parameter.requires_grad
            parameter.requires_grad_()  # torch hooks no frozen parameter
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._ready))
            if self._before_sum is not None:
                hook = _Hook(owner, self._before_sum, id(parameter))
                self._handles.append(parameter.register_hook(hook))
            parameter.requires_grad_(is_trained)

    def has(self, parameter: Parameter) -> bool:
        """Return whether a parameter is hooked, and torch calls the hooks."""
        is_armed = self._hooked.get(id(parameter)) == parameter._cdata  # noqa: SLF001
        return is_armed and self._ready in _hooks_of(parameter)


class _Hook:
    """Calls a function of an owner; does not keep the owner."""

    __slots__ = ("about", "call", "owner")
    __torch_unserializable__ = True  # a worker that gets the model needs none, and no warning

    def __init__(self, owner: HookOwner, call: Callable[[Any, Any], None], about: Any) -> None:
        """Take the function and its argument; None for what autograd gives."""
        self.owner, self.call, self.about = weakref.ref(owner), call, about

    @dynamo_disable
    def __call__(self, given: Tensor) -> None:
        if (owner := self.owner()) is not None:
            self.call(owner, given if self.about is None else self.about)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _hooks_of(parameter: Parameter) -> Collection[object]:
    return (parameter._post_accumulate_grad_hooks or {}).values()  # noqa: SLF001


def _rearm(parameter: Parameter) -> None:
    """Hook a parameter again whose inside was swapped: only the Python side knows its hooks."""
    for hooks in ("_post_accumulate_grad_hooks", "_backward_hooks"):
        setattr(parameter, hooks, getattr(parameter, hooks))


def _can_have_gradient(parameter: Tensor) -> bool:
    return parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex())
