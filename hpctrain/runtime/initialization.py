"""Creation, end and replacement of the world of this process: ``init`` and ``shutdown``."""

import atexit
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch

from hpctrain.cluster import env
from hpctrain.cluster.env import BEGUN, ENDED, set_torch_ranks, sets_threads
from hpctrain.cluster.start_watch import watched_start
from hpctrain.comm.factory import Connection, connect
from hpctrain.comm.mpi_library import version
from hpctrain.comm.mpi_start import is_communicator
from hpctrain.comm.mpi_world import find_world
from hpctrain.comm.observed import Statistics, observed, trace
from hpctrain.comm.plan.planning import StoredPlan
from hpctrain.comm.threaded import ThreadedCommunicator
from hpctrain.core import config, logs
from hpctrain.core.checks import Number, checked
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError, ReplicaError
from hpctrain.core.torch_compat import warn_if_untested
from hpctrain.core.units import listed
from hpctrain.negotiation.stall import LastCall
from hpctrain.negotiation.timeline import Timelines
from hpctrain.runtime import lazy_dynamo, torch_backend
from hpctrain.runtime.abort import FailureHooks, leave, start_guard
from hpctrain.runtime.attachments import Attachments, Origin
from hpctrain.runtime.last_check import compare
from hpctrain.runtime.process_set_table import Controllers, ProcessSets, with_thread
from hpctrain.runtime.process_sets import numbers_of
from hpctrain.runtime.rebuild import Rebuild, RebuildStage
from hpctrain.runtime.stopping import CommonStop
from hpctrain.runtime.world import World, current, is_initialized, replace_current

if TYPE_CHECKING:
    from hpctrain.comm.mpi_library import BeforeFinalize
    from hpctrain.comm.mpi_start import MpiComm
    from hpctrain.comm.spares import Spares
    from hpctrain.runtime.process_sets import ProcessSet


SPARES_RULE = (
    "with --spares only DistributedOptimizer may communicate before elastic.run, and elastic.run "
    "may be called only once, because a spare rank executes the rest of the program alone; move "
    "the call into the function that elastic.run calls, or omit --spares"
)


def init(
    comm: "Sequence[int] | MpiComm | Sequence[MpiComm] | None" = None,
    process_sets: "Sequence[ProcessSet] | str | None" = None,
    *,
    ranks_per_node: int | None = None,
    engine: str | None = None,
) -> None:
    """Join the world of all ranks of a launch. Collective.

    A second call only registers ``process_sets``, if any. Without a launcher the world has one
    rank; all functions work and send no messages. At the end of the program the ranks call
    ``shutdown`` automatically.

    Args:
        comm: ranks of the world, if not all. A list of ranks: the i-th becomes rank i, and only
            these ranks call ``init``. An mpi4py communicator: its ranks are the world, so that
            several worlds can train concurrently. A list of communicators: the first is the
            world, and each other communicator is a process set.
        process_sets: process sets to register, the same on every rank; ``"dynamic"`` registers
            none.
        ranks_per_node: number of ranks per simulated node. Divides one host into several nodes, so
            that a laptop runs the algorithms for several nodes; default
            ``HPCTRAIN_RANKS_PER_NODE``.
        engine: implementation of the collectives: ``hpctrain``, or ``horovod`` if installed;
            default ``HPCTRAIN_ENGINE``. The choice of rank 0 is used on all ranks.

    Raises:
        ConfigError: a setting or an argument is not valid, or a process set is given twice.
        LaunchError: launcher, MPI library and world do not match, or Horovod is missing on a rank.
        CommError: this process was forked from a process that had already called ``init``.
        NodeMemoryError: ``HPCTRAIN_SHARED_MEMORY`` is ``memfd``, but the ranks of a node cannot
            share memory.
        MismatchError: the ranks pass different process sets; on every rank.
    """
    chosen, *others = _communicators(comm)
    if not is_initialized():
        settings = Settings.from_env()
        if ranks_per_node is not None:
            number = checked("ranks_per_node", ranks_per_node, Number)
            settings = replace(settings, ranks_per_node=number)
        if engine is not None:
            settings = replace(settings, engine=checked("engine", engine, config.Engine))
        join(settings, chosen)
        _refuse_operations()
    current().attachments.owner.check()
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ConfigError(
                f"process_sets must be a list of ProcessSet or 'dynamic', got {process_sets!r}"
            )
        process_sets = None
    if process_sets or others:
        _register(others, list(process_sets or ()))


