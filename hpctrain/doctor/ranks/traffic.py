"""Measurements between ranks: latency, bandwidth, clocks, and the interfaces in use."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from hpctrain.cluster.resources import live_adapters
from hpctrain.cluster.topology import Topology
from hpctrain.comm.communicator import Communicator
from hpctrain.core.units import KIB, MIB
from hpctrain.doctor.checks.facts import Carried, MeasuredLink
from hpctrain.doctor.checks.network import slow

PING, LARGE, STOP = range(3)

PINGS_S, MOST_PINGS, FEWEST_PINGS = 0.02, 200, 3  # time for the pings of a link, and their number
FIRST_BYTES, LAST_BYTES = 256 * KIB, 16 * MIB
GROWTH = 4
LARGE_S = 8e-3  # a message is large enough if it takes this time in one direction
ENDLESS_S = 0.2  # a message that takes longer is not repeated
LARGE_RUNS = 3
FEWEST_ROUNDS = 3  # a node has a different partner in each round; two rounds connect all nodes
MOST_DOUBTS, PAUSES_S = 4, (0.1, 0.2, 0.4, 0.8, 1.6)
"""Maximum number of slow links that are measured again, and seconds before each repetition. A link
with a bad cable remains slow; a link that other work of a host has slowed down does not."""
COUNTED = Path("/proc/net/dev")
_WORD_BYTES = 4  # unit of the counter port_xmit_data

Clock = Callable[[], float]


def links_inside(comm: Communicator, topology: Topology) -> list[MeasuredLink]:
    """Measure the link between two ranks of each node. Collective."""
    return measure(comm, [(ranks[0], ranks[1]) for ranks in topology.nodes if len(ranks) > 1])


def links_between(
    comm: Communicator, topology: Topology, fast_adapters: tuple[str, ...], seconds: float
) -> tuple[list[MeasuredLink], list[Carried]]:
    """Measure links between the first ranks of nodes. Collective.

    The function measures rounds of disjoint pairs until about ``seconds`` have passed, and then
    measures slow links again. The results are identical on every rank.

    Returns:
        The links, and the bytes that each node sent during the measurements.

    """
    before = interface_bytes(), adapter_bytes()
    links: list[MeasuredLink] = []
    end = time.monotonic() + seconds
    for number, pairs in enumerate(rounds([ranks[0] for ranks in topology.nodes]), start=1):
        links += measure(comm, pairs)
        if not comm.broadcast_object(number < FEWEST_ROUNDS or time.monotonic() < end):
            break
    for pause_s in PAUSES_S:
        doubts = slow(links)[:MOST_DOUBTS]
        if doubts:
            time.sleep(pause_s)
        for doubt in doubts:
            again = measure(comm, [doubt.ranks])[0]
            links[links.index(doubt)] = doubt.with_best_of(again)
    after = interface_bytes(), adapter_bytes()
    mine = Carried(
        host=topology.hosts[topology.node],
        sent_bytes=sum(link.sent_bytes for link in links if comm.rank in link.ranks),
        by_interface=difference(before[0], after[0]),
        by_adapter=difference(before[1], after[1]),
        fast_adapters=fast_adapters,
    )
    nodes = comm.allgather_object(mine if topology.local_rank == 0 else None)
    return links, [node for node in nodes if node is not None]


def interface_bytes(table: Path = COUNTED) -> dict[str, int]:
    """Return the number of bytes that each interface of this network namespace has sent."""
    try:
        lines = table.read_text().splitlines()[2:]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines)
    return {name.strip(): int(counters.split()[8]) for name, counters in pairs}


def adapter_bytes() -> dict[str, int]:
    """Return the number of bytes that each fast adapter has sent."""
    found: dict[str, int] = {}
    for adapter in live_adapters():
        for file in adapter.glob("ports/*/counters/port_xmit_data"):
            try:
                words = int(file.read_text())
            except (OSError, ValueError):
                continue
            found[adapter.name] = found.get(adapter.name, 0) + words * _WORD_BYTES
    return found


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the increase of each counter; omit counters that did not change."""
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: value for name, value in grown.items() if value > 0}


