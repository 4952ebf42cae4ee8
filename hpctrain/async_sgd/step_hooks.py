"""Hooks of a local or asynchronous method, called around the steps of an optimizer."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hpctrain.comm.owner import Owner
from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.gradients.optimizer import METHOD_MARK, require_plain

_MARK = "_async_method"  # attribute of a parameter; ignored in copies of the parameter


class StepHooks:
    """Calls functions before and after each step of an optimizer.

    At most one method at a time can hook an optimizer or one of its parameters.

    Args:
        name: name of the method, for messages.
        optimizer: optimizer to hook; see ``require_unhooked``.
        parameters: parameters that the method trains.
        before: called at the beginning of each step.
        after: called at the end of each step.
        hides: whether the gradients are None during the step, so that the optimizer does nothing;
            the gradients are restored afterwards.
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
        self._name, self._optimizer, self._parameters = name, optimizer, parameters
        self._before, self._after, self._hides = before, after, hides
        self._hidden: list[Tensor | None] = []
        self._owner = Owner()
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
        """Add the handle of another hook, which ``remove`` removes, too."""
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
        self._owner.check()  # a step of a forked child would change shared parameters
        require_plain(self._name, self._optimizer)
        if kwargs.get("closure") or len(args) > 1:
            raise ConfigError(
                f"gradients must be computed before step() with {self._name}, but step() got a "
                "closure; call backward() before step(), and pass no closure"
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
    """Raise ``ConfigError`` if a method hooks the optimizer, or one of its parameters."""
    if (has := getattr(optimizer, METHOD_MARK, None)) is not None:
        raise ConfigError(
            f"an optimizer can only have one local or asynchronous method at a time, but {has} "
            f"already uses the optimizer passed to {name}; first end the block of {has}, or call "
            f"its close()"
        )
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    marks = [getattr(p, _MARK, None) for p in trained]
    others = [m[2] for p, m in zip(trained, marks, strict=True) if m and m[:2] == _here(p)]
    if others:
        raise ConfigError(
            "a parameter can only have one local or asynchronous method at a time, but "
            f"{others[0]} already uses {len(others)} of the parameters passed to {name}, in "
            f"another optimizer; first end the block of {others[0]}, or call its close()"
        )


def _here(p: Tensor) -> tuple[int, int]:
    return os.getpid(), id(p)