def _refuse_operations() -> None:
    """Make named operations of a spare rank raise until ``elastic.run`` is called.

    Before ``elastic.run`` no other rank submits the same operations.
    """
    origin = current().origin
    if origin.spares is not None and not origin.is_first:
        current().sets.global_controller.refuse(SPARES_RULE)


def _communicators(comm: object) -> list[object]:
    if isinstance(comm, Sequence) and comm and all(is_communicator(one) for one in comm):
        return list(comm)
    return [comm]


def _register(comms: Sequence[object], process_sets: "Sequence[ProcessSet]") -> None:
    """Register the process sets passed to ``init``, and bind each to its entry. Collective."""
    if current().origin.spares is not None:
        raise ConfigError(f"{SPARES_RULE}; register process sets by add_process_set()")
    of_comms = [(numbers_of(one), True) for one in comms]
    wanted = of_comms + [one.wanted() for one in process_sets]
    found = current().sets.register(wanted)[len(of_comms) :]
    seen = {0}
    for number, (one, registered) in enumerate(zip(process_sets, found, strict=True)):
        if registered.number in seen:
            raise ConfigError(
                f"process_sets must not contain all ranks, or the same ranks twice, but entry "
                f"{number} has {listed(registered.ranks)}; omit this entry"
            )
        seen.add(registered.number)
        one.bind(registered)


def join(settings: Settings, chosen: object = None) -> None:
    """Join the world with the given settings. Collective.

    A spare rank waits in this function. The function returns when the spare rank replaces a lost
    rank; if the other ranks finish first, the spare rank exits.
    """
    if is_initialized():
        return
    launched = env.launched() if settings.recover else None
    with watched_start(launched.local_size if launched else None):
        if not settings.spares:
            given = cast("MpiComm", chosen) if is_communicator(chosen) else None
            _join(settings, chosen, Origin(given=given))
            return
        spares = _spares_of(settings, chosen)
        if spares.is_worker:
            _join(settings, spares.workers, Origin(given=None, spares=spares))
            return

    def make(ranks: "MpiComm") -> None:
        if is_initialized():  # second call: a rank died before all ranks had created this world
            replace_world(ranks)
        else:
            _join(settings, ranks, Origin(given=None, spares=spares, is_first=False))

    if not spares.wait(make):
        sys.exit(0)


def _spares_of(settings: Settings, chosen: object) -> "Spares":
    """Divide all ranks into workers and spares. Collective."""
    if chosen is not None:
        raise ConfigError(
            "the world must have all ranks of the launch with --spares, but init got comm; call "
            "init without comm, or omit --spares"
        )
    from hpctrain.comm.spares import Spares  # noqa: PLC0415 - a world of one needs no MPI

    with start_guard(settings):
        if (whole := find_world(timeout_s=settings.timeout)) is None:
            raise ConfigError(
                "--spares must be used with at least two other ranks, but this rank is alone; "
                "start more ranks"
            )
        return Spares(whole, settings.spares, settings.timeout)


def _join(settings: Settings, chosen: object, origin: Origin) -> None:
    torch_backend.register()
    lazy_dynamo.install()
    with start_guard(settings):
        ranks = find_world(chosen, settings.timeout)
    # From here on, a failure of one rank ends all ranks.
    hooks = FailureHooks(ranks, settings.log_dir, recovers=settings.recover) if ranks else None
    try:
        _make(settings, ranks, hooks, origin)
    except BaseException:
        if hooks is not None and not origin.is_first:  # the survivors may try again
            if (begun := replace_current(None)) is not None:
                _stop_activity(begun)
            hooks.uninstall()
        raise


