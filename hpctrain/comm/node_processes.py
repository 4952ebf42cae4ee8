"""Detection of ranks of this node whose process has ended."""

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpctrain.cluster.process import STOPPED, birth, identity, stat
from hpctrain.core.errors import RankLostError
from hpctrain.core.python_compat import Self

if TYPE_CHECKING:
    from hpctrain.comm.watched_calls import WatchedCalls

LOOK_S = 0.1  # between two checks
PEERS_PER_LOOK = 16
"""Processes per check, which bounds its cost on nodes with hundreds of ranks."""


class NodeProcesses:
    """Checks the processes of the other ranks of this node, a few at a time.

    Args:
        pids: processes of the ranks of this node, by rank, in this pid namespace.
        rank: this rank.
    """

    def __init__(self, pids: Mapping[int, int], rank: int) -> None:
        self._rank = rank
        can_check = birth(os.getpid()) is not None  # without /proc no process can be checked
        self._born = {r: (p, birth(p)) for r, p in pids.items() if r != rank and can_check}
        self._to_look: list[int] = []
        self._next_look = 0.0

    @classmethod
    def of(cls, calls: "WatchedCalls") -> Self:
        """Find the processes of the ranks of ``calls`` in this pid namespace. Collective."""
        seen, here = calls.allgather(identity()), identity()
        same = {r: other.pid for r, other in enumerate(seen) if other.namespace == here.namespace}
        return cls(same, calls.rank)

    def check(self) -> None:
        """Check the next processes if the last check is long enough ago.

        Raises:
            RankLostError: a process has ended, even if its id belongs to a new process.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        if not self._to_look:
            self._to_look = list(self._born)
        now_due, self._to_look = self._to_look[:PEERS_PER_LOOK], self._to_look[PEERS_PER_LOOK:]
        for rank in now_due:
            pid, born = self._born[rank]
            if born is None or birth(pid) != born:
                raise RankLostError(
                    f"rank {rank} (process {pid} of this node) died while rank "
                    f"{self._rank} waits for it; its last output says why, and the "
                    f"kernel's log if it ran out of memory"
                )

    def stopped(self) -> dict[int, int]:
        """Return the processes that a signal or a debugger has stopped, by rank."""
        found = [(rank, pid, born, stat(pid)) for rank, (pid, born) in self._born.items()]
        return {
            rank: pid
            for rank, pid, born, now in found
            if now and now.birth == born and now.state in STOPPED
        }
