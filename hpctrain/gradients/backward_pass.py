"""``BackwardPass``: when a backward of autograd ends, and how often it makes each gradient."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from hpctrain.core.torch_compat import BACKWARD, call_after_backward, is_multithreading_enabled


class BackwardPass:
    """The backward that runs, with those nested in it, and how often earlier ones have fired."""

    def __init__(self) -> None:
        """Expect the first backward."""
        self.forget()
        self.relearn()

    def forget(self) -> None:
        """Expect another backward."""
        self.tasks: set[int] = set()  # graph tasks of autograd
        self.has_outer_end = False  # whether the outermost backward reports its end
        self.takes_early = False  # whether gradients are final as soon as they are made
        self.num_fires = 0  # hooks that have fired

    def relearn(self) -> None:
        """Learn again how often hooks fire: the first step keeps all gradients to its end."""
        self._is_first, self.fires_once = True, False
        self._nested_fires = -1

    def enter(self, task: int, on_end: Callable[[], None], *, is_outermost: bool) -> None:
        """Note a graph task, and have its end reported."""
        self.tasks.add(task)
        self.has_outer_end |= is_outermost
        call_after_backward(on_end)

    def is_over(self, have_all_fired: Callable[[], bool]) -> bool:
        """Return whether all is over at the end of a nested backward (reentrant checkpointing).

        If no hook has fired in the outer one, the end is known by counting: all have fired, or as
        many as in an earlier backward in which none ever did. Else ``step()`` reduces.
        """
        if self.has_outer_end:
            return False
        return self.num_fires == self._nested_fires or have_all_fired()

    def learn(self, fires: Iterable[int], num_passes: int) -> None:
        """Learn from the passes of a step how often each hook has fired."""
        if self.num_fires:
            once = all(number <= num_passes for number in fires)
            self.fires_once = once and (self._is_first or self.fires_once)
            self._is_first = False
            if not self.has_outer_end:
                self._nested_fires = self.num_fires // num_passes


def is_outermost(parameter: Tensor) -> bool:
    """Return whether the ``backward()`` that made a gradient was not called by another one.

    Autograd does not tell: a callback queued in a nested backward runs at the nested one's end.
    All of them enter the engine through one Python function, so its frames are counted. Gradients
    of an accelerator are made by a thread of the engine, in which there is no frame of the first.
    """
    is_in_thread = not parameter.is_cpu and is_multithreading_enabled()
    frame: Any = sys._getframe()  # noqa: SLF001
    depth = 0
    while frame is not None:
        depth += frame.f_code is BACKWARD
        frame = frame.f_back
    return depth <= (0 if is_in_thread else 1)
