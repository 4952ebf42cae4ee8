"""The world of this process: the only module of hpctrain with state that changes."""

import atexit
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, cast
from weakref import WeakKeyDictionary

import torch

from hpctrain.cluster import env
from hpctrain.cluster.env import BEGUN, ENDED, WATCHED
from hpctrain.cluster.start_watch import watched_start
from hpctrain.cluster.topology import Topology
from hpctrain.comm.communicator import Communicator, Owner
from hpctrain.comm.factory import Connection, connect
from hpctrain.comm.mpi_world import find_world, is_communicator, numbers_in
from hpctrain.comm.observed import Statistics, observed, trace
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.threaded import ThreadedCommunicator
from hpctrain.core import config, logs
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError, NotInitializedError, ReplicaError
from hpctrain.negotiation.stall import LastCall
from hpctrain.negotiation.timeline import Timelines
from hpctrain.runtime import arrival, lazy_dynamo, torch_backend
from hpctrain.runtime.abort import FailureHooks, leave, printed_once
from hpctrain.runtime.last_check import LastStates, compare
from hpctrain.runtime.process_set_table import Controllers, ProcessSets, Wanted, beside
from hpctrain.runtime.rebuild import Rebuild, Stage
from hpctrain.runtime.stopping import CommonStop

if TYPE_CHECKING:
    from hpctrain.comm.liveness import Liveness
    from hpctrain.comm.mpi_library import BeforeFinalize
    from hpctrain.comm.mpi_world import MpiComm
    from hpctrain.comm.spares import Spares
    from hpctrain.runtime.process_sets import ProcessSet


class OpenedSteps(Protocol):
    """The opening messages of steps, as a rank that has joined knows them."""

    def take_part(self, comm: Communicator) -> bool:
        """Take part in the next step of the other ranks with nothing. Collective.

        False if all ranks do so: there is no other step.
        """

    def hand_over(self) -> Mapping[int, Mapping[str, str]]:
        """Return, by optimizer, what its last step has left here; at the end. Not collective."""

    def last_to_step(self, comm: Communicator) -> Sequence[int]:
        """Return the ranks that have taken every step since all ranks had joined. Collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What ``init`` found and made."""

    comm: Communicator  # all ranks, for buckets; named operations have one of their own
    sets: ProcessSets  # what named operations go through
    topology: Topology
    plan: Plan
    plan_origin: str  # what the plan was chosen by, for people
    settings: Settings
    presence: "Liveness | None"  # who is still there; None in a world of one
    statistics: Statistics | None  # what the collectives cost, where that is wanted
    hooks: FailureHooks | None  # what ends all ranks when this one fails; None in a world of one
    ranks: "MpiComm | None"  # the same ranks for MPI; None in a world of one
    given: "MpiComm | None"  # the communicator that ``init`` was given
    spares: "Spares | None"  # who waits to take the place of ranks that are lost
    is_first: bool  # whether no ranks were lost before
    rebuild: Rebuild  # who holds state about the ranks
    timelines: Timelines  # the timeline that this rank records, if any
    last_call: LastCall  # what this rank has communicated last
    stop: CommonStop  # whether the ranks of a loop of the user's own are to stop
    step_checks: MutableMapping[Communicator, OpenedSteps]
    """What opens the steps of distributed optimizers, by the ranks that take them."""
    last_states: LastStates  # of models that ranks divide, for the comparison at the end
    before_finalize: "BeforeFinalize | None"
    """Takes leave where the program ends MPI itself; None in a world of one."""
    owner: Owner = field(default_factory=Owner)  # a forked child has no part in the end of a world


_world: World | None = None

SPARES_RULE = (
    "with --spares nothing but DistributedOptimizer communicates before elastic.run, which is "
    "called once, for a spare does that alone; move it into the function, or leave --spares out"
)


