"""State that elastic training commits, restores and sends to other ranks."""

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

Broadcast = Callable[[Any], Any]  # function that returns the object of rank 0 on every rank


class HostUpdate(enum.IntFlag):
    """Change of the hosts of a job, as a bit mask."""

    NONE = 0
    REMOVED = 1
    ADDED = 2


class HostsUpdatedInterrupt(HpctrainError, RuntimeError):  # noqa: N818 - Horovod's name
    """The hosts of the job change; ``elastic.run`` resumes training from the current state.

    Args:
        skip_sync: True if all remaining ranks have the same state, as when hosts are only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:  # noqa: FBT001, FBT002 - Horovod's
        super().__init__(
            "the hosts of this job have changed; call commit() in a function that is decorated by "
            "hpctrain.elastic.run"
        )
        self.skip_sync = skip_sync


class State(ABC):
    """Base class of training states, for programs that cannot use ``TorchState``.

    A subclass implements ``save``, ``restore`` and ``sync``, and ``reset`` if the state depends on
    the ranks.

    Args:
        bcast_object: function that returns the object of rank 0 on every rank; by default a
            broadcast of hpctrain.
        get_rank: function that returns the rank of this process; by default ``hpctrain.rank``.

    Source: Horovod 0.28, ``horovod.common.elastic.State``.
    Differs: both arguments are optional; changes of hosts may be reported on any rank, not only on
    rank 0; a commit is valid on all ranks or on none.
    """

    def __init__(
        self, bcast_object: Broadcast | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object or _broadcast
        self._rank = get_rank or world.rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], object]] = []
        self.num_commits = 0  # complete commits on this rank
        self._num_begun = 0  # commits that were begun; the last may be incomplete

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Register functions that ``elastic.run`` calls, in order, when training resumes. Local.

        Every rank calls the functions before ``sync()``, for example to adapt the learning rate to
        ``size()``.

        Args:
            callbacks: functions without arguments.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call ``reset()``, then the reset callbacks. Called by ``elastic.run``."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Report that hosts are added or removed, from any thread of any rank. Local.

        hpctrain does not call this method; a program that detects such changes can call it. After
        a call, all ranks raise ``HostsUpdatedInterrupt`` at their next ``commit()``.

        Args:
            timestamp: time of the report in seconds; a report is ignored unless it is later than
                the last known report.
            update_res: ``HostUpdate`` bits: 1 for removed hosts, 2 for added hosts, 3 for both.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state after all ranks have called ``commit``. Collective.

        After a failed operation, training resumes from the last commit, which is a copy of the
        state in memory. A commit is valid on all ranks or on none: if an error interrupts a commit
        on some ranks after other ranks have completed it, ``elastic.run`` completes that commit.

        Raises:
            HostsUpdatedInterrupt: hosts are added or removed; on every rank.
        """
        self._num_begun = self.num_commits + 1
        interrupt = self._news_of_hosts()
        self.save()
        self.num_commits = self._num_begun
        if interrupt is not None:
            raise interrupt

    def settle(self, of_ranks: Sequence[int]) -> None:
        """Complete the newest commit that any rank has completed. Not collective.

        A rank that has begun but not completed this commit now saves its state, which has not
        changed since the commit began.

        Args:
            of_ranks: ``num_commits`` of all ranks.
        """
        newest = max(of_ranks)
        if self.num_commits < newest == self._num_begun:
            self.save()
        self.num_commits = self._num_begun = newest

    def check_host_updates(self) -> None:
        """Raise an error if a change of hosts was reported on any rank. Collective.

        Raises:
            HostsUpdatedInterrupt: hosts are added or removed; on every rank.
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
        report = torch.tensor([newest, removed, added], dtype=torch.float64)
        world.current().comm.allreduce_(report, op=Op.MAX).wait()
        newest, removed, added = float(report[0]), bool(report[1]), bool(report[2])
        if newest <= self._last_updated_timestamp:
            return None
        self._last_updated_timestamp = newest
        return HostsUpdatedInterrupt(skip_sync=removed and not added)

    @abstractmethod
    def save(self) -> None:
        """Copy the state in memory. Not collective."""

    @abstractmethod
    def restore(self) -> None:
        """Restore the copy of the last ``save``. Not collective."""

    @abstractmethod
    def sync(self) -> None:
        """Broadcast the state of rank 0 to all ranks. Collective."""

    def reset(self) -> None:  # noqa: B027 - optional in subclasses
        """Adapt the state to the ranks of the current world. Called before ``sync()``."""


class ObjectState(State):
    """State of plain values, which are attributes of this object.

    A program passes attributes to the constructor, or sets them later.

    Args:
        bcast_object: see ``State``.
        get_rank: see ``State``.
        kwargs: attributes and their picklable values.

    Raises:
        ConfigError: an attribute has the name of an attribute of this class, or begins with ``_``.

    Source: Horovod 0.28, ``horovod.common.elastic.ObjectState``.
    Differs: values are copied, so in-place changes of a list are restored, too; attributes that
    are set later are saved, too, unless their name begins with ``_``.
    """

    def __init__(
        self,
        bcast_object: Broadcast | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = {}
        for name, value in kwargs.items():
            self._require_free(name)
            self._saved_state[name] = _copied(name, value)
            setattr(self, name, value)

    def save(self) -> None:
        """Copy the attributes in memory. Not collective.

        Raises:
            ConfigError: an attribute cannot be copied.
        """
        names = self._saved_state
        self._saved_state = {name: _copied(name, getattr(self, name)) for name in names}

    def restore(self) -> None:
        """Set the attributes to copies of the saved values. Not collective."""
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Set the attributes to the values of rank 0, and save them. Collective."""
        values = {name: getattr(self, name) for name in self._saved_state}
        self._saved_state = self._bcast_object(values)
        self.restore()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; if the attribute is new and its value plain, also save the value.

        Raises:
            ConfigError: the value cannot be copied, or ``name`` is the name of a method.
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
            raise ConfigError(
                "an attribute of a state must not have a name that the state itself uses, got "
                f"{name}; use another name"
            )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Declare the attributes of ``kwargs`` for type checkers."""


def _copied(name: str, value: Any) -> Any:
    try:
        if callable(value):  # deepcopy does not copy functions, but ``sync`` pickles them
            pickle.dumps(value)
        return copy.deepcopy(value)
    except Exception as error:
        raise ConfigError(
            f"attributes of a state must support deepcopy and pickle, but {name}, of type "
            f"{type(value).__name__}, does not: {error}; store the value elsewhere, or as _{name}"
        ) from error


def _broadcast(value: Any) -> Any:
    return world.current().comm.broadcast_object(value)


class Handler:
    """Saves and restores an object with ``state_dict()`` and ``load_state_dict()``.

    Args:
        value: object, such as a scheduler.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Store a copy of the state of the object."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load a copy of the saved state.

        A copy is loaded, because many objects keep references to loaded values.
        """
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Load the state of rank 0, and save that state. Collective."""
        self.value.load_state_dict(self._of_all_ranks())
        self.save()

    def reset(self) -> None:
        """Adapt the object to the ranks of the current world."""

    def _of_all_ranks(self) -> Any:
        return world.current().comm.broadcast_object(self.value.state_dict())


