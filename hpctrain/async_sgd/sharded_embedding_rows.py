"""Rows of a table, divided over ranks: who has which, and how they are read and summed.

A rank reads rows of its node where they lie, in the memory that the node shares. Between nodes a
row travels once for each pair of node and owner, however many ranks of the node want it; gradients
are summed over the node first.
"""

import math
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.async_sgd.sharded_embedding_rules import Places, bag_sums, take
from hpctrain.cluster.resources import available_bytes
from hpctrain.comm.agreement import agreed, raise_if_any
from hpctrain.comm.call_check import call_of
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.node.node_memory import OnDisk, reserve, reserve_lazily
from hpctrain.comm.node.shared_memory import SharedMemory
from hpctrain.core.errors import NodeMemoryError
from hpctrain.core.units import format_bytes

Bytes: TypeAlias = NDArray[np.uint8]

CHUNK_BYTES = 512 << 10
"""Rows that are worked on at once: they stay in the cache."""
_PLACE_BITS = 32
_FIRST_ROOM = 4096  # rows of each rank that are exchanged at once, until more are needed


class Told(NamedTuple):
    """What each rank says before a row moves."""

    num_rows: int = 0  # rows that it has for others
    weight: float = 1.0  # of its gradients
    lr: float = 0.0  # by which it would step what it owns
    flags: int = 0


NOTHING = Told()