def init(
    comm: "Sequence[int] | MpiComm | Sequence[MpiComm] | None" = None,
    process_sets: "Sequence[ProcessSet] | str | None" = None,
    *,
    ranks_per_node: int | None = None,
    engine: str | None = None,
) -> None:
    """Join the world of all ranks that were started together. Collective.

    A second call only registers ``process_sets``, if there are any. Without a launcher this is a
    world of one, in which everything works and nothing is sent. At the end of the program the
    ranks take leave of each other by themselves.

    Args:
        comm: another world than all ranks: a list of some of them, of which the i-th becomes
            rank i, and which alone call this; or an mpi4py communicator, whose ranks are the
            world, so that several can train side by side; or several of those, of which the
            first is the world and every other one a process set of it.
        process_sets: what else than all ranks together shall communicate, the same on every
            rank; ``"dynamic"`` means none yet.
        ranks_per_node: declares nodes on one host, so that a laptop runs the two-level path;
            else what ``HPCTRAIN_RANKS_PER_NODE`` says.
        engine: what moves tensors: ``hpctrain``, or ``horovod`` where that is installed; else
            what ``HPCTRAIN_ENGINE`` says. Rank 0 decides for all.

    Raises:
        ConfigError: a setting or an argument is not valid, or a process set is given twice.
        LaunchError: launcher, MPI library and world do not match, or a rank has no Horovod.
        NodeMemoryError: shared memory was forced and cannot be had.
        MismatchError: the ranks give different process sets; on every rank.
    """
    chosen, *others = _communicators(comm)
    if _world is None:
        settings = Settings.from_env()
        if ranks_per_node is not None:
            if ranks_per_node < 1:
                raise ConfigError(f"ranks_per_node must be at least 1, got {ranks_per_node}")
            settings = replace(settings, ranks_per_node=ranks_per_node)
        if engine is not None:
            if engine not in config.ENGINES:
                raise ConfigError(f"engine is one of {', '.join(config.ENGINES)}, got {engine!r}")
            settings = replace(settings, engine=engine)
        join(settings, chosen)
        _refuse_operations()
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ConfigError(
                f"process_sets is a list of ProcessSet or 'dynamic', got {process_sets!r}"
            )
        process_sets = None
    if process_sets or others:
        _register(others, list(process_sets or ()))


def _refuse_operations() -> None:
    """Let a spare have no named operations, which nobody shares, before ``elastic.run``."""
    if current().spares is not None and not current().is_first:
        current().sets.global_controller.refuse(SPARES_RULE)


def _communicators(comm: object) -> list[object]:
    if isinstance(comm, Sequence) and comm and all(is_communicator(one) for one in comm):
        return list(comm)
    return [comm]


def _register(comms: Sequence[object], process_sets: "Sequence[ProcessSet]") -> None:
    """Make the process sets that ``init`` was given, and let each know its own. Collective."""
    if current().spares is not None:
        raise ConfigError(f"{SPARES_RULE}: process sets are made by add_process_set()")
    of_comms = [Wanted(numbers_of(one), by_communicator=True) for one in comms]
    wanted = of_comms + [one.wanted() for one in process_sets]
    found = current().sets.register(wanted)[len(of_comms) :]
    seen = {0}
    for number, (one, registered) in enumerate(zip(process_sets, found, strict=True)):
        if registered.number in seen:
            raise ConfigError(
                f"entry {number} of process_sets has the ranks of an earlier one, or all: "
                f"{list(registered.ranks)}; leave it out"
            )
        seen.add(registered.number)
        one.bind(registered)


def numbers_of(comm: object) -> tuple[int, ...]:
    """Return which ranks those of a communicator are, else ``ConfigError``. Not collective."""
    return tuple(numbers_in(current().ranks, cast("MpiComm", comm)))


def join(settings: Settings, chosen: object = None) -> None:
    """Join the world as ``init`` does, with settings that are complete. Collective.

    A spare waits inside until it takes the place of a lost rank, or ends the program.
    """
    if _world is not None:
        return
    launched = env.launched() if settings.recover else None
    with watched_start(launched.local_size if launched else None):
        if not settings.spares:
            _join(settings, chosen)
            return
        spares = _spares_of(settings.spares, chosen)
        if spares.is_worker:
            _join(settings, spares.workers, spares=spares)
            return

    def make(ranks: "MpiComm") -> None:
        if is_initialized():  # in vain: a rank died before all had made this world
            go_on(ranks)
        else:
            _join(settings, ranks, is_first=False, spares=spares)

    if not spares.wait(make):
        sys.exit(0)


def _spares_of(number: int, chosen: object) -> "Spares":
    """Divide all ranks in those that work and those that wait. Collective."""
    if chosen is not None:
        raise ConfigError(
            "spares are of all ranks that were started together, and init was given some of them; "
            "call it without comm, or leave --spares out"
        )
    from hpctrain.comm.spares import Spares  # noqa: PLC0415 - a world of one needs no MPI

    if (whole := find_world()) is None:
        raise ConfigError("spares need ranks whose place they take, and this process is alone")
    return Spares(whole, number)


