"""Plans on disk: read from a file that a user names, remembered for the next run of a job."""

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hpctrain.cluster.topology import Topology
from hpctrain.comm.plan.choice import BETWEEN_NODES, BY_HOROVOD, ON_A_NODE, has_equal_nodes
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.rail.algorithms import ALGORITHMS
from hpctrain.core import config
from hpctrain.core.atomic import reason_of, sync
from hpctrain.core.errors import ConfigError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPlan:
    """A plan and the world it was made for."""

    nodes: tuple[int, ...]
    """Ranks of each node."""
    plan: Plan

    @classmethod
    def of(cls, topology: Topology, plan: Plan) -> Self:
        """Take the plan of the world with this topology."""
        return cls(nodes=_sizes(topology), plan=plan)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {"nodes": list(self.nodes), "plan": self.plan.as_dict()}

    @classmethod
    def from_dict(cls, content: object) -> Self:
        """Return what ``as_dict`` gave; further keys are left to other readers.

        Raises:
            ConfigError: a key is missing or its value is not valid; names it.
        """
        if not isinstance(content, dict):
            raise ConfigError("it is no table with the keys nodes and plan")
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


def read(path: Path) -> StoredPlan:
    """Read a file that holds a plan, such as the ``plan.json`` of a run.

    Raises:
        ConfigError: it cannot be read, or what it says is no plan.
    """
    try:
        return StoredPlan.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, ConfigError) as error:
        raise ConfigError(
            f"{path} is no file with a plan: {reason_of(error)}; name the plan.json of a run "
            f"directory, or leave HPCTRAIN_PLAN out"
        ) from None


def misfit(
    stored: StoredPlan, topology: Topology, node_memory: str, engine: str = "hpctrain"
) -> str:
    """Say what keeps a world from using a plan; empty where nothing does. Pure.

    Args:
        stored: the plan.
        topology: of the world.
        node_memory: how its nodes share memory.
        engine: what moves its tensors.
    """
    plan, sizes = stored.plan, _sizes(topology)
    if stored.nodes != sizes:
        return f"it is for {_nodes(stored.nodes)}, and this world has {_nodes(sizes)}"
    if plan.engine != engine:
        return f"it is for the engine {plan.engine}, and HPCTRAIN_ENGINE is {engine}"
    if plan.node_memory != node_memory:
        return f"it wants node memory {plan.node_memory}, and this world has {node_memory}"
    one_level = topology.num_nodes == 1 or node_memory in ("none", "alone")
    fewest, most = (0, 0) if one_level else (1, topology.max_rails)
    if not fewest <= plan.num_rails <= most:
        return f"it wants {plan.num_rails} rails, and this world can have {fewest} to {most}"
    for name, table, known in (
        ("tensors", plan.tensors, _ways(topology, node_memory, engine)),
        ("rail", plan.rail, _rail_algorithms(plan.num_rails)),
    ):
        if unknown := sorted({algorithm for _, algorithm in table.steps} - {*known}):
            return f"its {name} go by {', '.join(unknown)}, and here there are {', '.join(known)}"
    return ""


def key_of(facts: Mapping[str, Any]) -> str:
    """Return a name for what a measured plan depends on: the same facts, the same name."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_cached(key: str) -> StoredPlan | None:
    """Return what an earlier run measured; None where there is nothing that can be used."""
    path = _cached(key)
    if path is None or not path.exists():
        return None
    try:
        return read(path)
    except ConfigError as error:
        _LOG.debug("a plan that was measured earlier is left aside: %s", error)
        return None


def store_cached(key: str, stored: StoredPlan) -> None:
    """Remember a plan for the next run; where that cannot be, the next run measures again.

    Jobs that write the same plan at the same time do not disturb each other: the last one stays.
    """
    if (path := _cached(key)) is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".part", encoding="utf-8", delete=False
        ) as file:
            json.dump(stored.as_dict(), file, indent=1)
        sync(Path(file.name))
        Path(file.name).replace(path)
    except OSError as error:
        _LOG.debug("the plan is not remembered in %s: %s", path, reason_of(error))


def _cached(key: str) -> Path | None:
    folder = config.cache_folder()
    return None if folder is None else folder / "plans" / f"{key}.json"


def _sizes(topology: Topology) -> tuple[int, ...]:
    return tuple(map(len, topology.nodes))


def _nodes(sizes: Sequence[int]) -> str:
    smallest, largest = min(sizes), max(sizes)
    per_node = str(largest) if smallest == largest else f"{smallest} to {largest}"
    plural = "" if len(sizes) == 1 else "s"
    return f"{len(sizes)} node{plural} of {per_node} rank{'s' * (per_node != '1')}"


def _ways(topology: Topology, node_memory: str, engine: str) -> tuple[str, ...]:
    if engine == "horovod" and node_memory != "alone":
        return BY_HOROVOD if has_equal_nodes(topology) else BY_HOROVOD[:1]
    if node_memory in ("none", "alone"):
        return ("library",)
    return ON_A_NODE if topology.num_nodes == 1 else BETWEEN_NODES


def _rail_algorithms(num_rails: int) -> tuple[str, ...]:
    if num_rails == 0:
        return ("library",)
    return tuple(ALGORITHMS)
