"""Snapshots of the training state in memory, and rollback to the last snapshot."""

import torch
from torch import Tensor

from hpctrain.checkpoint.format.state_tree import mapped
from hpctrain.train.run_state import random_states, set_random_states
from hpctrain.train.stateful import GuardMemory
from hpctrain.train.task import Task


class Snapshot:
    """Copy of this rank's weights, buffers, optimizer state and random generators.

    The constructor is collective if the ranks divide the model. A rollback does not restore the
    number of finished steps, because this number determines the next batch: the batches since the
    snapshot are skipped, and the schedule, tests and checkpoints keep their steps.

    Args:
        task: task of the run.
        memory: loss statistics to copy.
        step: index of the next step, from 1.
    """

    def __init__(self, task: Task, memory: GuardMemory, step: int) -> None:
        self.step = step
        self._task, self._memory = task, memory
        self._parts = {"precision": task.precision, "ema": task.ema, "codec": task.exchange.codec}
        self._random = mapped(random_states(task.device), _copy)
        self._replica = mapped(task.exchange.local_state(), _copy)
        self._buffers = [_copy(buffer) for buffer in task.model.buffers()]
        self._states = {
            name: mapped(part.state_dict(), _copy) for name, part in self._parts.items() if part
        }
        self._spikes = memory.spikes.state_dict()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied state; may be called repeatedly. Local."""
        self._task.exchange.restore_model(self._replica, None)
        for buffer, value in zip(self._task.model.buffers(), self._buffers, strict=True):
            buffer.copy_(value)
        for name, state in self._states.items():
            part = self._parts[name]
            assert part is not None
            part.load_state_dict(mapped(state, _copy))
        self._memory.spikes.load_state_dict(self._spikes)
        set_random_states(self._random, self._task.device)


class Rollback:
    """Takes snapshots at regular steps, and restores the last snapshot.

    Args:
        task: task of the run.
        memory: loss statistics, which are also restored.
        every: number of steps between snapshots.
    """

    def __init__(self, task: Task, memory: GuardMemory, every: int) -> None:
        self._task, self._memory, self._every = task, memory, every
        self._snapshot: Snapshot | None = None
        self._skipped_to = 0  # last step that earlier rollbacks skipped

    def begin(self, step: int) -> None:
        """Take a snapshot before ``step`` if one is due. Collective if ranks divide the model."""
        if self._snapshot is None or (step - 1) % self._every == 0:
            self._snapshot = Snapshot(self._task, self._memory, step)

    def go_back(self, step: int) -> tuple[int, int]:
        """Restore the last snapshot; the caller skips ``step``. Local.

        Returns:
            The step after which the snapshot was taken, and the number of skipped steps that no
            earlier rollback has counted.
        """
        assert self._snapshot is not None
        since = self._snapshot.step - 1
        num_lost = step - max(since, self._skipped_to)
        self._skipped_to = step
        self._snapshot.restore()
        return since, num_lost


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