def _join(
    settings: Settings, chosen: object, *, is_first: bool = True, spares: "Spares | None" = None
) -> None:
    global _world  # noqa: PLW0603 - the one place
    torch_backend.register()
    lazy_dynamo.install()
    with printed_once():
        ranks = find_world(chosen, settings.timeout)
    # From here on nobody fails alone.
    hooks = FailureHooks(ranks, settings.log_dir, recovers=settings.recover) if ranks else None
    try:
        _make(settings, chosen, ranks, hooks, is_first=is_first, spares=spares)
    except BaseException:
        if hooks is not None and not is_first:  # there may be another try
            if _world is not None:
                _depart(_world)
                _world = None
            hooks.uninstall()
        raise


def _make(
    settings: Settings,
    chosen: object,
    ranks: "MpiComm | None",
    hooks: FailureHooks | None,
    *,
    is_first: bool,
    spares: "Spares | None",
) -> None:
    global _world  # noqa: PLW0603 - the one place
    threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else None
    found = connect(ranks, settings, threads)
    here = found.topology
    if ranks:
        arrival.take_place(found)
    if settings.recover:
        arrival.tell_place(here)
    # All ranks count, or none does: as rank 0 wants it.
    statistics = Statistics(found.comm) if found.settings.stats else None
    inside = observed(found.comm, trace if settings.trace else None, statistics)
    comm = beside(inside, found.plan)
    controllers = Controllers(
        topology=here,
        plan=found.plan,
        settings=found.settings,
        timelines=Timelines(here.rank, here.size),
        last_call=LastCall(),
        recorder=found.recorder,
        end=hooks.abort if hooks is not None else None,
    )
    sets, rebuild = ProcessSets(inside, comm, controllers), Rebuild()
    rebuild.register(Stage.RECORDS, close=controllers.timelines.stop)
    rebuild.register(Stage.SETS, renew=sets.renew, close=sets.close)
    _world = World(
        comm=comm,
        sets=sets,
        topology=here,
        plan=found.plan,
        plan_origin=found.plan_origin,
        settings=settings,
        presence=found.presence,
        statistics=statistics,
        hooks=hooks,
        ranks=ranks,
        given=cast("MpiComm", chosen) if is_communicator(chosen) else None,
        spares=spares,
        is_first=is_first,
        rebuild=rebuild,
        timelines=controllers.timelines,
        last_call=controllers.last_call,
        stop=CommonStop(comm, settings.budget),
        step_checks=WeakKeyDictionary(),
        last_states=LastStates(),
        before_finalize=_leave_before_finalize() if ranks else None,
    )
    _begin(_world, found)


def _begin(made: World, found: Connection) -> None:
    """Let people and files know of a world, and its end come with that of the program."""
    settings, hooks, rank = made.settings, made.hooks, made.topology.rank
    logs.setup(rank, made.topology.size, settings.log_dir, level=settings.log_level)
    arrival.report(found)
    if made.is_first and WATCHED in os.environ and rank == 0:
        sys.stderr.write(f"{BEGUN}\n")
    if settings.records is not None and rank == 0:
        arrival.tell_study(settings.records, found)
    if hooks is not None:
        hooks.last_words.append(made.timelines.stop)
        hooks.communicates = made.last_call.was_on
    if settings.timeline is not None:
        made.timelines.start(settings.timeline, mark_cycles=settings.timeline_mark_cycles)
    if found.presence is not None or made.statistics is not None or WATCHED in os.environ:
        atexit.register(_shut_down)


def _leave_before_finalize() -> "BeforeFinalize":
    from hpctrain.comm.mpi_library import BeforeFinalize  # noqa: PLC0415 - a world of one needs no MPI

    return BeforeFinalize(lambda: _leave(current(), raises=False))


def shutdown() -> None:
    """Take leave of the other ranks; nothing but ``init`` may be called afterwards.

    Collective in the end: it waits until every rank has called it or ended. Harmless before
    ``init`` and when called twice. A program that calls ``MPI.Finalize()`` takes leave by that.

    Then the ranks compare what the last step of each ``DistributedOptimizer`` has left: how many
    steps it has taken, and its weights; of a model that ranks divide replicated values, their
    optimizer state, and settings. Left out are replicas of whole models to which a rank has
    written since, as under ``torch.no_grad()``; torch does not count ``.data``. An optimizer that
    some ranks no longer have, after an error or a state that was loaded, is left out, too, and the
    ranks compare nothing while an exception is on its way on one of them.

    Raises:
        ReplicaError: it differs, on every rank; the world is over all the same. At the end of a
            program that does not call this, all ranks end with exit code 1 and the message.
    """
    _shut_down(raises=True)


