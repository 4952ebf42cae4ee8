"""Mailboxes, which send control messages between neighbours in a tree of ranks.

Messages pass through ring buffers within a node, and through MPI between nodes. Each rank
sleeps on its doorbell, a semaphore that senders on the same node post.
"""

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpctrain.comm.control_channel.ring import (
    HEAD_BYTES,
    RING_BYTES,
    Inlet,
    Outlet,
)
from hpctrain.comm.node.segments import LINE_BYTES, Fence, Semaphore, fence_of
from hpctrain.comm.waiting import BY_MPI, Pace, Watch, wait_until
from hpctrain.core.libc import Segment

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.control_channel.message_network import Network
    from hpctrain.comm.node.kernel import Kernel
    from hpctrain.comm.node.shared_memory import SharedMemory
    from hpctrain.comm.plan.plan import Plan
    from hpctrain.comm.rail.rail import Rail

_FLUSH_S = 1e-3  # between two tests whether large messages have been sent

_LINK_BYTES = HEAD_BYTES + RING_BYTES
_UP = 2 * LINE_BYTES
_DOWN = _UP + _LINK_BYTES
BOX_BYTES = _DOWN + _LINK_BYTES
"""Node memory per rank: the doorbell, a semaphore for fences, and the rings to and from the
parent."""

WORDS = LINE_BYTES // 8
"""Words per rank in a channel: one cache line, to avoid false sharing."""

FAN_OUT = 4
"""Maximum number of children of a rank within its node, and between nodes. A level of the tree
costs one latency and the work on this number of messages. With latencies of 10 to 50 us and 10 us
of work per message, four children give the lowest total latency for a thousand ranks."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Parent and children of one rank in a tree with root rank 0."""

    rank: int
    parent: int | None  # None at the root
    children: tuple[int, ...]  # children on other nodes first
    num_nodes: int = 1  # number of nodes of the whole tree

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Ranks of the parent, if any, and of the children."""
        return self.children if self.parent is None else (self.parent, *self.children)


def tree_of(nodes: Sequence[Sequence[int]], rank: int) -> Tree:
    """Return the parent and the children of ``rank`` in the tree of all ranks.

    The first ranks of the nodes form a tree, and the ranks of each node form a tree below its
    first rank. So only the first rank of a node communicates with other nodes.

    Args:
        nodes: ranks of each node, in any order. A node is a set of ranks that share memory. All
            nodes together contain ranks 0 to n - 1.
        rank: the rank.
    """
    members = sorted(sorted(ranks) for ranks in nodes)
    leaders = [ranks[0] for ranks in members]
    mine = next(ranks for ranks in members if rank in ranks)
    parent, children = _place(mine, rank)
    if rank == mine[0]:
        parent, of_other_nodes = _place(leaders, rank)
        children = of_other_nodes + children
    return Tree(rank, parent, children, len(members))


def nodes_of(leaders: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node; ``leaders[r]`` is the first rank of the node of rank r."""
    nodes: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        nodes.setdefault(leader, []).append(rank)
    return list(nodes.values())


