"""Messages and time of start-up, agreement, checkpoints and recovery, which move no gradients.

The numbers of calls match the implementation; a test compares the numbers of messages with counts
by Open MPI. The time excludes the start of processes, imports, computation and file access.

Source: Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport
message-passing systems", for gathered objects; otherwise binomial trees.
"""

import operator
from typing import NamedTuple

from hpctrain.cost.collectives import AllreduceSpec, Load, allreduce
from hpctrain.cost.machine import Machine


class Calls(NamedTuple):
    """Collective calls on small values, over N ranks."""

    gathers: int = 0
    """Number of barriers and of gathers of objects. Each of these calls has ceil(log2 N) rounds,
    in each of which every rank sends a message."""
    trees: int = 0
    """Number of passes through a binomial tree, each with N - 1 messages. A broadcast has one
    pass, an all-reduce has two."""

    def messages(self, size: int) -> int:
        """Return the number of messages of all ranks."""
        return self.gathers * size * (size - 1).bit_length() + self.trees * (size - 1)

    def rounds(self, size: int) -> int:
        """Return the number of successive messages on the longest path."""
        return sum(self) * (size - 1).bit_length()


class ControlPart(NamedTuple):
    """Messages of an operation over all ranks."""

    world: Calls = Calls()
    between: Calls = Calls()  # additional calls over all ranks if there are several nodes
    node: Calls = Calls()  # calls over the ranks of each node
    rails: Calls = Calls()  # calls over the ranks of each rail
    decisions: int = 0
    """Number of all-reduces of a few values, each in node memory and by recursive doubling on one
    rail."""
    gathered_bytes: int = 0
    """Approximate bytes of each rank that all ranks receive."""
    rooted_bytes: int = 0
    """Approximate bytes of each rank that rank 0 receives."""

    def __add__(self, other: "ControlPart") -> "ControlPart":  # type: ignore[override] # no concatenation
        pairs = zip(self[:4], other[:4], strict=True)
        world, between, node, rails = (Calls(*map(operator.add, *pair)) for pair in pairs)
        return ControlPart(world, between, node, rails, *map(operator.add, self[4:], other[4:]))

    def messages(self, machine: Machine) -> int:
        """Return the number of messages of all ranks; each rank of a node has its own rail."""
        nodes, local, size = machine.nodes, machine.ranks_per_node, machine.num_ranks
        found = self.world.messages(size) + nodes * self.node.messages(local)
        if nodes == 1:
            return found
        power = 1 << (nodes.bit_length() - 1)
        doubling = power * (power.bit_length() - 1) + 2 * (nodes - power)
        found += self.between.messages(size) + local * self.rails.messages(nodes)
        return found + self.decisions * doubling

    def load(self, machine: Machine) -> Load:
        """Return the load of the busiest rank and network adapter."""
        nodes, size = machine.nodes, machine.num_ranks
        in_node = Load(node_rounds=self.node.rounds(machine.ranks_per_node))
        num_bytes = (size - 1) * (self.gathered_bytes + self.rooted_bytes)
        if nodes == 1:
            return in_node + Load(self.world.rounds(size), num_bytes)
        rounds = self.world.rounds(size) + self.between.rounds(size) + self.rails.rounds(nodes)
        # All ranks of a node receive the gathered bytes, but only rank 0 receives rooted bytes.
        sharing = -(-machine.ranks_per_node // machine.nics)
        sent = (size - 1) * (sharing * self.gathered_bytes + self.rooted_bytes)
        decision = allreduce(machine, _DECISION_BYTES, AllreduceSpec("doubling", rails=1))
        decisions = Load(*(self.decisions * each for each in decision))
        return in_node + Load(0, 0, rounds, sent, num_bytes) + decisions

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of all messages."""
        return self.load(machine).seconds(machine)


_DECISION_BYTES = 64
_START = ControlPart(
    world=Calls(gathers=15, trees=47),
    between=Calls(gathers=5, trees=24),
    node=Calls(gathers=16),
    rails=Calls(gathers=2),
    gathered_bytes=500,
)
_LOAD = ControlPart(Calls(trees=6), Calls(trees=4), Calls(gathers=10), decisions=4)
PARTS = {
    "start": _START,  # ``init()``
    "step": ControlPart(decisions=1),  # header of a training step
    "stop check": ControlPart(decisions=1),  # ``should_stop()``
    "save": ControlPart(
        world=Calls(gathers=1, trees=10),
        between=Calls(trees=10),
        node=Calls(gathers=2),
        decisions=9,
        gathered_bytes=50,  # three durations that each rank has measured
        rooted_bytes=140,  # record of a file in the manifest; exact for one rank per node
    ),
    "load": _LOAD,
    # Not tested: the MPI agreements on the lost ranks are assumed to use trees, up and down.
    "recovery": _START + _LOAD + ControlPart(Calls(trees=10)),
}
"""Parts of a run by name, for replicated state and checkpoints with one file per node."""