def _make(
    settings: Settings, ranks: "MpiComm | None", hooks: FailureHooks | None, origin: Origin
) -> None:
    threads = torch.get_num_threads() if sets_threads() else None
    found = connect(ranks, settings, threads)
    here = found.topology
    if ranks:
        _configure_torch(found)
    if settings.recover:  # the world may be smaller than the launch
        set_torch_ranks(here.rank, here.size, here.host_rank, len(here.host_ranks))
    # The setting of rank 0 applies to all ranks, because the statistics use collectives.
    statistics = Statistics(found.comm) if found.settings.stats else None
    inside = observed(found.comm, trace if settings.trace else None, statistics)
    comm = with_thread(inside, found.plan)
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
    rebuild.register(RebuildStage.RECORDS, close=controllers.timelines.stop)
    rebuild.register(RebuildStage.SETS, renew=sets.renew, close=sets.close)
    made = World(
        comm=comm,
        sets=sets,
        topology=here,
        plan=found.plan,
        plan_origin=found.plan_origin,
        settings=settings,
        presence=found.presence,
        attachments=Attachments(
            hooks=hooks,
            before_finalize=_leave_before_finalize() if ranks else None,
            statistics=statistics,
            timelines=controllers.timelines,
        ),
        ranks=ranks,
        origin=origin,
        rebuild=rebuild,
        last_call=controllers.last_call,
        stop=CommonStop(comm, settings.budget),
        step_checks=WeakKeyDictionary(),
    )
    replace_current(made)
    _begin(made, found)


def _configure_torch(found: Connection) -> None:
    """Set the number of threads and the accelerator of this rank in torch. Local.

    The index of the accelerator is the index of the rank on its host, modulo the number of
    accelerators. The current device is kept if only one device is visible, as with ``srun
    --gpus-per-task=1``, or if the index of the current device is not 0.
    """
    torch.set_num_threads(found.plan.threads)
    count = torch.accelerator.device_count()
    if count > 1 and not torch.accelerator.current_device_index():
        torch.accelerator.set_device_index(found.topology.host_rank % count)


def _begin(made: World, found: Connection) -> None:
    """Start logs, records and the timeline of a world; register its shutdown at exit."""
    settings, mine, rank = made.settings, made.attachments, made.topology.rank
    logs.setup(rank, made.topology.size, settings.log_dir, level=settings.log_level)
    _report(found)
    if made.origin.is_first and config.setting("watched") and rank == 0:
        sys.stderr.write(f"{BEGUN}\n")
    if settings.records is not None and rank == 0:
        _write_plan(settings.records, found)
    if mine.hooks is not None:
        mine.hooks.last_words.append(mine.timelines.stop)
        mine.hooks.communicates = made.last_call.was_on
    if settings.timeline is not None:
        mine.timelines.start(settings.timeline, mark_cycles=settings.timeline_mark_cycles)
    if found.presence is not None or mine.statistics is not None or config.setting("watched"):
        atexit.register(_shut_down)


def _report(found: Connection) -> None:
    """Log the plan, and gather the warnings of all ranks on rank 0, which logs the warnings.

    Collective.
    """
    logs.logger.debug("plan by %s: %s", found.plan_origin, found.plan)
    notes = found.comm.gather_object([*config.remarks(engine=found.plan.engine), *found.notes])
    if notes is not None:
        logs.warn_merged(notes)
        warn_if_untested()


