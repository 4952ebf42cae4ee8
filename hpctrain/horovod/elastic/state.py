"""State that all ranks must hold alike to go on together, and its last commit."""

import copy
import enum
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.comm.ops import Op
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.runtime import world

Broadcast = Callable[[Any], Any]
"""Returns the object of rank 0 on every rank."""


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
    of rank 0.
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
        self.num_commits = 0
        """How often this state was committed here."""

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
        """Save the state, then see whether hosts come or go. Collective.

        A failed operation costs what was done since the last commit; a commit costs a copy of the
        state in memory.

        Raises:
            HostsUpdatedInterrupt: they do; on every rank.
        """
        self.save()
        self.num_commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """See whether any rank was told that hosts come or go. Collective, 24 bytes.

        Raises:
            HostsUpdatedInterrupt: one was; on every rank.
        """
        newest, what = self._last_updated_timestamp, HostUpdate.NONE
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:
                newest, what = max(newest, timestamp), what | HostUpdate(update)
        removed, added = (bool(what & bit) for bit in (HostUpdate.REMOVED, HostUpdate.ADDED))
        told = torch.tensor([newest, removed, added], dtype=torch.float64)
        world.current().comm.allreduce_(told, op=Op.MAX).wait()
        newest, removed, added = float(told[0]), bool(told[1]), bool(told[2])
        if newest > self._last_updated_timestamp:
            self._last_updated_timestamp = newest
            raise HostsUpdatedInterrupt(skip_sync=removed and not added)

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
    """A state of plain values, which are its attributes.

    Source: Horovod 0.28, ``horovod.common.elastic.ObjectState``.
    Differs: values are copied, so a list that is changed in place is restored too.
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
            setattr(self, name, value)
            self._saved_state[name] = copy.deepcopy(value)

    def save(self) -> None:
        """Copy the attributes."""
        names = self._saved_state
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in names}

    def restore(self) -> None:
        """Set the attributes to what was saved."""
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Set the attributes to those of rank 0, and save them. Collective."""
        if self._saved_state:
            values = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = self._bcast_object(values)
            self.restore()

    def _require_free(self, name: str) -> None:
        if hasattr(type(self), name) or name.startswith("_"):
            raise ConfigError(f"an attribute cannot be called {name}, the state uses that name")

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Tell type checkers that ``kwargs`` become attributes."""


def _broadcast(value: Any) -> Any:
    return world.current().comm.broadcast_object(value)