class ModelHandler(Handler):
    """Saves and restores a module, whose tensors are overwritten in place."""

    def restore(self) -> None:
        """Copy the saved tensors to the module."""
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
    """Saves and restores an optimizer, without gradients."""

    def restore(self) -> None:
        """Load the saved state, and clear gradients, which are not saved."""
        super().restore()
        self.value.zero_grad()

    def sync(self) -> None:
        """Load the state of rank 0, and clear gradients. Collective."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.value.zero_grad()
        self.save()


class SamplerHandler(Handler):
    """Saves and restores a sampler; ``sync`` merges the processed indices of all ranks."""

    def reset(self) -> None:
        """Divide the rest of the epoch among the current ranks."""
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
    """Return a handler for ``value``; None for a plain value, which is copied."""
    for kind, handler in _KINDS:
        if isinstance(value, kind):
            return handler(value)
    return Handler(value) if has_state(value) else None


def has_state(value: object) -> bool:
    """Return True if ``value`` has ``state_dict()`` and ``load_state_dict()``."""
    gives = callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")
    return gives and not isinstance(value, type)


class TorchState(ObjectState):
    """Training state of a model, an optimizer and other values, which become attributes.

    Attributes that are set later are also saved. Modules, optimizers, an ``ElasticSampler`` and
    other objects with ``state_dict()`` and ``load_state_dict()`` are not replaced: their state is
    saved, restored and sent to other ranks. Other values are copied and must be picklable.

    The constructor saves the state. It is not collective.

    Args:
        model: any module.
        optimizer: any optimizer, including a ``DistributedOptimizer``.
        kwargs: other models, optimizers, samplers, and values such as ``epoch=0``.

    Raises:
        ConfigError: an attribute has the name of an attribute of this class, or begins with ``_``.

    Source: Horovod 0.28, ``horovod.torch.elastic.TorchState``.
    Differs: for schedulers and scalers, the result of ``state_dict()`` is saved, whereas Horovod
    pickles them with the optimizer that they reference; ``sync()`` also saves; ``restore()``
    clears gradients; a restored optimizer does not share memory with the commit, so the commit can
    be restored again.
    """

    _is_shared = False  # whether ``sync`` was called

    def __init__(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any
    ) -> None:
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
        """Copy the state in memory. Not collective."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore the state of the last ``save``, ``commit`` or ``sync``. Not collective."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Broadcast the state of rank 0 to all ranks, and save this state. Collective.

        The indices recorded by ``ElasticSampler.record_indices`` are merged over all ranks.

        Raises:
            MismatchError: the ranks have different models, optimizers or samplers; on every rank.
        """
        names = sorted(self._handlers)  # attributes may be set later in any order
        first = self._bcast_object(names)
        world.current().comm.agree(
            names == first,
            f"the states of all ranks must have the same objects with state_dict(), but the state "
            f"of this rank has {', '.join(names)}, and that of rank 0 {', '.join(first)}; pass "
            f"the same objects to the constructor on all ranks",
        )
        self._is_shared = True
        for name in names:
            self._handlers[name].sync()
        super().sync()

    def reset(self) -> None:
        """Divide the rest of each sampler's epoch among the current ranks."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; also save the value if the attribute is new, or gets a new object.

        Raises:
            ConfigError: a plain value replaces an object with ``state_dict()``, or a new value
                cannot be copied.
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
                    f"a new {name} must have a state_dict() like the old {name}, got a "
                    f"{type(value).__name__}; use another name for plain values"
                )
        super().__setattr__(name, value)

    def _refuse_where_spares_lack(self, name: str, *, is_known: bool) -> None:
        if self._is_shared and not is_known and world.current().origin.spares is not None:
            raise ConfigError(
                "with --spares each object with state_dict() must be passed to the constructor "
                f"of the state, but {name} was set later; pass {name} to the constructor, or "
                "leave out --spares"
            )
