"""Process sets: subsets of the ranks, in which operations run separately."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from hpctrain.comm.mpi_start import is_communicator, numbers_in
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import MAX_RUNS, format_numbers
from hpctrain.runtime import world

if TYPE_CHECKING:
    from hpctrain.comm.mpi_start import MpiComm
    from hpctrain.runtime.process_set_table import Registered


class ProcessSet:
    """Subset of the ranks, for the argument ``process_set`` of operations and optimizers.

    Every rank, including the ranks outside of the set, must register the set by
    ``init(process_sets=...)`` or ``add_process_set``. Sets may overlap and contain each other.
    After ``remove_process_set`` or ``shutdown`` a set can be registered again.

    The constructor is not collective.

    Args:
        ranks_or_comm: ranks of the world in any order, the same on every rank; or an mpi4py
            communicator that contains the calling rank, and only ranks of the world.

    Raises:
        ConfigError: the argument is neither a list of ranks nor a communicator.
    """

    def __init__(self, ranks_or_comm: "Iterable[int] | MpiComm") -> None:
        self._ranks: list[int] | None = None
        self._comm: MpiComm | None = None
        self._registered: Registered | None = None
        if is_communicator(ranks_or_comm):
            self._comm = cast("MpiComm", ranks_or_comm)
            return
        ranks = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else None
        if ranks is None or not all(isinstance(rank, int) for rank in ranks):
            raise ConfigError(
                f"a ProcessSet must be made of a list of ranks or an mpi4py communicator, got "
                f"{ranks_or_comm!r}"
            )
        self._ranks = sorted(ranks)

    @property
    def ranks(self) -> list[int] | None:
        """Ranks in the set, numbered as in the world.

        None for a set that was created from a communicator and is not registered.
        """
        return self._ranks

    @property
    def mpi_comm(self) -> "MpiComm | None":
        """Communicator from which the set was created; None if it was created from ranks."""
        return self._comm

    @property
    def process_set_id(self) -> int | None:
        """Identifying number of the set, from 1; None if the set is not registered."""
        found = self.registered
        return found.number if found is not None and found.is_open else None

    @property
    def registered(self) -> "Registered | None":
        """Entry of this set in the table of its world; None before it is registered.

        The entry remains after the shutdown of the world.
        """
        return self._registered

    def size(self) -> int | None:
        """Return the number of ranks in the set; None if the set is not registered."""
        found = self.registered
        return len(found.ranks) if found is not None and found.is_open else None

    def rank(self) -> int | None:
        """Return the index of this rank in the set, from 0; None if the set is not registered.

        Arguments such as ``root_rank`` are always ranks of the world.

        Raises:
            ConfigError: this rank is not in the set.
        """
        if self.process_set_id is None:
            return None
        return world.current().sets.registered(self).rank

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None if ``ranks`` is None.

        Raises:
            NotInitializedError: ``init`` was not called.
        """
        return None if self.ranks is None else world.rank() in self.ranks

    def bind(self, found: "Registered") -> None:
        """Store ``found``, the entry that the world's table has for this set."""
        self._registered = found
        self._ranks = list(found.ranks)

    def wanted(self) -> tuple[tuple[int, ...], bool]:
        """Return the ranks, and True if the set was created from a communicator.

        Raises ``ConfigError``: a rank of the communicator is not in the world.
        """
        if self._comm is None:
            return tuple(self._ranks or ()), False
        return numbers_of(self._comm), True

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )

    __repr__ = __str__

    def __copy__(self) -> "ProcessSet":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "ProcessSet":
        return self  # copies of a module use the same set

    def __reduce__(self) -> str | tuple[Any, ...]:
        return type(self), (self._ranks,)


class _GlobalProcessSet(ProcessSet):
    """All ranks of the current world; stores no state."""

    @property
    def ranks(self) -> list[int]:
        return list(range(world.size())) if world.is_initialized() else []

    @property
    def mpi_comm(self) -> "MpiComm | None":
        return world.current().origin.given if world.is_initialized() else None

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def registered(self) -> "Registered | None":
        return world.current().sets.everyone

    def __repr__(self) -> str:
        return "global_process_set"

    def __reduce__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _GlobalProcessSet([])
"""The set of all ranks, from ``init`` to ``shutdown``; ``process_set_id`` is 0."""


def add_process_set(process_set: "ProcessSet | Sequence[int]") -> ProcessSet:
    """Register and return a process set. Collective over all ranks of the world.

    Sets can be added and removed at any time, without Horovod's HOROVOD_DYNAMIC_PROCESS_SETS.

    Args:
        process_set: either a set of ranks, the same on every rank; or a set that each rank creates
            from a communicator that contains the rank.

    Raises:
        NotInitializedError: ``init`` was not called.
        MismatchError: the ranks request different sets; on every rank.
        ConfigError: the set is empty or has ranks that do not exist; another set has the same
            ranks; or the MPI library does not allow calls from several threads.
    """
    sets = world.current().sets
    asked = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    found = sets.register([asked.wanted()], new=True)
    asked.bind(found[0])
    return asked


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective over all ranks of the world.

    Operations that all ranks of the set have submitted complete first.

    Returns:
        True if the set was removed; False if it was not registered, or is the global set.

    Raises:
        NotInitializedError: ``init`` was not called.
        MismatchError: the ranks pass different sets; raised on every rank, and no set is removed.
    """
    return world.current().sets.remove(process_set.registered)


def in_set(process_set: ProcessSet | None, rank: int, name: str = "root_rank") -> int:
    """Convert ``rank``, a rank of the world, to a rank in a process set. Local.

    Args:
        process_set: the set; None for all ranks.
        rank: rank of the world.
        name: name of the argument, for the error message.

    Raises:
        ConfigError: ``rank`` is not in the set.
    """
    ranks = (process_set or global_process_set).ranks or []
    if rank not in ranks:
        raise ConfigError(
            f"{name} must be the world rank of a member of the process set, one of "
            f"{format_numbers(ranks, MAX_RUNS)}, got {rank}"
        )
    return ranks.index(rank)


def numbers_of(comm: object) -> tuple[int, ...]:
    """Return the ranks of a communicator, numbered as in the world. Not collective.

    Raises:
        ConfigError: the communicator has ranks outside of the world.
    """
    return tuple(numbers_in(world.current().ranks, cast("MpiComm", comm)))
