"""Clocks of the nodes that differ: times in logs and of files then contradict each other."""

from collections.abc import Sequence

from hpctrain.cluster.topology import Topology
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_seconds
from hpctrain.doctor.ranks.links import Link

CHECK = "clocks"
WRONG_S = 1.0
"""Clocks that are kept by NTP differ by milliseconds."""
SHOWN = 4


def offsets(links: Sequence[Link], root: int) -> dict[int, tuple[float, float]]:
    """Return how far each rank's clock is ahead of that of ``root``, and by how much that may err.

    Goes along the links from one rank to the next where no pair with ``root`` was measured.

    Args:
        links: each with the difference of the clocks at its ends.
        root: a rank; ranks without a way to it are left out.
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
                ahead, error = found[here]
                found[other] = (ahead + sign * link.clock_s, error + link.clock_error_s)
                edge.append(other)
    return found


def check(links: Sequence[Link], topology: Topology) -> list[Finding]:
    """Compare the clocks of all nodes with that of the middle one.

    Args:
        links: between the first ranks of nodes.
        topology: of the world.
    """
    if topology.num_nodes == 1:
        return [Finding(CHECK, "ok", "one node, one clock")]
    host_of = {ranks[0]: host for ranks, host in zip(topology.nodes, topology.hosts, strict=True)}
    found = offsets(links, topology.nodes[0][0])
    middle = sorted(ahead for ahead, _ in found.values())[(len(found) - 1) // 2]
    wrong = {r: (o - middle, e) for r, (o, e) in found.items() if abs(o - middle) - e > WRONG_S}
    if wrong:
        told = [
            f"{host_of[rank]} is {format_seconds(abs(ahead))} {'ahead' if ahead > 0 else 'behind'}"
            f" (within {format_seconds(error)})"
            for rank, (ahead, error) in sorted(wrong.items())
        ]
        rest = f", and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
        return [
            Finding(
                CHECK,
                "warning",
                f"the clocks of the nodes differ: {', '.join(told[:SHOWN])}{rest}",
                "let chrony or ntpd keep the clocks (chronyc tracking shows the state): times in "
                "logs, ages of files and the end of a job are wrong until then",
            )
        ]
    most = max(abs(ahead - middle) for ahead, _ in found.values())
    error = max(error for _, error in found.values())
    return [
        Finding(
            CHECK,
            "ok",
            f"the clocks of {len(found)} nodes differ by {format_seconds(most)} at most "
            f"(estimated within {format_seconds(error)})",
        )
    ]