def _write_plan(folder: Path, found: Connection) -> None:
    """Write ``plan.json`` with the topology and the plan for a scaling study."""
    mpi = version() if found.topology.size > 1 else None  # one rank loads no MPI
    topology = {"mpi": mpi, "topology": dict(found.topology.describe())}
    facts = {**topology, **StoredPlan.of(found.topology, found.plan).as_dict()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _leave_before_finalize() -> "BeforeFinalize":
    from hpctrain.comm.mpi_library import BeforeFinalize  # noqa: PLC0415 - a world of one needs no MPI

    return BeforeFinalize(lambda: _leave(current(), raises=False))


def shutdown() -> None:
    """Leave the world; afterwards only ``init`` may be called.

    Collective: waits for all ranks, at most ``HPCTRAIN_TIMEOUT``. A no-op before ``init`` and in a
    second call. ``MPI.Finalize()`` calls this function automatically.

    The ranks compare the state after the last step of each ``DistributedOptimizer``: the number of
    steps and the weights. For a sharded model, the ranks compare the replicated values, the
    optimizer state of these values, and the settings of the optimizer. The comparison skips a
    replicated model that a rank has modified since the last step, for example under
    ``torch.no_grad()``; torch does not detect writes to ``.data``. The comparison also skips an
    optimizer that some ranks no longer have, after an error or after loading a state. If a rank is
    handling an exception, the ranks compare nothing.

    Raises:
        ReplicaError: the states differ; raised on every rank, after the world has ended. If the
            program does not call ``shutdown``, all ranks print the message and end with exit code
            1.
    """
    _shut_down(raises=True)


def _shut_down(*, raises: bool = False) -> None:
    leaving = replace_current(None)
    if leaving is None:
        return
    mine = leaving.attachments
    is_over = mine.before_finalize is not None and mine.before_finalize.is_over
    if mine.owner.is_here and not is_over:
        _leave(leaving, raises=raises)


def _leave(leaving: World, *, raises: bool) -> None:
    atexit.unregister(_shut_down)
    for comm in leaving.sets.communicators().values():
        if isinstance(comm, ThreadedCommunicator):
            comm.drain()  # while the loss of ranks is still detected
    fault, mine = "", leaving.attachments
    if leaving.presence is not None and mine.hooks is not None:
        strictness = leaving.settings.check_weights
        known = leaving.sets, leaving.step_checks, mine.last_states, strictness
        check = partial(compare, *known)
        fault = leave(leaving.presence, mine.hooks, check)
        if fault and not raises:
            mine.hooks.end(ReplicaError(fault))
    if mine.statistics is not None:
        mine.statistics.report()  # collective: ``leave`` returns on all ranks, or on none
    leaving.stop.close()
    leaving.rebuild.close()
    leaving.comm.close()
    if mine.before_finalize is not None:
        mine.before_finalize.close()
    is_normal = not fault and sys.exc_info()[0] is None and not hasattr(sys, "last_value")
    _report_end(leaving, is_normal=is_normal)
    if fault:
        raise ReplicaError(fault)  # the hooks remain installed, for an uncaught error
    if mine.hooks is not None and sys.exc_info()[0] is None:
        mine.hooks.uninstall()  # an error that is being handled needs the hooks to end all ranks


def _report_end(leaving: World, *, is_normal: bool) -> None:
    if leaving.origin.spares is not None:
        leaving.origin.spares.end()
    if config.setting("watched") and is_normal and leaving.topology.rank == 0:
        sys.stderr.write(f"{ENDED}\n")
        sys.stderr.flush()


def replace_world(ranks: "MpiComm", *, moves: bool = True) -> None:
    """Replace a world with lost ranks by a world of the survivors. Collective.

    If this function raises, this rank is still in the previous world, and the caller may try
    again.

    Args:
        ranks: the survivors.
        moves: True to keep the objects that are registered with ``rebuild``, so that they can move
            to the new world.
    """
    before = current()
    replace_current(None)
    hooks = before.attachments.hooks
    assert before.presence is not None
    assert hooks is not None
    if before.presence.is_open:  # closed if another rank has died in an earlier attempt
        _stop_activity(before)
    hooks.uninstall()
    try:
        _join(before.settings, ranks, replace(before.origin, given=None, is_first=False))
    except BaseException:
        replace_current(before)
        hooks.install()
        raise
    if moves:
        current().rebuild.follow(before.rebuild.leave())


def _stop_activity(leaving: World) -> None:
    """Stop all activity of a world with lost ranks. Not collective."""
    atexit.unregister(_shut_down)
    if leaving.presence is not None:
        leaving.presence.abandon()
    leaving.sets.drop()
    leaving.stop.close()
    leaving.attachments.timelines.stop()
    if leaving.attachments.before_finalize is not None:
        leaving.attachments.before_finalize.close()
