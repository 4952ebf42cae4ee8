"""Hooks around the steps of an optimizer; only one method at a time may add hooks."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.gradients.optimizer import METHOD_MARK, require_plain

_MARK = "_async_method"  # attribute of a parameter; in copies of it, it does not count


class StepHooks:
    """Calls functions before and after each step of an optimizer.

    At most one method at a time may hook an optimizer or one of its parameters. With ``hides``,
    gradients are None during the step, so that the optimizer does nothing, and are restored
    afterwards.
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
        """Hook an optimizer for the method ``name``; see ``require_unhooked``."""
        self._name, self._optimizer, self._parameters = name, optimizer, parameters
        self._before, self._after, self._hides = before, after, hides
        self._hidden: list[Tensor | None] = []
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._on_step),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        setattr(optimizer, METHOD_MARK, name)
        for p in parameters:
            setattr(p, _MARK, (*_here(p), name))

    @property
    def are_on(self) -> bool:
        """Whether the hooks are still installed."""
        return bool(self._handles)

    def add(self, handle: object) -> None:
        """Add the handle of another hook, which is removed with these hooks."""
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove the hooks; a second call does nothing."""
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
                f"{self._name} must have gradients before step(), but got a closure; call "
                "backward() before step()"
            )
        self._before()
        if self._hides:
            self._hidden = [p.grad for p in self._parameters]
            for p in self._parameters:
                p.grad = None

    @dynamo_disable
    def _after_step(self) -> None:
        self._after()
        for p, grad in zip(self._parameters, self._hidden, strict=bool(self._hidden)):
            p.grad = grad
        self._hidden = []


def require_unhooked(name: str, optimizer: Optimizer) -> None:
    """Raise ``ConfigError`` if another method has the optimizer, or one of its parameters."""
    if (has := getattr(optimizer, METHOD_MARK, None)) is not None:
        raise ConfigError(
            f"an optimizer must have one such method at a time, but {name} follows {has}; end the "
            "block of the first, or call its close(), before"
        )
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    marks = [getattr(p, _MARK, None) for p in trained]
    others = [m[2] for p, m in zip(trained, marks, strict=True) if m and m[:2] == _here(p)]
    if others:
        raise ConfigError(
            f"a parameter must have one such method at a time, but {name} follows {others[0]}, "
            f"which has {len(others)} parameters of this optimizer by another one; end its block, "
            "or call its close(), before"
        )


def _here(p: Tensor) -> tuple[int, int]:
    return os.getpid(), id(p)
