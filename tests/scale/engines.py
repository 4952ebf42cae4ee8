"""Progress engines of thousands of ranks, which exchange messages over a simulated network."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch

from hpctrain.comm.control_channel.mailbox import FAN_OUT, Tree
from hpctrain.core.config import Settings
from hpctrain.negotiation import progress_engine, request, stall
from hpctrain.negotiation.progress_engine import ProgressEngine
from hpctrain.negotiation.request import Handle, Kind, ReduceOp, Request
from hpctrain.negotiation.stall import LastCall, SetMember, StallWatch
from hpctrain.negotiation.timeline import Timelines
from tests.scale.network import Network

RANKS_PER_NODE = 64


def node_lists(size: int, ranks_per_node: int = RANKS_PER_NODE) -> list[list[int]]:
    """Return the ranks of each node."""
    firsts = range(0, size, ranks_per_node)
    return [list(range(first, min(first + ranks_per_node, size))) for first in firsts]


def all_trees(nodes: Sequence[Sequence[int]]) -> dict[int, Tree]:
    """Return ``tree_of(nodes, rank)`` of all ranks, in linear time."""
    members = sorted(map(sorted, nodes))
    leaders = [ranks[0] for ranks in members]

    def edges(ranks: Sequence[int], place: int) -> tuple[int | None, tuple[int, ...]]:
        first = FAN_OUT * place + 1
        parent = ranks[(place - 1) // FAN_OUT] if place else None
        return parent, tuple(ranks[first : first + FAN_OUT])

    trees = {}
    for number, ranks in enumerate(members):
        for place, rank in enumerate(ranks):
            parent, children = edges(ranks, place)
            if not place:
                parent, of_other_nodes = edges(leaders, number)
                children = of_other_nodes + children
            trees[rank] = Tree(rank, parent, children, len(members))
    return trees


class QueueMailbox:
    """Mailbox of one rank; a message that has arrived is in ``inbox`` until ``receive``."""

    channel = None  # no fast path: it needs node memory

    def __init__(self, tree: Tree, engines: "Engines") -> None:
        self.tree, self._engines = tree, engines
        self.inbox: list[tuple[int, bytes]] = []

    def send(self, to: int, message: bytes) -> None:
        self._engines.send(self.tree.rank, to, message)

    def receive(self) -> list[tuple[int, bytes]]:
        found, self.inbox = self.inbox, []
        return found

    def flush(self, *, down: bool = False) -> None:
        pass  # a message that was sent has left


class StubExecutor:
    """Completes decided operations without communication, and records their names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def carry_out(self, handles: Sequence[Handle], *_: object) -> None:
        for handle in handles:
            self.names.append(handle.name)
            handle.succeed(handle.request.tensors)


class Engines:
    """The engines of all ranks. A rank takes a turn when a message arrives or by ``turn``.

    Args:
        size: number of ranks.
        network: counts and delivers the messages; holds the virtual time.
        settings: intervals of the stall reports.
        ranks_per_node: ranks per node, which determines the tree of ranks.
    """

    def __init__(
        self,
        size: int,
        network: Network | None = None,
        settings: Settings | None = None,
        ranks_per_node: int = RANKS_PER_NODE,
    ) -> None:
        self.network = network or Network(size)
        self.reports: list[tuple[str, bool]] = []
        self.messages: list[tuple[int, int, int]] = []
        """Source, destination and size in bytes of each message."""
        nodes = node_lists(size, ranks_per_node)
        members = [SetMember(rank, f"node{rank // ranks_per_node}") for rank in range(size)]
        trees = all_trees(nodes)
        self.posts = [QueueMailbox(trees[rank], self) for rank in range(size)]
        self.engines = [
            self._engine(rank, size, settings or Settings(), members) for rank in range(size)
        ]
        self.executors = [StubExecutor() for _ in self.engines]
        for engine, executor in zip(self.engines, self.executors, strict=True):
            engine._executor = executor
        self._signature = Request(Kind.ALLREDUCE, "x", [torch.ones(4)], op=ReduceOp.SUM).signature

    def _engine(
        self, rank: int, size: int, settings: Settings, members: list[SetMember]
    ) -> ProgressEngine:
        comm = SimpleNamespace(
            rank=rank, size=size, new_mailbox=lambda: self.posts[rank], fail=lambda: None
        )
        stalls = StallWatch(settings, rank, members, LastCall())
        stalls.log_reports = lambda now: self.reports.extend(stalls.reports(now))
        return ProgressEngine(
            comm, fusion_bytes=1 << 20, timelines=Timelines(rank, size), stalls=stalls
        )

    def send(self, source: int, dest: int, message: bytes) -> None:
        def deliver() -> None:
            self.posts[dest].inbox.append((source, message))
            self.turn(dest)

        if source not in self.network.lost:
            self.messages.append((source, dest, len(message)))
        self.network.send(source, dest, len(message), deliver)

    def turn(self, rank: int, *, checks: bool = False) -> None:
        """Let the engine of a rank process what has arrived, as its driver does."""
        if rank in self.network.lost:
            return
        with self._time_of(rank):
            self.engines[rank].advance()
            if checks:
                self.engines[rank].check_stalls()
                self.engines[rank].advance()

    def submit(self, name: str, ranks: Iterable[int]) -> list[Handle]:
        """Submit an all-reduce on ``ranks``; the ranks take their turns in this order."""
        tensors, handles = (torch.ones(4),), []
        for rank in ranks:
            with self._time_of(rank):
                made = Request.signed(self._signature, name, tensors, in_place=True)
                handles.append(Handle(None, made))
                self.engines[rank].queue.enter(handles[-1])
            self.turn(rank)
        return handles

    def reduce(self, name: str, late: Sequence[int] = ()) -> list[Handle]:
        """Submit an all-reduce on all ranks in random order, and execute it.

        The ranks ``late`` submit a second after the other ranks have nothing left to do.
        """
        ranks = [rank for rank in range(self.network.size) if rank not in {*late}]
        self.network.random.shuffle(ranks)
        handles = self.submit(name, ranks)
        if late:
            self.network.run()
            now = max(self.network.clocks) + 1.0
            for rank in late:
                self.network.clocks[rank] = now
            handles += self.submit(name, late)
        self.network.run()
        return handles

    def watch_stalls(self, since: float, until: float) -> None:
        """Let all ranks check for stalled operations once a second, at random phases."""
        network = self.network
        order = network.random.sample(range(network.size), network.size)
        for number in range(int(until - since)):
            for place, rank in enumerate(order):
                when = since + number + place / network.size

                def check(rank: int = rank, when: float = when) -> None:
                    network.clocks[rank] = max(network.clocks[rank], when)
                    self.turn(rank, checks=True)

                network.at(when, check)
        network.run(until)

    @contextmanager
    def _time_of(self, rank: int) -> Iterator[None]:
        self._rank = rank
        yield

    def monotonic(self) -> float:
        """Return the virtual time of the rank that takes its turn."""
        return self.network.clocks[self._rank]


@contextmanager
def virtual_time(engines: Engines) -> Iterator[None]:
    """Let the modules of negotiation read the clock of ``engines``."""
    clock = SimpleNamespace(monotonic=engines.monotonic)
    with (
        patch.object(progress_engine, "time", clock),
        patch.object(request, "time", clock),
        patch.object(stall, "time", clock),
    ):
        yield
