"""Rows of a table, divided over ranks: who has which, and how they are read and summed.

A rank reads rows of its node where they lie, in the memory that the node shares. Between nodes a
row travels once for each pair of node and owner, however many ranks of the node want it; gradients
are summed over the node first.
"""

import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.async_sgd.sharded_embedding_cache import RowCache
from hpctrain.async_sgd.sharded_embedding_rules import learning_rate
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.cluster.resources import available_bytes
from hpctrain.comm.agreement import agreed, raise_if_any
from hpctrain.comm.call_check import call_of
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.node.node_memory import OnDisk, reserve, reserve_lazily
from hpctrain.core.atomic import refusal
from hpctrain.core.errors import CheckpointError, MismatchError, NodeMemoryError
from hpctrain.core.units import by_rank, format_bytes

Places: TypeAlias = NDArray[np.int64]
"""Numbers of rows, ``(rows,)``."""
Bytes: TypeAlias = NDArray[np.uint8]

CHUNK_BYTES = 1 << 20
"""Rows that are worked on at once: they stay in the cache."""
_PLACE_BITS = 32
_PLACES = (1 << _PLACE_BITS) - 1
IS_COUNTED, IS_FROZEN = 1, 2
"""Flags of a step."""
_KEYS = {"table", "steps", "lr", "tensors"}  # of the state of a table
_FIRST_ROOM = 4096  # rows of each rank that are exchanged at once, until more are needed


def keys_of(rows: Places, places: Places | int) -> Places:
    """Return what sorts by row, then by the place of a value: one number for each pair."""
    return (rows << _PLACE_BITS) | places


def keys_at(rows: Places, first: int = 0) -> Places:
    """Return keys of rows whose values lie in a row, from place ``first`` on."""
    return keys_of(rows, np.arange(first, first + len(rows)))


def take(rows: Tensor, places: Places) -> Tensor:
    """Return a copy of some rows, ``(places, width)``."""
    if rows.dtype is torch.float32 and len(places):  # its kernel reads ahead, twice as fast
        return bag_sums(rows, places, np.arange(len(places)))
    return rows.index_select(0, torch.from_numpy(places))


def bag_sums(rows: Tensor, places: Places, starts: Places) -> Tensor:
    """Return the sums of rows of some places, in their order, from each of ``starts`` on."""
    at, begin = torch.from_numpy(places), torch.from_numpy(starts)
    sums: Tensor = torch.embedding_bag(rows, at, begin, scale_grad_by_freq=False, mode=0)[0]
    return sums


def put(rows: Tensor, places: Places, values: Tensor) -> None:
    """Replace some rows of a contiguous ``(rows, width)``."""
    kind = np.dtype((np.void, rows.shape[1] * rows.itemsize))  # copied row by row, not by number
    there, given = (each.contiguous().numpy().view(kind)[:, 0] for each in (rows, values))
    np.put(there, places, given)


class Buffers:
    """Memory for results, used again when nobody refers to them any more.

    Fresh memory costs several times the copy into it, page by page.
    """

    _MOST = 4  # results of one table that are in use at once and have memory that is kept

    def __init__(self) -> None:
        self._kept: list[tuple[Bytes, weakref.ref[Bytes]]] = []

    def take(self, rows: Tensor, places: Places) -> Tensor:
        """Do as ``take``."""
        if not len(places):
            return take(rows, places)
        num_bytes = len(places) * rows.shape[1] * rows.itemsize
        free = (i for i, (memory, user) in enumerate(self._kept) if user() is None)
        fits = (i for i in free if len(self._kept[i][0]) >= num_bytes)
        number = next(fits, None)
        memory = np.empty(num_bytes, np.uint8) if number is None else self._kept.pop(number)[0]
        view = memory[:num_bytes]  # torch refers to it as long as a tensor has this memory
        self._kept = [(memory, weakref.ref(view)), *self._kept[: self._MOST - 1]]
        found = torch.from_numpy(view).view(rows.dtype).view(len(places), rows.shape[1])
        return torch.index_select(rows, 0, torch.from_numpy(places), out=found)


