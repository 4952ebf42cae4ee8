"""Data movement for torch.distributed through node memory, and messages between nodes.

All tensors are flat and contiguous.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.comm.call_check import call_of
from hpctrain.comm.hierarchical import HierarchicalCommunicator
from hpctrain.comm.node.shared_memory import SharedMemory
from hpctrain.comm.node.shared_slots import SharedSlots
from hpctrain.comm.ops import Op, combination, combine_to, finish
from hpctrain.comm.process_group.transfers import Transfers
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.core.errors import MismatchError

_LINE = 64  # parts of a slot start at multiples of a cache line


def by_memory(levels: HierarchicalCommunicator) -> "Transfers | NodeExchange":
    """Create the object that moves tensors among ranks, some of which share memory. Collective."""
    if levels.num_rails == 0:
        return NodeExchange(levels.node, levels.node.slots)
    found = levels.allgather_object(levels.node_ranks if levels.node.local_rank == 0 else None)
    nodes = [ranks for ranks in found if ranks]
    if len({len(ranks) for ranks in nodes}) > 1:
        return Transfers(levels)
    return LevelTransfers(levels, nodes)


class LevelTransfers(Transfers):
    """Moves tensors by node memory within nodes, and by messages between nodes.

    Only ranks with the same local rank exchange messages, so each byte is sent to a node once.

    Args:
        levels: the ranks.
        nodes: ranks of each node, by local rank; all nodes have the same number of ranks.
    """

    def __init__(self, levels: HierarchicalCommunicator, nodes: Sequence[Sequence[int]]) -> None:
        super().__init__(levels)
        self._nodes = nodes
        self._levels = levels
        self._memory = NodeExchange(levels.node, levels.node.slots)
        self._local = levels.node.local_rank
        self._rail = [ranks[self._local] for ranks in nodes]
        self._here = self._rail.index(self.rank)

    def all_gather(self, outs: Sequence[Tensor], mine: Tensor) -> None:
        """Copy ``mine`` of each rank r to ``outs[r]``: over the rail, then in the node."""
        self._levels.check_call(
            f"all_gather of {[out.numel() for out in outs]} {name_of(mine.dtype)}"
        )
        outs[self.rank].copy_(mine)
        for dest, source in self._partners():
            self._levels.wire.exchange(mine, dest, outs[source], source)
        self._levels.watch.confirm()
        for ranks in self._nodes:
            of_node = [outs[rank] for rank in ranks]
            self._memory.all_gather(of_node, of_node[self._local])

    def reduce_scatter(
        self, out: Tensor, parts: Sequence[Tensor], op: Op, scale: float | None
    ) -> None:
        """Reduce ``parts[r]`` to ``out`` of rank r: in the node, then over the rail."""
        numels = [part.numel() for part in parts]
        self._levels.check_call(f"reduce_scatter of {numels} {name_of(out.dtype)}")
        sums = []
        for ranks in self._nodes:
            of_node = [parts[rank] for rank in ranks]
            sums.append(torch.empty_like(of_node[self._local]))
            self._memory.reduce_scatter(sums[-1], of_node, op, None)
        how = combination(out.dtype, op)
        found = [sums[self._here] if rank == self.rank else out.clone() for rank in self._rail]
        for dest, source in self._partners():
            node = self._rail.index(source)
            self._levels.wire.exchange(sums[self._rail.index(dest)], dest, found[node], source)
        self._levels.watch.confirm()
        lanes = [how.view(part) for part in found]
        total = lanes[0].to(how.accumulate_dtype, copy=True)
        for other in lanes[1:]:
            how.into(total, other)
        finish(total, scale, how.view(out))

    def broadcast(self, values: Tensor, root: int) -> None:
        """Send ``values`` of rank ``root`` along a tree of nodes, then inside each node."""
        self._levels.check_call(
            f"broadcast of {values.numel()} {name_of(values.dtype)} from {root}"
        )
        node = next(number for number, ranks in enumerate(self._nodes) if root in ranks)
        local = list(self._nodes[node]).index(root)
        if local == self._local:
            self._along_tree(values, node)
            self._levels.watch.confirm()
        self._memory.broadcast(values, local)

    def _along_tree(self, values: Tensor, root: int) -> None:
        """Broadcast ``values`` over the rail from node ``root``, along a binomial tree."""
        size, wire = len(self._rail), self._levels.wire
        place = (self._here - root) % size
        span = 1
        while span < size and not place & span:
            span *= 2
        if place:
            wire.receive_(values, self._rail[(place - span + root) % size])
        while span := span // 2:
            if place + span < size:
                wire.send(values, self._rail[(place + span + root) % size])

    def _partners(self) -> list[tuple[int, int]]:
        """Return the destination and the source of this rank's messages in each round."""
        size = len(self._rail)
        steps = range(1, size)
        ends = [((self._here + step) % size, (self._here - step) % size) for step in steps]
        return [(self._rail[dest], self._rail[source]) for dest, source in ends]


