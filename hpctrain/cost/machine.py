"""A machine as the models of time see it: links, cards, switches, stragglers and failures."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hpctrain.core.checks import (
    Amount,
    AtLeast0,
    Bounds,
    CheckedFields,
    Count,
    Number,
    Positive,
)
from hpctrain.core.errors import ConfigError
from hpctrain.core.paths import absolute
from hpctrain.core.toml_values import TomlValues, read_toml


@dataclass(frozen=True, slots=True)
class Link(CheckedFields):
    """A way for messages: one of m bytes takes ``latency_s + m / bytes_per_s`` if alone."""

    latency_s: AtLeast0
    """Of a message without bytes."""
    bytes_per_s: Positive
    """In each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(CheckedFields):
    """Nodes that are alike, with ranks numbered node by node.

    Links work in both directions at once. A level that is not there costs nothing if it is not
    used: ``node`` where there is one rank per node, ``network`` where there is one node. Raises
    ``ConfigError`` where a value breaks the rule of its field.
    """

    nodes: Number = 1
    """As many as there are, or as you may have."""
    ranks_per_node: Number = 1
    """Processes of each node, one for each GPU, say."""
    node: Link = Link(1e-6, 10e9)
    """Between two ranks of a node."""
    network: Link = Link(2e-6, 12.5e9)
    """Between two nodes, through one card of each."""
    nics: Number = 1
    """Network cards of a node; local rank r uses card r modulo their number."""
    ranks_per_core: Positive = 1.0
    """How many ranks take turns on a core; those that have nothing to do leave it."""
    reduce_bytes_per_s: Positive = math.inf
    """How fast one rank combines two tensors, in bytes of one of them."""
    handle_bytes_per_s: Positive = math.inf
    """How fast a processor hands bytes to a card, where the card does not fetch them."""
    memory_bytes: Amount = 80e9
    """Memory of a rank, such as that of its GPU."""
    flops_per_s: Amount = 150e12
    """Operations a second that a rank reaches in training: half of a data sheet's, say."""
    pass_s: AtLeast0 = 0.0
    """Of a layer beside its arithmetic, forward, and twice backward: starting kernels, say."""
    tensor_pass_s: AtLeast0 = 0.0
    """And besides where ranks share its matrices: torch then places each operation in Python."""
    leaf_size: Count = 0
    """Nodes below a leaf switch of a fat tree; 0 for a network in which only cards are shared."""
    oversubscription: Annotated[float, Bounds(least=1)] = 1.0
    """Bandwidth of a leaf's nodes over that of the leaf's links upwards."""
    spine_latency_s: AtLeast0 = 0.0
    """By how much a message is later that leaves its leaf."""
    jitter: AtLeast0 = 0.0
    """Spread of a rank's time to compute: standard deviation of its logarithm."""
    slow_fraction: Annotated[float, Bounds(least=0, most=1)] = 0.0
    """Part of the nodes that compute more slowly, all the time."""
    slow_factor: Annotated[float, Bounds(least=1)] = 1.0
    """How many times as long those take."""
    mtbf_s: Positive = math.inf
    """Mean time between failures of one node."""
    checkpoint_s: AtLeast0 = 0.0
    """For how long a checkpoint holds up the training."""
    restart_s: AtLeast0 = 0.0
    """From a failure until the training goes on where its last checkpoint was."""

    @classmethod
    def read(cls, path: str | Path) -> "Machine":
        """Read a machine from a TOML file: a key for each field, a table for each link.

        Raises ``ConfigError``: the file cannot be read, a key is unknown or a value not valid.
        """
        values = TomlValues(cls)
        way_out = "hpctrain bench fit --out writes one"
        values.merge(read_toml(absolute(path), cls, way_out), f"file {path}")
        if "nodes" not in values.origins:
            raise ConfigError(f"file {path}: a machine has nodes; say how many: nodes = 64")
        return values.build()

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    def turns(self, at_work: int) -> float:
        """Return how many times as long processors take while so many ranks of a node work."""
        return max(1.0, self.ranks_per_core * at_work / self.ranks_per_node)
