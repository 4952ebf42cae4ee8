"""Two levels: inside the node through shared memory, then once over the slow link, by all cards.

A bucket's all-reduce is three steps in a row, each callable by a codec that replaces the middle:

    part = comm.node_sum(bucket)      # each local rank sums its slice over the node
    comm.rail_sum(part)               # each slice is all-reduced over its rail
    comm.publish(bucket, scale)       # each local rank writes its slice into all buckets
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.mpi import MpiCommunicator, check, flattened
from hpctrain.comm.rail import Rail
from hpctrain.comm.shared_memory import LOW_PRECISION, SharedMemory, slice_bounds
from hpctrain.comm.work import FINISHED, Check, Work

if TYPE_CHECKING:
    from mpi4py import MPI

STAGE_BYTES = 4 << 20
"""Ordinary tensors pass through a bucket of this size: it stays in the last-level cache."""


class HierarchicalCommunicator(MpiCommunicator):
    """Ranks on one or more nodes; buckets and large tensors take the two levels.

    What is small or is no sum goes flat over MPI. Needs no particular order of ranks, nor equal
    numbers of ranks per node.
    """

    def __init__(
        self,
        world: "MPI.Intracomm",
        node: SharedMemory,
        rail: Rail | None,
        *,
        num_rails: int,
        staged_bytes: int,
        check: Check,
    ) -> None:
        """Take the levels; ``rail`` is None on ranks whose slices go by another rank's rail."""
        super().__init__(world, check=check)
        self._node = node
        self._rail = rail
        self._num_rails = num_rails
        self._one_node = num_rails == 0
        self._staged_bytes = staged_bytes
        self._stages: dict[torch.dtype, Bucket] = {}

    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Make a bucket in node memory."""
        return self._node.new_bucket(numel, dtype)

    def allreduce_(self, tensor: Tensor | Bucket, *, scale: float | None = None) -> Work:
        """Sum a bucket where it lies, a large tensor through a bucket, a small one flat."""
        values = tensor.flat if isinstance(tensor, Bucket) else tensor
        check(values, scale)
        if isinstance(tensor, Bucket):
            self._allreduce_bucket(tensor, scale)
            return FINISHED
        if tensor.numel() * tensor.itemsize < self._staged_bytes:
            return super().allreduce_(tensor, scale=scale)
        with flattened(tensor) as flat:
            self._allreduce_staged(flat, scale)
        return FINISHED

    def node_sum(self, bucket: Bucket, scale: float | None = None) -> Tensor:
        """Sum the bucket inside the node, times ``scale``.

        Returns:
            The part of it that this rank takes over its rail; empty where it takes none.
        """
        self._node.node_sum(bucket, scale)
        if self._num_rails != self._node.local_size:
            self._node.barrier()  # this rank's rail carries slices that other ranks summed
        if self._rail is None:
            return bucket.flat[:0]
        bounds = slice_bounds(bucket.numel, self._num_rails, self._node.local_rank)
        return bucket.peers[0][bounds] if bucket.peers else bucket.flat

    def rail_sum(self, part: Tensor) -> None:
        """Sum what ``node_sum`` returned over the nodes."""
        if self._rail is not None:
            self._rail.allreduce_(part)

    def publish(self, bucket: Bucket, scale: float | None) -> None:
        """Write the sum, times ``scale``, into the bucket of every rank of the node."""
        if self._num_rails != self._node.local_size:
            self._node.barrier()
        self._node.publish(bucket, scale)

    def _allreduce_bucket(self, bucket: Bucket, scale: float | None) -> None:
        if self._one_node:
            self._node.allreduce_(bucket, scale)
            return
        # A node's sum in 16 bits could overflow where the average does not: scale it first.
        early = scale if bucket.flat.dtype in LOW_PRECISION else None
        part = self.node_sum(bucket, early)
        self.rail_sum(part)
        self.publish(bucket, None if early is not None else scale)

    def _allreduce_staged(self, values: Tensor, scale: float | None) -> None:
        if values.dtype not in self._stages:
            numel = STAGE_BYTES // values.itemsize
            self._stages[values.dtype] = self.new_bucket(numel, values.dtype)
        stage = self._stages[values.dtype]
        for chunk in values.split(stage.numel):
            stage.flat[: chunk.numel()].copy_(chunk)
            self._allreduce_bucket(stage, scale)
            chunk.copy_(stage.flat[: chunk.numel()])

    def close(self) -> None:
        """Free the MPI communicators; buckets live as long as something refers to them."""
        if self._rail is not None:
            self._rail.close()
        self._node.close()
        super().close()
