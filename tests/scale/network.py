"""A simulated network with virtual time, which counts the messages of all ranks."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple


class Costs(NamedTuple):
    """Costs of a message, those of Python code on a network of 100 Gbit/s by default."""

    alpha_s: float = 5e-6  # latency
    beta_s: float = 8e-11  # per byte
    gamma_s: float = 10e-6  # work of the sender, and of the receiver


COSTS = Costs()


@dataclass(frozen=True, slots=True)
class Traffic:
    """Totals of all ranks, and maxima over the ranks."""

    num_messages: int
    num_bytes: int
    most_messages: int  # sent or received by one rank
    most_peers: int  # ranks with which one rank exchanges messages
    num_rounds: int  # length of the longest chain of messages, each sent after the one before
    seconds: float  # virtual

    def per_rank(self, size: int) -> float:
        """Return the mean number of messages that a rank sends."""
        return self.num_messages / size


class Network:
    """Delivers messages in the order of virtual time; messages of two ranks keep their order.

    Args:
        size: number of ranks.
        seed: seed of ``random``, from which tests draw faults. Equal seeds give equal runs.
        jitter_s: mean of a random addition to each latency.
    """

    def __init__(
        self, size: int, *, seed: int = 0, costs: Costs = COSTS, jitter_s: float = 0.0
    ) -> None:
        self.size, self.costs, self.random = size, costs, Random(seed)
        self._jitter_s = jitter_s
        self.clocks = [0.0] * size
        self.slow: dict[int, float] = {}
        """By rank: the factor by which its work on messages takes longer."""
        self.lost: set[int] = set()
        """Ranks that neither send nor receive."""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._num_events = 0
        self._arrivals: dict[tuple[int, int], float] = {}
        self.forget()

    def forget(self) -> None:
        """Set all counters to zero; clocks continue from the latest one."""
        self._start = max(self.clocks)
        self.clocks = [self._start] * self.size
        self.sent, self.received = [0] * self.size, [0] * self.size
        self.num_bytes = 0
        self.peers = defaultdict[int, set[int]](set)
        self.rounds = [0] * self.size

    def traffic(self) -> Traffic:
        """Return the counters since ``forget``."""
        return Traffic(
            num_messages=sum(self.sent),
            num_bytes=self.num_bytes,
            most_messages=max(map(sum, zip(self.sent, self.received, strict=True))),
            most_peers=max(map(len, self.peers.values()), default=0),
            num_rounds=max(self.rounds),
            seconds=max(self.clocks) - self._start,
        )

    def send(self, source: int, dest: int, num_bytes: int, deliver: Callable[[], object]) -> None:
        """Send a message; ``deliver`` is called when it has arrived and ``dest`` is free."""
        if source in self.lost:
            return
        costs = self.costs
        self._count(source, dest, num_bytes)
        self.clocks[source] += costs.gamma_s * self.slow.get(source, 1.0)
        latency_s = costs.alpha_s + costs.beta_s * num_bytes
        if self._jitter_s:
            latency_s += self.random.expovariate(1 / self._jitter_s)
        arrival = max(self.clocks[source] + latency_s, self._arrivals.get((source, dest), 0.0))
        self._arrivals[source, dest] = arrival
        number = self.rounds[source] + 1

        def arrive() -> None:
            if dest not in self.lost:
                self.received[dest] += 1
                self.rounds[dest] = max(self.rounds[dest], number)
                self.clocks[dest] = max(self.clocks[dest], arrival)
                self.clocks[dest] += costs.gamma_s * self.slow.get(dest, 1.0)
                deliver()

        self.at(arrival, arrive)

    def _count(self, source: int, dest: int, num_bytes: int) -> None:
        self.sent[source] += 1
        self.num_bytes += num_bytes
        self.peers[source].add(dest)
        self.peers[dest].add(source)

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Call ``action`` at a virtual time."""
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, action))

    def step(self, until: float = float("inf")) -> bool:
        """Perform the next event before ``until``; return False if there is none."""
        if not self._events or self._events[0][0] >= until:
            return False
        _, _, action = heapq.heappop(self._events)
        action()
        return True

    def run(self, until: float = float("inf")) -> None:
        """Perform all events before ``until``."""
        while self.step(until):
            pass

    def meet(self, ranks: Sequence[int], num_bytes: int, num_rounds: int) -> None:
        """Count a collective of ``ranks``, in which each rank sends a message per round.

        The partners in round k are at a distance of 2^k, as in recursive doubling.
        """
        size = len(ranks)
        self.num_bytes += size * num_rounds * num_bytes
        distances = {(sign << k) % size for k in range(num_rounds) for sign in (1, -1)} - {0}
        self._pass_time(ranks, num_bytes, num_rounds)
        for place, rank in enumerate(ranks):
            self.sent[rank] += num_rounds
            self.received[rank] += num_rounds
            self.peers[rank].update([ranks[(place + far) % size] for far in distances])

    def broadcast(self, ranks: Sequence[int], num_bytes: int) -> None:
        """Count a broadcast along a binomial tree of ``ranks``."""
        size = len(ranks)
        self.num_bytes += (size - 1) * num_bytes
        self._pass_time(ranks, num_bytes, (size - 1).bit_length())
        for place in range(1, size):
            rank, parent = ranks[place], ranks[place & (place - 1)]
            self.sent[parent] += 1
            self.received[rank] += 1
            self.peers[rank].add(parent)
            self.peers[parent].add(rank)

    def _pass_time(self, ranks: Sequence[int], num_bytes: int, num_rounds: int) -> None:
        costs, factor = self.costs, 1.0
        if self.slow:
            factor = max(self.slow.get(rank, 1.0) for rank in ranks)
        one_s = costs.alpha_s + costs.beta_s * num_bytes + 2 * costs.gamma_s * factor
        end = max(self.clocks[rank] for rank in ranks) + num_rounds * one_s
        number = max(self.rounds[rank] for rank in ranks) + num_rounds
        for rank in ranks:
            self.clocks[rank], self.rounds[rank] = end, number
