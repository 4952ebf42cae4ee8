"""The source of a world's plan: a file, an earlier measurement, a new one, or the rule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain import __version__
from hpctrain.cluster import env
from hpctrain.cluster.topology import Topology
from hpctrain.comm.plan.choice import has_equal_nodes
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.plan.plan_file import (
    StoredPlan,
    key_of,
    load_cached,
    misfit,
    read,
    store_cached,
)
from hpctrain.core import horovod_variables
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError, NodeMemoryError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.node.shared_memory import SharedMemory
    from hpctrain.comm.waiting import Watch

_CPU = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDecision:
    """A plan, and where it comes from; the same on every rank."""

    plan: Plan
    origin: str
    """What it was chosen by, for people."""
    key: str = ""
    """Where a measurement is to be kept; empty where none is wanted."""


def pinned(world: "MPI.Intracomm | None", settings: Settings) -> StoredPlan | None:
    """Return what ``settings.plan`` holds, None where there is none. Collective.

    Args:
        world: rank 0 of it reads for all; None in a world of one.
        settings: the same on every rank.

    Raises:
        ConfigError: it cannot be read; on every rank.
    """
    if settings.plan is None:
        return None
    found: StoredPlan | str = ""
    if world is None or world.rank == 0:
        try:
            found = read(settings.plan)
        except ConfigError as error:
            found = str(error)
    if world is not None:
        found = world.bcast(found)
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def share_memory(
    world: "MPI.Intracomm",
    topology: Topology,
    settings: Settings,
    stored: StoredPlan | None,
    watch: "Watch",
) -> "tuple[SharedMemory | None, str]":
    """Share memory as ``levels.share_memory`` does, in the way of the stored plan if there is one.

    Raises:
        ConfigError: the way of the plan cannot be had; on every rank.
        NodeMemoryError: a way was forced by the settings and does not work; on every rank.
    """
    from hpctrain.comm import build  # noqa: PLC0415 - a world of one needs no MPI

    if stored is None or settings.shared_memory != "auto":
        return build.share_memory(world, topology, settings.shared_memory, watch)
    way = stored.plan.node_memory
    if way in ("none", "alone"):
        return None, ""
    try:
        return build.share_memory(world, topology, way, watch)
    except NodeMemoryError as error:
        raise ConfigError(
            f"the plan of {settings.plan} wants node memory {way}, which cannot be had here: "
            f"{error}; leave HPCTRAIN_PLAN out"
        ) from None


def decide(
    world: "MPI.Intracomm | None",
    topology: Topology,
    settings: Settings,
    stored: StoredPlan | None,
    rule: Plan,
    machines: Sequence[str] = (),
) -> PlanDecision:
    """Take the pinned plan, else what an earlier run has measured, else the rule. Collective.

    Args:
        world: all ranks; None in a world of one.
        topology: of the world.
        settings: of rank 0.
        stored: from ``pinned``.
        rule: the plan that follows from facts and settings.
        machines: ``machine()`` of every rank.

    Raises:
        ConfigError: the pinned plan cannot be used in this world; on every rank.
    """
    if stored is not None:
        if problem := misfit(stored, topology, rule.node_memory, rule.engine):
            raise ConfigError(
                f"the plan of {settings.plan} does not fit: {problem}; start the ranks that it "
                f"is for, or leave HPCTRAIN_PLAN out"
            )
        return PlanDecision(plan=stored.plan, origin=str(settings.plan))
    by_rule = PlanDecision(plan=rule, origin="rule")
    if world is None or settings.probe == "off" or not _has_choice(topology, settings, rule):
        return by_rule
    key = key_of(
        {
            "rule": rule.as_dict(),  # follows from all settings that matter
            "nodes": topology.nodes,
            "hosts": len({host.partition("#")[0] for host in topology.hosts}),
            "environment": env.tuning(),
            "horovod": horovod_variables.found() if rule.engine == "horovod" else {},
            "cards": topology.cards,
            "machines": machines,
            "mpi": _mpi_library(),
            "hpctrain": __version__,
        }
    )
    if settings.probe == "auto":
        found = load_cached(key) if world.rank == 0 else None
        if found is not None and misfit(found, topology, rule.node_memory, rule.engine):
            found = None
        if (found := world.bcast(found)) is not None:
            return PlanDecision(plan=found.plan, origin="a measurement in an earlier run")
    return replace(by_rule, key=key)


def measured(
    decision: PlanDecision,
    comm: "Communicator",
    world: "MPI.Intracomm",
    topology: Topology,
    watch: "Watch",
) -> PlanDecision:
    """Measure where that is wanted, use what is fastest, and remember it. Collective.

    Args:
        decision: from ``decide``.
        comm: of all ranks, joined with the plan that was decided.
        world: the same ranks.
        topology: of the world.
        watch: looks at the others during waits.
    """
    if not decision.key:
        return decision
    from hpctrain.comm.plan.probe import Choosing, measure  # noqa: PLC0415 - needs MPI

    assert isinstance(comm, Choosing)
    plan = measure(comm, world, decision.plan, watch)
    if world.rank == 0:
        store_cached(decision.key, StoredPlan.of(topology, plan))
    return PlanDecision(plan=plan, origin="measurement")


def _has_choice(topology: Topology, settings: Settings, rule: Plan) -> bool:
    """Say whether there are several algorithms to choose from."""
    if rule.engine == "horovod":
        return settings.horovod_way == "auto" and has_equal_nodes(topology)
    return rule.node_memory != "none"


def machine(num_cores: int) -> str:
    """Describe the processors of this rank: equal words, equal processors."""
    model = ""
    try:
        with _CPU.open(encoding="utf-8", errors="replace") as file:
            model = next((line for line in file if line.startswith("model name")), "")
    except OSError:
        pass  # no Linux: the number of cores has to do
    return f"{num_cores} x {model.partition(':')[2].strip()}"


def _mpi_library() -> str:
    from mpi4py import MPI  # noqa: PLC0415 - a world of one needs no MPI

    return MPI.Get_library_version()
