"""Negotiators of many ranks in one process; messages stay in queues until a test delivers them."""

from collections import deque
from collections.abc import Sequence
from random import Random

import torch

from hpctrain.comm.control_channel.mailbox import Tree
from hpctrain.negotiation.messages import OperationBatch
from hpctrain.negotiation.negotiator import Negotiator
from hpctrain.negotiation.request import Kind, ReduceOp, Signature


def signature_of(
    shape: Sequence[int] = (4,), kind: Kind = Kind.ALLREDUCE, root: int | None = None
) -> Signature:
    op = ReduceOp.SUM if kind is Kind.ALLREDUCE else None
    shapes = (torch.Size(shape),)
    return Signature(kind, (torch.float32,), shapes, op, 1.0, 1.0, root, ("cpu",))


def chain(size: int) -> list[Tree]:
    """Return a tree in which the parent of rank r is rank r - 1."""
    return trees_of([None, *range(size - 1)])


def star(size: int) -> list[Tree]:
    """Return a tree in which rank 0 is the parent of all ranks."""
    return trees_of([None, *[0] * (size - 1)])


def trees_of(parents: Sequence[int | None]) -> list[Tree]:
    children: list[list[int]] = [[] for _ in parents]
    for rank, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(rank)
    return [Tree(rank, parent, tuple(children[rank])) for rank, parent in enumerate(parents)]


def random_trees(size: int, random: Random) -> list[Tree]:
    order = [0, *random.sample(range(1, size), size - 1)]
    parents: list[int | None] = [None] * size
    for place in range(1, size):
        parents[order[place]] = random.choice(order[:place])
    return trees_of(parents)


class Ranks:
    """The negotiators of all ranks, their decisions, and the messages between them."""

    def __init__(self, trees: Sequence[Tree], **options: int) -> None:
        self.negotiators = [Negotiator(tree, **options) for tree in trees]
        self.batches: list[list[OperationBatch]] = [[] for _ in trees]
        self.queues: dict[tuple[int, int], deque[bytes]] = {}
        """Undelivered messages by (source, dest); no queue is empty."""
        self.messages: list[tuple[int, int, bytes]] = []

    def post(self, rank: int, *, decide: bool = True) -> None:
        """Append the outgoing messages of a rank to the queues."""
        for dest, message in self.negotiators[rank].outbox(decide=decide):
            self.queues.setdefault((rank, dest), deque()).append(message)
            self.messages.append((rank, dest, message))
        self.batches[rank] += self.negotiators[rank].decided()

    def waiting(self) -> list[tuple[int, int]]:
        """Return the (source, dest) pairs with undelivered messages."""
        return [*self.queues]

    def deliver(self, edge: tuple[int, int]) -> None:
        source, dest = edge
        queue = self.queues[edge]
        message = queue.popleft()
        if not queue:
            del self.queues[edge]
        self.negotiators[dest].receive(source, message)

    def settle(self) -> list[OperationBatch]:
        """Deliver all messages; return the decisions of all ranks since the last call."""
        for rank in range(len(self.negotiators)):
            self.post(rank)
        while edges := self.waiting():
            for edge in edges:
                self.deliver(edge)
            for _, dest in edges:
                self.post(dest)
        first, *others = self.batches
        assert all(batches == first for batches in others)
        self.batches = [[] for _ in self.negotiators]
        return first
