"""Mailboxes along a tree of ranks: rings inside the node, MPI between nodes, one doorbell."""

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
    from hpctrain.comm.node.shared_memory import SharedMemory
    from hpctrain.comm.plan.plan import Plan
    from hpctrain.comm.rail.rail import Rail

_FLUSH_S = 1e-3  # between two looks whether large messages have left

_WAY_BYTES = HEAD_BYTES + RING_BYTES
_UP = 2 * LINE_BYTES
_DOWN = _UP + _WAY_BYTES
BOX_BYTES = _DOWN + _WAY_BYTES
"""What each rank has in node memory: its doorbell, a semaphore for fences, and the rings to and
from its parent."""

WORDS = LINE_BYTES // 8
"""Words of a rank in a channel: a cache line, as it is read while others are written."""

FAN_OUT = 4
"""Children on the same kind of link. A level costs a latency and the work on as many messages;
for links of 10 to 50 us and 10 us of work on each, four make the shortest way to a thousand."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The place of one rank in the tree; rank 0 is the root."""

    rank: int  # my rank
    parent: int | None  # the rank towards the root; None at the root
    children: tuple[int, ...]  # the ranks away from the root: first those of other nodes
    num_nodes: int = 1  # of all ranks

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Return the parent, if there is one, and the children."""
        return self.children if self.parent is None else (self.parent, *self.children)


def tree_of(nodes: Sequence[Sequence[int]], rank: int) -> Tree:
    """Return the place of ``rank`` in the tree of all ranks.

    The first ranks of the nodes form a tree, and the ranks of each node another one below its
    first rank. So a node's messages leave it once. ``nodes`` has the ranks of each node, numbered
    from 0 without gaps, in any order; a node is what shares memory, at worst each rank by itself.
    """
    members = sorted(sorted(ranks) for ranks in nodes)
    leaders = [ranks[0] for ranks in members]
    mine = next(ranks for ranks in members if rank in ranks)
    parent, children = _place(mine, rank)
    if rank == mine[0]:
        parent, of_other_nodes = _place(leaders, rank)
        children = of_other_nodes + children
    return Tree(rank, parent, children, len(members))


def _place(ranks: list[int], rank: int) -> tuple[int | None, tuple[int, ...]]:
    """Return parent and children of ``rank`` where ``ranks[0]`` is the root."""
    place = ranks.index(rank)
    parent = ranks[(place - 1) // FAN_OUT] if place else None
    return parent, tuple(ranks[FAN_OUT * place + 1 : FAN_OUT * (place + 1) + 1])


class NodeChannel(NamedTuple):
    """What the ranks of a node agree by without messages; see ``negotiation.fast_path``."""

    words: memoryview  # ``WORDS`` zeros of 64 bits for each rank, mapped by all
    tree: Tree  # of the node alone
    doorbells: Sequence[Callable[[], object]]  # wake the ranks
    fence: Fence  # orders loads and stores, if the processor does not
    plan: "Plan"
    network: "Network | None" = None  # to the other nodes
    rank: int = 0  # this rank, among all
    leaders: Sequence[int] = ()  # first ranks of all nodes, if this is one, and there are others
    count_sent: Callable[[int], object] = int  # counts bytes that were sent to other nodes


class Mailbox:
    """This rank's mailboxes to its parent and its children.

    One thread at a time sends, receives and sleeps; any thread rings.
    """

    def __init__(  # noqa: PLR0913 - the ways, and how to wait on them
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
        """Take the ways to the neighbours.

        ``edges`` leads to the neighbours on this node, by rank, ``network`` to the others;
        ``doorbell`` is of this process; ``sleep`` begins at this ``pace``.
        """
        self.tree = tree
        self.channel = channel  # None without node memory
        self._outlets = {rank: outlet for rank, (outlet, _) in edges.items()}
        self._ways_out = tuple(self._outlets.values())
        self._ways_down = tuple(
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
        """Send ``message`` to a neighbour in the tree, without waiting for it.

        What a neighbour has no room for yet stays here, and leaves in later calls of ``send``,
        ``receive``, ``flush`` and ``sleep``. The messages to one neighbour arrive in order.
        """
        outlet = self._outlets.get(to)
        if outlet is not None:
            outlet.send(message)
        else:
            assert self._network is not None
            assert to in self.tree.neighbours
            self._network.send(to, message)

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the messages that have come, each with its sender, without waiting."""
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
        """Return when all that was sent has left; to be called before waiting for anything else.

        A large message leaves when its receiver calls ``receive``, ``flush`` or ``sleep``. What
        comes meanwhile is read, so that neighbours that send too get on. With ``down`` only what
        goes to children counts. ``RankLostError`` if a rank is lost, or the wait has lasted too
        long.
        """
        start = time.perf_counter()
        woken = False
        while self._is_sending(down=down):
            self._inbox = self.receive()
            if self._is_sending(down=down):
                woken |= self._doorbell.wait(_FLUSH_S)
                self._watch.look_in_step(None, "", time.perf_counter() - start)
        if woken:
            self.ring()  # it may have been for somebody else

    def sleep(self, timeout_s: float) -> bool:
        """Return True when something may have come, or somebody rang; False when the time is over.

        The first microseconds are spent awake where ranks have a core each; then the others are
        looked at ten times a second. ``RankLostError`` if one is lost, or the sleep has lasted too
        long.
        """
        self._push()
        if self._something_came() or self._inbox:
            return True
        start = time.perf_counter()
        look = partial(self._watch.look_in_step, None, "")
        came = wait_until(
            self._something_came, look, self.pace, nap=self._nap, timeout_s=timeout_s
        )
        self._watch.waited_s += time.perf_counter() - start
        return came

    def ring(self) -> None:
        """Wake ``sleep`` of this process, now or the next one."""
        self._doorbell.post()

    def drain(self) -> None:
        """Forget who rang; for who does not sleep now, and calls ``receive`` before it does."""
        while self._try_wait():
            pass

    def close(self) -> None:
        """Give back what the mailboxes hold. Collective; what nobody has received is lost."""
        if self._network is not None:
            self._network.close(self._watch)
            self._network = None

    def _is_sending(self, *, down: bool) -> bool:
        for outlet in self._ways_down if down else self._ways_out:
            if outlet.is_stuck:
                return True
        if self._network is None:
            return False
        return self._network.is_sending(self.tree.children if down else None)

    def _push(self) -> None:
        for outlet in self._ways_out:
            if outlet.is_stuck:
                outlet.push()

    def _something_came(self) -> bool:
        if self._try_wait():
            self.drain()  # one look finds all that was rung for
            return True
        return self._network is not None and self._network.look()

    def _nap(self, seconds: float) -> bool:
        if not self._doorbell.wait(seconds):
            return False
        self._something_came()
        return True


