"""The places of a bucket's elements while gradients are made, and how they come to be summed.

On an accelerator they are summed where they are (``PeerBucket``) or by the host:

    depart    device to host     ``down``, behind what the caller's stream has written
    reduce    between the ranks  the host, once ``down`` has come so far
              host to device     ``up``
    arrive    nothing moves      the caller's stream goes on behind ``up``

Two streams, so that a bucket on its way back does not wait for one that is not full yet.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpctrain.comm.bucket import CHUNK_BYTES, Bucket, chunks_of
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device import Device, Makers, device_of
from hpctrain.comm.node.peer_bucket import PeerBucket


class BucketPlace(Protocol):
    """The elements of a bucket, but for what the host writes there itself."""

    flat: Tensor  # where gradients are made
    travels: Tensor  # the same elements where they are summed

    @property
    def makers(self) -> Makers | None:
        """Where what comes there is made; None for the host."""

    def depart(self) -> None:
        """Start, behind all that the caller's stream has to do. Not collective."""

    def reduce(self, sum_on_host: Callable[[], object], scale: float | None) -> None:
        """Sum over the ranks, times ``scale``; the host sums what it has. Collective."""

    def arrive(self) -> None:
        """Let the caller's stream go on when the sum is there, and not before."""


class OnHost:
    """Elements that are made and summed in the bucket itself."""

    makers = None

    def __init__(self, flat: Tensor) -> None:
        self.flat = self.travels = flat

    def depart(self) -> None:
        """Be there."""

    def reduce(self, sum_on_host: Callable[[], object], scale: float | None) -> None:  # noqa: ARG002
        """Let the host sum."""
        sum_on_host()

    def arrive(self) -> None:
        """Be there."""


class New(NamedTuple):
    """A bucket of the host, and where its elements are."""

    bucket: Bucket  # of the host; behind elements that it sums come the marks
    place: BucketPlace


def new_place(
    comm: Communicator,
    device: torch.device,
    numel: int,
    num_marks: int,
    dtype: torch.dtype,
    *,
    by_peers: bool,
) -> New:
    """Make room for ``numel`` elements on a device, and for marks, on the host. Collective.

    ``by_peers`` sums elements of an accelerator where they are, if ``comm`` has levels:
    ``CommError``, on all ranks, where that cannot be.
    """
    there = device_of(device)
    if there is not None and by_peers:
        assert comm.levels is not None
        place = PeerBucket(there, comm, comm.levels, numel, dtype)
        return New(comm.new_bucket(num_marks, dtype), place)
    bucket = comm.new_bucket(numel + num_marks, dtype)
    elements = bucket.flat[:numel]
    if there is None:
        return New(bucket, OnHost(elements))
    return New(_for_all_cores(bucket), StagedBucket(there, elements))


def _for_all_cores(bucket: Bucket) -> Bucket:
    """Cut a bucket into chunks that are worth all threads: backward needs no cores here."""
    if not bucket.peers:
        return bucket
    local_rank = next(rank for rank, peer in enumerate(bucket.peers) if peer is bucket.flat)
    num_bytes = CHUNK_BYTES * torch.get_num_threads()
    return replace(bucket, chunks=chunks_of(bucket.peers, local_rank, num_bytes))


def why_by_host(devices: Iterable[torch.device]) -> str:
    """Say why the host sums what these devices have; empty if it need not."""
    for device in devices:
        there = device_of(device)
        if there is None or there.keeps_apart:
            return f"{device.type}: {there.keeps_apart if there else 'it is the host'}"
    return ""


class StagedBucket:
    """Elements on an accelerator that travel by a bucket of the host: a copy goes, and returns."""

    def __init__(self, device: Device, host: Tensor) -> None:
        """Make as many elements on the device. Not collective."""
        self._device, self.travels, self.makers = device, host, Makers(device)
        self.flat = device.zeros(host.numel(), host.dtype, (device.down, device.up))
        self._full, self._on_host, self._back = (device.new_event() for _ in range(3))
        device.pin(host, self, self._back)

    def depart(self) -> None:
        """Start for the host, behind all that the caller's stream has to do."""
        device = self._device
        self._full.record(device.current_stream())
        device.down.wait_event(self._full)
        with device.on(device.down):
            self.travels.copy_(self.flat, non_blocking=True)
        self._on_host.record(device.down)

    def reduce(self, sum_on_host: Callable[[], object], scale: float | None) -> None:  # noqa: ARG002
        """Let the host sum what has departed, and start for the device. Collective."""
        device = self._device
        self._on_host.synchronize()
        sum_on_host()
        with device.on(device.up):
            self.flat.copy_(self.travels, non_blocking=True)
        self._back.record(device.up)

    def arrive(self) -> None:
        """Let the caller's stream go on when they are back, and not before."""
        self._device.current_stream().wait_event(self._back)
