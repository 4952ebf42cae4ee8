"""Ordinary tensors pass through node memory: each rank writes its own, all read each other's.

A rank that writes for the next operation must not meet one that still reads for this one. Two
slots per rank, used in turns, do that without a second barrier: before a slot is written again,
its readers have come to the barrier of the operation between.
"""

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.calls import tensor_call
from hpctrain.comm.ops import Combination, scale_
from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.comm.slices import chunks_of, combine_to

Slots = tuple[Tensor, ...]


class Stage:
    """Two slots per rank, in the stage of ``node``; every method is collective over the node."""

    def __init__(self, node: SharedMemory) -> None:
        self._node = node
        self._num_bytes = len(node.stage[0]) // 2
        self._slots: dict[torch.dtype, tuple[Slots, Slots]] = {}

    def numel(self, dtype: torch.dtype) -> int:
        """Return how many elements a slot takes."""
        return self._num_bytes // dtype.itemsize

    def direct_(self, values: Tensor, combination: Combination, scale: float | None) -> None:
        """Replace ``values`` by the sum: every rank reads all slots, after a single barrier."""
        for chunk in _pieces(values, self.numel(values.dtype)):
            combine_to(chunk, self._put(chunk, combination), combination, scale)
            self._node.num_bytes += (1 + self._node.local_size) * chunk.numel() * chunk.itemsize

    def slices_(self, values: Tensor, combination: Combination, scale: float | None) -> None:
        """Replace ``values`` by the sum: every rank sums a slice, then reads those of all."""
        for chunk in _pieces(values, self.numel(values.dtype)):
            bucket = self.enter(chunk, combination)
            self._node.sum_slice(bucket, combination, scale)
            self._node.barrier()
            self.leave(chunk, bucket, None)

    def enter(self, values: Tensor, combination: Combination) -> Bucket:
        """Copy ``values`` into this rank's slot and meet; they must fit.

        Returns:
            The slots of all ranks, as a bucket.
        """
        peers = self._put(values, combination)
        self._node.num_bytes += values.numel() * values.itemsize
        chunks = chunks_of(peers, self._node.local_rank)
        return Bucket(peers[self._node.local_rank], peers, chunks)

    def leave(self, values: Tensor, bucket: Bucket, scale: float | None) -> None:
        """Copy the sum out of the first rank's slot, times ``scale``; a barrier comes before."""
        values.copy_(bucket.peers[0])
        if scale is not None:
            scale_(values, scale)
        self._node.num_bytes += values.numel() * values.itemsize

    def _put(self, values: Tensor, combination: Combination) -> Slots:
        numel, turn = values.numel(), self._node.turn
        slots = self._of(values.dtype)[turn]
        if numel != slots[0].numel():
            slots = tuple(slot[:numel] for slot in slots)
        slots[self._node.local_rank].copy_(values)
        self._node.meet(tensor_call(combination.op, values.dtype, numel))
        return slots

    def _of(self, dtype: torch.dtype) -> tuple[Slots, Slots]:
        if dtype not in self._slots:
            end = self.numel(dtype) * dtype.itemsize
            typed = [
                tuple(raw[first : first + end].view(dtype) for raw in self._node.stage)
                for first in (0, self._num_bytes)
            ]
            self._slots[dtype] = (typed[0], typed[1])
        return self._slots[dtype]


def _pieces(values: Tensor, numel: int) -> tuple[Tensor, ...]:
    return (values,) if values.numel() <= numel else values.split(numel)