def _place(ranks: list[int], rank: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the parent and the children of ``rank`` in the tree with root ``ranks[0]``."""
    place = ranks.index(rank)
    parent = ranks[(place - 1) // FAN_OUT] if place else None
    return parent, tuple(ranks[FAN_OUT * place + 1 : FAN_OUT * (place + 1) + 1])


class NodeChannel(NamedTuple):
    """Words in node memory by which the ranks of a node commit operations without messages.

    ``negotiation.fast_path`` documents the protocol.
    """

    words: memoryview  # ``WORDS`` int64 zeros per rank, mapped by all ranks
    tree: Tree  # tree of the ranks of the node
    doorbells: Sequence[Callable[[], object]]  # functions that wake a rank, by local rank
    fence: Fence  # orders loads and stores; None if not needed
    plan: "Plan"
    network: "Network | None" = None  # sends messages to other nodes
    rank: int = 0  # this rank, in the communicator
    leaders: Sequence[int] = ()  # first ranks of all nodes; empty on other ranks or on one node
    count_sent: Callable[[int], object] = int  # counts bytes sent to other nodes
    kernel: "Kernel | None" = None  # uses the words and doorbells, if there is one node


class Mailbox:
    """Exchanges messages with the parent and the children of this rank.

    Not collective, except ``close``. Only one thread at a time may call the methods, except
    ``ring``, which any thread may call.

    Args:
        tree: parent and children of this rank.
        edges: rings to and from each neighbour on this node, by rank.
        doorbell: wakes this process.
        network: sends messages to neighbours on other nodes; None if there are none.
        channel: shared words of the node; None without node memory.
        watch: performs all waits.
        pace: durations of spinning, yielding and sleeping.
    """

    def __init__(  # noqa: PLR0913 - the links, and the waits
        self,
        tree: Tree,
        edges: Mapping[int, tuple[Outlet, Inlet]],
        doorbell: Semaphore,
        *,
        network: "Network | None" = None,
        channel: NodeChannel | None = None,
        watch: Watch,
        pace: Pace,
    ) -> None:
        self.tree = tree
        self.channel = channel
        self._outlets = {rank: outlet for rank, (outlet, _) in edges.items()}
        self._all_outlets = tuple(self._outlets.values())
        self._child_outlets = tuple(
            outlet for rank, outlet in self._outlets.items() if rank in tree.children
        )
        self._inlets = [(rank, inlet.receive) for rank, (_, inlet) in edges.items()]
        self._doorbell = doorbell
        self._try_wait = doorbell.try_wait
        self._network = network
        self._watch = watch
        self._inbox: list[tuple[int, bytes]] = []
        self.pace = pace

    def send(self, to: int, message: bytes) -> None:
        """Send ``message`` to a neighbour in the tree without waiting.

        Bytes that do not fit the ring are sent by later calls of ``send``, ``receive``, ``flush``
        and ``sleep``. Messages to one neighbour arrive in order.
        """
        outlet = self._outlets.get(to)
        if outlet is not None:
            outlet.send(message)
        else:
            assert self._network is not None
            assert to in self.tree.neighbours
            self._network.send(to, message)

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived, with their senders, without waiting."""
        self._push()
        found, self._inbox = self._inbox, []
        for rank, receive in self._inlets:
            messages = receive()
            if messages is not None:
                found += [(rank, message) for message in messages]
        network = self._network
        if network is not None and network.look():
            found += network.inbox
            network.inbox.clear()
        return found

    def flush(self, *, down: bool = False) -> None:
        """Wait until all messages have left this rank.

        The caller must call this method before it waits for other ranks. A large message leaves
        while its receiver calls ``receive``, ``flush`` or ``sleep``. Messages that arrive during
        the wait are stored, so that neighbours that send can continue, too.

        Args:
            down: wait only for messages to children.

        Raises:
            RankLostError: a rank is lost, or the wait exceeds the limit.
        """
        start = time.perf_counter()
        woken = False
        while self._is_sending(down=down):
            self._inbox = self.receive()
            if self._is_sending(down=down):
                woken |= self._doorbell.wait(_FLUSH_S)
                self._watch.look_in_step(None, "", time.perf_counter() - start)
        if woken:
            self.ring()  # the post of the doorbell may have been for a later ``sleep``

    def sleep(self, timeout_s: float) -> bool:
        """Sleep until a message may have arrived or the doorbell rings; return False on timeout.

        If each rank has its own core, the rank spins for the first microseconds.

        Args:
            timeout_s: longest sleep.

        Raises:
            RankLostError: a rank is lost, or the sleep exceeds the limit of waits.
        """
        self._push()
        if self._has_received() or self._inbox:
            return True
        start = time.perf_counter()
        look = partial(self._watch.look_in_step, None, "")
        came = wait_until(
            self._has_received, look, self.pace, sleep=self._sleep_once, timeout_s=timeout_s
        )
        self._watch.waited_s += time.perf_counter() - start
        return came

    def ring(self) -> None:
        """End the current ``sleep`` of this process, or else the next one."""
        self._doorbell.post()

    def drain(self) -> None:
        """Clear the doorbell. The caller must call ``receive`` before ``sleep``."""
        while self._try_wait():
            pass

    def close(self) -> None:
        """Free the resources. Collective; messages that were not received are lost."""
        if self._network is not None:
            self._network.close(self._watch)
            self._network = None

    def _is_sending(self, *, down: bool) -> bool:
        for outlet in self._child_outlets if down else self._all_outlets:
            if outlet.is_stuck:
                return True
        if self._network is None:
            return False
        return self._network.is_sending(self.tree.children if down else None)

    def _push(self) -> None:
        for outlet in self._all_outlets:
            if outlet.is_stuck:
                outlet.push()

    def _has_received(self) -> bool:
        if self._try_wait():
            self.drain()  # one test handles all posts
            return True
        return self._network is not None and self._network.look()

    def _sleep_once(self, seconds: float) -> bool:
        if not self._doorbell.wait(seconds):
            return False
        self._has_received()
        return True


def alone() -> Mailbox:
    """Create the mailbox of a single rank, which has no neighbours."""
    tree, pace = tree_of([[0]], 0), Pace(spin_s=0.0)
    return Mailbox(tree, {}, _private_doorbell(), watch=Watch(), pace=pace)


def flat(comm: "MPI.Intracomm", watch: Watch) -> Mailbox:
    """Create a mailbox between ranks without shared memory. Collective."""
    tree = tree_of([[rank] for rank in range(comm.size)], comm.rank)
    return Mailbox(
        tree, {}, _private_doorbell(), network=_network(comm, watch), watch=watch, pace=BY_MPI
    )


def by_node(
    comm: "MPI.Intracomm", node: "SharedMemory", rail: "Rail | None", watch: Watch, plan: "Plan"
) -> Mailbox:
    """Create a mailbox in node memory, with MPI between the first ranks of nodes. Collective.

    Raises:
        NodeMemoryError: not enough memory; on every rank of the node.
    """
    from hpctrain.comm.watched_calls import WatchedCalls  # noqa: PLC0415 - needs MPI

    mine = node.ranks_of(comm)
    leaders = WatchedCalls(comm, watch).allgather(mine[0])
    nodes = nodes_of(leaders)
    tree = tree_of(nodes, comm.rank)
    segments = node.allocate(BOX_BYTES + LINE_BYTES * len(mine))
    boxes = dict(zip(mine, segments, strict=True))
    doorbell, spare = Semaphore(boxes[comm.rank]), Semaphore(boxes[comm.rank], LINE_BYTES)
    doorbell.initialise()
    spare.initialise()
    node.barrier()  # doorbells must be initialised before a rank rings
    is_one = len(nodes) == 1
    network, fence = None if is_one else _network(comm, watch), fence_of(spare)
    is_voter = network is not None and comm.rank == mine[0]
    words = np.frombuffer(memoryview(segments[0]), np.int64, WORDS * len(mine), BOX_BYTES)
    bells, of_node = list(map(Semaphore, segments)), tree_of([range(len(mine))], node.local_rank)
    kernel = node.waits.kernel if is_one else None
    if kernel is not None:
        rung = node.local_rank, 0, *of_node.children
        kernel.use_words(words.ctypes.data, [bells[rank].address for rank in rung])
    channel = NodeChannel(
        words.data,
        of_node,
        [bell.post for bell in bells],
        fence,
        plan,
        network,
        comm.rank,
        [ranks[0] for ranks in nodes] if is_voter else (),
        int if rail is None else rail.wire.count,
        kernel,
    )
    return Mailbox(
        tree,
        _edges(tree, boxes, fence),
        doorbell,
        network=network,
        channel=channel,
        watch=watch,
        pace=node.waits.pace if is_one else BY_MPI._replace(spin_s=node.waits.pace.spin_s),
    )


def _edges(tree: Tree, boxes: dict[int, Segment], fence: Fence) -> dict[int, tuple[Outlet, Inlet]]:
    """Return the rings to and from the neighbours on this node."""
    edges = {}
    for rank in tree.neighbours:
        if rank not in boxes:
            continue
        doorbell = Semaphore(boxes[rank])
        if rank == tree.parent:
            box, out, back = boxes[tree.rank], _UP, _DOWN
        else:
            box, out, back = boxes[rank], _DOWN, _UP
        edges[rank] = (
            Outlet(_part(box, out), doorbell, fence),
            Inlet(_part(box, back), doorbell, fence),
        )
    return edges


def _part(box: Segment, offset: int) -> memoryview:
    return np.frombuffer(memoryview(box), np.uint8, _LINK_BYTES, offset).data


def _private_doorbell() -> Semaphore:
    """Return a doorbell in private memory."""
    doorbell = Semaphore((ctypes.c_char * LINE_BYTES)())
    doorbell.initialise()
    return doorbell


def _network(comm: "MPI.Intracomm", watch: Watch) -> "Network":
    from hpctrain.comm.control_channel.message_network import Network  # noqa: PLC0415 - needs MPI
    from hpctrain.comm.watched_calls import WatchedCalls  # noqa: PLC0415

    return Network(WatchedCalls(comm, watch).duplicate())
