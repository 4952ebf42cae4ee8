"""Links that are much slower than the others, the node they have in common, and its clock."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from hpctrain.core.finding import Finding
from hpctrain.core.units import format_bytes, format_seconds
from hpctrain.doctor.checks.check import check, few, listed, note, ok, plural, warning
from hpctrain.doctor.checks.facts import Link, WorldFacts

SLOWER = 3.0
"""A link is slow below such a share of the usual bandwidth; what is healthy differs by two."""
LATER, LATER_S = 4.0, 300e-6
"""A link is slow above so many times the usual latency, and so much more: the rest is noise."""
SLOWEST_BYTES_PER_S, LONGEST_S = 12e6, 5e-3
"""Worse than any network that is made for computing; a gigabit carries 118e6 bytes."""
WRONG_S = 1.0
"""Clocks that are kept by NTP differ by milliseconds."""


@check("links")
def check_links(world: WorldFacts) -> list[Finding]:
    """Tell how fast messages are inside nodes and between them, and name the slow links."""
    found = []
    if world.inside:
        found.append(note(f"inside a node: {_spreads(world.inside)}"))
    if world.between:
        pairs = plural(len(world.between), "pair")
        found.append(note(f"between nodes: {_spreads(world.between)}, by {pairs}"))
        found += _blame(slow(world.between), world)
    return found


def slow(links: Sequence[Link]) -> list[Link]:
    """Return the links that are much slower than usual, or than any should be.

    Usual is the median over nodes of the best link that each has: with one bad node of three,
    most links are bad, and most nodes are not.
    """
    return [link for link in links if _is_slow(link, *_usual(links))]


def _blame(bad: Sequence[Link], world: WorldFacts) -> list[Finding]:
    """Name the nodes all of whose links are slow while others' are not; else the pairs."""
    if not bad:
        return []
    links, host_of = world.between, world.host_of
    mine = {r: [link for link in links if r in link.ranks] for r in sorted(host_of)}
    guilty = [
        rank
        for rank, own in mine.items()
        if len(own) > 1 and all(link in bad for link in own) and len(bad) < len(links)
    ]
    latency_s, bytes_per_s = _usual(links)
    usual = f"usual here is {format_seconds(latency_s)}, {_rate(bytes_per_s)}"
    look = "ask the site to look at its cable, switch port and card"
    nodes = [
        warning(
            f"slow link: {host_of[rank]} reaches every other node only with "
            f"{_figures(mine[rank])}; {usual}",
            f"{look}; until then leave it out: sbatch --exclude={host_of[rank]}",
        )
        for rank in guilty
    ]
    compared = usual if len(links) > 1 else "a gigabit carries 112 MiB/s"
    pairs = [
        warning(
            f"slow link: between {' and '.join(host_of[rank] for rank in link.ranks)} with "
            f"{_figures([link])}; {compared}",
            "find out whether messages take the network that is meant for them (see network); "
            f"if they do, {look}",
        )
        for link in bad
        if not set(guilty) & set(link.ranks)
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


def _figures(links: Sequence[Link]) -> str:
    latency_s = min(link.latency_s for link in links)
    return f"{format_seconds(latency_s)}, {_rate(max(link.bytes_per_s for link in links))}"


def _spreads(links: Sequence[Link]) -> str:
    latency = _spread((link.latency_s for link in links), format_seconds)
    return f"{latency} latency, {_spread((link.bytes_per_s for link in links), _rate)}"


def _spread(values: Iterable[float], text: Callable[[float], str]) -> str:
    ordered = sorted(values)
    return " to ".join(dict.fromkeys((text(ordered[0]), text(ordered[-1]))))


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"


@check("clocks")
def check_clocks(world: WorldFacts) -> list[Finding]:
    """Compare the clocks of all nodes with that of the middle one."""
    if world.topology.num_nodes == 1:
        return [ok("one node, one clock")]
    found = offsets(world.between, world.topology.nodes[0][0])
    middle = sorted(ahead for ahead, _ in found.values())[(len(found) - 1) // 2]
    wrong = [
        f"{world.host_of[rank]} is {format_seconds(abs(ahead - middle))} "
        f"{'ahead' if ahead > middle else 'behind'} (within {format_seconds(error_s)})"
        for rank, (ahead, error_s) in sorted(found.items())
        if abs(ahead - middle) - error_s > WRONG_S
    ]
    if wrong:
        what = f"the clocks of the nodes differ: {listed(wrong)}"
        do = (
            "let chrony or ntpd keep the clocks (chronyc tracking shows the state): times in "
            "logs, ages of files and the end of a job are wrong until then"
        )
        return [warning(what, do)]
    most = max(abs(ahead - middle) for ahead, _ in found.values())
    error_s = max(error_s for _, error_s in found.values())
    return [
        ok(
            f"the clocks of {len(found)} nodes differ by {format_seconds(most)} at most "
            f"(estimated within {format_seconds(error_s)})"
        )
    ]


def offsets(links: Sequence[Link], root: int) -> dict[int, tuple[float, float]]:
    """Return how far each rank's clock is ahead of that of ``root``, and by how much that may err.

    Goes along the links from one rank to the next where no pair with ``root`` was measured.

    Ranks without a way to it are left out.
    """
    found = {root: (0.0, 0.0)}
    edge = [root]
    while edge:
        here = edge.pop(0)
        for link in links:
            if here not in link.ranks:
                continue
            first, second = link.ranks
            other, sign = (second, 1) if here == first else (first, -1)
            if other not in found:
                ahead, error_s = found[here]
                found[other] = (ahead + sign * link.clock_s, error_s + link.clock_error_s)
                edge.append(other)
    return found
