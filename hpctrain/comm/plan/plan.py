"""The plan: the algorithm for each operation and size.

The plan also determines the order of additions, and so the rounding of sums.
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hpctrain.core.config import ENGINES
from hpctrain.core.errors import ConfigError
from hpctrain.core.python_compat import Self
from hpctrain.core.units import MIB, format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class SizeTable:
    """A table with an algorithm for each range of message sizes.

    Raises:
        ConfigError: the sizes do not begin at 0, or do not increase.
    """

    steps: tuple[tuple[int, str], ...]
    """Smallest size in bytes and name of the algorithm, by size; the first size is 0."""

    _sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = [num_bytes for num_bytes, _ in self.steps]
        if not sizes or sizes[0] != 0 or sizes != sorted(set(sizes)):
            raise ConfigError(f"sizes of a plan must begin at 0 and increase, got {sizes}")
        object.__setattr__(self, "_sizes", tuple(sizes))

    def at(self, num_bytes: int) -> str:
        """Return the algorithm for a message of ``num_bytes``."""
        return self.steps[bisect_right(self._sizes, num_bytes) - 1][1]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured times of one algorithm at one size, on the slowest rank."""

    what: str  # ``tensors``: not buckets, over all ranks; ``rail``: slices over a rail
    num_bytes: int  # size of the message
    algorithm: str  # a name in the table ``what`` of the plan
    runs: tuple[float, ...]  # seconds of each run

    @property
    def seconds(self) -> float:
        """Median of the runs."""
        return statistics.median(self.runs)


_ADDED_LATER = ("fusion_bytes", "cycle_s", "engine", "chunk_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Algorithms and parameters of the communication of one world; identical on every rank."""

    node_memory: str
    """Method by which ranks of a node share memory: ``memfd``, ``none`` (flat MPI), or ``alone``
    in a world of one rank."""
    num_rails: int  # ranks per node that send between nodes; 0 on one node
    bucket_bytes: int  # largest bucket if gradients are reduced during backward
    overlap: str
    """Reduction of buckets: ``thread``, concurrently with backward; ``inline``, in hooks of
    backward; ``end``, after backward."""
    threads: int  # torch threads per rank
    tensors: SizeTable
    """Algorithms of tensors that are not buckets: ``direct``, ``slices`` or ``library`` on one
    node, ``levels`` or ``library`` on several; with Horovod, ``flat`` or ``two-level`` for all."""
    rail: SizeTable  # algorithms of a rail, by size of the slice
    measured: tuple[Measurement, ...] = ()
    """Measurements from which the tables were chosen; empty if they were chosen by rule."""
    fusion_bytes: int = 64 * MIB  # largest message of several named operations
    cycle_s: float = 0.0
    """Time that a named operation waits to be fused with later operations, unless a caller waits
    for its result."""
    chunk_bytes: int = 0
    """Size of the chunks in which longer slices are sent over a rail, several in flight; 0 for no
    chunks."""
    engine: str = "hpctrain"  # ``hpctrain`` or ``horovod``

    def table(self, what: str) -> SizeTable:
        """Return the table named ``tensors`` or ``rail``."""
        return {"tensors": self.tensors, "rail": self.rail}[what]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields in a form that a JSON file can store."""
        return asdict(self) | {
            "tensors": [list(step) for step in self.tensors.steps],
            "rail": [list(step) for step in self.rail.steps],
            "measured": [asdict(measurement) for measurement in self.measured],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create a plan from a dictionary that ``as_dict`` has returned.

        Fields that older versions did not write may be missing.

        Raises:
            ConfigError: a field is missing, unknown, or of the wrong type.
        """
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values and name not in _ADDED_LATER]
        unknown = [name for name in values if name not in names]
        if missing or unknown:
            wrong = [f"{name} is missing" for name in missing]
            wrong += [f"{name} is unknown" for name in unknown]
            raise ConfigError(
                f"a plan must have the fields {', '.join(names)}, but {', '.join(wrong)}"
            )
        return cls(**{name: _read(_READERS[name], name, value) for name, value in values.items()})

    def describe(self) -> list[tuple[str, str]]:
        """Return a human-readable description, as rows of name and value."""
        if self.node_memory == "alone":
            return [("gradients", "are not sent: one rank"), ("threads", str(self.threads))]
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
            "thread": f"during backward, on a thread, {buckets}",
            "inline": f"inline in backward, {buckets}",
            "end": "after backward, one bucket per dtype",
        }
        return [
            ("gradient path", path),
            ("gradients sent", when[self.overlap]),
            *(
                [("between nodes", _in_words(self.rail) + self._chunks())]
                if self.num_rails
                else []
            ),
            *([("other tensors", _in_words(self.tensors))] if self.engine == "hpctrain" else []),
            ("small operations", f"fused up to {format_bytes(self.fusion_bytes)}{self._pause()}"),
            ("threads per rank", str(self.threads)),
        ]

    def _chunks(self) -> str:
        return f", {format_bytes(self.chunk_bytes)} at a time" if self.chunk_bytes else ""

    def _pause(self) -> str:
        return f", after {format_seconds(self.cycle_s)}" if self.cycle_s else ""

    def measurements(self, what: str) -> list[tuple[str, ...]]:
        """Return the measurements as a table with one row per size, one column per algorithm.

        The first row is a header. ``*`` marks the algorithm that the plan uses for a size. The
        table is empty if nothing was measured.
        """
        measured = [m for m in self.measured if m.what == what]
        if not measured:
            return []
        found = {(m.num_bytes, m.algorithm): m.seconds for m in measured}
        algorithms = list(dict.fromkeys(m.algorithm for m in measured))

        def cell(size: int, algorithm: str) -> str:
            if (size, algorithm) not in found:
                return ""
            mark = " *" if self.table(what).at(size) == algorithm else ""
            return format_seconds(found[size, algorithm]) + mark

        sizes = sorted({m.num_bytes for m in measured})
        lines = [(format_bytes(size), *(cell(size, one) for one in algorithms)) for size in sizes]
        return [("size", *algorithms), *lines]


