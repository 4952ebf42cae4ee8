"""The state of a training: models, optimizers, samplers, schedulers, plain values."""

import copy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.collectives.parameters import broadcast_optimizer_state, broadcast_parameters
from hpctrain.core.errors import ConfigError
from hpctrain.horovod.elastic.sampler import ElasticSampler
from hpctrain.horovod.elastic.state import ObjectState
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


class TorchState(ObjectState):
    """The state of a training; everything it is given becomes an attribute of that name.

    Modules, optimizers, an ``ElasticSampler`` and whatever else has ``state_dict()`` and
    ``load_state_dict()`` keep their identity: their contents are saved, restored and given to
    other ranks. Other values are copied as they are, and must be picklable.

    Source: Horovod 0.28, ``horovod.torch.elastic.TorchState``.
    Differs: schedulers and scalers are kept by their state, where Horovod pickles them together
    with the optimizer they know; ``sync()`` saves too; ``restore()`` drops gradients; a restored
    optimizer does not share memory with the commit, so it can be restored again.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any
    ) -> None:
        """Keep the objects, and save them at once. Not collective.

        Args:
            model: any module.
            optimizer: any optimizer, wrapped by ``DistributedOptimizer`` or not.
            kwargs: further models, optimizers, samplers, and values such as ``epoch=0``.

        Raises:
            ConfigError: a name is taken by the state itself.
        """
        kept: dict[str, Handler] = {}
        plain: dict[str, Any] = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            self._require_free(name)
            if (handler := handler_of(value)) is None:
                plain[name] = value
            else:
                kept[name] = handler
        super().__init__(**plain)
        for name, handler in kept.items():
            setattr(self, name, handler.value)
        self._handlers = kept

    def save(self) -> None:
        """Copy everything in memory. Not collective."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return everything to the last ``save``, ``commit`` or ``sync``. Not collective."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0, and save it. Collective.

        What an ``ElasticSampler`` has recorded index by index is put together from all ranks.
        """
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Share out anew what is left of the epoch of each sampler."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep another object under a known name, and save it at once.

        Raises:
            ConfigError: an object that was kept by its state is replaced by a plain value.
        """
        kept = self.__dict__.get("_handlers", {})
        if name in kept and value is not kept[name].value:
            if (handler := handler_of(value)) is None:
                raise ConfigError(
                    f"{name} is kept by its state_dict(), so another {name} needs one too, got a "
                    f"{type(value).__name__}; give plain values a name of their own"
                )
            kept[name] = handler
        super().__setattr__(name, value)
