"""Storage of the elements of a bucket, and selection of the backend that sums them.

Elements on an accelerator are summed there (``PeerBucket``, ``NcclBucket``) or by the host:

    depart    copy to the host    stream ``down``, after the work of the caller's stream
    reduce    sum over the ranks  the host, after the copy
              copy to the device  stream ``up``
    arrive    wait                the caller's stream waits for ``up``

With two streams, the copy of a sum to the device does not wait for buckets that are not full yet.

With NCCL, the ranks synchronize on the host once per bucket, so that all queue the same sums. The
host does not wait for the sum, which runs in a stream, also between nodes.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from hpctrain.comm.bucket import CHUNK_BYTES, Bucket, chunks_of
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device import Device, DeviceBucket, device_of
from hpctrain.comm.nccl.library import TYPES
from hpctrain.comm.nccl.nccl_communicator import NcclCommunicator, nccl_over
from hpctrain.comm.node.peer_bucket import PeerBucket
from hpctrain.comm.ops import Op, combination, scale_, scaled_when
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.comm.tensor_bucket import BucketStorage
from hpctrain.core import config, logs
from hpctrain.core.errors import CommError, MismatchError
from hpctrain.core.units import by_rank

T = TypeVar("T")

ReduceBackend = Literal["host", "peers", "nccl"]
"""Backend that sums elements on an accelerator: ``host``; ``peers``, where each rank sums its
slice in the memory of all accelerators of its node; or ``nccl``. Elements on the host are always
summed by the host."""


def new_storage(
    comm: Communicator,
    device: torch.device,
    numel: int,
    num_marks: int,
    dtype: torch.dtype,
    *,
    backend: ReduceBackend,
) -> tuple[Bucket, BucketStorage | None]:
    """Allocate the elements of a bucket on a device, and its marks on the host. Collective.

    Args:
        comm: ranks that sum the bucket.
        device: device of the gradients.
        numel: number of elements.
        num_marks: number of marks, see ``plan_buckets``.
        dtype: dtype of elements and marks.
        backend: backend that sums elements on an accelerator.

    Returns:
        A bucket on the host, and the storage of the elements, or None if the bucket contains
        the elements.

    Raises:
        CommError: an accelerator does not support ``backend``; on all ranks. ``peers`` requires
            that the ranks of a node share memory.
    """
    there = device_of(device)
    if there is not None and backend != "host":
        place: BucketStorage
        if backend == "nccl":
            place = NcclBucket(there, nccl_over(comm, there), numel, dtype)
        else:
            place = PeerBucket(there, comm, numel, dtype)
        return comm.new_bucket(num_marks, dtype), place
    bucket = comm.new_bucket(numel + num_marks, dtype)
    if there is None:
        return bucket, None
    return _for_all_cores(bucket), StagedBucket(there, bucket.flat[:numel])


def by_first_backend(
    comm: Communicator,
    devices: Collection[torch.device],
    make: Callable[[ReduceBackend], T],
    refusal: str,
) -> T:
    """Create buckets with the first backend that is permitted and works. Collective.

    Args:
        comm: ranks that sum the buckets.
        devices: devices of the gradients of this rank.
        make: creates the buckets; raises ``CommError`` if the backend does not work.
        refusal: reason why only the host can sum these gradients; empty if there is none.

    Returns:
        The result of ``make``.

    Raises:
        CommError: ``HPCTRAIN_DEVICE_SUMS=nccl`` is set, but NCCL cannot sum; on all ranks.
        MismatchError: ``HPCTRAIN_DEVICE_SUMS=nccl`` is set on some ranks only; on all ranks.
    """
    is_there = any(device_of(device) is not None for device in devices)
    against_nccl = refusal or ("" if is_there else "parameters are on the host")
    against_peers = refusal or _why_by_host(comm, devices)
    offers = comm.allgather_object(
        (config.setting("device_sums"), is_there, against_nccl, against_peers)
    )
    asked, are_there, why_not_nccl, why_not_peers = zip(*offers, strict=True)
    if "nccl" in asked and comm.size > 1 and any(are_there):
        if len({*asked}) > 1:
            raise MismatchError(
                f"HPCTRAIN_DEVICE_SUMS=nccl must be set on all ranks or none, got {by_rank(asked)}"
            )
        return _make_by_nccl(make, by_rank([reason or None for reason in why_not_nccl]))
    refusal = next(filter(None, why_not_peers), "")
    if not refusal:
        try:
            return make("peers")
        except CommError as error:
            refusal = str(error)
    if is_there:
        logs.logger.info("gradients of accelerators are summed by the host: %s", refusal)
    return make("host")


def _make_by_nccl(make: Callable[[ReduceBackend], T], refusal: str) -> T:
    cause = None
    if not refusal:
        try:
            return make("nccl")
        except CommError as error:
            refusal, cause = str(error), error
    raise CommError(
        f"HPCTRAIN_DEVICE_SUMS=nccl can only be set if NCCL can sum the gradients, but NCCL "
        f"cannot: {refusal}; set HPCTRAIN_DEVICE_SUMS=auto"
    ) from cause


def _for_all_cores(bucket: Bucket) -> Bucket:
    """Return the bucket with chunks of ``CHUNK_BYTES`` per torch thread.

    During backward on an accelerator the cores are idle, so that all threads can sum.
    """
    if not bucket.peers:
        return bucket
    local_rank = next(rank for rank, peer in enumerate(bucket.peers) if peer is bucket.flat)
    num_bytes = CHUNK_BYTES * torch.get_num_threads()
    return replace(bucket, chunks=chunks_of(bucket.peers, local_rank, num_bytes))


def _why_by_host(comm: Communicator, devices: Collection[torch.device]) -> str:
    """Return why the backend ``peers`` cannot sum on these devices; empty if it can sum."""
    for device in devices:
        there = device_of(device)
        if there is None or there.keeps_apart:
            return f"{device.type}: {there.keeps_apart if there else 'parameters are on the host'}"
    if config.setting("device_sums") == "host":
        return "HPCTRAIN_DEVICE_SUMS=host"
    return "" if comm.node is not None else "the ranks of a node do not share its memory"


class StagedBucket(DeviceBucket):
    """Storage on an accelerator; elements are copied to the host, summed and copied back.

    Args:
        device: the accelerator.
        host: elements of the bucket on the host, 1-D.
    """

    def __init__(self, device: Device, host: Tensor) -> None:
        flat = device.zeros(host.numel(), host.dtype, (device.down, device.up))
        super().__init__(device, flat, device.new_event())
        self.summed, self._on_host = host, device.new_event()
        device.pin(host, self, self._back)

    def depart(self) -> None:
        """Start the copy to the host after all work queued on the caller's stream."""
        super().depart()
        device = self._device
        device.down.wait_event(self._full)
        with device.on(device.down):
            self.summed.copy_(self.flat, non_blocking=True)
        self._on_host.record(device.down)

    def weigh(self, factor: float) -> None:
        """Multiply the elements by ``factor`` on the host, after the copy to the host."""
        self._on_host.synchronize()
        scale_(self.summed, factor)

    def reduce(self, sum_on_host: Callable[[], object], scale: float | None) -> None:
        """Sum on the host, then start the copy to the device. Collective."""
        del scale  # applied by ``sum_on_host``
        device = self._device
        self._on_host.synchronize()
        sum_on_host()
        with device.on(device.up):
            self.flat.copy_(self.summed, non_blocking=True)
        self._back.record(device.up)


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
