"""Hooks around the steps of a plain optimizer, and the mark of the method that has them."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.gradients.optimizer import METHOD_MARK, require_plain

_MARK = "_async_method"  # that of a parameter; copies of it, which carry it along, do not count


class StepHooks:
    """Calls a method around each step of an optimizer, which has one such method at a time.

    Its parameters have one, too, by whatever optimizer. With ``hides`` the step finds no
    gradients, so that an optimizer does nothing; they are there again behind it.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        before: Callable[[], object],
        after: Callable[[], object] = lambda: None,
        *,
        hides: bool = True,
    ) -> None:
        """Hook an optimizer for the method of this name; see ``require_unhooked``."""
        self._name, self._optimizer, self._parameters = name, optimizer, parameters
        self._before, self._after, self._hides = before, after, hides
        self._hidden: list[Tensor | None] = []
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._on_step),
            optimizer.register_step_post_hook(lambda *_: self._behind_step()),
        ]
        setattr(optimizer, METHOD_MARK, name)
        for p in parameters:
            setattr(p, _MARK, (*_here(p), name))

    @property
    def are_on(self) -> bool:
        """Whether nobody has removed them."""
        return bool(self._handles)

    def add(self, handle: object) -> None:
        """Take a handle of one more hook, which is removed with these."""
        self._handles.append(handle)

    def remove(self) -> None:
        """Leave optimizer and parameters to others. Harmless the second time."""
        if self._handles:
            delattr(self._optimizer, METHOD_MARK)
            for p in self._parameters:
                delattr(p, _MARK)
        while self._handles:
            self._handles.pop().remove()

    @dynamo_disable
    def _on_step(self, _: Optimizer, args: Sequence[Any], kwargs: Any) -> None:
        require_plain(self._name, self._optimizer)
        if kwargs.get("closure") or len(args) > 1:
            raise ConfigError(
                f"{self._name} steps by the gradients that there are before step(), and takes no "
                f"closure; call backward() before step()"
            )
        self._before()
        if self._hides:
            self._hidden = [p.grad for p in self._parameters]
            for p in self._parameters:
                p.grad = None

    @dynamo_disable
    def _behind_step(self) -> None:
        self._after()
        for p, grad in zip(self._parameters, self._hidden, strict=bool(self._hidden)):
            p.grad = grad
        self._hidden = []


def require_unhooked(name: str, optimizer: Optimizer) -> None:
    """Raise ``ConfigError`` if another method has the optimizer, or one of its parameters."""
    if (has := getattr(optimizer, METHOD_MARK, None)) is not None:
        raise ConfigError(
            f"an optimizer has one such method at a time, {name} comes beside {has}; end its "
            f"block, or call its close(), before"
        )
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    marks = [getattr(p, _MARK, None) for p in trained]
    others = [m[2] for p, m in zip(trained, marks, strict=True) if m and m[:2] == _here(p)]
    if others:
        raise ConfigError(
            f"a parameter has one such method at a time, {name} comes beside {others[0]}, which "
            f"has {len(others)} parameters of this optimizer by another one; end its block, or "
            f"call its close(), before"
        )


def _here(p: Tensor) -> tuple[int, int]:
    return os.getpid(), id(p)
