"""State that all ranks must hold alike to go on together, and its last commit."""

import copy
import enum
import pickle
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.collectives.parameters import broadcast_optimizer_state, broadcast_parameters
from hpctrain.comm.ops import Op
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.horovod.elastic.sampler import ElasticSampler
from hpctrain.runtime import world

Broadcast = Callable[[Any], Any]  # returns the object of rank 0 on every rank


class HostUpdate(enum.IntFlag):
    """What has happened to the hosts of a job."""

    NONE = 0
    REMOVED = 1
    ADDED = 2


class HostsUpdatedInterrupt(HpctrainError, RuntimeError):  # noqa: N818 - Horovod's name
    """The hosts of the job change; ``elastic.run`` takes training up again, nothing is lost."""

    def __init__(self, skip_sync: bool = False) -> None:  # noqa: FBT001, FBT002 - Horovod's
        """Say whether the ranks that stay hold the same state already: hosts only leave."""
        super().__init__(
            "the hosts of this job change; let hpctrain.elastic.run call the function that commits"
        )
        self.skip_sync = skip_sync


class State(ABC):
    """Base of all states: subclass it where ``TorchState`` does not fit.

    A subclass supplies ``save``, ``restore`` and ``sync``, and ``reset`` if it has something to
    adapt to another world.

    Source: Horovod 0.28, ``horovod.common.elastic.State``.
    Differs: both arguments may be left out; news of hosts that any rank has count, not only those
    of rank 0; a commit counts on all ranks or on none.
    """

    def __init__(
        self, bcast_object: Broadcast | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        """Take Horovod's two functions, or ours.

        Args:
            bcast_object: returns the object of rank 0 on every rank.
            get_rank: returns the number of this rank.
        """
        self._bcast_object = bcast_object or _broadcast
        self._rank = get_rank or world.rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], object]] = []
        self.num_commits = 0  # how often this state was committed here
        self._num_begun = 0  # and how often that was begun: the last time perhaps in vain

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Have functions called, in this order, each time training is taken up again.

        They run on every rank after the ranks have agreed and before ``sync()``: the place to fit
        a learning rate to ``size()``.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the world of today, then call the callbacks; ``elastic.run`` calls this."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take the news that hosts come or go; from any thread, on any rank.

        Nothing in hpctrain calls it yet: it is for a program that learns of such news itself. All
        ranks stop at their next ``commit()``.

        Args:
            timestamp: seconds; news that are not younger than the last known ones are old.
            update_res: ``HostUpdate`` bits: 1 hosts go, 2 hosts come, 3 both.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state once all ranks are here, then see whether hosts come or go. Collective.

        A failed operation costs what was done since the last commit; a commit costs a copy of the
        state in memory. It counts on all ranks or on none: ``elastic.run`` completes one that an
        error has kept some ranks from.

        Raises:
            HostsUpdatedInterrupt: they do; on every rank.
        """
        self._num_begun = self.num_commits + 1
        interrupt = self._news_of_hosts()
        self.save()
        self.num_commits = self._num_begun
        if interrupt is not None:
            raise interrupt

    def settle(self, of_ranks: Sequence[int]) -> None:
        """Count the commit that any rank has last, of the ``num_commits`` of all. Not collective.

        Who has that one begun only saves it now: nothing was done since.
        """
        newest = max(of_ranks)
        if self.num_commits < newest == self._num_begun:
            self.save()
        self.num_commits = self._num_begun = newest

    def check_host_updates(self) -> None:
        """See whether any rank was told that hosts come or go. Collective, 24 bytes.

        Raises:
            HostsUpdatedInterrupt: one was; on every rank.
        """
        if (interrupt := self._news_of_hosts()) is not None:
            raise interrupt

    def _news_of_hosts(self) -> HostsUpdatedInterrupt | None:
        newest, what = self._last_updated_timestamp, HostUpdate.NONE
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:
                newest, what = max(newest, timestamp), what | HostUpdate(update)
        removed, added = (bool(what & bit) for bit in (HostUpdate.REMOVED, HostUpdate.ADDED))
        told = torch.tensor([newest, removed, added], dtype=torch.float64)
        world.current().comm.allreduce_(told, op=Op.MAX).wait()
        newest, removed, added = float(told[0]), bool(told[1]), bool(told[2])
        if newest <= self._last_updated_timestamp:
            return None
        self._last_updated_timestamp = newest
        return HostsUpdatedInterrupt(skip_sync=removed and not added)

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of the state in memory. Not collective."""

    @abstractmethod
    def restore(self) -> None:
        """Return to the copy of the last ``save``. Not collective."""

    @abstractmethod
    def sync(self) -> None:
        """Give every rank the state of rank 0. Collective."""

    def reset(self) -> None:  # noqa: B027 - most states have nothing to do
        """Adapt to the world of today, before ``sync()``."""


