"""A machine in the cost models: nodes, links, processors and failures."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hpctrain.core.checks import Amount, AtLeast0, Bounds, CheckedFields, Count, Number, Positive
from hpctrain.core.errors import ConfigError
from hpctrain.core.paths import absolute
from hpctrain.core.toml_values import TomlValues, read_toml


@dataclass(frozen=True, slots=True)
class Link(CheckedFields):
    """Latency and bandwidth: a message of m bytes takes ``latency_s + m / bytes_per_s``."""

    latency_s: AtLeast0
    """Time of an empty message."""
    bytes_per_s: Positive
    """Bandwidth in each direction."""


@dataclass(frozen=True, kw_only=True)
class MachineShape(CheckedFields):
    """Number and arrangement of ranks, NICs and switches; ranks are numbered by node."""

    nodes: Number = 1
    """Number of nodes; a planner may use fewer."""
    ranks_per_node: Number = 1
    """Ranks on each node, for example one per GPU."""
    nics: Number = 1
    """NICs of a node; local rank r uses NIC r modulo this number."""
    ranks_per_core: Positive = 1.0
    """Ranks that share a core; a waiting rank yields the core."""
    leaf_size: Count = 0
    """Nodes below a leaf switch of a fat tree; 0 for a network in which ranks share only NICs."""
    oversubscription: Annotated[float, Bounds(least=1)] = 1.0
    """Bandwidth of a leaf's nodes divided by the bandwidth of the leaf's uplinks."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    def turns(self, at_work: int) -> float:
        """Return the slowdown factor of a rank while ``at_work`` ranks of a node compute."""
        return max(1.0, self.ranks_per_core * at_work / self.ranks_per_node)


@dataclass(frozen=True, kw_only=True)
class MachineLinks(CheckedFields):
    """Speed of messages, and of the work that ranks do on messages."""

    node: Link = Link(1e-6, 10e9)
    """Link between two ranks of a node."""
    network: Link = Link(2e-6, 12.5e9)
    """Link between two nodes, through one NIC of each node."""
    spine_latency_s: AtLeast0 = 0.0
    """Additional latency of a message that leaves its leaf switch."""
    reduce_bytes_per_s: Positive = math.inf
    """Rate at which a rank combines two tensors, in bytes of one tensor."""
    handle_bytes_per_s: Positive = math.inf
    """Rate at which a processor copies bytes to a NIC without DMA."""


@dataclass(frozen=True, kw_only=True)
class MachineProcessors(CheckedFields):
    """Speed and memory of a rank, and the differences between ranks."""

    memory_bytes: Amount = 80e9
    """Memory of a rank, for example of its GPU."""
    flops_per_s: Amount = 150e12
    """Operations per second that a rank reaches in training, often half of the data sheet."""
    pass_s: AtLeast0 = 0.0
    """Overhead of a layer in the forward pass, such as kernel launches; the overhead of the
    backward pass is twice as large."""
    tensor_pass_s: AtLeast0 = 0.0
    """Additional overhead with tensor parallelism: torch dispatches each operation in Python."""
    jitter: AtLeast0 = 0.0
    """Standard deviation of the logarithm of a rank's compute time."""
    slow_fraction: Annotated[float, Bounds(least=0, most=1)] = 0.0
    """Fraction of the nodes that always compute more slowly."""
    slow_factor: Annotated[float, Bounds(least=1)] = 1.0
    """Compute time of a slow node relative to the other nodes."""


@dataclass(frozen=True, kw_only=True)
class MachineFailures(CheckedFields):
    """Failures of nodes, and the cost of checkpoints and restarts."""

    mtbf_s: Positive = math.inf
    """Mean time between failures of one node."""
    checkpoint_s: AtLeast0 = 0.0
    """Time for which a checkpoint blocks the training."""
    restart_s: AtLeast0 = 0.0
    """Time from a failure until the training continues from its last checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Machine(MachineFailures, MachineProcessors, MachineLinks, MachineShape):
    """A machine of identical nodes.

    Links transfer in both directions concurrently. The link ``node`` is not used with one rank per
    node, and the link ``network`` is not used with one node.

    Raises:
        ConfigError: a value is out of the range of its field.
    """

    @classmethod
    def read(cls, path: str | Path) -> "Machine":
        """Read a machine from a TOML file: a key for each field, a table for each link.

        Raises:
            ConfigError: the file cannot be read, a key is unknown or a value is invalid.
        """
        values = TomlValues(cls)
        remedy = "write a machine file with hpctrain bench fit --out"
        values.merge(read_toml(absolute(path), cls, remedy), f"file {path}")
        if "nodes" not in values.origins:
            raise ConfigError(
                f"file {path}: a machine must have nodes, but this key is missing; add nodes = 64"
            )
        return values.build()
