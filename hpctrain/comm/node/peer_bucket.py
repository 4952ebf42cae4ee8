"""Buckets on accelerators that are summed in place within a node, and by rails between nodes.

As in host memory, each local rank sums its slice over the buckets of all ranks and writes the sum
to each bucket. Between nodes only the slice is copied to the host and sent over the rail. The
ranks of a node synchronize twice on the host: after all ranks have recorded that their buckets are
full, and after all ranks have recorded that their slices are written. These records are events,
for which streams wait. In a world of one node, the host does not wait for events.
"""

from collections.abc import Callable

import torch

from hpctrain.comm.bucket import slice_bounds
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device import Device, DeviceBucket
from hpctrain.comm.node.peer_memory import segment_for
from hpctrain.comm.ops import Op, combination, combine_to, scale_, scaled_when


class PeerBucket(DeviceBucket):
    """Elements on this rank's accelerator, with mapped buckets of the other ranks of the node.

    The constructor is collective.

    Args:
        device: the accelerator of this rank.
        comm: ranks that sum the bucket.
        numel: number of elements, initially zero.
        dtype: dtype of the elements.

    Raises:
        CommError: a rank cannot map the memory of another rank of its node; on all ranks.
    """

    def __init__(self, device: Device, comm: Communicator, numel: int, dtype: torch.dtype) -> None:
        assert comm.node is not None, "the ranks of a node share memory"
        self._node, self._how, members = comm.node, combination(dtype, Op.SUM), comm.node_ranks
        num_bytes = max(numel, 1) * dtype.itemsize
        segment = segment_for(self, comm, members, num_bytes, device.new_segment)
        full, self._fulls = device.shared_event(comm, members)
        self._done, self._dones = device.shared_event(comm, members)
        peers = [raw.view(dtype)[:numel] for raw in segment.peers]
        local_rank = comm.node.local_rank
        super().__init__(device, peers[local_rank], full)
        self._on_host = device.new_event()
        num_slices = comm.num_rails or comm.node.local_size
        own = slice_bounds(numel, num_slices, local_rank) if local_rank < num_slices else slice(0)
        self._parts = [self._how.view(peer[own]) for peer in peers]
        self._kernel = None if comm.num_rails else device.sum_of(self._parts, self._how)
        self._total = torch.empty_like(self._parts[0][: 0 if self._kernel else None])
        self._internode = comm.internode
        self._slice = device.pinned(self._total) if self._internode is not None else None

    def weigh(self, factor: float) -> None:
        """Multiply the elements of this rank by ``factor``, before ``reduce``. Not collective."""
        up = self._device.up
        up.wait_event(self._full)
        with self._device.on(up):
            scale_(self.flat, factor)
        self._full.record(up)

    def reduce(self, check_call: Callable[[], object], scale: float | None) -> None:
        """Call ``check_call``; then queue the sum over the ranks, times ``scale``. Collective."""
        up, on = self._device.up, self._device.on
        check_call()  # all ranks of the node have recorded their full events
        for full in self._fulls:
            up.wait_event(full)
        with on(up):
            if self._parts[0].numel():
                self._sum_slice(scale)
        self._done.record(up)
        self._node.barrier()  # all ranks of the node have recorded that their slices are written
        for done in self._dones:
            up.wait_event(done)
        self._back.record(up)

    def _sum_slice(self, scale: float | None) -> None:
        if self._kernel is not None:
            self._kernel(scale)
            return
        total, late = self._total, None
        if self._slice is not None:
            scale, late = scaled_when(scale, self._how)
        combine_to(total, self._parts, self._how, scale)
        if self._internode is not None and self._slice is not None:
            self._slice.copy_(total, non_blocking=True)
            self._on_host.record(self._device.up)
            self._on_host.synchronize()
            self._internode.allreduce_(self._slice).wait()
            total.copy_(self._slice, non_blocking=True)
            if late is not None:
                scale_(total, late)
        for part in self._parts:
            part.copy_(total)
