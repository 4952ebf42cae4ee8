"""Exchange of rows and of sums of gradients between the ranks of a table.

A rank reads the rows of its node from shared memory. A row of another node is sent to a node once,
for any number of ranks that read it; gradients are summed over the node before they are sent.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from hpctrain.async_sgd.sharded_embedding_cache import RowCache
from hpctrain.async_sgd.sharded_embedding_memory import NodeRows
from hpctrain.async_sgd.sharded_embedding_rows import (
    Places,
    RowOwners,
    RowSums,
    keys_at,
    keys_of,
    places_of,
    rows_of,
    take,
)
from hpctrain.comm.agreement import agreed, raise_if_any
from hpctrain.comm.call_check import call_of
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.owner import Owner
from hpctrain.comm.threaded import start_on
from hpctrain.core.errors import ConfigError, MismatchError, NodeMemoryError, NotInitializedError
from hpctrain.core.units import by_rank
from hpctrain.runtime import world
from hpctrain.runtime.rebuild import RebuildStage

T = TypeVar("T")

IS_COUNTED, IS_FROZEN = 1, 2
"""Flags of a rank's report before a step: sample counts are set, the table is frozen."""
_FIRST_ROOM = 4096  # rows per rank in the first exchange buffer


class RowReport(NamedTuple):
    """Header that each rank sends to all ranks before rows are exchanged."""

    num_rows: int = 0  # rows that this rank writes to the exchange buffer
    weight: float = 1.0  # weight of this rank's gradients; in a lookup, version of its rows
    lr: float = 0.0  # learning rate of the rows that this rank owns
    flags: int = 0  # in a lookup, nonzero if rows that were cached in earlier steps are invalid


_NOTHING = RowReport()


def require_same_step(reports: Sequence[RowReport]) -> None:
    """Raise ``MismatchError`` if learning rates or flags differ between the reports of ranks."""
    if len({each.lr for each in reports}) > 1:
        raise MismatchError(
            f"the lr of a table must be the same on every rank, since each rank updates a part of "
            f"the rows, got {by_rank([str(each.lr) for each in reports])}; set the same value"
        )
    for flag, what in (
        (IS_COUNTED, "set_num_samples of a table must be called"),
        (IS_FROZEN, "requires_grad_(False) of a table must be called"),
    ):
        num = sum(each.flags & flag != 0 for each in reports)
        if num not in (0, len(reports)):
            raise MismatchError(
                f"{what} by all ranks or by none, but {num} of {len(reports)} ranks have called "
                f"it; call it on every rank"
            )


