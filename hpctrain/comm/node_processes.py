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
"""Processes per check; the limit bounds the cost of a check on nodes with hundreds of ranks."""


class NodeProcesses:
    """Checks whether the processes of the other ranks of this node exist, a few at a time.

    Args:
        pids: process id by rank, for the ranks of this node in this PID namespace.
        rank: this rank.
    """

    def __init__(self, pids: Mapping[int, int], rank: int) -> None:
        self._rank = rank
        can_check = birth(os.getpid()) is not None  # without /proc no process can be checked
        self._born = {r: (p, birth(p)) for r, p in pids.items() if r != rank and can_check}
        self._to_check: list[int] = []
        self._next_check = 0.0

    @classmethod
    def of(cls, calls: "WatchedCalls") -> Self:
        """Create an instance for the ranks of ``calls`` in this PID namespace. Collective."""
        seen, here = calls.allgather(identity()), identity()
        same = {r: other.pid for r, other in enumerate(seen) if other.namespace == here.namespace}
        return cls(same, calls.rank)

    def check(self) -> None:
        """Check the next few processes; a no-op within ``LOOK_S`` after the last check.

        Raises:
            RankLostError: a process has ended, also if a new process has its id.
        """
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + LOOK_S
        if not self._to_check:
            self._to_check = list(self._born)
        now_due, self._to_check = self._to_check[:PEERS_PER_LOOK], self._to_check[PEERS_PER_LOOK:]
        for rank in now_due:
            pid, born = self._born[rank]
            if born is None or birth(pid) != born:
                raise RankLostError(
                    f"rank {rank} (process {pid} of this node) died while rank "
                    f"{self._rank} waits for it; read its last output, and the kernel log "
                    f"if it ran out of memory"
                )

    def stopped(self) -> dict[int, int]:
        """Return, by rank, the ids of processes that a signal or a debugger has stopped."""
        found = [(rank, pid, born, stat(pid)) for rank, (pid, born) in self._born.items()]
        return {
            rank: pid
            for rank, pid, born, now in found
            if now and now.birth == born and now.state in STOPPED
        }
