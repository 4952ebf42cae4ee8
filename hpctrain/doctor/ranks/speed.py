"""Links that are much slower than the others, and the node they have in common."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from hpctrain.cluster.topology import Topology
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_seconds
from hpctrain.doctor.ranks.links import Link
from hpctrain.doctor.ranks.network import format_rate
from hpctrain.doctor.ranks.shown import few

CHECK = "links"

SLOWER = 3.0
"""A link is slow below such a share of the usual bandwidth; what is healthy differs by two."""
LATER, LATER_S = 4.0, 300e-6
"""A link is slow above so many times the usual latency, and so much more: the rest is noise."""
SLOWEST_BYTES_PER_S, LONGEST_S = 12e6, 5e-3
"""Worse than any network that is made for computing; a gigabit carries 118e6 bytes."""


def slow(links: Sequence[Link]) -> list[Link]:
    """Return the links that are much slower than usual, or than any should be.

    Usual is the median over nodes of the best link that each has: with one bad node of three,
    most links are bad, and most nodes are not.
    """
    return [link for link in links if _is_slow(link, *_usual(links))]


def check(links: Sequence[Link], topology: Topology) -> list[Finding]:
    """Tell how fast the links between nodes are, and name the slow ones.

    Args:
        links: between the first ranks of nodes; slow ones were measured twice.
        topology: of the world.
    """
    if not links:
        return []
    bad = slow(links)
    what = (
        f"between nodes: {_spread([link.latency_s for link in links], format_seconds)} latency, "
        f"{_spread([link.bytes_per_s for link in links], format_rate)}, "
        f"by {len(links)} pair{'s' * (len(links) > 1)}"
    )
    if not bad:
        return [Finding(CHECK, "note", what)]
    return [Finding(CHECK, "note", what), *_blame(bad, links, topology)]


def inside(links: Sequence[Link]) -> list[Finding]:
    """Tell how fast messages inside the nodes are."""
    if not links:
        return []
    latency = _spread([link.latency_s for link in links], format_seconds)
    rate = _spread([link.bytes_per_s for link in links], format_rate)
    return [Finding(CHECK, "note", f"inside a node: {latency} latency, {rate}")]


def _blame(bad: Sequence[Link], links: Sequence[Link], topology: Topology) -> list[Finding]:
    """Name the nodes all of whose links are slow while others' are not; else the pairs."""
    host_of = {ranks[0]: host for ranks, host in zip(topology.nodes, topology.hosts, strict=True)}
    reached = {rank for link in links for rank in link.ranks}
    mine = {r: [link for link in links if r in link.ranks] for r in sorted(reached)}
    guilty = [
        rank
        for rank, own in mine.items()
        if len(own) > 1 and all(link in bad for link in own) and len(bad) < len(links)
    ]
    latency_s, bytes_per_s = _usual(links)
    usual = f"usual here is {format_seconds(latency_s)}, {format_rate(bytes_per_s)}"
    look = "ask the site to look at its cable, switch port and card"
    nodes = [
        Finding(
            CHECK,
            "warning",
            f"slow link: {host_of[rank]} reaches every other node only with "
            f"{_figures(mine[rank])}; {usual}",
            f"{look}; until then leave it out: sbatch --exclude={host_of[rank]}",
        )
        for rank in guilty
    ]
    others = [link for link in bad if not set(guilty) & set(link.ranks)]
    pairs = [
        Finding(
            CHECK,
            "warning",
            f"slow link: between {host_of[link.ranks[0]]} and {host_of[link.ranks[1]]} with "
            f"{_figures([link])}; {usual if len(links) > 1 else 'a gigabit carries 112 MiB/s'}",
            "find out whether messages take the network that is meant for them (see network); "
            f"if they do, {look}",
        )
        for link in others
    ]
    return [*few(nodes), *few(pairs)]


def _usual(links: Sequence[Link]) -> tuple[float, float]:
    """Return latency and bandwidth of the usual node's best link."""
    nodes = {rank for link in links for rank in link.ranks}
    own = [[link for link in links if rank in link.ranks] for rank in nodes]
    return (
        median(min(link.latency_s for link in found) for found in own),
        median(max(link.bytes_per_s for link in found) for found in own),
    )


def _is_slow(link: Link, latency_s: float, bytes_per_s: float) -> bool:
    late = link.latency_s > max(LATER * latency_s, latency_s + LATER_S)
    return (
        late
        or link.latency_s > LONGEST_S
        or link.bytes_per_s < max(bytes_per_s / SLOWER, SLOWEST_BYTES_PER_S)
    )


def _figures(links: Iterable[Link]) -> str:
    found = list(links)
    latency_s = min(link.latency_s for link in found)
    return f"{format_seconds(latency_s)}, {format_rate(max(k.bytes_per_s for k in found))}"


def _spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"
