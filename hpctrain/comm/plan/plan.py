"""The plan: which algorithm moves what. It fixes the order of sums, so it is part of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from hpctrain.cluster.topology import Topology
from hpctrain.comm.batching import DEFAULT
from hpctrain.comm.measurement import Measurement, rows
from hpctrain.comm.plan.size_table import SizeTable
from hpctrain.core.config import ENGINES, Settings
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import KIB, format_bytes, format_seconds

DIRECT_RANKS = 4
"""Up to so many ranks of a node each sums all that they hold: one more meeting costs as much."""
DIRECT_BYTES = 64 * KIB
"""Where more ranks do so, up to so many bytes besides the own ones and one other's."""

_ADDED_LATER = ("fusion_bytes", "cycle_s", "engine")
_NO_RAIL = SizeTable(((0, "library"),))
_FLAT, _TWO_LEVEL = SizeTable(((0, "flat"),)), SizeTable(((0, "two-level"),))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How the ranks of one world move gradients; the same value on every rank."""

    node_memory: str
    """How the ranks of a node share memory: ``memfd``, ``window``, ``none`` (flat MPI), or
    ``alone`` in a world of one."""
    num_rails: int
    """Local ranks of each node that take part in the slow link; 0 on one node."""
    bucket_bytes: int
    """Largest message while gradients travel during backward."""
    overlap: str
    """``thread``: buckets travel beside backward; ``inline``: inside it; ``end``: after it."""
    threads: int
    """Torch's threads of each rank: the cores it really has."""
    tensors: SizeTable
    """How ordinary tensors travel: ``direct``, ``slices`` or ``library`` on one node, ``levels``
    or ``library`` on several; all tensors by ``flat`` or ``two-level`` with Horovod."""
    rail: SizeTable
    """How a rail carries its part, by the bytes of the part."""
    measured: tuple[Measurement, ...] = ()
    """What the tables were chosen by; empty where the rule chose them."""
    fusion_bytes: int = DEFAULT.fusion_bytes
    """Largest message of several named operations."""
    cycle_s: float = DEFAULT.cycle_s
    """How long a named operation waits for others, unless somebody waits for it."""
    engine: str = "hpctrain"
    """What moves tensors: ``hpctrain`` or ``horovod``."""

    def table(self, what: str) -> SizeTable:
        """Return the table of ``tensors`` or of the ``rail``."""
        return {"tensors": self.tensors, "rail": self.rail}[what]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON file."""
        return asdict(self) | {
            "tensors": [list(step) for step in self.tensors.steps],
            "rail": [list(step) for step in self.rail.steps],
            "measured": [asdict(measurement) for measurement in self.measured],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the plan that ``as_dict`` gave these fields.

        Raises:
            ConfigError: a field is missing, unknown, or of another type; names it. Fields that
                older versions did not have may be missing.
        """
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values and name not in _ADDED_LATER]
        unknown = [name for name in values if name not in names]
        if missing or unknown:
            wrong = [f"{name} is missing" for name in missing]
            wrong += [f"{name} is unknown" for name in unknown]
            raise ConfigError(f"a plan has the fields {', '.join(names)}; {', '.join(wrong)}")
        return cls(**{name: _read(_READERS[name], name, value) for name, value in values.items()})

    def for_group(self, topology: Topology) -> "Plan":
        """Return the plan of some of the ranks, whose topology is given; pure.

        A table stays where the group spans one node as all ranks do, or several as they do.
        """
        several = topology.num_nodes > 1
        num_rails = 0
        if several and self.node_memory != "none":
            num_rails = min(self.num_rails or 1, topology.max_rails)
        if several == (self.num_rails > 0) or self.node_memory == "none":
            return replace(self, num_rails=num_rails, measured=())
        return replace(
            self,
            num_rails=num_rails,
            tensors=_tensors_of(topology, self.node_memory),
            rail=rail_rule(topology.num_nodes),
            measured=(),
        )

    def describe(self) -> list[tuple[str, str]]:
        """Return rows of name and value for a table."""
        if self.node_memory == "alone":
            return [("gradients", "stay where they are: one rank"), ("threads", str(self.threads))]
        if self.engine == "horovod":
            path = f"Horovod, {_in_words(self.tensors)}"
        elif self.node_memory == "none":
            path = "flat MPI"
        elif self.num_rails:
            plural = "s" * (self.num_rails > 1)
            path = f"node memory ({self.node_memory}), then {self.num_rails} rail{plural}"
        else:
            path = f"node memory ({self.node_memory})"
        buckets = f"in buckets of {format_bytes(self.bucket_bytes)}"
        when = {
            "thread": f"beside backward, on a thread, {buckets}",
            "inline": f"inside backward, {buckets}",
            "end": "after backward, one bucket per dtype",
        }
        return [
            ("gradients take", path),
            ("they travel", when[self.overlap]),
            *([("between nodes", _in_words(self.rail))] if self.num_rails else []),
            *([("other tensors", _in_words(self.tensors))] if self.engine == "hpctrain" else []),
            ("small ones", f"fused up to {format_bytes(self.fusion_bytes)}{self._pause()}"),
            ("threads per rank", str(self.threads)),
        ]

    def _pause(self) -> str:
        return f", after {format_seconds(self.cycle_s)}" if self.cycle_s else ""

    def measurements(self, what: str) -> list[tuple[str, ...]]:
        """Return a table of what was measured: sizes down, algorithms across, the first row names.

        The algorithm that the plan takes for a size is marked by ``*``.

        Args:
            what: ``tensors`` or ``rail``.

        Returns:
            No row at all where nothing was measured.
        """
        return rows([m for m in self.measured if m.what == what], self.table(what))


