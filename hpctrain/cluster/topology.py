"""The place of every rank: facts of all ranks in, one frozen value out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.core.errors import TopologyError
from hpctrain.core.python_compat import Self
from hpctrain.core.units import format_numbers

SHOWN = 8  # nodes named in ``describe``; a thousand would drown the rest


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """What one rank knows of itself; ``comm.factory`` gathers them over MPI."""

    host: str  # name of the host, different for every machine
    node: str = ""
    """Tells nodes apart where the host's name does not; empty means the host is the node."""
    cores: tuple[int, ...]  # affinity mask
    cards: int = 1  # network cards of the host
    devices: int = 0  # accelerators that this rank may use
    visible: str = ""  # which ones, where the environment says so
    launcher: str = "alone"  # who started this rank, a name of ``cluster.env.LAUNCHERS``
    scheduler: str = ""  # whose job it is; empty outside of jobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The world as one rank sees it; all ranks agree on all but what says "mine"."""

    rank: int  # my rank in the world
    size: int  # ranks in the world
    nodes: tuple[tuple[int, ...], ...]
    """World ranks of each node, in rank order; nodes in the order of their lowest rank."""
    hosts: tuple[str, ...]
    """Name of each node: the host's, or ``host#2`` for the second node declared on it."""
    cards: int  # network cards of the node that has fewest, so that all ranks plan alike
    devices: int = 0  # accelerators that every rank may use, at least
    cores: tuple[int, ...]  # my affinity mask
    core_peers: tuple[int, ...]
    """Ranks of my host, of whatever declared node, whose masks overlap with mine; me included."""
    num_peer_cores: int  # cores that ``core_peers`` have together
    launcher: str  # who started me
    scheduler: str  # whose job this is; empty outside of jobs

    @classmethod
    def from_facts(
        cls, facts: Sequence[RankFacts], rank: int, ranks_per_node: int | None = None
    ) -> Self:
        """Build the topology from the facts of all ranks, ``facts[r]`` being those of rank r.

        Pure: the same facts give the same nodes on every rank, in any order of ranks.

        Args:
            facts: one entry per rank.
            rank: my rank.
            ranks_per_node: declares nodes: every so many ranks of a host, in rank order, are a
                node of their own, the last of a host with what is left.

        Raises:
            TopologyError: the rank is not in the facts or ``ranks_per_node`` is below 1.
        """
        if not 0 <= rank < len(facts):
            raise TopologyError(f"a rank is one of {len(facts)} that gave facts, got {rank}")
        if ranks_per_node is not None and ranks_per_node < 1:
            raise TopologyError(
                f"ranks_per_node must be at least 1, got {ranks_per_node}; leave it out to take "
                "every host as one node"
            )
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
        """Return the topology of some of the ranks; the i-th of ``ranks`` becomes rank i.

        Args:
            ranks: of this world, each once, mine among them.

        Raises:
            TopologyError: my rank is not among them.
        """
        if self.rank not in ranks:
            raise TopologyError(f"rank {self.rank} is not in the group {format_numbers(ranks)}")
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

    @property
    def node(self) -> int:
        """Index of my node."""
        return next(i for i, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def num_nodes(self) -> int:
        """Nodes of the world, declared ones too."""
        return len(self.nodes)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """World ranks of my node."""
        return self.nodes[self.node]

    @property
    def local_rank(self) -> int:
        """My rank on my node."""
        return self.node_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        """Ranks on my node."""
        return len(self.node_ranks)

    @property
    def host_ranks(self) -> list[int]:
        """World ranks of my host, of whose ranks several nodes may be declared."""
        host = self.hosts[self.node].partition("#")[0]
        both = zip(self.hosts, self.nodes, strict=True)
        return sorted(r for h, n in both for r in n if h.partition("#")[0] == host)

    @property
    def host_rank(self) -> int:
        """My number on my host."""
        return self.host_ranks.index(self.rank)

    @property
    def cross_ranks(self) -> tuple[int, ...]:
        """World ranks with my local rank, one of each node that has so many; my rail."""
        return tuple(
            ranks[self.local_rank] for ranks in self.nodes if len(ranks) > self.local_rank
        )

    @property
    def cross_rank(self) -> int:
        """My place among ``cross_ranks``, as Horovod counts it."""
        return self.cross_ranks.index(self.rank)

    @property
    def cross_size(self) -> int:
        """How many ranks have my local rank, as Horovod counts it."""
        return len(self.cross_ranks)

    @property
    def is_homogeneous(self) -> bool:
        """Whether all nodes hold equally many ranks."""
        return len(set(map(len, self.nodes))) == 1

    @property
    def max_rails(self) -> int:
        """The most slices that every node has an owner for: the ranks of the smallest node."""
        return min(map(len, self.nodes))

    @property
    def shared_cores(self) -> tuple[int, ...]:
        """Ranks that take turns on my cores, me included; empty when there is one for each."""
        return self.core_peers if len(self.core_peers) > self.num_peer_cores else ()

    def describe(self) -> list[tuple[str, str]]:
        """Return name and text for each row of a table about the machine, as seen by this rank."""
        sizes = sorted(set(map(len, self.nodes)))
        per_node = "-".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
        plural = "" if self.num_nodes == 1 else "s"
        names = [f"{h}: {format_numbers(r)}" for h, r in zip(self.hosts, self.nodes, strict=True)]
        if len(names) > SHOWN:
            names[SHOWN - 1 : -1] = [f"... {len(names) - SHOWN} more ..."]
        cores = f"{format_numbers(self.cores)} of rank {self.rank}"
        if len(self.core_peers) > 1:
            cores += f", {self.num_peer_cores} for {len(self.core_peers)} ranks"
        return [
            ("ranks", f"{self.size} on {self.num_nodes} node{plural}, {per_node} per node"),
            ("nodes", "; ".join(names)),
            ("cores", cores),
            ("network cards", f"{self.cards} per node"),
            ("accelerators", f"{self.devices or 'none'} that each rank sees"),
            ("launcher", self.launcher),
            ("scheduler", self.scheduler or "none"),
        ]


def _group(facts: Sequence[RankFacts]) -> dict[str, list[int]]:
    """Map each host to its ranks; a node that a rank names itself is taken as a host."""
    hosts: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        hosts.setdefault(fact.node or fact.host, []).append(rank)
    return hosts


def _declare(
    host: str, ranks: list[int], ranks_per_node: int | None
) -> list[tuple[str, tuple[int, ...]]]:
    """Cut the ranks of one host into declared nodes."""
    if ranks_per_node is None or len(ranks) <= ranks_per_node:
        return [(host, tuple(ranks))]
    starts = range(0, len(ranks), ranks_per_node)
    return [
        (f"{host}#{i}", tuple(ranks[start : start + ranks_per_node]))
        for i, start in enumerate(starts, start=1)
    ]
