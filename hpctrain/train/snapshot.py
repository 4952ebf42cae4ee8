"""Snapshot in memory of what steps change, to which a run can go back."""

import torch
from torch import Tensor

from hpctrain.checkpoint.format.state_tree import mapped
from hpctrain.train.run_state import random_states, set_random_states
from hpctrain.train.stateful import GuardMemory
from hpctrain.train.task import Task


class Snapshot:
    """Copies of this rank's weights, buffers, optimizer state and generators between two steps.

    Not the number of the step, which counts batches: where a run goes back those that came since
    stay left out, and its schedule, its tests and its checkpoints are where they would be.
    """

    def __init__(self, task: Task, memory: GuardMemory, step: int) -> None:
        """Copy them before ``step``. Collective where ranks divide the model."""
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
        """Give all of it back, in the place of a step; may be called again. Not collective."""
        self._task.exchange.restore_model(self._replica, None)
        for buffer, value in zip(self._task.model.buffers(), self._buffers, strict=True):
            buffer.copy_(value)
        for name, state in self._states.items():
            part = self._parts[name]
            assert part is not None
            part.load_state_dict(mapped(state, _copy))
        self._memory.spikes.load_state_dict(self._spikes)
        set_random_states(self._random, self._task.device)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