class NodeExchange:
    """Moves tensors between the ranks of one node; every method is collective.

    Each rank writes into its slot; after a synchronization all ranks read. Each rank has two
    slots, which are used alternately, as in ``SharedSlots``.
    """

    def __init__(self, node: SharedMemory, slots: SharedSlots) -> None:
        self._node, self._slots = node, slots
        self._rank, self._size = node.local_rank, node.local_size
        self._room = slots.numel(torch.uint8)  # size of a slot in bytes
        self._shape = torch.Size((self._room,))

    def broadcast(self, values: Tensor, root: int) -> None:
        """Replace ``values`` by the values of local rank ``root``."""
        call = call_of(f"broadcast of {values.numel()} {name_of(values.dtype)} from {root}")
        raw = _bytes(values)
        for start in _starts(raw.numel(), self._room):
            piece = raw[start : start + self._room]
            slot = self._all_slots()[root][: piece.numel()]
            self._node.begin(call)
            if self._rank == root:
                slot.copy_(piece)
            self._node.await_others(call)
            if self._rank != root:
                piece.copy_(slot)
            self._count(piece)

    def all_gather(self, outs: Sequence[Tensor], mine: Tensor) -> None:
        """Copy ``mine`` of rank r into ``outs[r]`` on all ranks."""
        numels = [out.numel() for out in outs]
        call = call_of(f"all_gather of {numels} {name_of(mine.dtype)}")
        self._spread([_bytes(out) for out in outs], mine, call.text, max(numels))

    def gather(self, outs: Sequence[Tensor] | None, mine: Tensor, root: int) -> None:
        """Copy ``mine`` of rank r into ``outs[r]`` on rank ``root``."""
        text = f"gather of {mine.numel()} {name_of(mine.dtype)} on {root}"
        self._spread([_bytes(out) for out in outs or ()], mine, text, mine.numel())

    def _spread(self, outs: Sequence[Tensor], mine: Tensor, text: str, most: int) -> None:
        raw, call, room = _bytes(mine), call_of(text), self._room
        for start in _starts(most * mine.itemsize, room):
            slots, piece = self._all_slots(), raw[start : start + room]
            self._node.begin(call)
            slots[self._rank][: piece.numel()].copy_(piece)
            self._node.await_others(call)
            self._count(piece)
            for rank, out in enumerate(outs):
                given = piece if rank == self._rank else slots[rank]
                _copy(out[start : start + room], given)

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, root: int) -> None:
        """Copy ``parts[r]`` of rank ``root`` into ``out`` of rank r."""
        call = call_of(f"scatter of {out.numel()} {name_of(out.dtype)} from {root}")
        share, raw = self._share(0), _bytes(out)
        given = [_bytes(part) for part in parts or ()]
        for start in _starts(raw.numel(), share):
            slot = self._all_slots()[root]
            self._node.begin(call)
            for rank, part in enumerate(given):
                _copy(slot[rank * share :], part[start : start + share])
            self._node.await_others(call)
            _copy(raw[start : start + share], slot[self._rank * share :])
            self._count(raw[start : start + share])

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Send ``parts[r]`` to rank r; store the received tensors in ``outs``.

        The slots start with the sizes, since a rank does not know the sizes on other ranks.

        Raises:
            MismatchError: two ranks give different sizes.
        """
        call = call_of(f"all_to_all of {name_of(parts[0].dtype)}")
        head = 2 * self._size * 8
        share = self._share(head)
        given, taken = [_bytes(part) for part in parts], [_bytes(out) for out in outs]
        sizes = [part.numel() for part in given] + [out.numel() for out in taken]
        start, most = 0, 1
        while start < most:
            slots = self._all_slots()
            self._node.begin(call)
            slots[self._rank][:head].view(torch.int64).copy_(torch.tensor(sizes))
            for rank, part in enumerate(given):
                _copy(slots[self._rank][head + rank * share :], part[start : start + share])
            self._node.await_others(call)
            if start == 0:
                most = self._agreed([slot[:head].view(torch.int64).tolist() for slot in slots])
            for rank, out in enumerate(taken):
                _copy(out[start : start + share], slots[rank][head + self._rank * share :])
                self._count(out[start : start + share])
            start += share

    def _agreed(self, sizes: Sequence[Sequence[int]]) -> int:
        """Return the bytes of the largest part; raise ``MismatchError`` if two ranks disagree."""
        for rank, given in enumerate(sizes):
            for other, taken in enumerate(sizes):
                if given[other] != taken[self._size + rank]:
                    raise MismatchError(
                        f"sender and receiver of all_to_all must give the same size, but rank "
                        f"{rank} sends {given[other]} bytes to rank {other}, which expects "
                        f"{taken[self._size + rank]}; compare the split sizes of the two "
                        f"ranks"
                    )
        return max(size for given in sizes for size in given)

    def reduce_scatter(
        self, out: Tensor, parts: Sequence[Tensor], op: Op, scale: float | None
    ) -> None:
        """Reduce ``parts[r]`` over the ranks, and store the result in ``out`` of rank r."""
        how = combination(out.dtype, op)
        numels = [part.numel() for part in parts]
        text = f"reduce_scatter by {op.value} of {numels} {name_of(out.dtype)} times {scale}"
        call, share = call_of(text), self._share(0) // how.storage_dtype.itemsize
        given, total = [how.view(part) for part in parts], how.view(out)
        mine = given[self._rank]
        # If the result would overwrite this rank's part before the sum, its slot is read instead.
        overlaps = self._rank > 1 and total.data_ptr() == mine.data_ptr()
        for start in _starts(max(part.numel() for part in given), share):
            slots = [how.view(slot) for slot in self._all_slots()]
            self._node.begin(call)
            for rank, part in enumerate(given):
                if rank != self._rank or overlaps:
                    _copy(slots[self._rank][rank * share :], part[start : start + share])
            self._node.await_others(call)
            piece = total[start : start + share]
            if numel := piece.numel():
                first = self._rank * share
                found = [slot[first : first + numel] for slot in slots]
                if not overlaps:
                    found[self._rank] = mine[start : start + share]
                combine_to(piece, found, how, scale)
                self._count(piece)

    def _all_slots(self) -> tuple[Tensor, ...]:
        """Return the current slot of every rank, as bytes."""
        return self._slots.views(torch.uint8, self._shape, self._node.turn)

    def _share(self, head: int) -> int:
        """Return the bytes of each rank's part of a slot, after the first ``head`` bytes."""
        return (self._room - head) // self._size // _LINE * _LINE

    def _count(self, piece: Tensor) -> None:
        self._node.count((1 + self._size) * piece.nbytes)


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def _starts(num: int, step: int) -> range:
    """Return the starts of pieces of ``step`` elements; one piece if there are no elements."""
    return range(0, max(num, 1), step)


def _copy(out: Tensor, given: Tensor) -> None:
    """Copy the elements that ``given`` and ``out`` both have, unless the two share memory."""
    numel = min(out.numel(), given.numel())
    if numel and out.data_ptr() != given.data_ptr():
        out[:numel].copy_(given[:numel])
