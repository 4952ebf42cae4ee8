"""Processes that ``multiprocessing`` spawns: they import the script again, and need ours too.

A forked process has all that its parent has. A spawned one starts empty, unpickles what its parent
tells about the script, and runs that; what is unpickled with it can put the shim there first.
"""

import multiprocessing.spawn
from collections.abc import Callable
from typing import Any

_original = multiprocessing.spawn.get_preparation_data


class _First:
    """What calls a function when it is unpickled."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return self.function, ()


def take_along(function: Callable[[], object]) -> None:
    """Let every process that is spawned from now on call a function before it does anything.

    Args:
        function: can be pickled by its name.
    """

    def prepared(name: str) -> dict[str, Any]:
        return {"hpctrain_shim": _First(function), **_original(name)}

    multiprocessing.spawn.get_preparation_data = prepared


def leave_alone() -> None:
    """Spawn as Python does."""
    multiprocessing.spawn.get_preparation_data = _original
