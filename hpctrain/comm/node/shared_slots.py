"""Ordinary tensors pass through node memory: each rank writes its own, all read each other's.

A rank that writes for the next operation must not meet one that still reads for this one. Two
slots per rank, used in turns, do that without a second barrier: before a slot is written again,
its readers have come to the barrier of the operation between.
"""

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket, chunks_of
from hpctrain.comm.call_check import Call, tensor_call
from hpctrain.comm.node.shared_memory import SharedMemory, combine_to
from hpctrain.comm.ops import Combination, scale_

Slots = tuple[Tensor, ...]

MOST_SEEN = 256
"""Views that are kept: making one costs as much as a small sum."""


class SharedSlots:
    """Two slots per rank, in the stage of ``node``; every method is collective over the node."""

    def __init__(self, node: SharedMemory) -> None:
        self._node = node
        self._num_bytes = len(node.stage[0]) // 2
        self._seen: dict[tuple[torch.dtype, int, int], Slots] = {}

    def numel(self, dtype: torch.dtype) -> int:
        """Return how many elements a slot takes."""
        return self._num_bytes // dtype.itemsize

    def direct_(self, values: Tensor, combination: Combination, scale: float | None) -> None:
        """Replace ``values`` by the sum: every rank reads all slots, after a single barrier."""
        node = self._node
        call = tensor_call(combination.op, values.dtype, values.numel(), scale)
        for chunk in _pieces(values, self.numel(values.dtype)):
            parts = list(self._put(chunk, call))
            if node.local_rank < 2:
                parts[node.local_rank] = chunk  # one stream less than from the slot
            combine_to(chunk, parts, combination, scale)
        node.num_bytes += (1 + node.local_size) * values.numel() * values.itemsize

    def slices_(self, values: Tensor, combination: Combination, scale: float | None) -> None:
        """Replace ``values`` by the sum: every rank sums a slice, then reads those of all."""
        call = tensor_call(combination.op, values.dtype, values.numel(), scale)
        for chunk in _pieces(values, self.numel(values.dtype)):
            bucket = self.enter(chunk, call)
            self._node.sum_slice(bucket, combination, scale)
            self._node.barrier()
            self.leave(chunk, bucket, None)

    def enter(self, values: Tensor, call: Call) -> Bucket:
        """Copy flat ``values``, which must fit, into this rank's slot, and meet for ``call``.

        Returns:
            The slots of all ranks, as a bucket.
        """
        peers = self._put(values, call)
        self._node.num_bytes += values.numel() * values.itemsize
        chunks = chunks_of(peers, self._node.local_rank)
        return Bucket(peers[self._node.local_rank], peers, chunks)

    def leave(self, values: Tensor, bucket: Bucket, scale: float | None) -> None:
        """Copy the sum out of the first rank's slot, times ``scale``; a barrier comes before."""
        values.copy_(bucket.peers[0])
        if scale is not None:
            scale_(values, scale)
        self._node.num_bytes += values.numel() * values.itemsize

    def _put(self, values: Tensor, call: Call) -> Slots:
        numel, node = values.numel(), self._node
        slots = self._views(values.dtype, numel, node.turn)
        slots[node.local_rank].copy_(values)
        node.meet(call)
        return slots

    def _views(self, dtype: torch.dtype, numel: int, turn: int) -> Slots:
        """Look at the slots of a turn as ``numel`` elements; programs repeat a few sizes."""
        key = (dtype, numel, turn)
        slots = self._seen.get(key)
        if slots is None:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            first = turn * self._num_bytes
            end = first + numel * dtype.itemsize
            slots = tuple(raw[first:end].view(dtype) for raw in self._node.stage)
            self._seen[key] = slots
        return slots


def _pieces(values: Tensor, numel: int) -> tuple[Tensor, ...]:
    return (values,) if values.numel() <= numel else values.split(numel)
