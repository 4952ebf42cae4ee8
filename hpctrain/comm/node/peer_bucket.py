"""Buckets on accelerators of one node, summed where they are: nothing goes through the host.

As in the memory of the node, each local rank sums its slice over all ranks' buckets and writes the
sum into each of them. The ranks meet on the host, twice, when they have queued what the others
wait for; the work itself waits in the streams, and the host for none of it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hpctrain.comm.bucket import slice_bounds
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device import Device
from hpctrain.comm.node.peer_memory import segment_for
from hpctrain.comm.node.shared_memory import combine, spread
from hpctrain.comm.ops import Op, combination


class PeerBucket:
    """Elements on this rank's device, and those of the others of its node, mapped here."""

    def __init__(self, device: Device, comm: Communicator, numel: int, dtype: torch.dtype) -> None:
        """Make ``numel`` zeros on the device of each rank. Collective.

        ``CommError``, on all ranks, where a device cannot reach the memory of another.
        """
        self._device, self._comm = device, comm
        self._how = combination(dtype, Op.SUM)
        segment = segment_for(self, comm, max(numel, 1) * dtype.itemsize, device.device)
        peers = [raw.view(dtype)[:numel] for raw in segment.peers]
        self.flat = self.travels = peers[comm.rank]
        own = slice_bounds(numel, comm.size, comm.rank)
        self._parts: list[Tensor] = [peer[own] for peer in peers]
        self._full, self._fulls = device.shared_event(comm)
        self._done, self._dones = device.shared_event(comm)
        self._back = device.new_event()

    def depart(self) -> None:
        """Let the sum come behind all that the caller's stream has to do."""
        self._full.record(self._device.current_stream())

    def reduce(self, meet: Callable[[], object], scale: float | None) -> None:
        """Sum, times ``scale``; the ranks ``meet`` before, and once more. Collective."""
        device = self._device
        meet()  # all have recorded that their buckets are full
        for full in self._fulls:
            device.up.wait_event(full)
        with device.on(device.up):
            if self._parts[0].numel():
                spread(combine(self._parts, self._how, scale), self._parts, self._how)
        self._done.record(device.up)
        self._comm.barrier()  # all have recorded that their slices are summed
        for done in self._dones:
            device.up.wait_event(done)
        self._back.record(device.up)

    def arrive(self) -> None:
        """Let the caller's stream go on when the sum is there, and not before."""
        self._device.current_stream().wait_event(self._back)
