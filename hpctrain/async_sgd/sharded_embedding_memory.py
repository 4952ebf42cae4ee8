"""Storage of the rows and optimizer state of a table in node memory or on a disk."""

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.async_sgd.sharded_embedding_ids import FirstRows
from hpctrain.async_sgd.sharded_embedding_rows import Bytes, Places, RowOwners, put, take
from hpctrain.async_sgd.sharded_embedding_rules import Rule, learning_rate
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.cluster.resources import available_bytes
from hpctrain.comm.agreement import agreed, raise_if_refused
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.node.node_memory import OnDisk, reserve, reserve_lazily
from hpctrain.core.atomic import refusal
from hpctrain.core.errors import CheckpointError, NodeMemoryError
from hpctrain.core.torch_compat import version_of
from hpctrain.core.units import format_bytes

_KEYS = {"table", "steps", "lr", "tensors"}  # keys of the state of a table


class NodeRows:
    """Stores the rows that this node owns, and the optimizer state of this rank's rows.

    A row that was never stepped uses no memory: its values are computed by ``first``. The
    constructor is collective.

    Args:
        comm: all ranks.
        owners: owners of the rows.
        first: initial values of rows.
        widths: number of optimizer state elements per row, by name.
        folder: folder on a disk of the node that stores the rows; None for memory.

    Raises:
        NodeMemoryError: memory or disk space is not sufficient; on every rank.
    """

    @torch.inference_mode(mode=False)
    def __init__(
        self,
        comm: Communicator,
        owners: RowOwners,
        first: FirstRows,
        widths: Mapping[str, int],
        folder: Path | None,
    ) -> None:
        self._owners, self._node, self.first = owners, comm.node, first
        how: Callable[[int], int] = reserve_lazily if folder is None else OnDisk(folder)
        per_rank, itemsize = owners.per_rank, first.dtype.itemsize
        own = slice(owners.local_rank * per_rank, (owners.local_rank + 1) * per_rank)
        with agreed(comm, NodeMemoryError):
            rows = self.allocate(per_rank * first.dim * itemsize, how)
            self._rows, self._marks = self.as_rows(rows, first.dim), self.allocate(per_rank, how)
            self._own = {"rows": self._rows[own]}  # the state of the optimizer is added below
            self._is_stored = self._marks[own]
            self._stored = torch.from_numpy(self._is_stored)  # its version counts writes by torch
            for name, width in widths.items():
                kept = _private(per_rank * width * itemsize, how)
                self._own[name] = self.as_rows(kept, width)

    def allocate(self, num_bytes: int, how: Callable[[int], int] = reserve) -> Bytes:
        """Return zeros in node memory, ``num_bytes`` for each rank. Collective over the node."""
        if self._node is None:
            return _private(num_bytes, how)
        size = num_bytes * self._owners.local_size
        region = self._node.new_region(size, how)
        return np.frombuffer(memoryview(region.shared), np.uint8, size)

    def as_rows(self, memory: Bytes, width: int) -> Tensor:
        """Return memory as a tensor of rows, ``(rows, width)``."""
        return torch.from_numpy(memory).view(self.first.dtype).view(-1, width)

    @property
    def version(self) -> int:
        """A number that changes when rows are written by other means than ``step``."""
        return version_of(self._own["rows"]) + version_of(self._stored)

    def are_here(self, rows: Places) -> NDArray[np.bool_]:
        """Return a mask: True for the rows that this node owns."""
        first = self._owners.first_on_node
        return (rows >= first) & (rows < first + len(self._rows))

    def read(self, rows: Places) -> tuple[Tensor, Places]:
        """Return ``values`` and ``index``: row ``rows[i]``, on this node, is ``values[index[i]]``.

        The values may be node memory.
        """
        first = self._owners.first_on_node
        places = rows - first if first else rows
        is_stored = self._marks[places].view(np.bool_)
        if is_stored.all():
            return self._rows, places
        values = take(self._rows, places)
        values[torch.from_numpy(~is_stored)] = self.first.values(rows[~is_stored])
        return values, np.arange(len(rows))

    def step(self, rows: Places, grads: Tensor, rule: Rule, step: int) -> None:
        """Apply ``rule`` to ``rows``, which this rank owns, and to their state."""
        places = rows - self._owners.start
        kept = {name: take(values, places) for name, values in self._own.items()}
        is_new = self._is_stored[places] == 0
        if is_new.any():
            kept["rows"][torch.from_numpy(is_new)] = self.first.values(rows[is_new])
        rule.step(kept["rows"], grads, kept, step)
        for name, values in kept.items():
            put(self._own[name], places, values)
        self._is_stored[places] = 1

    # -- checkpoints --------------------------------------------------------------------------

    def pieces(self) -> dict[str, TensorPiece]:
        """Return this rank's rows, optimizer state and ``is_stored`` flags, with their positions.

        Local.
        """
        found = {}
        for name, whole in {**self._own, "is_stored": self._stored}.items():
            values = whole[: self._owners.size]
            rest = tuple(values.shape[1:])
            start = (self._owners.start, *(0 for _ in rest))
            shape = (self._owners.num_rows, *rest)
            found[name] = TensorPiece(values, Shard(shape, start, tuple(values.shape)))
        return found

    def check(self, what: str, state: Any) -> None:
        """Raise ``CheckpointError`` unless ``state`` fits this table, which ``what`` describes."""
        if not isinstance(state, Mapping) or not {*state} >= _KEYS:
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise CheckpointError(
                f"the state of a table must be a result of sharded_state(), a dictionary with the "
                f"keys {sorted(_KEYS)}, got {got}; pass the entry of the checkpoint in which "
                f"sharded_state() was saved"
            )
        own, pieces = self.pieces(), state["tensors"]
        if {*pieces} != {*own}:
            raise CheckpointError(
                f"a table must load the state of the same optimizer, with tensors {sorted(own)}, "
                f"got {sorted(pieces)}; make the table with the optimizer of the saved table"
            )
        if state["table"] != what:  # the arguments determine rows that were never stepped
            raise CheckpointError(
                f"a table must be made with the arguments of the saved table, but this table has "
                f"{what}, and the saved table has {state['table']}; make the table with the "
                f"arguments of the saved table, or load another checkpoint"
            )
        learning_rate(state["lr"])
        for name, piece in own.items():
            found, shard = pieces[name], piece.shard
            if not isinstance(found, TensorPiece) or found.shard != shard:
                got = str(found.shard) if isinstance(found, TensorPiece) else type(found).__name__
                raise CheckpointError(
                    f"each rank must load its own part of {name!r} of a table, on this rank "
                    f"{shard}, got {got}; load the checkpoint by load(into=table.wanted(path))"
                )
            if found.tensor.dtype is not piece.tensor.dtype:
                raise CheckpointError(
                    f"the saved {name!r} of a table must have the dtype of the table, "
                    f"{piece.tensor.dtype}, got {found.tensor.dtype}; make the table with the "
                    f"arguments of the saved table"
                )

    def restore(self, pieces: Mapping[str, TensorPiece]) -> None:
        """Copy saved rows and state; reset all other rows to their initial values. Local."""
        is_stored = pieces["is_stored"].tensor.bool()
        is_over = torch.from_numpy(self._is_stored[: len(is_stored)]).bool() & ~is_stored
        for name, own in self.pieces().items():
            # Rows that were never stored are not written, so that they take no memory.
            own.tensor[is_over] = 0
            own.tensor[is_stored] = pieces[name].tensor[is_stored]


