"""Table of the process sets of a world, with their communicators and controllers."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

from hpctrain.cluster.topology import Topology
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.flight_recorder import FlightRecorder
from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.threaded import ThreadedCommunicator
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError, HorovodInternalError, MismatchError, NodeMemoryError
from hpctrain.core.units import by_rank, listed
from hpctrain.negotiation.controller import Controller
from hpctrain.negotiation.request import Kind, Request
from hpctrain.negotiation.stall import LastCall, SetMember, StallWatch
from hpctrain.negotiation.timeline import Timelines

if TYPE_CHECKING:
    from hpctrain.comm.liveness import Gather

T = TypeVar("T")


class Wanted(NamedTuple):
    """Process set that a rank asks to register."""

    ranks: tuple[int, ...]  # ranks of the world, sorted
    by_communicator: bool
    """Whether the set was created from a communicator. Different ranks may then pass different
    communicators, and each of these becomes a set."""


def wanted_by_all(lists: Sequence[Sequence[Wanted]]) -> list[tuple[int, ...]]:
    """Merge the requests of all ranks; return the ranks of each set, in order of set numbers.

    ``lists[rank]`` contains the requests of ``rank``. As in Horovod, sets created from
    communicators precede sets created from ranks.

    Raises:
        MismatchError: the ranks request different sets.
    """
    compared = [
        ["a communicator" if by else list(ranks) for ranks, by in wanted] for wanted in lists
    ]
    if any(each != compared[0] for each in compared):
        shown = [
            ", ".join("a communicator" if by else listed(ranks) for ranks, by in wanted)
            for wanted in lists
        ]
        raise MismatchError(
            f"all ranks must register the same process sets in the same order, got "
            f"{by_rank(shown)}"
        )
    columns = list(zip(*lists, strict=True))
    of_comms = [sorted({one.ranks for one in c}) for c in columns if c[0].by_communicator]
    of_ranks = [c[0].ranks for c in columns if not c[0].by_communicator]
    return [*(ranks for sets in of_comms for ranks in sets), *of_ranks]


@dataclass(frozen=True, kw_only=True, slots=True)
class Controllers:
    """Factory of controllers, with the arguments that all controllers of a world share."""

    topology: Topology
    plan: Plan
    settings: Settings
    timelines: Timelines
    last_call: LastCall
    recorder: FlightRecorder  # records the unnamed collectives
    end: Callable[[int], object] | None  # ends all ranks with an exit code; None for one rank

    def make(self, comm: Communicator, ranks: Sequence[int]) -> Controller:
        """Create the controller of a process set; the controller closes ``comm``. Collective."""
        settings, plan = self.settings, self.plan
        nodes = zip(self.topology.nodes, self.topology.hosts, strict=True)
        hosts = {rank: host for members, host in nodes for rank in members}
        members = [SetMember(rank, hosts[rank]) for rank in ranks]
        return Controller(
            comm,
            fusion_bytes=(
                plan.fusion_bytes if settings.fusion_bytes is None else settings.fusion_bytes
            ),
            cycle_s=plan.cycle_s if settings.cycle_s is None else settings.cycle_s,
            timeout_s=settings.timeout,
            timelines=self.timelines,
            stalls=StallWatch(
                settings,
                comm.rank,
                members,
                self.last_call,
                self.end,
                recorder=self.recorder if len(ranks) == self.topology.size else None,
            ),
        )


class Registered:
    """Entry of a process set in the table of this rank."""

    __slots__ = ("comm", "controller", "inside", "is_open", "number", "rank", "ranks")

    def __init__(self, number: int, ranks: Sequence[int], me: int) -> None:
        self.number = number
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(me) if me in self.ranks else None
        """Index of this rank in the set, from 0; None outside of the set."""
        self.is_open = True
        self.inside: Communicator | None = None
        """Communicator for buckets, without a thread; None outside of the set."""
        self.comm: Communicator | None = None  # ``inside``, with a thread if the plan uses threads
        self.controller: Controller | None = None
        """Executes named operations; None outside of the set."""


class Registrable(Protocol):
    """Interface of objects with an entry in the table, such as ``ProcessSet``."""

    @property
    def registered(self) -> "Registered | None":
        """Entry of the set in the table; None before it is registered."""


class ProcessSets:
    """All process sets of a world; set 0 contains all ranks.

    The constructor is collective: it creates the controller of set 0.

    Args:
        inside: communicator of all ranks without a thread; the world closes it.
        comm: ``inside``, with a thread if the plan uses threads; the world closes it.
        controllers: common arguments of the controllers.
    """

    def __init__(self, inside: Communicator, comm: Communicator, controllers: Controllers) -> None:
        self._me, self._size = inside.rank, inside.size
        self._controllers = controllers
        self._next_number = 1
        self._free_numbers: deque[int] = deque()
        self.everyone = Registered(0, range(inside.size), inside.rank)
        self.everyone.inside, self.everyone.comm = inside, comm
        self.everyone.controller = self._controller_over(inside, self.everyone.ranks)
        self.global_controller = self.everyone.controller
        """Controller of the named operations of all ranks."""
        self._sets = {0: self.everyone}

    def controller(self, process_set: Registrable | None) -> Controller:
        """Return the controller of a set; for None, the controller of all ranks.

        Raises like ``registered``.
        """
        if process_set is None:
            return self.global_controller
        controller = self.registered(process_set).controller
        assert controller is not None
        return controller

    def controllers(self) -> list[Controller]:
        """Return the controllers of the sets that contain this rank, by increasing set number."""
        found = [one.controller for one in self._by_number()]
        return [controller for controller in found if controller is not None]

    def communicators(self) -> dict[int, Communicator]:
        """Return, by set number, the bucket communicators of the sets that contain this rank."""
        return {one.number: one.comm for one in self._by_number() if one.comm is not None}

    def communicator(self, process_set: Registrable | None) -> Communicator:
        """Return a set's communicator for buckets; the set's controller uses another communicator.

        For None, return the communicator of all ranks. Raises like ``registered``.
        """
        found = self.everyone if process_set is None else self.registered(process_set)
        assert found.comm is not None
        return found.comm

    def registered(self, process_set: Registrable) -> Registered:
        """Return the entry of a set.

        Raises:
            ConfigError: the set is not registered, or does not contain this rank.
        """
        found = process_set.registered
        if found is None or not found.is_open:
            raise ConfigError(
                f"a process set must be registered before use, but {process_set} is not, or was "
                f"removed; pass it to init() or add_process_set() on every rank first"
            )
        if found.rank is None:
            raise ConfigError(
                f"a rank must be in the process set that it uses, but rank {self._me} is not in "
                f"{process_set}; call this function only on the ranks of the set"
            )
        return found

    def find(self, ranks: Sequence[int]) -> Registered | None:
        """Return the set that has exactly these ranks, which are sorted; None if no set has."""
        return next((one for one in self._sets.values() if one.ranks == tuple(ranks)), None)

    def by_number(self) -> dict[int, list[int]]:
        """Return the ranks of every set, by set number."""
        return {number: list(one.ranks) for number, one in sorted(self._sets.items())}

    def register(
        self, asked: Sequence[tuple[tuple[int, ...], bool]], *, new: bool = False
    ) -> list[Registered]:
        """Return the set of each entry of ``asked``, and create missing sets.

        Collective over the world.

        Args:
            asked: for each set a pair: the ranks of the set, and True if the set was created from
                a communicator. If False, all ranks pass the same ranks. If True, each rank passes
                the ranks of its own communicator, which contains this rank.
            new: True to raise an error if a set exists already.

        Raises:
            MismatchError: the ranks request different sets; on every rank.
            ConfigError: a set cannot be created, or ``new`` is True and a set exists already; on
                every rank.
        """
        wanted = [Wanted(*one) for one in asked]
        lists = self._in_order(lambda inside: inside.allgather_object(wanted))
        every = wanted_by_all(lists)
        for ranks in every:
            self._check(ranks, new=new)
        for ranks in every:
            if self.find(ranks) is None:
                self._add(ranks)
        found = [self.find(want.ranks) for want in wanted]
        return [one for one in found if one is not None]

    def remove(self, registered: Registered | None) -> bool:
        """Complete the operations that all ranks of a set have submitted, then close the set.

        Collective over the world. Operations that only some ranks of the set have submitted fail.

        Returns:
            False if the set is not registered, or is the set of all ranks.

        Raises:
            MismatchError: the ranks pass different sets; raised on every rank, and no set is
                closed.
        """
        known = registered is not None and registered.is_open
        number = registered.number if registered is not None and known else None
        numbers = self._in_order(lambda inside: inside.allgather_object(number))
        if len(set(numbers)) > 1:
            names = [f"set {one}" if one is not None else "no registered set" for one in numbers]
            raise MismatchError(
                f"all ranks must remove the same process set, got {by_rank(names)}"
            )
        if number is None or number == 0:
            return False
        removed = self._sets.pop(number)
        if removed.controller is not None:
            with suppress(HorovodInternalError):  # after ``break_off`` no operation is in flight
                removed.controller.run(Request(Kind.BARRIER, "barrier.removal", ()))
        self._close(removed)
        self._free_numbers.append(number)
        return True

    def break_off(self, reason: str) -> None:
        """Make the operations of all sets that contain this rank fail until ``renew`` is called.

        Not collective. Pending and later operations fail, on all ranks of these sets.
        """
        for one in self._by_number():
            if one.controller is not None:
                one.controller.break_off(reason)

    def renew(self) -> None:
        """Replace all controllers and discard their operations. Collective over the world.

        No rank may be waiting for a named operation. The numbers and ranks of the sets do not
        change.
        """
        for one in self._by_number():
            if one.controller is not None:
                one.controller.abandon()
                one.controller = self._controllers.make(one.controller.comm, one.ranks)
        assert self.everyone.controller is not None
        self.global_controller = self.everyone.controller

    def drop(self) -> None:
        """Close all sets without messages to other ranks, which may be lost. Not collective."""
        for one in self._by_number():
            one.is_open = False
            if one.controller is not None:
                one.controller.drop()
            if isinstance(one.comm, ThreadedCommunicator):
                one.comm.drop()

    def shut_down_broken(self, gather: "Gather") -> None:
        """Shut down all controllers if a controller has failed on some rank.

        Collective over the world, by ``gather``: a failed controller cannot synchronize the ranks.
        """
        mine = any(controller.is_broken for controller in self.controllers())
        if b"broken" in gather(b"broken" if mine else b"well"):
            for controller in self.controllers():
                controller.shut_down()

    def close(self) -> None:
        """Close all sets. Collective over the world."""
        for one in reversed(self._by_number()):
            self._close(one)

    def _by_number(self) -> list[Registered]:
        return [self._sets[number] for number in sorted(self._sets)]

    def _in_order(self, function: Callable[[Communicator], T]) -> T:
        """Call ``function`` when the operations in flight on the world are complete.

        Return the result of ``function``.
        """
        inside, comm = self.everyone.inside, self.everyone.comm
        assert inside is not None
        if not isinstance(comm, ThreadedCommunicator):
            return function(inside)
        results: list[T] = []
        comm.submit(lambda: results.append(function(inside))).wait()
        return results[0]

    def _check(self, ranks: Sequence[int], *, new: bool) -> None:
        shown = listed(ranks)
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self._size)):
            raise ConfigError(
                f"a process set must have one or more different ranks from 0 to "
                f"{self._size - 1}, got {shown}"
            )
        known = self.find(ranks)
        if new and known is not None:
            raise ConfigError(
                f"two process sets must not have exactly the same ranks, but set {known.number} "
                f"has {shown}; use that set{', or remove it first' if known.number else ''}"
            )
        if known is None and len(ranks) > 1 and not calls_from_threads():
            raise ConfigError(
                f"MPI must support concurrent calls for process sets, but it was started "
                f"without MPI_THREAD_MULTIPLE, so {shown} cannot be a process set; let mpi4py "
                f"start MPI with its default, mpi4py.rc.thread_level = 'multiple'"
            )

    def _add(self, ranks: Sequence[int]) -> None:
        number = self._free_numbers.popleft() if self._free_numbers else self._next_number
        self._next_number = max(self._next_number, number + 1)
        made = Registered(number, ranks, self._me)
        refusal = ""
        try:
            made.inside = self._in_order(lambda inside: inside.group(ranks))
            if made.inside is not None:
                made.controller = self._controller_over(made.inside, ranks)
                made.comm = with_thread(made.inside, self._controllers.plan)
        except NodeMemoryError as error:
            # Every rank of the set raises this error; ``agree`` reports it to all other ranks.
            refusal = str(error)
        try:
            self._in_order(lambda inside: inside.agree(not refusal, refusal))
        except MismatchError:
            self._close(made)
            self._free_numbers.append(number)
            raise
        self._sets[number] = made

    def _controller_over(self, inside: Communicator, ranks: Sequence[int]) -> Controller:
        """Create a controller with a separate communicator. Collective over ``inside``."""
        comm = inside.group(range(inside.size))
        assert comm is not None
        return self._controllers.make(comm, ranks)

    def _close(self, one: Registered) -> None:
        one.is_open = False
        if one.controller is not None:
            one.controller.close()
        if one.comm is not None and one is not self.everyone:
            one.comm.close()


def with_thread(comm: Communicator, plan: Plan) -> Communicator:
    """Return ``comm``; add a thread, which all optimizers share, if the plan uses threads."""
    if plan.overlap != "thread":
        return comm
    return cast("Communicator", ThreadedCommunicator(comm))
