"""Selection of the plan: from a file, from a measurement now or in an earlier run, or by rule."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from hpctrain import __version__
from hpctrain.cluster import env
from hpctrain.cluster.topology import Topology
from hpctrain.comm import mpi_library
from hpctrain.comm.agreement import on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan.choice import (
    BETWEEN_NODES,
    BY_HOROVOD,
    ON_A_NODE,
    choose_plan,
    has_equal_nodes,
)
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.rail.algorithms import ALGORITHMS
from hpctrain.core import config
from hpctrain.core.atomic import publishing, reason_of
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError
from hpctrain.core.formats import fault_of, stamp
from hpctrain.core.python_compat import Self

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.waiting import Watch

VERSION, READER = 1, "1.0"
"""Version of the format of a stored plan, and the oldest hpctrain that reads this version."""

_CPU = Path("/proc/cpuinfo")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPlan:
    """A plan, with the node sizes of the world for which it was chosen, as stored in a file."""

    nodes: tuple[int, ...]  # number of ranks per node
    plan: Plan

    @classmethod
    def of(cls, topology: Topology, plan: Plan) -> Self:
        """Return a stored plan with ``plan`` and the node sizes of ``topology``."""
        return cls(nodes=_sizes(topology), plan=plan)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the file as a dictionary."""
        stamped = stamp(VERSION, READER)
        return {**stamped, "nodes": list(self.nodes), "plan": self.plan.as_dict()}

    @classmethod
    def from_dict(cls, content: object) -> Self:
        """Create a stored plan from a dictionary that ``as_dict`` has returned.

        Other keys are ignored.

        Raises:
            ConfigError: a key is missing, its value is invalid, or the format is newer.
        """
        if not isinstance(content, dict):
            raise ConfigError("the content must be a table with the keys nodes and plan")
        if fault := fault_of(content, VERSION):
            raise ConfigError(fault)
        nodes, plan = content.get("nodes"), content.get("plan")
        if (
            not nodes
            or not isinstance(nodes, list)
            or not all(type(n) is int and n > 0 for n in nodes)
        ):
            raise ConfigError(f"nodes must list the ranks of each node, got {nodes!r}")
        if not isinstance(plan, dict):
            raise ConfigError(f"plan must be a table, got {plan!r}")
        return cls(nodes=tuple(nodes), plan=Plan.from_dict(plan))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file with a plan, such as ``plan.json`` of a run.

        Raises:
            ConfigError: the file cannot be read or contains no valid plan.
        """
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, ConfigError) as error:
            raise ConfigError(
                f"{path} cannot be read as a plan: {reason_of(error)}; pass the plan.json of a "
                f"run directory, or unset HPCTRAIN_PLAN"
            ) from None

    def misfit(self, topology: Topology, node_memory: str, engine: str = "hpctrain") -> str:
        """Return why a world cannot use the plan; empty if it can. Not collective."""
        plan, sizes = self.plan, _sizes(topology)
        if self.nodes != sizes:
            return (
                f"the plan was made for {_nodes(self.nodes)}, and this world has {_nodes(sizes)}"
            )
        if plan.engine != engine:
            return (
                f"the plan was made for the engine {plan.engine}, and HPCTRAIN_ENGINE is {engine}"
            )
        if plan.node_memory != node_memory:
            return (
                f"the plan requires node memory {plan.node_memory}, and this world has "
                f"{node_memory}"
            )
        one_level = topology.num_nodes == 1 or node_memory in ("none", "alone")
        fewest, most = (0, 0) if one_level else (1, topology.max_rails)
        if not fewest <= plan.num_rails <= most:
            return (
                f"the plan requires {plan.num_rails} rails, and this world supports {fewest} to "
                f"{most}"
            )
        for name, table, known in (
            ("tensors", plan.tensors, _algorithms(topology, node_memory, engine)),
            ("rail", plan.rail, tuple(ALGORITHMS) if plan.num_rails else ("library",)),
        ):
            if unknown := sorted({algorithm for _, algorithm in table.steps} - {*known}):
                return (
                    f"table {name} of the plan has {', '.join(unknown)}, and this world supports "
                    f"{', '.join(known)}"
                )
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDecision:
    """A plan and its origin; identical on every rank."""

    plan: Plan
    origin: str  # human-readable
    key: str = ""  # cache key of the measurement to make; empty for none


def pinned(comm: Communicator, settings: Settings) -> StoredPlan | None:
    """Read the plan in the file ``settings.plan``; return None without a file. Collective.

    Raises:
        ConfigError: the file cannot be read; on every rank.
    """
    if settings.plan is None:
        return None
    return on_root(comm, partial(StoredPlan.read, settings.plan), ConfigError)


def memory_wanted(settings: Settings, stored: StoredPlan | None) -> str:
    """Return the method of sharing memory in the settings or, if ``auto``, in the plan."""
    if stored is None or settings.shared_memory != "auto":
        return settings.shared_memory
    method = stored.plan.node_memory
    return "off" if method in ("none", "alone") else method


def decide(
    comm: Communicator,
    topology: Topology,
    settings: Settings,
    stored: StoredPlan | None,
    *,
    node_memory: str,
    num_threads: int,
) -> PlanDecision:
    """Choose the stored plan, the plan of an earlier measurement, or the rule. Collective.

    Args:
        comm: all ranks.
        topology: nodes and cores of the ranks.
        settings: settings of rank 0.
        stored: plan of the file that the user has set; None if not set.
        node_memory: method of sharing memory that works on every node.
        num_threads: number of torch threads of this rank.

    Raises:
        ConfigError: the stored plan cannot be used in this world; on every rank.
    """
    threads = comm.allgather_object(num_threads)
    rule = choose_plan(topology, settings, node_memory=node_memory, threads=threads)
    rule = comm.broadcast_object(rule)
    if stored is not None:
        if problem := stored.misfit(topology, rule.node_memory, rule.engine):
            raise ConfigError(
                f"the plan of {settings.plan} must match the world, but {problem}; start the "
                f"job as for the plan, or unset HPCTRAIN_PLAN"
            )
        return PlanDecision(plan=stored.plan, origin=str(settings.plan))
    by_rule = PlanDecision(plan=rule, origin="rule")
    one_choice = rule.node_memory in ("none", "alone") and rule.tensors.at(0) != "two-level"
    if settings.probe == "off" or one_choice:
        return by_rule
    key = key_of(
        {
            "rule": rule.as_dict(),  # depends on all relevant settings
            "nodes": topology.nodes,
            "hosts": len({host.partition("#")[0] for host in topology.hosts}),
            "environment": env.tuning(),
            "cards": topology.cards,
            "machines": comm.allgather_object(machine(len(topology.cores))),
            "mpi": mpi_library.version(),
            "hpctrain": __version__,
        }
    )
    if settings.probe == "auto":
        found = load_cached(key) if comm.rank == 0 else None
        if found is not None and found.misfit(topology, rule.node_memory, rule.engine):
            found = None
        if (found := comm.broadcast_object(found)) is not None:
            return PlanDecision(plan=found.plan, origin="a measurement in an earlier run")
    return replace(by_rule, key=key)


def measured(
    decision: PlanDecision,
    comm: Communicator,
    world: "MPI.Intracomm",
    topology: Topology,
    watch: "Watch",
) -> PlanDecision:
    """If ``decision`` has a key, measure, then use and store the fastest plan. Collective."""
    if not decision.key:
        return decision
    from hpctrain.comm.plan.probe import measure, measure_horovod  # noqa: PLC0415 - needs MPI

    by_horovod = decision.plan.engine == "horovod"
    function: Any = measure_horovod if by_horovod else measure
    plan = function(comm, world, decision.plan, watch)
    if world.rank == 0:
        store_cached(decision.key, StoredPlan.of(topology, plan))
    return PlanDecision(plan=plan, origin="measurement")


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the cache key of a measured plan: a digest of ``facts``, which determine the plan."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_cached(key: str) -> StoredPlan | None:
    """Return the plan that an earlier run measured; None if there is no valid plan."""
    path = _cached(key)
    if path is None or not path.exists():
        return None
    try:
        return StoredPlan.read(path)
    except ConfigError as error:
        _LOG.debug("the plan of an earlier measurement is ignored: %s", error)
        return None


def store_cached(key: str, stored: StoredPlan) -> None:
    """Store a plan for later runs; on failure a later run measures again.

    The file is replaced atomically, so jobs may write the same plan concurrently.
    """
    if (path := _cached(key)) is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with publishing(path, token_hex(8)) as part:
            part.write_text(json.dumps(stored.as_dict(), indent=1), encoding="utf-8")
    except OSError as error:
        _LOG.debug("the plan cannot be stored in %s: %s", path, reason_of(error))


def _cached(key: str) -> Path | None:
    folder = config.cache_folder()
    return None if folder is None else folder / "plans" / f"{key}.json"


def machine(num_cores: int) -> str:
    """Return number and model of the cores of this rank, to compare machines."""
    model = ""
    try:
        with _CPU.open(encoding="utf-8", errors="replace") as file:
            model = next((line for line in file if line.startswith("model name")), "")
    except OSError:
        pass  # not Linux: only the number of cores is known
    return f"{num_cores} x {model.partition(':')[2].strip()}"


def _sizes(topology: Topology) -> tuple[int, ...]:
    return tuple(map(len, topology.nodes))


def _nodes(sizes: Sequence[int]) -> str:
    smallest, largest = min(sizes), max(sizes)
    per_node = str(largest) if smallest == largest else f"{smallest} to {largest}"
    plural = "" if len(sizes) == 1 else "s"
    return f"{len(sizes)} node{plural} of {per_node} rank{'s' * (per_node != '1')}"


def _algorithms(topology: Topology, node_memory: str, engine: str) -> tuple[str, ...]:
    if engine == "horovod" and node_memory != "alone":
        return BY_HOROVOD if has_equal_nodes(topology) else BY_HOROVOD[:1]
    if node_memory in ("none", "alone"):
        return ("library",)
    return ON_A_NODE if topology.num_nodes == 1 else BETWEEN_NODES