class RowSums:
    """Sums of values by row, calculated some at a time; equal rows are summed in their order."""

    def __init__(self, rows: Places, values: Tensor, index: Places | None = None) -> None:
        """Let ``values[index[i]]`` belong to ``rows[i]``; in the order of values without index."""
        numbers = np.arange(len(rows))
        keys = (rows << _PLACE_BITS) | numbers
        if not (rows[1:] > rows[:-1]).all():
            keys.sort()
        sorted_rows, order = keys >> _PLACE_BITS, keys & ((1 << _PLACE_BITS) - 1)
        is_first = np.empty(len(rows), np.bool_)
        is_first[:1] = True
        np.not_equal(sorted_rows[1:], sorted_rows[:-1], out=is_first[1:])
        self._starts = np.append(np.flatnonzero(is_first), len(rows))
        self._values, self._order = values, order if index is None else index[order]
        self.rows = sorted_rows[self._starts[:-1]]  # each once, in order

    def __len__(self) -> int:
        return len(self.rows)

    def between(self, first: int, stop: int) -> Tensor:
        """Return the sums of some of ``rows``, ``(stop - first, dim)``."""
        starts = self._starts[first : stop + 1]
        order = self._order[starts[0] : starts[-1]]
        if len(order) == stop - first:
            return take(self._values, order)
        return bag_sums(self._values, order, starts[:-1] - starts[0])

    def chunks(self) -> Sequence[tuple[int, int]]:
        """Cut ``rows`` into parts of ``CHUNK_BYTES``."""
        row_bytes = self._values.shape[1] * self._values.itemsize
        size = max(1, CHUNK_BYTES // row_bytes)
        return [(at, min(at + size, len(self))) for at in range(0, len(self), size)]


class _Room:
    """Where the ranks of a node leave rows and their numbers for each other."""

    def __init__(self, node: SharedMemory, num_rows: int, dim: int, dtype: torch.dtype) -> None:
        """Make it. Collective over the node; ``NodeMemoryError`` on all of its ranks."""
        row_bytes, size = dim * dtype.itemsize, node.local_size
        unit = math.lcm(math.lcm(mmap.PAGESIZE, row_bytes) // row_bytes, mmap.PAGESIZE // 8)
        self.num_rows = -(-num_rows // unit) * unit  # of each rank; ranks meet at a page's end
        of_rows = node.new_region(self.num_rows * size * row_bytes)
        of_numbers = node.new_region(self.num_rows * size * 8)
        self.values = torch.frombuffer(of_rows.shared, dtype=dtype).view(-1, dim)
        self.numbers = np.frombuffer(memoryview(of_numbers.shared), np.int64).reshape(size, -1)

    def leave(self, local_rank: int, numbers: Places, values: "RowSums | Tensor | None") -> None:
        """Write what this rank has."""
        self.numbers[local_rank, : len(numbers)] = numbers
        first = local_rank * self.num_rows
        if isinstance(values, Tensor):
            self.values[first : first + len(numbers)] = values
        elif values is not None:
            for start, stop in values.chunks():
                self.values[first + start : first + stop] = values.between(start, stop)


class RowShards:
    """Rows ``[0, num_rows)``, of which every rank owns a range. Methods are collective.

    ``initial`` calculates rows that nobody has stored yet, so that no memory is touched for them.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what a table is
        self,
        comm: Communicator,
        name: str,
        num_rows: int,
        dim: int,
        dtype: torch.dtype,
        widths: dict[str, int],
        initial: Callable[[Places], Tensor],
        folder: Path | None,
    ) -> None:
        """Divide the rows, and make room for them and for ``widths`` numbers of state.

        Raises ``NodeMemoryError``: there is too little, on every rank.
        """
        self.comm, self.name = comm, name
        self.num_rows, self.dim, self.dtype, self.initial = num_rows, dim, dtype, initial
        self._lay_out()
        self._check_memory(widths, folder)
        self._room: _Room | None = None
        self._num_room = 0  # rows of each rank that have room, on every node
        self._node = comm.levels.node if comm.levels is not None else None
        how = reserve_lazily if folder is None else OnDisk(folder)
        with agreed(comm, NodeMemoryError):
            self._make(widths, how)
        self.own = self._rows[self._first_own : self._first_own + self.per_rank]
        self.is_stored = self._is_stored_on_node[self.local_rank][: self.per_rank]
        """Which of ``own`` hold values."""

    def _lay_out(self) -> None:
        """Say which ranks are where, and which range each owns."""
        comm, levels = self.comm, self.comm.levels
        mine = tuple(levels.node_ranks) if levels is not None else (comm.rank,)
        self._nodes = sorted(set(comm.allgather_object(mine)))
        self._owners = [rank for node in self._nodes for rank in node]
        here = self._nodes.index(mine)
        first = sum(map(len, self._nodes[:here]))
        self.local_rank, self.local_size = mine.index(comm.rank), len(mine)
        self._is_shared = max(map(len, self._nodes)) > 1
        self._is_one_node = len(self._nodes) == 1 and levels is not None
        row_bytes = self.dim * self.dtype.itemsize
        unit = math.lcm(mmap.PAGESIZE, row_bytes) // row_bytes  # ranks meet at a page's end
        self.per_rank = -(-self.num_rows // (comm.size * unit)) * unit
        self._first_own = self.local_rank * self.per_rank  # among those of the node
        self._first_on_node = first * self.per_rank
        self.start, self.stop = self._range_of(first + self.local_rank)

    def _range_of(self, owner: int) -> tuple[int, int]:
        """Return the rows of an owner, numbered by nodes."""
        first = owner * self.per_rank
        return min(first, self.num_rows), min(first + self.per_rank, self.num_rows)

    def _check_memory(self, widths: dict[str, int], folder: Path | None) -> None:
        """Refuse what does not fit: pages are taken when they are used, too late for an error."""
        row_bytes = (self.dim + sum(widths.values())) * self.dtype.itemsize + 1
        need_bytes, left_bytes = row_bytes * self.per_rank * self.local_size, available_bytes()
        refusal = None
        if folder is None and left_bytes is not None and need_bytes > left_bytes:
            refusal = (
                f"{self.name} and the state of its optimizer need {format_bytes(need_bytes)} of "
                f"memory on this node, and {format_bytes(left_bytes)} are left; start it on more "
                f"nodes, or keep it on a disk of the node by path="
            )
        raise_if_any(self.comm.allgather_object(refusal), NodeMemoryError)

    def _make(self, widths: dict[str, int], how: Callable[[int], int]) -> None:
        """Make the memory. Collective over the node."""
        size, node = self.local_size, self._node
        row_bytes = self.dim * self.dtype.itemsize

        def shared(num_bytes: int) -> Bytes:
            if node is None:
                return _private(num_bytes, how)
            return np.frombuffer(
                memoryview(node.new_region(num_bytes * size, how).shared), np.uint8
            )

        rows, marks = shared(self.per_rank * row_bytes), shared(self.per_rank)
        self._rows = torch.from_numpy(rows).view(self.dtype).view(-1, self.dim)
        self._is_stored_on_node = marks.reshape(size, -1)
        if node is not None:  # two places, used in turns: one may still be read
            fields = len(Told._fields)
            head = node.new_region(size * fields * 16, reserve)
            numbers = np.frombuffer(memoryview(head.shared), np.float64)
            self._head = numbers[: size * fields * 2].reshape(2, size, fields)
        self.state: dict[str, Tensor] = {}
        for name, width in widths.items():
            own = _private(self.per_rank * width * self.dtype.itemsize, how)
            self.state[name] = torch.from_numpy(own).view(self.dtype).view(-1, width)

    # -- agreement ----------------------------------------------------------------------------

    def agree(self, call: str, refusal: str | None = None, told: Told = NOTHING) -> Sequence[Told]:
        """Return what all ranks tell, by rank, if all are about to make one call and may.

        ``MismatchError``, on every rank, else.
        """
        call = f"{call} of {self.name}"
        node = self._node
        if self._is_one_node and node is not None:
            head = self._head[node.turn]
            head[self.local_rank] = told
            if not node.compare(call_of(call), 0 if refusal is None else 1) or refusal:
                raise_if_any(self.comm.allgather_object(refusal))
            return [Told(int(n), weight, lr, int(flags)) for n, weight, lr, flags in head.tolist()]
        heard = self.comm.allgather_object((call, refusal, told))
        raise_if_any(
            [
                None if theirs == heard[0][0] else f"{theirs} while others do {heard[0][0]}"
                for theirs, _, _ in heard
            ]
        )
        raise_if_any([refused for _, refused, _ in heard])
        return [each for _, _, each in heard]

    # -- reading ------------------------------------------------------------------------------

    def read(self, rows: Places, refusal: str | None = None) -> tuple[Tensor, Places]:
        """Return ``values`` and ``index``: row ``rows[i]`` is ``values[index[i]]``.

        What is returned may be the memory of the node: it holds until the next step.
        """
        if self._is_one_node or self.comm.size == 1:
            self.agree("lookup", refusal)
            return self._read_here(rows)
        distinct, index = np.unique(rows, return_inverse=True)
        is_here = self._is_here(distinct)
        found = torch.empty(len(distinct), self.dim, dtype=self.dtype)
        remote, is_remote = distinct[~is_here], torch.from_numpy(~is_here)
        counts = self.agree("lookup", refusal, Told(len(remote)))
        values, places = self._read_here(distinct[is_here])
        found[~is_remote] = take(values, places)
        if any(each.num_rows for each in counts):
            found[is_remote] = self._fetch(remote, counts)
        return found, index

    def _is_here(self, rows: Places) -> NDArray[np.bool_]:
        first, stop = self._first_on_node, self._first_on_node + self.per_rank * self.local_size
        return (rows >= first) & (rows < stop)

    def _read_here(self, rows: Places) -> tuple[Tensor, Places]:
        """Return what ``read`` does, of rows on this node. Not collective."""
        places = marked = rows - self._first_on_node
        if (gap := self._is_stored_on_node.shape[1] - self.per_rank) > 0:  # up to a page's end
            marked = places + places // self.per_rank * gap
        is_stored = self._is_stored_on_node.ravel()[marked].view(np.bool_)
        if is_stored.all():
            return self._rows, places
        values = take(self._rows, places)
        is_new = ~is_stored
        values[torch.from_numpy(is_new)] = self.initial(rows[is_new])
        return values, np.arange(len(rows))

    def _fetch(self, rows: Places, counts: Sequence[Told]) -> Tensor:
        """Return rows of other nodes, each of which crosses to this one once. Collective."""
        wanted = self._exchange(rows, None, counts)
        asked = [self._union(wanted, owner) for owner in range(self.comm.size)]
        heard = self._to_owners(asked)
        replies = [take(*self._read_here(numbers.numpy())) for numbers in heard]
        came = self.comm.alltoall(replies)
        numbers = np.concatenate(asked)
        values = torch.cat([came[rank].view(-1, self.dim) for rank in self._owners])
        if not self._is_shared:
            return take(values, np.searchsorted(numbers, rows))
        counts = self.agree("reply", None, Told(len(numbers)))
        found = torch.empty(len(rows), self.dim, dtype=self.dtype)
        for there, of_rank in self._exchange(numbers, values, counts):
            at = np.searchsorted(there, rows)
            has = at < len(there)
            has[has] = there[at[has]] == rows[has]
            found[torch.from_numpy(has)] = take(of_rank, at[has])
        return found

    def _union(self, parts: "_Parts", owner: int) -> Places:
        """Return which rows of an owner the node wants, if this rank asks for them."""
        if not self._serves(owner):
            return np.empty(0, np.int64)
        first, stop = self._range_of(owner)
        return np.unique(
            np.concatenate([_within(numbers, first, stop)[0] for numbers, _ in parts])
        )

    def _serves(self, owner: int) -> bool:
        """Say whether this rank is the one of its node that speaks with an owner elsewhere."""
        rank = self._owners[owner]
        node = next(node for node in self._nodes if rank in node)
        if self.comm.rank in node:
            return False
        return node.index(rank) % self.local_size == self.local_rank

    def _to_owners(self, asked: Sequence[Places]) -> list[Tensor]:
        """Send numbers to their owners; return what came, by rank. Collective."""
        by_rank = [torch.empty(0, dtype=torch.int64)] * self.comm.size
        for rank, numbers in zip(self._owners, asked, strict=True):
            by_rank[rank] = torch.from_numpy(numbers)
        return self.comm.alltoall(by_rank)

    # -- adding -------------------------------------------------------------------------------

    def sum_own(self, sums: RowSums, told: Sequence[Told]) -> RowSums:
        """Return the sums over all ranks of what this rank owns, in a fixed order.

        ``told`` are the numbers of rows of all ranks, by ``agree``. Not to be read any more after
        the ranks agree again.
        """
        if self.comm.size == 1:
            return sums
        parts = self._exchange(sums.rows, sums, told)
        own = self._sum_of(parts, self.start, self.stop)
        if self._is_one_node:
            return own
        by_owner = [
            self._sum_of(parts, *self._range_of(owner)) if self._serves(owner) else None
            for owner in range(self.comm.size)
        ]
        nothing = np.empty(0, np.int64)
        heard = self._to_owners([nothing if each is None else each.rows for each in by_owner])
        given = [torch.empty(0, self.dim, dtype=self.dtype)] * self.comm.size
        for rank, each in zip(self._owners, by_owner, strict=True):
            if each is not None and len(each):
                given[rank] = each.between(0, len(each))
        came = self.comm.alltoall(given)
        heard[self.comm.rank] = torch.from_numpy(own.rows)
        if len(own):
            came[self.comm.rank] = own.between(0, len(own))
        numbers = np.concatenate([heard[rank].numpy() for rank in self._owners])
        return RowSums(
            numbers, torch.cat([came[rank].view(-1, self.dim) for rank in self._owners])
        )

    def _sum_of(self, parts: "_Parts", first: int, stop: int) -> RowSums:
        """Sum the rows of a range over what ranks of this node have."""
        numbers, index, values = [], [], parts[0][1]
        for place, (there, of_rank) in enumerate(parts):
            inside, start = _within(there, first, stop)
            numbers.append(inside)
            base = place * self._room.num_rows if self._room is not None else 0
            index.append(np.arange(start, start + len(inside)) + base)
            values = of_rank if self._room is None else self._room.values
        return RowSums(np.concatenate(numbers), values, np.concatenate(index))

    def _exchange(
        self, numbers: Places, values: "RowSums | Tensor | None", told: Sequence[Told]
    ) -> "_Parts":
        """Return what all ranks of this node have: sorted numbers, and values for each."""
        node, most = self._node, max(each.num_rows for each in told)
        if self._is_shared and most > self._num_room:  # on all ranks alike
            self._num_room = max(most, _FIRST_ROOM, 2 * self._num_room)
            self._room = None
            with agreed(self.comm, NodeMemoryError):
                if node is not None and self.local_size > 1:
                    self._room = _Room(node, self._num_room, self.dim, self.dtype)
        if node is None or self.local_size == 1:
            if isinstance(values, RowSums):
                values = values.between(0, len(values)) if len(values) else None
            nothing = torch.empty(0, self.dim, dtype=self.dtype)
            return [(numbers, nothing if values is None else values)]
        room = self._room
        assert room is not None
        room.leave(self.local_rank, numbers, values)
        node.barrier()
        found = []
        for place, rank in enumerate(self._nodes[self._node_number]):
            count, first = told[rank].num_rows, place * room.num_rows
            found.append((room.numbers[place, :count], room.values[first : first + count]))
        return found

    @property
    def _node_number(self) -> int:
        return next(i for i, node in enumerate(self._nodes) if self.comm.rank in node)


_Parts: TypeAlias = Sequence[tuple[Places, Tensor]]


def _within(numbers: Places, first: int, stop: int) -> tuple[Places, int]:
    """Return sorted numbers of a range, and where they begin."""
    start, end = np.searchsorted(numbers, [first, stop])
    return numbers[start:end], int(start)


def _private(num_bytes: int, how: Callable[[int], int]) -> Bytes:
    """Return zeros that this rank alone has; pages are taken when they are stored to."""
    if not isinstance(how, OnDisk) or not num_bytes:
        return np.zeros(num_bytes, np.uint8)
    try:
        descriptor = how(num_bytes)
    except OSError as error:
        raise NodeMemoryError(
            f"cannot reserve {format_bytes(num_bytes)} in {how}: {error}; make room, or name "
            f"another folder"
        ) from error
    file = mmap.mmap(descriptor, num_bytes)
    os.close(descriptor)
    return np.frombuffer(file, np.uint8)