def _in_words(table: SizeTable) -> str:
    """Format a table as ``doubling below 64.0 KiB, then ring``."""
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
        raise TypeError("a string is required")
    return value


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)} is required")
        return _text(value)

    return read


def _integer(minimum: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise TypeError(f"an integer of at least {minimum} is required")
        return value

    return read


def _table(value: Any) -> SizeTable:
    return SizeTable(tuple((_integer(0)(size), _text(name)) for size, name in value))


def _measured(value: Any) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(
            _one_of("tensors", "rail")(entry["what"]),
            _integer(0)(entry["num_bytes"]),
            _text(entry["algorithm"]),
            _seconds(entry["runs"]),
        )
        for entry in value
    )


def _time(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise TypeError("a non-negative number of seconds is required")
    return float(value)


def _seconds(value: Any) -> tuple[float, ...]:
    if not value:
        raise ValueError("at least one run is required")
    return tuple(map(_time, value))


_READERS: dict[str, Callable[[Any], Any]] = {
    "node_memory": _one_of("memfd", "none", "alone"),
    "num_rails": _integer(0),
    "bucket_bytes": _integer(1),
    "overlap": _one_of("thread", "inline", "end"),
    "threads": _integer(1),
    "tensors": _table,
    "rail": _table,
    "measured": _measured,
    "fusion_bytes": _integer(0),
    "cycle_s": _time,
    "chunk_bytes": _integer(0),
    "engine": _one_of(*ENGINES),
}


def expected_s(times: Mapping[int, float], num_bytes: int) -> float:
    """Return the duration for ``num_bytes``, extrapolated from ``times``; 0 without times."""
    sizes = sorted(times)
    if not sizes:
        return 0.0
    last = times[sizes[-1]]
    if len(sizes) == 1:
        return last
    slope = (last - times[sizes[-2]]) / (sizes[-1] - sizes[-2])
    return last + max(slope, 0.0) * (num_bytes - sizes[-1])
