"""Lays the mailboxes of a group of ranks out: which neighbours share memory, and where."""

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.comm.control_channel.message_tree import Tree, tree_of
from hpctrain.comm.control_channel.ring import HEAD_BYTES, RING_BYTES, Inlet, Outlet, fence_of
from hpctrain.comm.control_channel.tree_mailbox import Edge, TreeMailbox
from hpctrain.comm.node.mapping import Segment
from hpctrain.comm.node.semaphore import LINE_BYTES, Semaphore
from hpctrain.comm.watch import Watch

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.control_channel.message_network import Network
    from hpctrain.comm.node.shared_memory import SharedMemory

_WAY_BYTES = HEAD_BYTES + RING_BYTES
_UP = 2 * LINE_BYTES
_DOWN = _UP + _WAY_BYTES
BOX_BYTES = _DOWN + _WAY_BYTES
"""What each rank has in node memory: its bell, a semaphore for fences, and the rings to and from
its parent."""


def alone() -> TreeMailbox:
    """Make the mailboxes of a single rank, which only ever rings."""
    bell = _private_bell()
    return TreeMailbox(tree_of([[0]], 0), {}, bell, watch=Watch(), spin=False)


def flat(comm: "MPI.Intracomm", watch: Watch) -> TreeMailbox:
    """Make mailboxes between ranks that share no memory. Collective.

    Args:
        comm: the ranks; it is duplicated.
        watch: looks at the others during sleeps.
    """
    bell = _private_bell()
    tree = tree_of([[rank] for rank in range(comm.size)], comm.rank)
    return TreeMailbox(tree, {}, bell, network=_network(comm), watch=watch, spin=True)


def by_node(comm: "MPI.Intracomm", node: "SharedMemory", watch: Watch) -> TreeMailbox:
    """Make mailboxes in node memory, and between the first ranks of nodes by MPI. Collective.

    Args:
        comm: the ranks; it is duplicated where there are several nodes.
        node: those that share memory with this one.
        watch: looks at the others during sleeps.

    Raises:
        NodeMemoryError: there is not enough memory; on every rank of the node.
    """
    mine = node.ranks_of(comm)
    leaders = comm.allgather(mine[0])
    nodes = [
        [rank for rank in range(comm.size) if leaders[rank] == leader]
        for leader in dict.fromkeys(leaders)
    ]
    tree = tree_of(nodes, comm.rank)
    boxes = dict(zip(mine, node.allocate(BOX_BYTES), strict=True))
    bell, spare = _semaphores(boxes[comm.rank])
    bell.initialise()
    spare.initialise()
    node.barrier()  # nobody rings a bell that is not there yet
    return TreeMailbox(
        tree,
        _edges(tree, boxes, spare),
        bell,
        network=_network(comm) if len(nodes) > 1 else None,
        watch=watch,
        spin=node.spin,
    )


def _edges(tree: Tree, boxes: dict[int, Segment], spare: Semaphore) -> dict[int, Edge]:
    """Connect this rank with those of its neighbours that have a box on this node."""
    fence = fence_of(spare)
    edges = {}
    for rank in tree.neighbours:
        if rank not in boxes:
            continue
        bell, _ = _semaphores(boxes[rank])
        if rank == tree.parent:
            box, out, back = boxes[tree.rank], _UP, _DOWN
        else:
            box, out, back = boxes[rank], _DOWN, _UP
        edges[rank] = Edge(
            Outlet(_part(box, out), bell, fence), Inlet(_part(box, back), bell, fence)
        )
    return edges


def _semaphores(box: Segment) -> tuple[Semaphore, Semaphore]:
    """Return the bell and the one for fences."""
    base = ctypes.addressof(box)
    return Semaphore(base, box), Semaphore(base + LINE_BYTES, box)


def _part(box: Segment, offset: int) -> memoryview:
    return np.frombuffer(memoryview(box), np.uint8, _WAY_BYTES, offset).data


def _private_bell() -> Semaphore:
    """Return the bell of a rank that shares no memory."""
    bell, _ = _semaphores((ctypes.c_char * _UP)())
    bell.initialise()
    return bell


def _network(comm: "MPI.Intracomm") -> "Network":
    from hpctrain.comm.control_channel.message_network import Network  # noqa: PLC0415 - needs MPI

    return Network(comm.Dup())
