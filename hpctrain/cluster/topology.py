"""Topology: nodes, hosts and cores of all ranks, computed from facts that each rank gathers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hpctrain.core.checks import Number, checked
from hpctrain.core.errors import TopologyError
from hpctrain.core.python_compat import Self
from hpctrain.core.units import MAX_RUNS, format_numbers

SHOWN = 8  # nodes listed in ``describe``


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """Facts about one rank; ``comm.factory`` gathers them over MPI."""

    host: str  # name of the host, unique per machine
    node: str = ""
    """Name of the node if the host name does not identify the node; else empty."""
    cores: tuple[int, ...]  # affinity mask
    share: tuple[int, ...] = ()  # cores to which the rank may be bound; see ``binding.bound``
    cards: int = 1  # network adapters of the host
    devices: int = 0  # accelerators that this rank may use
    visible: str = ""  # names of these accelerators, if an environment variable is set
    launcher: str = "alone"  # launcher of this rank, a name of ``cluster.env.LAUNCHERS``
    scheduler: str = ""  # scheduler of the job; empty outside of jobs


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Nodes and hosts of all ranks, and the position of this rank.

    A field is equal on all ranks, unless its description begins with "of this rank".
    """

    rank: int  # of this rank: its index in the world, from 0
    size: int  # ranks in the world
    nodes: tuple[tuple[int, ...], ...]
    """World ranks of each node, in rank order; nodes in the order of their lowest rank."""
    hosts: tuple[str, ...]
    """Name of each node: its host name, or ``host#2`` for the second declared node of a host."""
    cards: int  # network adapters per node: the minimum of all nodes
    devices: int = 0  # accelerators per rank: the minimum of all ranks
    cores: tuple[int, ...]  # of this rank: its affinity mask
    core_peers: tuple[int, ...]
    """Of this rank: itself and the ranks of its host with overlapping affinity masks."""
    num_peer_cores: int  # of this rank: cores of all ``core_peers``
    launcher: str  # launcher of this rank
    scheduler: str  # scheduler of the job; empty outside of jobs

    @classmethod
    def from_facts(
        cls, facts: Sequence[RankFacts], rank: int, ranks_per_node: int | None = None
    ) -> Self:
        """Build the topology from the facts of all ranks.

        A pure function: all ranks compute the same nodes from the same facts.

        Args:
            facts: one entry per rank; ``facts[r]`` is of rank r.
            rank: index of this rank, from 0.
            ranks_per_node: divides each host into nodes of this many ranks, in rank order; the
                last node of a host has the remaining ranks.

        Raises:
            TopologyError: the rank is not in the facts or ``ranks_per_node`` is below 1.
        """
        if not 0 <= rank < len(facts):
            raise TopologyError(
                f"rank must be one of the {len(facts)} ranks with facts, got {rank}"
            )
        checked("ranks_per_node", ranks_per_node, Number | None, TopologyError)
        hosts = _group(facts)
        nodes = sorted(
            (ranks, name)
            for host, members in hosts.items()
            for name, ranks in _declare(host, members, ranks_per_node)
        )
        mine = facts[rank]
        host_ranks = next(members for members in hosts.values() if rank in members)
        peers = [r for r in host_ranks if r == rank or set(facts[r].cores) & set(mine.cores)]
        return cls(
            rank=rank,
            size=len(facts),
            nodes=tuple(ranks for ranks, _ in nodes),
            hosts=tuple(name for _, name in nodes),
            cards=min(fact.cards for fact in facts),
            devices=min(fact.devices for fact in facts),
            cores=mine.cores,
            core_peers=tuple(peers),
            num_peer_cores=len({core for r in peers for core in facts[r].cores}),
            launcher=mine.launcher,
            scheduler=mine.scheduler,
        )

    def of_group(self, ranks: Sequence[int]) -> Self:
        """Return the topology of a group of ranks; ``ranks[i]`` becomes rank i.

        Args:
            ranks: distinct ranks of this world, including this rank.

        Raises:
            TopologyError: this rank is not in ``ranks``.
        """
        if self.rank not in ranks:
            raise TopologyError(
                f"a group must contain this rank, got {format_numbers(ranks, MAX_RUNS)} on rank "
                f"{self.rank}"
            )
        number = {rank: i for i, rank in enumerate(ranks)}
        nodes = sorted(
            (tuple(sorted(number[r] for r in members if r in number)), host)
            for members, host in zip(self.nodes, self.hosts, strict=True)
            if set(members) & number.keys()
        )
        return replace(
            self,
            rank=number[self.rank],
            size=len(ranks),
            nodes=tuple(members for members, _ in nodes),
            hosts=tuple(host for _, host in nodes),
            core_peers=tuple(sorted(number[r] for r in self.core_peers if r in number)),
        )

    @cached_property
    def node(self) -> int:
        """Index of the node of this rank."""
        return next(i for i, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def num_nodes(self) -> int:
        """Number of nodes; parts of a host that ``ranks_per_node`` declares count as nodes."""
        return len(self.nodes)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """World ranks of the node of this rank."""
        return self.nodes[self.node]

    @property
    def local_rank(self) -> int:
        """Index of this rank among the ranks of its node."""
        return self.node_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on the node of this rank."""
        return len(self.node_ranks)

    @cached_property
    def host_ranks(self) -> list[int]:
        """World ranks of the host of this rank, which may contain several declared nodes."""
        host = self.hosts[self.node].partition("#")[0]
        both = zip(self.hosts, self.nodes, strict=True)
        return sorted(r for h, n in both for r in n if h.partition("#")[0] == host)

    @property
    def host_rank(self) -> int:
        """Index of this rank among the ranks of its host."""
        return self.host_ranks.index(self.rank)

    @cached_property
    def cross_ranks(self) -> tuple[int, ...]:
        """World ranks with the local rank of this rank, one per node: the rail of this rank."""
        local_rank = self.local_rank
        return tuple(ranks[local_rank] for ranks in self.nodes if len(ranks) > local_rank)

    @property
    def cross_rank(self) -> int:
        """Index of this rank in ``cross_ranks``, as in Horovod."""
        return self.cross_ranks.index(self.rank)

    @property
    def cross_size(self) -> int:
        """Number of ranks with the same local rank, as in Horovod."""
        return len(self.cross_ranks)

    @property
    def is_homogeneous(self) -> bool:
        """Whether all nodes have the same number of ranks."""
        return len(set(map(len, self.nodes))) == 1

    @property
    def max_rails(self) -> int:
        """Largest possible number of rails, which is the number of ranks of the smallest node."""
        return min(map(len, self.nodes))

    @property
    def shared_cores(self) -> tuple[int, ...]:
        """This rank and the ranks that share its cores; empty if they have enough cores."""
        return self.core_peers if len(self.core_peers) > self.num_peer_cores else ()

    def describe(self) -> list[tuple[str, str]]:
        """Return table rows (name, text) about the machine, from the view of this rank."""
        sizes = sorted(set(map(len, self.nodes)))
        per_node = "-".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
        plural = "" if self.num_nodes == 1 else "s"
        nodes = zip(self.hosts, self.nodes, strict=True)
        names = [f"{host}: {format_numbers(ranks, MAX_RUNS)}" for host, ranks in nodes]
        if len(names) > SHOWN:
            names[SHOWN - 1 : -1] = [f"... {len(names) - SHOWN} more ..."]
        cores = f"{format_numbers(self.cores)} of rank {self.rank}"
        if len(self.core_peers) > 1:
            cores += f", {self.num_peer_cores} for {len(self.core_peers)} ranks"
        return [
            ("ranks", f"{self.size} on {self.num_nodes} node{plural}, {per_node} per node"),
            ("nodes", "; ".join(names)),
            ("cores", cores),
            ("network adapters", f"{self.cards} per node"),
            ("accelerators", f"{self.devices or 'none'} that each rank sees"),
            ("launcher", self.launcher),
            ("scheduler", self.scheduler or "none"),
        ]


def _group(facts: Sequence[RankFacts]) -> dict[str, list[int]]:
    """Return the ranks of each host; if ``RankFacts.node`` is set, it replaces the host name."""
    hosts: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        hosts.setdefault(fact.node or fact.host, []).append(rank)
    return hosts


def _declare(
    host: str, ranks: list[int], ranks_per_node: int | None
) -> list[tuple[str, tuple[int, ...]]]:
    """Divide the ranks of a host into nodes of ``ranks_per_node`` ranks, and name the nodes."""
    if ranks_per_node is None or len(ranks) <= ranks_per_node:
        return [(host, tuple(ranks))]
    starts = range(0, len(ranks), ranks_per_node)
    return [
        (f"{host}#{i}", tuple(ranks[start : start + ranks_per_node]))
        for i, start in enumerate(starts, start=1)
    ]
