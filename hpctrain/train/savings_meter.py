"""Traffic between nodes with and without compression, since the last record."""

from typing import Any

import torch

from hpctrain.comm.operation_result import Traffic
from hpctrain.train.task import Task


class SavingsMeter:
    """Sums the traffic of this rank's steps until ``take`` reduces it over all ranks."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._clear()

    def _clear(self) -> None:
        self._node_bytes = self._rail_bytes = self._num_steps = 0
        self._began_s = now.rail_s if (now := self._task.exchange.savings) else 0.0

    def add(self, moved: Traffic) -> None:
        """Add the traffic of one step. Local."""
        self._node_bytes += moved.node_bytes
        self._rail_bytes += moved.rail_bytes
        self._num_steps += 1

    def take(self) -> dict[str, Any]:
        """Return means per step since the last call. Collective.

        Returns:
            ``node_bytes`` and ``rail_bytes``: bytes that all ranks moved within and between
            nodes; ``ratio``: bytes between nodes without a codec, divided by ``rail_bytes``;
            ``won_s``: seconds saved, None if the link was not measured. Empty without
            compression.
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
        # The last rank to arrive does not wait, so the minimum excludes waiting for other ranks.
        busy_s = min((s for s in rows[:, 2].tolist() if s), default=0.0)
        node_bytes, rail_bytes, _ = rows.sum(dim=0).tolist()
        return {
            "node_bytes": round(node_bytes),
            "rail_bytes": round(rail_bytes),
            "ratio": now.plain_bytes / rail_bytes if now.plain_bytes else 1.0,
            "won_s": None if now.plain_s is None else now.plain_s - busy_s,
        }
