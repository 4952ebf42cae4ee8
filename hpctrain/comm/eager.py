"""Functions that torch.compile leaves alone: what talks to other ranks is no graph."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Let a function, and all that it calls, run as it is, also inside of what is compiled.

    It goes below other decorators, next to the function.

    ``torch.compiler.disable`` does the same with a wrapper, and imports the compiler for it: a
    second of processor time on every rank, in programs that compile nothing.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - ends a graph
    return function
