"""Handlers of a ``TorchState``'s objects: they save, restore and synchronize one kind each."""

import copy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.collectives.parameters import broadcast_optimizer_state, broadcast_parameters
from hpctrain.horovod.elastic.sampler import ElasticSampler
from hpctrain.runtime import world


class Handler:
    """Keeps an object that has ``state_dict()`` and ``load_state_dict()``, such as a scheduler."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Copy its state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Give it a copy of what was saved: many objects keep what they load."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Give it the state of rank 0, and save that. Collective."""
        self.value.load_state_dict(self._of_all_ranks())
        self.save()

    def reset(self) -> None:
        """Adapt it to the world of today."""

    def _of_all_ranks(self) -> Any:
        return world.current().comm.broadcast_object(self.value.state_dict())


class ModelHandler(Handler):
    """Keeps a module; its tensors are replaced in place."""

    def restore(self) -> None:
        """Copy back what was saved."""
        self.value.load_state_dict(self._saved)

    def _of_all_ranks(self) -> Any:
        state = self.value.state_dict()
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        broadcast_parameters(tensors, root_rank=0)
        others = {name: value for name, value in state.items() if name not in tensors}
        if others:
            state.update(world.current().comm.broadcast_object(others))
        return state


class OptimizerHandler(Handler):
    """Keeps an optimizer."""

    def restore(self) -> None:
        """Load what was saved, and forget gradients, which are no part of it."""
        super().restore()
        self.value.zero_grad()

    def sync(self) -> None:
        """Take the state of rank 0, and forget gradients. Collective."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.value.zero_grad()
        self.save()


class SamplerHandler(Handler):
    """Keeps a sampler: what is done is what any rank has done."""

    def reset(self) -> None:
        """Share out what is left among the ranks of today."""
        self.value.reset()

    def _of_all_ranks(self) -> Any:
        states = world.current().comm.allgather_object(self.value.state_dict())
        done = {index for state in states for index in state["processed_indices"]}
        return {**states[0], "processed_indices": sorted(done)}


_KINDS: tuple[tuple[type, type[Handler]], ...] = (
    (nn.Module, ModelHandler),
    (Optimizer, OptimizerHandler),
    (ElasticSampler, SamplerHandler),
)


def handler_of(value: object) -> Handler | None:
    """Return what keeps ``value``; None for a plain one, which is copied as it is."""
    for kind, handler in _KINDS:
        if isinstance(value, kind):
            return handler(value)
    if callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict"):
        return None if isinstance(value, type) else Handler(value)
    return None
