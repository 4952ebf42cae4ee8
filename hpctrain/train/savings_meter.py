"""Meter of what compression spares between nodes, since the last record."""

from typing import Any

import torch

from hpctrain.comm.operation_result import Traffic
from hpctrain.train.task import Task


class SavingsMeter:
    """Adds up what this rank's steps move until ``take`` sums it over all ranks."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._clear()

    def _clear(self) -> None:
        self._node_bytes = self._rail_bytes = self._num_steps = 0
        self._began_s = now.rail_s if (now := self._task.exchange.savings) else 0.0

    def add(self, moved: Traffic) -> None:
        """Add one step."""
        self._node_bytes += moved.node_bytes
        self._rail_bytes += moved.rail_bytes
        self._num_steps += 1

    def take(self) -> dict[str, Any]:
        """Return what records say of a step, as a mean; nothing without compression. Collective.

        ``node_bytes`` and ``rail_bytes`` of all ranks, the ``ratio`` of the bytes that would
        cross without a codec, and ``won_s``, None where the link was not probed.
        """
        now = self._task.exchange.savings
        if now is None:
            return {}
        comm, num_steps = self._task.comm, max(self._num_steps, 1)
        rows = torch.zeros(comm.size, 3, dtype=torch.float64)
        row = (self._node_bytes, self._rail_bytes, now.rail_s - self._began_s)
        rows[comm.rank] = torch.tensor(row, dtype=torch.float64) / num_steps
        self._clear()
        comm.allreduce_(rows).wait()
        # Who came last has not waited for others: the least is what coding and the link took.
        busy_s = min((s for s in rows[:, 2].tolist() if s), default=0.0)
        node_bytes, rail_bytes, _ = rows.sum(dim=0).tolist()
        return {
            "node_bytes": round(node_bytes),
            "rail_bytes": round(rail_bytes),
            "ratio": now.plain_bytes / rail_bytes if now.plain_bytes else 1.0,
            "won_s": None if now.plain_s is None else now.plain_s - busy_s,
        }
