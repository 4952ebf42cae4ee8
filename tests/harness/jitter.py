"""Ranks that come late: seeded sleeps around what they do together."""

import functools
import pkgutil
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

MOST_S = 0.004
"""Longest sleep; what a rank does between two barriers of a small test takes far less."""

TOGETHER = {
    "hpctrain.comm.node.shared_memory:SharedMemory": ("barrier",),
    "hpctrain.comm.rail.rail:Rail": ("allreduce_by",),
    "hpctrain.comm.mpi:MpiCommunicator": ("barrier", "broadcast_", "allgather_object", "agree"),
    "hpctrain.comm.hierarchical:HierarchicalCommunicator": ("allreduce_",),
}
"""Methods in which ranks wait for each other, where each of them ends up. By name: most launches
of tests need neither these nor torch, which takes two seconds of a core on every rank."""


class Jitter:
    """Sleeps of one rank: a third of the calls is late, by other times on every rank."""

    def __init__(self, seed: int, rank: int) -> None:
        self._numbers = random.Random(f"{seed} {rank}")
        self.num_sleeps = 0

    def sleep(self) -> None:
        """Sleep now, or do not."""
        if self._numbers.random() < 1 / 3:
            self.num_sleeps += 1
            time.sleep(self._numbers.uniform(0.0, MOST_S))

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, with sleeps before and after it."""

        @functools.wraps(function)
        def late(*args: Any, **options: Any) -> Any:
            self.sleep()
            try:
                return function(*args, **options)
            finally:
                self.sleep()

        return late

    def start(self, patch: pytest.MonkeyPatch) -> None:
        """Let this process be late wherever its ranks wait for each other."""
        for place, names in TOGETHER.items():
            owner = pkgutil.resolve_name(place)
            for name in names:
                patch.setattr(owner, name, self.around(getattr(owner, name)))