def alone() -> Mailbox:
    """Make the mailboxes of a single rank, which only ever rings."""
    tree, pace = tree_of([[0]], 0), Pace(spin_s=0.0)
    return Mailbox(tree, {}, _private_doorbell(), watch=Watch(), pace=pace)


def flat(comm: "MPI.Intracomm", watch: Watch) -> Mailbox:
    """Make mailboxes between ranks that share no memory. Collective."""
    tree = tree_of([[rank] for rank in range(comm.size)], comm.rank)
    return Mailbox(
        tree, {}, _private_doorbell(), network=_network(comm, watch), watch=watch, pace=BY_MPI
    )


def by_node(
    comm: "MPI.Intracomm", node: "SharedMemory", rail: "Rail | None", watch: Watch, plan: "Plan"
) -> Mailbox:
    """Make mailboxes in node memory, and between the first ranks of nodes by MPI. Collective.

    ``NodeMemoryError``, on every rank of the node, if there is not enough memory.
    """
    from hpctrain.comm.watched_calls import WatchedCalls  # noqa: PLC0415 - needs MPI

    mine = node.ranks_of(comm)
    leaders = WatchedCalls(comm, watch).allgather(mine[0])
    nodes = [
        [rank for rank in range(comm.size) if leaders[rank] == leader]
        for leader in dict.fromkeys(leaders)
    ]
    tree = tree_of(nodes, comm.rank)
    segments = node.allocate(BOX_BYTES + LINE_BYTES * comm.size)
    boxes = dict(zip(mine, segments, strict=True))
    doorbell, spare = Semaphore(boxes[comm.rank]), Semaphore(boxes[comm.rank], LINE_BYTES)
    doorbell.initialise()
    spare.initialise()
    node.barrier()  # nobody rings a doorbell that is not there yet
    is_one = len(nodes) == 1
    network, fence = None if is_one else _network(comm, watch), fence_of(spare)
    is_voter = network is not None and comm.rank == mine[0]
    words = np.frombuffer(memoryview(segments[0]), np.int64, WORDS * len(mine), BOX_BYTES).data
    channel = NodeChannel(
        words,
        tree_of([range(len(mine))], node.local_rank),
        [Semaphore(segment).post for segment in segments],
        fence,
        plan,
        network,
        comm.rank,
        [ranks[0] for ranks in nodes] if is_voter else (),
        int if rail is None else rail.wire.count,
    )
    return Mailbox(
        tree,
        _edges(tree, boxes, fence),
        doorbell,
        network=network,
        channel=channel,
        watch=watch,
        pace=node.pace if is_one else BY_MPI._replace(spin_s=node.pace.spin_s),
    )


def _edges(tree: Tree, boxes: dict[int, Segment], fence: Fence) -> dict[int, tuple[Outlet, Inlet]]:
    """Connect this rank with those of its neighbours that have a box on this node."""
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
    return np.frombuffer(memoryview(box), np.uint8, _WAY_BYTES, offset).data


def _private_doorbell() -> Semaphore:
    """Return the doorbell of a rank that shares no memory."""
    doorbell = Semaphore((ctypes.c_char * LINE_BYTES)())
    doorbell.initialise()
    return doorbell


def _network(comm: "MPI.Intracomm", watch: Watch) -> "Network":
    from hpctrain.comm.control_channel.message_network import Network  # noqa: PLC0415 - needs MPI
    from hpctrain.comm.watched_calls import WatchedCalls  # noqa: PLC0415

    return Network(WatchedCalls(comm, watch).duplicate())
