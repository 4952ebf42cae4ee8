"""Buckets on accelerators that NCCL sums over all ranks, also between nodes.

The ranks synchronize on the host once per bucket, so that all queue the same sums. The host does
not wait for the sum, which runs in a stream. NCCL adds 16-bit values in 16 bits, so that a
sum may overflow although the average does not. So 16-bit values are scaled before the sum.
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
    """Elements on this rank's accelerator that NCCL sums.

    Args:
        device: the accelerator.
        nccl: the ranks.
        numel: number of elements, initially zero.
        dtype: dtype of the elements.

    Raises:
        CommError: NCCL does not support the dtype.
    """

    def __init__(
        self, device: Device, nccl: NcclCommunicator, numel: int, dtype: torch.dtype
    ) -> None:
        self._how = combination(dtype, Op.SUM)
        if self._how.storage_dtype not in TYPES:
            raise CommError(
                f"the dtype of an NCCL bucket must be one of {', '.join(map(name_of, TYPES))}, "
                f"got {name_of(dtype)}"
            )
        super().__init__(device, device.zeros(numel, dtype, (nccl.stream,)), device.new_event())
        self._nccl = nccl

    def weigh(self, factor: float) -> None:
        """Multiply the elements of this rank by ``factor`` before the sum. Not collective."""
        self._nccl.stream.wait_event(self._full)
        with self._device.on(self._nccl.stream):
            scale_(self.flat, factor)

    def reduce(self, check_call: Callable[[], object], scale: float | None) -> None:
        """Call ``check_call``; then queue the sum over the ranks, times ``scale``. Collective."""
        stream = self._nccl.stream
        early, late = scaled_when(scale, self._how)
        check_call()
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
