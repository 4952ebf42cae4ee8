"""A machine as the models of time see it: links, cards, switches, stragglers and failures."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from hpctrain.core.errors import ConfigError


def _check(owner: object, name: str, right: bool, rule: str) -> None:  # noqa: FBT001
    if not right:
        what = type(owner).__name__.lower()
        raise ConfigError(f"{name} of a {what} must be {rule}, got {getattr(owner, name)!r}")


@dataclass(frozen=True, slots=True)
class Link:
    """A way for messages: one of m bytes takes ``latency_s + m / bytes_per_s`` if alone."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check(self, "latency_s", self.latency_s >= 0, "a number of seconds, 0 or more")
        _check(self, "bytes_per_s", self.bytes_per_s > 0, "bytes in a second, more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Nodes that are alike, with ranks numbered node by node.

    Links work in both directions at once. A level that is not there costs nothing if it is not
    used: ``node`` where there is one rank per node, ``network`` where there is one node.
    """

    nodes: int
    ranks_per_node: int = 1
    node: Link = Link(1e-6, 10e9)
    """Between two ranks of a node."""
    network: Link = Link(2e-6, 12.5e9)
    """Between two nodes, through one card of each."""
    nics: int = 1
    """Network cards of a node; local rank r uses card r modulo their number."""
    reduce_bytes_per_s: float = math.inf
    """How fast one rank combines two tensors, in bytes of one of them."""
    leaf_size: int = 0
    """Nodes below a leaf switch of a fat tree; 0 for a network in which only cards are shared."""
    oversubscription: float = 1.0
    """Bandwidth of a leaf's nodes over that of the leaf's links upwards."""
    spine_latency_s: float = 0.0
    """By how much a message is later that leaves its leaf."""
    jitter: float = 0.0
    """Spread of a rank's time to compute: standard deviation of its logarithm."""
    slow_fraction: float = 0.0
    """Part of the nodes that compute more slowly, all the time."""
    slow_factor: float = 1.0
    """How many times as long those take."""
    mtbf_s: float = math.inf
    """Mean time between failures of one node."""
    checkpoint_s: float = 0.0
    """For how long a checkpoint holds up the training."""
    restart_s: float = 0.0
    """From a failure until the training goes on where its last checkpoint was."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "nics"):
            _check(self, name, getattr(self, name) >= 1, "1 or more")
        for name in ("reduce_bytes_per_s", "mtbf_s"):
            _check(self, name, getattr(self, name) > 0, "more than 0, or inf")
        for name in ("leaf_size", "spine_latency_s", "jitter", "checkpoint_s", "restart_s"):
            _check(self, name, getattr(self, name) >= 0, "0 or more")
        for name in ("oversubscription", "slow_factor"):
            _check(self, name, getattr(self, name) >= 1, "1 or more")
        _check(self, "slow_fraction", 0 <= self.slow_fraction <= 1, "from 0 to 1")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a machine from a TOML file: a key for each field, a table for each link.

        Raises ``ConfigError``: the file cannot be read, a key is unknown or a value not valid.
        """
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as the TOML of a machine: {error}") from None
        try:
            for name in {"node", "network"} & table.keys():
                table[name] = _made(Link, table[name])
            machine: Self = _made(cls, table)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        return machine

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def leaf_bytes_per_s(self) -> float:
        """What a leaf switch's links upwards carry together in each direction; inf without."""
        if not self.leaf_size:
            return math.inf
        return self.leaf_size * self.nics * self.network.bytes_per_s / self.oversubscription


def _made(kind: Any, values: Any) -> Any:
    """Make a ``Link`` or a ``Machine`` from a table of the file."""
    what = kind.__name__.lower()
    if not isinstance(values, Mapping):
        raise ConfigError(f"a {what} is a table with keys, got {values!r}")
    types: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    if unknown := sorted(values.keys() - types.keys()):
        raise ConfigError(f"a {what} has the keys {', '.join(types)}; got {', '.join(unknown)}")
    needed = ("nodes",) if kind is Machine else tuple(types)
    if missing := [name for name in needed if name not in values]:
        raise ConfigError(f"a {what} needs {', '.join(needed)}; add {', '.join(missing)}")
    for name, value in values.items():
        kinds = {int: (int,), float: (int, float), Link: (Link,)}[types[name]]
        if not isinstance(value, kinds) or isinstance(value, bool):
            nouns = {int: "a whole number", float: "a number", Link: "a table"}
            raise ConfigError(f"{name} is {nouns[types[name]]}, got {value!r}")
    return kind(**values)