def require_memory(
    comm: Communicator, name: str, owners: RowOwners, row_bytes: int, copies: int, path: object
) -> None:
    """Raise ``NodeMemoryError``, on all ranks, if a node has too little memory. Collective.

    The kernel allocates pages at the first write, when it is too late to raise an error.

    Args:
        comm: all ranks.
        name: name of the table, for messages.
        owners: owners of the rows.
        row_bytes: bytes of a row and its optimizer state.
        copies: rows in each rank's cache.
        path: folder of rows on a disk; None for memory.
    """
    rank_bytes = row_bytes * owners.per_rank + (row_bytes + 24) * copies
    need_bytes, left_bytes = rank_bytes * owners.local_size, available_bytes()
    refusal = None
    if path is None and left_bytes is not None and need_bytes > left_bytes:
        refusal = (
            f"a table must fit into the memory of its nodes, but {name} and its optimizer state "
            f"need {format_bytes(need_bytes)} of memory on this node, of which "
            f"{format_bytes(left_bytes)} are available; use more nodes, or store the rows on a "
            f"disk of each node by path="
        )
    raise_if_refused(comm, refusal, NodeMemoryError)


def _private(num_bytes: int, how: Callable[[int], int]) -> Bytes:
    """Return zeros in private memory, or in a private file if ``how`` is ``OnDisk``."""
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
