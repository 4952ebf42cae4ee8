"""Rows and optimizer state of a table in node memory, with save and restore."""

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
from hpctrain.async_sgd.sharded_embedding_owners import RowOwners
from hpctrain.async_sgd.sharded_embedding_rows import Bytes, Places, put, take
from hpctrain.async_sgd.sharded_embedding_rules import Rule, learning_rate
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.cluster.resources import available_bytes
from hpctrain.comm.agreement import agreed, raise_if_any
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.node.node_memory import OnDisk, reserve, reserve_lazily
from hpctrain.core.atomic import refusal
from hpctrain.core.errors import CheckpointError, NodeMemoryError
from hpctrain.core.torch_compat import version_of
from hpctrain.core.units import format_bytes

_KEYS = {"table", "steps", "lr", "tensors"}  # of the state of a table


class NodeRows:
    """Storage of the rows that this node owns, and of the optimizer state of this rank's rows.

    A row that was never stepped is not stored, and takes no memory: its values follow from
    ``first``.

    Args:
        comm: all ranks.
        owners: owners of the rows.
        first: initial values of rows.
        widths: numbers of optimizer state of a row, by name.
        folder: on a disk of the node for the rows; None for memory.

    Raises:
        NodeMemoryError: there is too little memory or disk; on every rank.
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
        """Allocate the memory. Collective."""
        self._owners, self._node, self.first = owners, comm.node, first
        how: Callable[[int], int] = reserve_lazily if folder is None else OnDisk(folder)
        per_rank, itemsize = owners.per_rank, first.dtype.itemsize
        own = slice(owners.local_rank * per_rank, (owners.local_rank + 1) * per_rank)
        with agreed(comm, NodeMemoryError):
            rows = self.allocate(per_rank * first.dim * itemsize, how)
            self._rows, self._marks = self.as_rows(rows, first.dim), self.allocate(per_rank, how)
            self._own = {"rows": self._rows[own]}  # and after it the optimizer's state
            self._is_stored = self._marks[own]
            self._stored = torch.from_numpy(self._is_stored)  # its version counts writes
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
        """A number that changes when a user writes to rows, and not with steps."""
        return version_of(self._own["rows"]) + version_of(self._stored)

    def are_here(self, rows: Places) -> NDArray[np.bool_]:
        """Return a mask of the rows that this node owns."""
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
        """Step rows that this rank owns, by their gradients."""
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
        """Return the tensors of this rank, by name, with their places in the table. Local."""
        found = {}
        for name, whole in {**self._own, "is_stored": self._stored}.items():
            values = whole[: self._owners.size]
            rest = tuple(values.shape[1:])
            start = (self._owners.start, *(0 for _ in rest))
            shape = (self._owners.num_rows, *rest)
            found[name] = TensorPiece(values, Shard(shape, start, tuple(values.shape)))
        return found

    def check(self, what: str, state: Any) -> None:
        """Raise ``CheckpointError`` unless ``state`` fits this table, described by ``what``."""
        if not isinstance(state, Mapping) or not {*state} >= _KEYS:
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise CheckpointError(
                f"the state of a table must be a result of sharded_state(), with "
                f"{sorted(_KEYS)}, got {got}; name the key of the checkpoint at which it was saved"
            )
        own, pieces = self.pieces(), state["tensors"]
        if {*pieces} != {*own}:
            raise CheckpointError(
                f"a table must load the state of the same optimizer, {sorted(own)}, got "
                f"{sorted(pieces)}; make the table with the arguments of the saved one"
            )
        if state["table"] != what:  # rows that were not stepped yet are not in the state
            raise CheckpointError(
                f"a table of {what} must load a state of such a table, but the state is of one of "
                f"{state['table']}; make the table with the arguments of the saved one"
            )
        learning_rate(state["lr"])
        for name, piece in own.items():
            found, shard = pieces[name], piece.shard
            if not isinstance(found, TensorPiece) or found.shard != shard:
                got = str(found.shard) if isinstance(found, TensorPiece) else type(found).__name__
                raise CheckpointError(
                    f"{name} of a table must be read in parts, of which this rank has {shard}, "
                    f"got {got}; use load(into=table.wanted(path))"
                )
            if found.tensor.dtype is not piece.tensor.dtype:
                raise CheckpointError(
                    f"{name} of this table must be {piece.tensor.dtype}, got "
                    f"{found.tensor.dtype}; make the table with the arguments of the saved one"
                )

    def restore(self, pieces: Mapping[str, TensorPiece]) -> None:
        """Restore stored rows and their state; all other rows are as in a new table. Local."""
        is_stored = pieces["is_stored"].tensor.bool()
        is_over = torch.from_numpy(self._is_stored[: len(is_stored)]).bool() & ~is_stored
        for name, own in self.pieces().items():
            # Rows that were never stored are not written, so that they take no memory.
            own.tensor[is_over] = 0
            own.tensor[is_stored] = pieces[name].tensor[is_stored]


def require_memory(
    comm: Communicator, name: str, owners: RowOwners, row_bytes: int, copies: int, path: object
) -> None:
    """Raise ``NodeMemoryError``, on all ranks, if a table does not fit into a node. Collective.

    Pages are allocated when they are used, too late for an error.

    Args:
        comm: all ranks.
        name: name of the table, for messages.
        owners: owners of its rows.
        row_bytes: bytes of a row and its state.
        copies: rows in the cache of each rank.
        path: path of rows on disk; None for memory.
    """
    rank_bytes = row_bytes * owners.per_rank + (row_bytes + 24) * copies
    need_bytes, left_bytes = rank_bytes * owners.local_size, available_bytes()
    refusal = None
    if path is None and left_bytes is not None and need_bytes > left_bytes:
        refusal = (
            f"{name} and the state of its optimizer need {format_bytes(need_bytes)} of "
            f"memory on this node, but {format_bytes(left_bytes)} are available; start it on more "
            f"nodes, or store it on a disk of the node by path="
        )
    raise_if_any(comm.allgather_object(refusal), NodeMemoryError)


def _private(num_bytes: int, how: Callable[[int], int]) -> Bytes:
    """Return zeros that only this rank has; pages are allocated when they are written."""
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