class Told(NamedTuple):
    """What each rank says before a row moves."""

    num_rows: int = 0  # rows that it has for others
    weight: float = 1.0  # of its gradients
    lr: float = 0.0  # by which it would step what it owns
    flags: int = 0


_NOTHING = Told()


def require_alike(told: Sequence[Told]) -> None:
    """Raise ``MismatchError`` unless what all ranks tell of a step is one step."""
    if len({each.lr for each in told}) > 1:
        raise MismatchError(
            f"the lr of a table must be the same on every rank, since owners step their rows by "
            f"it, got {by_rank([str(each.lr) for each in told])}; set it alike"
        )
    for flag, what in (
        (IS_COUNTED, "set_num_samples of a table must be called"),
        (IS_FROZEN, "requires_grad_(False) of a table must be called"),
    ):
        num = sum(each.flags & flag != 0 for each in told)
        if num not in (0, len(told)):
            raise MismatchError(
                f"{what} by all ranks or by none, {num} of {len(told)} have called it; call it on "
                f"every rank"
            )


class RowSums:
    """Sums of values by row, calculated some at a time; equal rows are summed in their order."""

    def __init__(self, keys: Places, values: Tensor) -> None:
        """Sum ``values`` of the places in ``keys``, which come in any order."""
        keys = np.sort(keys)
        rows, self._places, self._values = keys >> _PLACE_BITS, keys & _PLACES, values
        self._starts = np.append(np.flatnonzero(np.diff(rows, prepend=-1)), len(rows))
        self.rows = rows[self._starts[:-1]]  # each once, in order
        self.factor = 1.0  # of the sums

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, part: slice) -> Tensor:
        """Return the sums of a part of ``rows``, ``(rows, dim)``."""
        starts = self._starts[part.start : part.stop + 1]
        places = self._places[starts[0] : starts[-1]]
        is_taken = len(places) == len(starts) - 1  # all of them come once
        sums = (
            take(self._values, places)
            if is_taken
            else bag_sums(self._values, places, starts[:-1] - starts[0])
        )
        return sums if self.factor == 1.0 else sums.mul_(self.factor)

    def all(self) -> Tensor:
        """Return all sums."""
        return self.of(slice(0, len(self)))

    def chunks(self) -> Sequence[slice]:
        """Cut ``rows`` into parts of ``CHUNK_BYTES``."""
        size = max(1, CHUNK_BYTES // (self._values.shape[1] * self._values.itemsize))
        return [slice(at, min(at + size, len(self))) for at in range(0, len(self), size)]


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
        cache: tuple[int, int],
    ) -> None:
        """Divide the rows, and make room for them and for ``widths`` numbers of state.

        Raises ``NodeMemoryError``: there is too little, on every rank.
        """
        self.comm, self.name = comm, name
        self.num_rows, self.dim, self.dtype, self.initial = num_rows, dim, dtype, initial
        self._node = comm.node
        self._lay_out()
        self._check_memory(widths, folder, cache[0])
        self.cache = RowCache(*cache, dim, dtype)
        self._num_room = 0  # rows of each rank that can be exchanged at once, on every node
        with agreed(comm, NodeMemoryError):
            self._make(widths, reserve_lazily if folder is None else OnDisk(folder))

    def _lay_out(self) -> None:
        """Say which ranks are where, which range each owns, and whom this one serves."""
        comm = self.comm
        here = tuple(comm.node_ranks)
        nodes = sorted(set(comm.allgather_object(here)))
        self._here, self._owners = here, [rank for node in nodes for rank in node]
        self._local_rank, self._local_size = here.index(comm.rank), len(here)
        self._is_one_node = comm.size == 1 or (len(nodes) == 1 and comm.node is not None)
        self.per_rank = -(-self.num_rows // comm.size)
        first = self._owners.index(here[0])
        self._first_on_node = first * self.per_rank
        self.start, self.stop = self._range_of(first + self._local_rank)
        # The owners with whom this rank speaks for its node: itself, and elsewhere by turns.
        turns = [(node, turn) for node in nodes for turn in range(len(node))]
        self._spoken = [
            owner
            for owner, (node, turn) in enumerate(turns)
            if (turn if node == here else turn % len(here)) == self._local_rank
        ]

    def _range_of(self, owner: int) -> tuple[int, int]:
        """Return the rows of an owner, numbered by nodes."""
        first = owner * self.per_rank
        return min(first, self.num_rows), min(first + self.per_rank, self.num_rows)

    def _check_memory(self, widths: dict[str, int], folder: Path | None, copies: int) -> None:
        """Refuse what does not fit: pages are taken when they are used, too late for an error."""
        row_bytes = (self.dim + sum(widths.values())) * self.dtype.itemsize + 1
        rank_bytes = row_bytes * self.per_rank + (row_bytes + 24) * copies
        need_bytes, left_bytes = rank_bytes * self._local_size, available_bytes()
        refusal = None
        if folder is None and left_bytes is not None and need_bytes > left_bytes:
            refusal = (
                f"{self.name} and the state of its optimizer need {format_bytes(need_bytes)} of "
                f"memory on this node, and {format_bytes(left_bytes)} are left; start it on more "
                f"nodes, or keep it on a disk of the node by path="
            )
        raise_if_any(self.comm.allgather_object(refusal), NodeMemoryError)

    @torch.inference_mode(mode=False)
    def _make(self, widths: dict[str, int], how: Callable[[int], int]) -> None:
        """Make the memory, of which changes are counted. Collective over the node."""
        size, itemsize = self._local_size, self.dtype.itemsize
        rows = self._shared(self.per_rank * self.dim * itemsize, how)
        self._rows, self._marks = self._as_rows(rows, self.dim), self._shared(self.per_rank, how)
        own = slice(self._local_rank * self.per_rank, (self._local_rank + 1) * self.per_rank)
        self.own = {"rows": self._rows[own]}
        """Rows of this rank, and behind them what its optimizer keeps of each."""
        self.is_stored = self._marks[own]
        """Which of them hold values; all else is zero."""
        self._stored = torch.from_numpy(self.is_stored)  # the same, which knows who writes to it
        for name, width in widths.items():
            kept = _private(self.per_rank * width * itemsize, how)
            self.own[name] = self._as_rows(kept, width)
        fields = len(Told._fields)  # in two places, used in turns: one may still be read
        self._head = self._shared(fields * 16).view(np.float64).reshape(2, size, fields)

    def _shared(self, num_bytes: int, how: Callable[[int], int] = reserve) -> Bytes:
        """Return zeros that the node has once, as many for each rank. Collective over it."""
        if self._node is None:
            return _private(num_bytes, how)
        region = self._node.new_region(num_bytes * self._local_size, how)
        return np.frombuffer(memoryview(region.shared), np.uint8, num_bytes * self._local_size)

    def _as_rows(self, memory: Bytes, width: int) -> Tensor:
        return torch.from_numpy(memory).view(self.dtype).view(-1, width)

    # -- agreement ----------------------------------------------------------------------------

    def agree(
        self, call: str, refusal: str | None = None, told: Told = _NOTHING
    ) -> Sequence[Told]:
        """Return what all ranks tell, by rank, if all are about to make one call and may.

        ``MismatchError``, on every rank, else.
        """
        call, node = f"{call} of {self.name}", self._node
        if self._is_one_node and node is not None:
            head = self._head[node.turn]
            head[self._local_rank] = told
            if not node.compare(call_of(call), 0 if refusal is None else 1) or refusal:
                raise_if_any(self.comm.allgather_object(refusal))
            return [Told(int(n), weight, lr, int(flags)) for n, weight, lr, flags in head.tolist()]
        heard = self.comm.allgather_object((refusal, told), call)
        raise_if_any([refused for refused, _ in heard])
        return [each for _, each in heard]

    # -- reading ------------------------------------------------------------------------------

    def read(self, rows: Places, flags: int, refusal: str | None = None) -> tuple[Tensor, Places]:
        """Return ``values`` and ``index``: row ``rows[i]`` is ``values[index[i]]``.

        What is returned may be the memory of the node: it holds until the next step. With
        any flag of any rank no rank takes copies of former steps.
        """
        if self._is_one_node:
            self.agree("lookup", refusal)
            return self._read_here(rows)
        distinct, index = np.unique(rows, return_inverse=True)
        first, stop = self._first_on_node, self._first_on_node + len(self._rows)
        is_here = (distinct >= first) & (distinct < stop)
        found = torch.empty(len(distinct), self.dim, dtype=self.dtype)
        # Of changes by a user, not by steps.
        version = self.own["rows"]._version + self._stored._version  # noqa: SLF001
        told = self.agree("lookup", refusal, Told(int((~is_here).sum()), version, flags=flags))
        found[torch.from_numpy(is_here)] = take(*self._read_here(distinct[is_here]))
        if any(each.num_rows for each in told):
            found[torch.from_numpy(~is_here)] = self._fetch(distinct[~is_here], told)
        return found, index

    def _read_here(self, rows: Places) -> tuple[Tensor, Places]:
        """Return what ``read`` does, of rows on this node. Not collective."""
        places = rows - self._first_on_node if self._first_on_node else rows
        is_stored = self._marks[places].view(np.bool_)
        if is_stored.all():
            return self._rows, places
        values = take(self._rows, places)
        values[torch.from_numpy(~is_stored)] = self.initial(rows[~is_stored])
        return values, np.arange(len(rows))

    def _fetch(self, rows: Places, told: Sequence[Told]) -> Tensor:
        """Return rows of other nodes, each of which crosses to this one once. Collective."""
        wanted, _ = self._exchange(rows, None, told)
        of_owners = [self._of_owner(wanted, owner) for owner in self._spoken]
        numbers = np.unique(np.concatenate(of_owners) >> _PLACE_BITS)
        versions, exact = [each.weight for each in told], any(each.flags for each in told)
        missed = numbers[~(is_hit := self.cache.find(numbers, versions, exact=exact))]
        bounds = {each: np.searchsorted(missed, self._range_of(each)) for each in self._spoken}
        asked = {owner: missed[slice(*part)] for owner, part in bounds.items()}
        heard = self._cross({owner: torch.from_numpy(each) for owner, each in asked.items()})
        read = {owner: take(*self._read_here(each.numpy())) for owner, each in enumerate(heard)}
        values = self.cache.join(numbers, is_hit, torch.cat(self._cross(read)))
        came = RowSums(keys_at(numbers), values)
        told = self.agree("reply", None, Told(len(numbers)))
        parts, values = self._exchange(numbers, came, told)
        keys = np.sort(np.concatenate(parts))
        return take(values, keys[np.searchsorted(keys, keys_of(rows, 0))] & _PLACES)

    def _of_owner(self, parts: list[Places], owner: int) -> Places:
        """Return keys of the rows that belong to an owner."""
        bounds = keys_of(np.array(self._range_of(owner)), 0)
        return np.concatenate([keys[slice(*np.searchsorted(keys, bounds))] for keys in parts])

    def _cross(self, given: Mapping[int, Tensor]) -> list[Tensor]:
        """Send owners what is theirs; return what came, by owner. Collective."""
        nothing = next(iter(given.values()))[:0]
        sent = [nothing] * self.comm.size
        for owner, values in given.items():
            sent[self._owners[owner]] = values
        came = self.comm.alltoall(sent)
        return [came[rank] for rank in self._owners]

    # -- adding -------------------------------------------------------------------------------

    def sum_own(self, sums: RowSums, told: Sequence[Told]) -> RowSums:
        """Return the sums over all ranks of what this rank owns, in a fixed order.

        ``told`` are the numbers of rows of all ranks, by ``agree``. Not to be read any more after
        the ranks agree again.
        """
        self.cache.clock += 1
        if self.comm.size == 1:
            return sums
        parts, values = self._exchange(sums.rows, sums, told)
        mine = {each: RowSums(self._of_owner(parts, each), values) for each in self._spoken}
        if self._is_one_node:
            return mine[self._spoken[0]]
        rows = self._cross({owner: torch.from_numpy(each.rows) for owner, each in mine.items()})
        values = torch.cat(self._cross({owner: each.all() for owner, each in mine.items()}))
        return RowSums(keys_at(torch.cat(rows).numpy()), values)

    def _exchange(
        self, rows: Places, sums: RowSums | None, told: Sequence[Told]
    ) -> tuple[list[Places], Tensor]:
        """Return sorted keys of the rows of each rank of this node, and the values of all."""
        most, row_bytes = max(each.num_rows for each in told), self.dim * self.dtype.itemsize
        if most > self._num_room:  # on all ranks alike
            self._num_room = max(most, _FIRST_ROOM, 2 * self._num_room)
            with agreed(self.comm, NodeMemoryError):
                keys = self._shared(self._num_room * 8)
                values = self._shared(self._num_room * row_bytes)
            self._keys = keys.view(np.int64).reshape(-1, self._num_room)
            self._values = self._as_rows(values, self.dim)
        first = self._local_rank * self._num_room
        self._keys[self._local_rank, : len(rows)] = keys_at(rows, first)
        if sums is not None:
            for part in sums.chunks():
                self._values[first + part.start : first + part.stop] = sums.of(part)
        if self._node is not None:
            self._node.barrier()
        counts = [told[rank].num_rows for rank in self._here]
        return [keys[:num] for keys, num in zip(self._keys, counts, strict=True)], self._values

    # -- in checkpoints -----------------------------------------------------------------------

    def pieces(self) -> dict[str, TensorPiece]:
        """Return what this rank owns, by name, and which part it is. Not collective."""
        found = {}
        for name, whole in {**self.own, "is_stored": self._stored}.items():
            values = whole[: self.stop - self.start]
            rest = tuple(values.shape[1:])
            start = (self.start, *(0 for _ in rest))
            found[name] = TensorPiece(
                values, Shard((self.num_rows, *rest), start, tuple(values.shape))
            )
        return found

    def check(self, what: str, state: Any) -> None:
        """Return if a state is of the table ``what``. Raises ``CheckpointError``: it is not."""
        if not isinstance(state, Mapping) or not {*state} >= _KEYS:
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise CheckpointError(
                f"a table goes on with what its sharded_state() has returned, with "
                f"{sorted(_KEYS)}, got {got}; name the key of the checkpoint at which it was saved"
            )
        own, pieces = self.pieces(), state["tensors"]
        if {*pieces} != {*own}:
            raise CheckpointError(
                f"a table goes on with the state of its own optimizer, {sorted(own)}, got "
                f"{sorted(pieces)}; make it as it was saved"
            )
        if state["table"] != what:  # rows that were not stepped yet are not in the state
            raise CheckpointError(
                f"a table goes on with a state of its own, this is one of {what}, and the state "
                f"is of one of {state['table']}; make it as it was saved"
            )
        learning_rate(state["lr"])
        for name, piece in own.items():
            found, shard = pieces[name], piece.shard
            if not isinstance(found, TensorPiece) or found.shard != shard:
                got = str(found.shard) if isinstance(found, TensorPiece) else type(found).__name__
                raise CheckpointError(
                    f"{name} of a table is read in parts, by load(into=table.wanted(path)), of "
                    f"which this rank's is {shard}, got {got}"
                )
            if found.tensor.dtype is not piece.tensor.dtype:
                raise CheckpointError(
                    f"{name} of this table is {piece.tensor.dtype}, got {found.tensor.dtype}; "
                    f"make it as it was saved"
                )

    def restore(self, pieces: Mapping[str, TensorPiece]) -> None:
        """Take back what is stored; everything else is as in a new table. Not collective."""
        is_stored = pieces["is_stored"].tensor.bool()
        is_over = torch.from_numpy(self.is_stored[: len(is_stored)]).bool() & ~is_stored
        for name, own in self.pieces().items():
            # What was never stored is not touched: its memory is not taken.
            own.tensor[is_over] = 0
            own.tensor[is_stored] = pieces[name].tensor[is_stored]


def _private(num_bytes: int, how: Callable[[int], int]) -> Bytes:
    """Return zeros that this rank alone has; pages are taken when they are stored to."""
    if not isinstance(how, OnDisk) or not num_bytes:
        return np.zeros(num_bytes, np.uint8)
    try:
        descriptor = how(num_bytes)
    except OSError as error:
        raise NodeMemoryError(
            f"cannot reserve {format_bytes(num_bytes)} in {how}: "
            f"{refusal(error, 'name another folder')}"
        ) from error
    file = mmap.mmap(descriptor, num_bytes)
    os.close(descriptor)
    return np.frombuffer(file, np.uint8)