def measure(
    comm: Communicator, pairs: Sequence[tuple[int, int]], clock: Clock = time.time
) -> list[MeasuredLink]:
    """Measure the links of disjoint pairs of ranks concurrently. Collective.

    ``pairs`` must be identical on every rank. The result has a link for each pair, in the same
    order, and is identical on every rank. Ranks without a partner wait.
    """
    mine: MeasuredLink | None = None
    for first, second in pairs:
        if comm.rank == first:
            mine = _request(comm, second, clock)
        elif comm.rank == second:
            _reply(comm, first, clock)
    found = {link.ranks: link for link in comm.allgather_object(mine) if link is not None}
    return [found[pair] for pair in pairs]


def rounds(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs; each pair of ranks is in one round (round-robin)."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        pairs = [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        if pairs:
            yield pairs
        circle[1:] = [circle[-1], *circle[1:-1]]


def _request(comm: Communicator, partner: int, clock: Clock) -> MeasuredLink:
    """Measure the link to ``partner``, which executes ``_reply``.

    A small message requests each reply of the partner.
    """
    _ping(comm, partner, clock)  # opens the connection
    trips: list[tuple[float, float]] = []
    end = time.perf_counter() + PINGS_S
    while len(trips) < FEWEST_PINGS or (len(trips) < MOST_PINGS and time.perf_counter() < end):
        trips.append(_ping(comm, partner, clock))
    quickest_s, ahead_s = min(trips)
    one_way_s, num_bytes, sent_bytes = _large(comm, partner)
    _send(comm, partner, STOP)
    return MeasuredLink(
        ranks=(comm.rank, partner),
        latency_s=quickest_s / 2,
        bytes_per_s=num_bytes / one_way_s,
        sent_bytes=sent_bytes,
        clock_s=ahead_s,
        clock_error_s=quickest_s / 2,
    )


def _ping(comm: Communicator, partner: int, clock: Clock) -> tuple[float, float]:
    """Return the seconds of a round trip, and by how many seconds the partner's clock is ahead."""
    theirs = torch.empty(1, dtype=torch.float64)
    start, before = time.perf_counter(), clock()
    _send(comm, partner, PING)
    comm.recv_(theirs, partner)
    after, seconds = clock(), time.perf_counter() - start
    return seconds, float(theirs) - (before + after) / 2


def _large(comm: Communicator, partner: int) -> tuple[float, int, int]:
    """Return the one-way seconds and the bytes of the largest message, and all bytes sent."""
    sent_bytes = 0
    num_bytes = FIRST_BYTES
    while True:
        one_way_s = math.inf
        for _ in range(LARGE_RUNS):  # the minimum excludes disturbances
            one_way_s = min(one_way_s, _round_trip(comm, partner, num_bytes) / 2)
            sent_bytes += num_bytes
            if one_way_s > ENDLESS_S:
                return one_way_s, num_bytes, sent_bytes
        if one_way_s >= LARGE_S or num_bytes >= LAST_BYTES:
            return one_way_s, num_bytes, sent_bytes
        num_bytes *= GROWTH


def _round_trip(comm: Communicator, partner: int, num_bytes: int) -> float:
    values = torch.empty(num_bytes, dtype=torch.uint8)
    start = time.perf_counter()
    _send(comm, partner, LARGE, num_bytes)
    comm.send(values, partner)
    comm.recv_(values, partner)
    return time.perf_counter() - start


def _reply(comm: Communicator, partner: int, clock: Clock) -> None:
    """Reply to requests of ``partner`` until the request STOP arrives."""
    message = torch.empty(2, dtype=torch.int64)
    while True:
        comm.recv_(message, partner)
        what, num_bytes = message.tolist()
        if what == STOP:
            return
        if what == LARGE:
            values = torch.empty(num_bytes, dtype=torch.uint8)
            comm.recv_(values, partner)
            comm.send(values, partner)
        else:
            comm.send(torch.tensor([clock()], dtype=torch.float64), partner)


def _send(comm: Communicator, partner: int, what: int, num_bytes: int = 0) -> None:
    comm.send(torch.tensor([what, num_bytes]), partner)