class ObjectState(State):
    """A state of plain values, which are its attributes: given to it, or set later.

    Source: Horovod 0.28, ``horovod.common.elastic.ObjectState``.
    Differs: values are copied, so a list that is changed in place is restored too; attributes
    that are set later are kept as well, unless their name begins with ``_``.
    """

    def __init__(
        self,
        bcast_object: Broadcast | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Make an attribute of each of ``kwargs``; the values can be pickled.

        Raises:
            ConfigError: a name is taken by the state itself.
        """
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = {}
        for name, value in kwargs.items():
            self._require_free(name)
            self._saved_state[name] = _copied(name, value)
            setattr(self, name, value)

    def save(self) -> None:
        """Copy the attributes; ``ConfigError`` if one cannot be copied."""
        names = self._saved_state
        self._saved_state = {name: _copied(name, getattr(self, name)) for name in names}

    def restore(self) -> None:
        """Set the attributes to what was saved."""
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Set the attributes to those of rank 0, and save them. Collective."""
        values = {name: getattr(self, name) for name in self._saved_state}
        self._saved_state = self._bcast_object(values)
        self.restore()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new one that holds a plain value is saved at once.

        Raises:
            ConfigError: that cannot be copied; or the name is taken by the state itself.
        """
        saved = self.__dict__.get("_saved_state")
        if callable(getattr(type(self), name, None)) and not callable(value):
            self._require_free(name)
        is_known = name in self.__dict__ or hasattr(type(self), name) or name.startswith("_")
        if saved is not None and not is_known and not has_state(value):
            saved.setdefault(name, _copied(name, value))
        super().__setattr__(name, value)

    def _require_free(self, name: str) -> None:
        if hasattr(type(self), name) or name.startswith("_"):
            raise ConfigError(f"an attribute cannot be called {name}, the state uses that name")

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Tell type checkers that ``kwargs`` become attributes."""


def _copied(name: str, value: Any) -> Any:
    try:
        if callable(value):  # it is not copied, but other ranks get it
            pickle.dumps(value)
        return copy.deepcopy(value)
    except Exception as error:
        raise ConfigError(
            f"attributes of a state are copied by each commit and sent to others, and {name}, "
            f"of type {type(value).__name__}, cannot be: {error}; keep it elsewhere, or as _{name}"
        ) from error


def _broadcast(value: Any) -> Any:
    return world.current().comm.broadcast_object(value)


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
    return Handler(value) if has_state(value) else None


def has_state(value: object) -> bool:
    """Say whether ``value`` gives its state, and loads one."""
    gives = callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")
    return gives and not isinstance(value, type)


class TorchState(ObjectState):
    """The state of a training; everything it is given becomes an attribute of that name.

    What is set as an attribute later is kept in the same way.

    Modules, optimizers, an ``ElasticSampler`` and whatever else has ``state_dict()`` and
    ``load_state_dict()`` keep their identity: their contents are saved, restored and given to
    other ranks. Other values are copied as they are, and must be picklable.

    Source: Horovod 0.28, ``horovod.torch.elastic.TorchState``.
    Differs: schedulers and scalers are kept by their state, where Horovod pickles them together
    with the optimizer they know; ``sync()`` saves too; ``restore()`` drops gradients; a restored
    optimizer does not share memory with the commit, so it can be restored again.
    """

    _is_shared = False  # whether the ranks have synchronized it

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

        Raises:
            MismatchError: the ranks have other models, optimizers, samplers; on every rank.
        """
        names = sorted(self._handlers)  # one that is set later has any place among them
        first = self._bcast_object(names)
        world.current().comm.agree(
            names == first,
            f"this state keeps {', '.join(names)} by their state_dict(), that of rank 0 "
            f"{', '.join(first)}; give them to the state where it is made, on all ranks",
        )
        self._is_shared = True
        for name in names:
            self._handlers[name].sync()
        super().sync()

    def reset(self) -> None:
        """Share out anew what is left of the epoch of each sampler."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep what is new, and another object under a known name, and save it at once.

        Raises:
            ConfigError: an object that was kept by its state is replaced by a plain value, or a
                new value cannot be copied.
        """
        kept = self.__dict__.get("_handlers")
        if kept is not None and not name.startswith("_") and not hasattr(type(self), name):
            is_kept = name in kept
            if has_state(value):
                self._refuse_where_spares_lack(name, is_known=is_kept)
                if not is_kept or value is not kept[name].value:
                    kept[name] = handler_of(value)
                    self._saved_state.pop(name, None)
            elif is_kept:
                raise ConfigError(
                    f"{name} is kept by its state_dict(), so another {name} needs one too, got a "
                    f"{type(value).__name__}; give plain values a name of their own"
                )
        super().__setattr__(name, value)

    def _refuse_where_spares_lack(self, name: str, *, is_known: bool) -> None:
        if self._is_shared and not is_known and world.current().origin.spares is not None:
            raise ConfigError(
                f"a spare that takes the place of a lost rank has what the state was made with, "
                f"and could not take over {name}, which has a state_dict(); give it to the state "
                f"where that is made, or leave --spares out"
            )