class RowExchange:
    """Exchanges rows and sums of gradients between ranks and the owners of rows.

    The constructor is collective, as are ``run``, ``agree``, ``read`` and ``sum_own``.

    Args:
        comm: all ranks.
        name: name of the table, for messages.
        owners: owners of the rows.
        memory: rows of this node.
        cache: cache of rows of other nodes.
    """

    is_over = False
    """Whether the world of the table was shut down."""

    def __init__(
        self, comm: Communicator, name: str, owners: RowOwners, memory: NodeRows, cache: RowCache
    ) -> None:
        self.comm, self.name, self.cache, self._owner = comm, name, cache, Owner()
        self._owners, self._memory, self._node = owners, memory, comm.node
        self._is_one_node = comm.size == 1 or (
            owners.local_size == comm.size and comm.node is not None
        )
        self._num_room = 0  # rows per rank that fit into the exchange buffer; equal on all nodes
        fields = len(RowReport._fields)
        with agreed(comm, NodeMemoryError):
            head = memory.allocate(fields * 16).view(np.float64)
        # Two buffers are used alternately: other ranks may still read the previous reports.
        self._head = head.reshape(2, owners.local_size, fields)
        self._follow_world()

    def _follow_world(self) -> None:
        """Register the actions at the end of the world and after the loss of ranks."""
        kept = weakref.ref(self)

        def move() -> None:
            if kept() is not None:
                raise ConfigError(
                    "a ShardedEmbedding must keep all ranks of its world, but ranks were lost "
                    "with their rows; restart from the last checkpoint"
                )

        def close() -> None:
            if (one := kept()) is not None:
                one.is_over = True

        world.current().rebuild.register(RebuildStage.HOLDERS, close=close, move=move)

    def require_world(self) -> None:
        """Raise an error after the world of the table was shut down, or in a forked child."""
        self._owner.check()
        if self.is_over:
            raise NotInitializedError(
                "a ShardedEmbedding must be used before hpctrain.shutdown(), but this table is of "
                "a world that was shut down; make the table again after hpctrain.init()"
            )

    def run(self, function: Callable[[], T]) -> T:
        """Run ``function``, which communicates, after the operations in flight; return its result.

        Collective.
        """
        self.require_world()
        found: list[T] = []
        start_on(self.comm, lambda: found.append(function())).wait()
        return found[0]

    def agree(
        self, call: str, refusal: str | None = None, report: RowReport = _NOTHING
    ) -> Sequence[RowReport]:
        """Check that ``call`` is identical on all ranks; return the reports of all ranks.

        Raises:
            MismatchError: ranks make different calls, or any rank passes a ``refusal``; on every
                rank.
        """
        call, node = f"{call} of {self.name}", self._node
        if self._is_one_node and node is not None:
            head = self._head[node.turn]
            head[self._owners.local_rank] = report
            if not node.compare(call_of(call), 0 if refusal is None else 1) or refusal:
                raise_if_any(self.comm.allgather_object(refusal))
            return [RowReport(int(n), weight, lr, int(fl)) for n, weight, lr, fl in head.tolist()]
        received = self.comm.allgather_object((refusal, report), call)
        raise_if_any([refused for refused, _ in received])
        return [each for _, each in received]

    # -- reading ------------------------------------------------------------------------------

    def read(self, rows: Places, flags: int, refusal: str | None = None) -> tuple[Tensor, Places]:
        """Return ``values`` and ``index``: row ``rows[i]`` is ``values[index[i]]``.

        The values may be node memory, which is valid until the next step. If any rank passes
        nonzero ``flags``, no rank uses rows that were cached in earlier steps.
        """
        memory = self._memory
        if self._is_one_node:
            self.agree("lookup", refusal)
            return memory.read(rows)
        distinct, index = np.unique(rows, return_inverse=True)
        is_here = memory.are_here(distinct)
        found = torch.empty(len(distinct), memory.first.dim, dtype=memory.first.dtype)
        report = RowReport(int((~is_here).sum()), memory.version, flags=flags)
        reports = self.agree("lookup", refusal, report)
        found[torch.from_numpy(is_here)] = take(*memory.read(distinct[is_here]))
        if any(each.num_rows for each in reports):
            found[torch.from_numpy(~is_here)] = self._fetch(distinct[~is_here], reports)
        return found, index

    def _fetch(self, rows: Places, reports: Sequence[RowReport]) -> Tensor:
        """Return rows of other nodes; each row is sent to this node once. Collective."""
        owners = self._owners
        wanted, _ = self._share(rows, None, reports)
        of_owners = [owners.keys_for(wanted, owner) for owner in owners.partners]
        numbers = np.unique(rows_of(np.concatenate(of_owners)))
        versions, exact = [each.weight for each in reports], any(each.flags for each in reports)
        missed = numbers[~(is_hit := self.cache.find(numbers, versions, exact=exact))]
        bounds = {o: np.searchsorted(missed, owners.range_of(o)) for o in owners.partners}
        requested = {owner: missed[slice(*part)] for owner, part in bounds.items()}
        received = self._cross(
            {owner: torch.from_numpy(each) for owner, each in requested.items()}
        )
        read = {o: take(*self._memory.read(each.numpy())) for o, each in enumerate(received)}
        values = self.cache.join(numbers, is_hit, torch.cat(self._cross(read)))
        came = RowSums(keys_at(numbers), values)
        reports = self.agree("reply", None, RowReport(len(numbers)))
        parts, values = self._share(numbers, came, reports)
        keys = np.sort(np.concatenate(parts))
        return take(values, places_of(keys[np.searchsorted(keys, keys_of(rows, 0))]))

    def _cross(self, given: Mapping[int, Tensor]) -> list[Tensor]:
        """Send a tensor to each owner in ``given``; return the tensor received from each owner.

        Collective.
        """
        nothing = next(iter(given.values()))[:0]
        sent = [nothing] * self.comm.size
        for owner, values in given.items():
            sent[self._owners.ranks[owner]] = values
        received = self.comm.alltoall(sent)
        return [received[rank] for rank in self._owners.ranks]

    # -- adding -------------------------------------------------------------------------------

    def sum_own(self, sums: RowSums, reports: Sequence[RowReport]) -> RowSums:
        """Return the gradients of the rows of this rank, summed over all ranks in a fixed order.

        The result is valid until the next call of ``agree``.

        Args:
            sums: sums of this rank's gradients.
            reports: result of ``agree`` for this step.
        """
        self.cache.clock += 1
        if self.comm.size == 1:
            return sums
        owners = self._owners
        parts, values = self._share(sums.rows, sums, reports)
        mine = {o: RowSums(owners.keys_for(parts, o), values) for o in owners.partners}
        if self._is_one_node:
            return mine[owners.partners[0]]
        rows = self._cross({owner: torch.from_numpy(each.rows) for owner, each in mine.items()})
        values = torch.cat(self._cross({owner: each.all() for owner, each in mine.items()}))
        return RowSums(keys_at(torch.cat(rows).numpy()), values)

    def _share(
        self, rows: Places, sums: RowSums | None, reports: Sequence[RowReport]
    ) -> tuple[list[Places], Tensor]:
        """Write this rank's rows and sums to node memory, and return all ranks' rows and sums.

        Returns:
            For each rank of this node, the sorted keys of its rows; a tensor with the sums of all
            ranks of this node, in which the places of the keys are indices.
        """
        largest, local_rank = max(each.num_rows for each in reports), self._owners.local_rank
        if largest > self._num_room:  # true on all ranks or on none
            self._grow(largest)
        first = local_rank * self._num_room
        self._keys[local_rank, : len(rows)] = keys_at(rows, first)
        if sums is not None:
            for part in sums.chunks():
                self._values[first + part.start : first + part.stop] = sums.of(part)
        if self._node is not None:
            self._node.barrier()
        counts = [reports[rank].num_rows for rank in self._owners.here]
        return [keys[:num] for keys, num in zip(self._keys, counts, strict=True)], self._values

    def _grow(self, num_rows: int) -> None:
        """Allocate an exchange buffer of at least ``num_rows`` per rank. Collective."""
        self._num_room = max(num_rows, _FIRST_ROOM, 2 * self._num_room)
        first = self._memory.first
        with agreed(self.comm, NodeMemoryError):
            keys = self._memory.allocate(self._num_room * 8)
            values = self._memory.allocate(self._num_room * first.dim * first.dtype.itemsize)
        self._keys = keys.view(np.int64).reshape(-1, self._num_room)
        self._values = self._memory.as_rows(values, first.dim)
