"""Buckets on accelerators that NCCL sums over all ranks, between nodes, too.

NCCL finds its own way through NVLink, the node and the network. The ranks meet on the host once
for each bucket, so that none queues a sum that another one does not; the sum itself waits in a
stream, and the host for none of it. NCCL adds values of 16 bits in 16 bits, in an order of its
own: they are scaled before, or a sum could overflow where the average does not.
"""

from collections.abc import Callable

import torch

from hpctrain.comm.device import Device, DeviceBucket
from hpctrain.comm.nccl.library import TYPES
from hpctrain.comm.nccl.nccl_communicator import NcclCommunicator
from hpctrain.comm.ops import Op, combination, scale_, scaled_when
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.core.errors import CommError


class NcclBucket(DeviceBucket):
    """Elements on this rank's accelerator."""

    def __init__(
        self, device: Device, nccl: NcclCommunicator, numel: int, dtype: torch.dtype
    ) -> None:
        """Make ``numel`` zeros, the same on all ranks. Raises ``CommError``: NCCL adds no such."""
        self._how = combination(dtype, Op.SUM)
        if self._how.storage_dtype not in TYPES:
            raise CommError(f"NCCL adds {', '.join(map(name_of, TYPES))}, not {name_of(dtype)}")
        super().__init__(device, device.zeros(numel, dtype, (nccl.stream,)), device.new_event())
        self._nccl = nccl

    def weigh(self, factor: float) -> None:
        """Multiply the bucket of this rank."""
        self._nccl.stream.wait_event(self._full)
        with self._device.on(self._nccl.stream):
            scale_(self.flat, factor)

    def reduce(self, meet: Callable[[], object], scale: float | None) -> None:
        """Sum, times ``scale``; all ranks ``meet`` before. Collective."""
        stream = self._nccl.stream
        early, late = scaled_when(scale, self._how)
        meet()
        stream.wait_event(self._full)
        with self._device.on(stream):
            if self.flat.numel():
                self._sum(early, late)
        self._back.record(stream)
        self._nccl.ends_with(self._back)

    def _sum(self, early: float | None, late: float | None) -> None:
        if early is not None:
            scale_(self.flat, early)
        self._nccl.all_reduce_(self._how.view(self.flat))
        if late is not None:
            scale_(self.flat, late)
