"""Measures messages between pairs of ranks: latency, bandwidth and the difference of clocks."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.core.units import KIB, MIB

PING, LARGE, CLOCK, STOP = range(4)

PINGS_S, MOST_PINGS, FEWEST_PINGS = 0.02, 200, 3
"""A link is pinged for so long."""
FIRST_BYTES, LAST_BYTES = 256 * KIB, 16 * MIB
GROWTH = 4
LARGE_S = 8e-3
"""A message that takes so long in one direction is large enough."""
ENDLESS_S = 0.2
"""And one that takes so long needs no second try."""
LARGE_RUNS = 3
CLOCK_PINGS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What two ranks measured between them."""

    ranks: tuple[int, int]
    """The rank that measured, and the one that answered."""
    latency_s: float
    """Of a small message in one direction, the best of many."""
    bytes_per_s: float
    """Of a large message, the best of a few."""
    sent_bytes: int = 0
    """What each of the two has sent to the other, about."""
    clock_s: float = 0.0
    """How far the clock of the second rank is ahead of that of the first."""
    clock_error_s: float = 0.0
    """The true difference lies within so much of ``clock_s``."""

    def with_best_of(self, other: "Link") -> "Link":
        """Return this link with the better figures of two measurements."""
        return Link(
            ranks=self.ranks,
            latency_s=min(self.latency_s, other.latency_s),
            bytes_per_s=max(self.bytes_per_s, other.bytes_per_s),
            sent_bytes=self.sent_bytes + other.sent_bytes,
            clock_s=self.clock_s,
            clock_error_s=self.clock_error_s,
        )


Clock = Callable[[], float]


def measure(
    comm: Communicator, pairs: Sequence[tuple[int, int]], clock: Clock = time.time
) -> list[Link]:
    """Measure pairs of ranks, all at the same time. Collective; ranks in no pair wait.

    Args:
        comm: all ranks.
        pairs: disjoint, the same on every rank.
        clock: seconds since 1970 by this rank's clock.

    Returns:
        A link for each pair, in their order; the same on every rank.
    """
    mine: Link | None = None
    for first, second in pairs:
        if comm.rank == first:
            mine = _ask(comm, second, clock)
        elif comm.rank == second:
            _answer(comm, first, clock)
    found = {link.ranks: link for link in comm.allgather_object(mine) if link is not None}
    return [found[pair] for pair in pairs]


def rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Pair all ranks with all others, in rounds of disjoint pairs: the circle of a tournament."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    half = len(circle) // 2
    found = []
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append(
            [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        )
        circle[1:] = [circle[-1], *circle[1:-1]]
    return [pairs for pairs in found if pairs]


def _ask(comm: Communicator, partner: int, clock: Clock) -> Link:
    """Lead the measurement: every request is one small message, and the partner obeys."""
    _round_trip(comm, partner, PING)  # opens the connection
    trips: list[float] = []
    end = time.perf_counter() + PINGS_S
    while len(trips) < FEWEST_PINGS or (len(trips) < MOST_PINGS and time.perf_counter() < end):
        trips.append(_round_trip(comm, partner, PING))
    offset_s, error_s = min(
        (_clock_of(comm, partner, clock) for _ in range(CLOCK_PINGS)), key=lambda found: found[1]
    )
    one_way_s, num_bytes, sent_bytes = _large(comm, partner)
    _send(comm, partner, STOP)
    return Link(
        ranks=(comm.rank, partner),
        latency_s=min(trips) / 2,
        bytes_per_s=num_bytes / one_way_s,
        sent_bytes=sent_bytes,
        clock_s=offset_s,
        clock_error_s=error_s,
    )


def _large(comm: Communicator, partner: int) -> tuple[float, int, int]:
    """Return the seconds of a large message one way, its bytes, and all bytes that were sent."""
    sent_bytes = 0
    num_bytes = FIRST_BYTES
    while True:
        one_way_s = math.inf
        for _ in range(LARGE_RUNS):  # the best: anything else may happen on a host meanwhile
            one_way_s = min(one_way_s, _round_trip(comm, partner, LARGE, num_bytes) / 2)
            sent_bytes += num_bytes
            if one_way_s > ENDLESS_S:
                return one_way_s, num_bytes, sent_bytes
        if one_way_s >= LARGE_S or num_bytes >= LAST_BYTES:
            return one_way_s, num_bytes, sent_bytes
        num_bytes *= GROWTH


def _round_trip(comm: Communicator, partner: int, what: int, num_bytes: int = 0) -> float:
    values = torch.empty(num_bytes, dtype=torch.uint8)
    start = time.perf_counter()
    _send(comm, partner, what, num_bytes)
    if what == LARGE:
        comm.send(values, partner)
        comm.recv_(values, partner)
    else:
        _receive(comm, partner)
    return time.perf_counter() - start


def _clock_of(comm: Communicator, partner: int, clock: Clock) -> tuple[float, float]:
    """Return how far the partner's clock is ahead, and by how much that may be wrong."""
    theirs = torch.empty(1, dtype=torch.float64)
    before = clock()
    _send(comm, partner, CLOCK)
    comm.recv_(theirs, partner)
    after = clock()
    return float(theirs) - (before + after) / 2, abs(after - before) / 2


def _answer(comm: Communicator, partner: int, clock: Clock) -> None:
    """Do what the partner asks for, until it has enough."""
    while True:
        what, num_bytes = _receive(comm, partner)
        if what == STOP:
            return
        if what == LARGE:
            values = torch.empty(num_bytes, dtype=torch.uint8)
            comm.recv_(values, partner)
            comm.send(values, partner)
        elif what == CLOCK:
            comm.send(torch.tensor([clock()], dtype=torch.float64), partner)
        else:
            _send(comm, partner, PING)


def _send(comm: Communicator, partner: int, what: int, num_bytes: int = 0) -> None:
    comm.send(torch.tensor([what, num_bytes]), partner)


def _receive(comm: Communicator, partner: int) -> tuple[int, int]:
    message = torch.empty(2, dtype=torch.int64)
    comm.recv_(message, partner)
    what, num_bytes = message.tolist()
    return what, num_bytes
