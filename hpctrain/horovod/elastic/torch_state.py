"""The state of a training: models, optimizers, samplers, schedulers, plain values."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from hpctrain.core.errors import ConfigError
from hpctrain.horovod.elastic.handlers import Handler, handler_of
from hpctrain.horovod.elastic.state import ObjectState


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