def choose_plan(
    topology: Topology, settings: Settings, *, node_memory: str, threads: Sequence[int]
) -> Plan:
    """Choose the plan by rule, from facts that are the same on every rank.

    Args:
        topology: of the world.
        settings: of rank 0.
        node_memory: name of the way that every node can share memory, or ``none``.
        threads: torch's threads of each rank.
    """
    overlap = settings.overlap
    if overlap == "auto":
        # A thread that sums competes with backward for cores; without a free one it only delays.
        num_busy = (max(threads) + 1) * len(topology.core_peers)
        free_core = topology.num_peer_cores >= num_busy
        overlap = "thread" if free_core else "end"
    one_level = topology.num_nodes == 1 or node_memory == "none"
    tensors = _tensors_of(topology, node_memory)
    if settings.engine == "horovod" and node_memory != "alone":
        forced = settings.horovod_way == "two-level" and has_equal_nodes(topology)
        tensors = _TWO_LEVEL if forced else _FLAT
    return Plan(
        node_memory=node_memory,
        num_rails=0 if one_level else min(topology.max_rails, 2 * topology.cards),
        bucket_bytes=settings.bucket_bytes,
        overlap=overlap,
        threads=min(threads),
        tensors=tensors,
        rail=_NO_RAIL if one_level else rail_rule(topology.num_nodes),
        engine=settings.engine,
    )


def has_equal_nodes(topology: Topology) -> bool:
    """Say whether there are several nodes, with several ranks each and as many on all. Pure."""
    sizes = {len(ranks) for ranks in topology.nodes}
    return topology.num_nodes > 1 and len(sizes) == 1 and sizes != {1}


def tensors_rule(num_nodes: int, node_memory: str, local_size: int) -> SizeTable:
    """Choose how ordinary tensors travel, without a measurement.

    Args:
        num_nodes: nodes of the world.
        node_memory: see ``Plan``.
        local_size: ranks of the largest node.
    """
    if node_memory in ("none", "alone"):
        return SizeTable(((0, "library"),))
    if num_nodes > 1:
        return SizeTable(((0, "levels"),))
    if local_size <= DIRECT_RANKS:
        return SizeTable(((0, "direct"),))
    return SizeTable(((0, "direct"), (max(DIRECT_BYTES // (local_size - 2), 1), "slices")))


def rail_rule(num_nodes: int) -> SizeTable:
    """Choose how a rail carries its part, without a measurement."""
    if num_nodes == 1:
        return _NO_RAIL
    from hpctrain.comm.rail.rail import default_table  # noqa: PLC0415 - a world of one needs no MPI

    return default_table(num_nodes)


def _tensors_of(topology: Topology, node_memory: str) -> SizeTable:
    return tensors_rule(topology.num_nodes, node_memory, max(map(len, topology.nodes)))


def _in_words(table: SizeTable) -> str:
    """Write a table as ``doubling below 64.0 KiB, then ring``."""
    names = [name for _, name in table.steps]
    limits = [format_bytes(size) for size, _ in table.steps[1:]]
    parts = [f"{name} below {limit}" for name, limit in zip(names, limits, strict=False)]
    return ", ".join([*parts, f"then {names[-1]}" if parts else names[-1]])


def _read(reader: Callable[[Any], Any], name: str, value: object) -> Any:
    try:
        return reader(value)
    except (TypeError, ValueError, KeyError, ConfigError) as error:
        raise ConfigError(f"{name} of a plan cannot be {value!r}: {error}") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is needed")
    return value


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)} is needed")
        return _text(value)

    return read


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError("a whole number from 0 on is needed")
    return value


def _at_least_one(value: object) -> int:
    if (number := _count(value)) == 0:
        raise ValueError("at least 1 is needed")
    return number


def _table(value: Any) -> SizeTable:
    return SizeTable(tuple((_count(size), _text(name)) for size, name in value))


def _measured(value: Any) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(
            _one_of("tensors", "rail")(entry["what"]),
            _count(entry["num_bytes"]),
            _text(entry["algorithm"]),
            _seconds(entry["runs"]),
        )
        for entry in value
    )


def _time(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise TypeError("seconds from 0 on are needed")
    return float(value)


def _seconds(value: Any) -> tuple[float, ...]:
    if not value:
        raise ValueError("at least one run is needed")
    return tuple(float(seconds) for seconds in value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "node_memory": _one_of("memfd", "window", "none", "alone"),
    "num_rails": _count,
    "bucket_bytes": _at_least_one,
    "overlap": _one_of("thread", "inline", "end"),
    "threads": _at_least_one,
    "tensors": _table,
    "rail": _table,
    "measured": _measured,
    "fusion_bytes": _count,
    "cycle_s": _time,
    "engine": _one_of(*ENGINES),
}