def _shut_down(*, raises: bool = False) -> None:
    global _world
    if _world is None:
        return
    leaving, _world = _world, None
    is_over = leaving.before_finalize is not None and leaving.before_finalize.is_over
    if leaving.owner.is_here and not is_over:
        _leave(leaving, raises=raises)


def _leave(leaving: World, *, raises: bool) -> None:
    atexit.unregister(_shut_down)
    for comm in leaving.sets.communicators().values():
        if isinstance(comm, ThreadedCommunicator):
            comm.drain()  # while lost ranks are still looked for
    fault = ""
    if leaving.presence is not None and leaving.hooks is not None:
        fault = leave(leaving.presence, leaving.hooks, lambda gather: compare(leaving, gather))
        if fault and not raises:
            leaving.hooks.end(ReplicaError(fault))
    if leaving.statistics is not None:
        leaving.statistics.report()  # nobody waits in vain: from `leave` all return, or none
    leaving.stop.close()
    leaving.rebuild.close()
    leaving.comm.close()
    if leaving.before_finalize is not None:
        leaving.before_finalize.close()
    is_well = not fault and sys.exc_info()[0] is None and not hasattr(sys, "last_value")
    _tell_end(leaving, is_well=is_well)
    if fault:
        raise ReplicaError(fault)  # with the hooks, for who does not catch it
    if leaving.hooks is not None and sys.exc_info()[0] is None:
        leaving.hooks.uninstall()  # an error on its way out still needs them to end all ranks


def _tell_end(leaving: World, *, is_well: bool) -> None:
    if leaving.spares is not None:
        leaving.spares.end()
    if WATCHED in os.environ and is_well and leaving.topology.rank == 0:
        sys.stderr.write(f"{ENDED}\n")
        sys.stderr.flush()


def go_on(ranks: "MpiComm", *, moves: bool = True) -> None:
    """Leave a world of which ranks are lost for one of ``ranks``, which are left. Collective.

    What has registered with ``rebuild`` to outlive its world follows, if it ``moves``. After an
    error this rank is in the world before, and may leave it for another one.
    """
    global _world  # noqa: PLW0603 - the one place
    before, _world = current(), None
    assert before.presence is not None
    assert before.hooks is not None
    if before.presence.is_open:  # else one more rank has died while the next world was made
        _depart(before)
    before.hooks.uninstall()
    try:
        _join(before.settings, ranks, is_first=False, spares=before.spares)
    except BaseException:
        _world = before
        before.hooks.install()
        raise
    if moves:
        current().rebuild.follow(before.rebuild.leave())


def _depart(leaving: World) -> None:
    """Let nothing of a world go on of which ranks are lost. Not collective."""
    atexit.unregister(_shut_down)
    if leaving.presence is not None:
        leaving.presence.abandon()
    leaving.sets.drop()
    leaving.stop.close()
    leaving.timelines.stop()
    if leaving.before_finalize is not None:
        leaving.before_finalize.close()


def current() -> World:
    """Return the world.

    Raises:
        NotInitializedError: there is none yet.
    """
    if _world is None:
        raise NotInitializedError("this needs the world of all ranks; call hpctrain.init() first")
    return _world


def is_initialized() -> bool:
    """Say whether ``init`` was called and ``shutdown`` was not."""
    return _world is not None


def rank() -> int:
    """Return the number of this process, from 0."""
    return current().topology.rank


def size() -> int:
    """Return the number of ranks."""
    return current().topology.size


def local_rank() -> int:
    """Return the number of this rank on its node, from 0."""
    return current().topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return current().topology.local_size


def cross_rank() -> int:
    """Return the number of this node among those that have a rank of this ``local_rank``."""
    return current().topology.cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a rank of this ``local_rank``."""
    return current().topology.cross_size


def is_homogeneous() -> bool:
    """Say whether every node has the same number of ranks."""
    return current().topology.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002
    """Record what named operations do from now on, in a file that Perfetto and Chrome open.

    Not collective. A timeline that is being recorded in another file ends.

    Args:
        file_path: the file of rank 0, the only one that records; with ``{rank}`` in it, which
            becomes the number of each, every rank that calls this writes a file.
        mark_cycles: whether to mark where each round of the controller begins.

    Raises:
        NotInitializedError: ``init`` was not called; a ``ValueError``.
    """
    current().timelines.start(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """End the timeline: its file is complete. Not collective; harmless without one.

    Raises:
        NotInitializedError: ``init`` was not called; a ``ValueError``.
    """
    current().timelines.stop()
