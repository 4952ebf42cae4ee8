"""Accelerators: buckets in their memory, each with a twin in node memory that the ranks sum.

A gradient on its way, with the stream that each step runs on:

    depart    device to host     ``down``, behind what the caller's stream has written
    sum       between the ranks  the host, once ``down`` has come so far
    comeback  host to device     ``up``
    arrive    nothing moves      the caller's stream goes on behind ``up``

Two streams, so that a bucket on its way back does not wait for one that is not full yet.
"""

import logging
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor

from hpctrain.comm.bucket import Bucket

_LOG = logging.getLogger(__name__)


class Device:
    """The streams and the memory of one accelerator, of whatever kind torch knows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down, self.up = self.new_stream(), self.new_stream()

    def new_stream(self) -> torch.Stream:
        """Make a queue of work that runs beside others."""
        return torch.Stream(self.device)

    def new_event(self) -> torch.Event:
        """Make what a stream passes; a host that waits for it sleeps."""
        return torch.Event(self.device, blocking=True)

    def current_stream(self) -> torch.Stream:
        """Return the stream on which the caller's work is queued."""
        return torch.accelerator.current_stream(self.device)

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Queue what is called inside on another stream."""
        return stream

    def zeros(self, numel: int, dtype: torch.dtype, users: Sequence[torch.Stream]) -> Tensor:
        """Make memory that is not used again before the ``users``, too, are through with it."""
        made = torch.zeros(numel, dtype=dtype, device=self.device)
        for stream in users:
            made.record_stream(stream)
        return made

    def pin(self, host: Tensor, owner: object, last: torch.Event) -> bool:
        """Let copies to and from ``host`` run beside the host, as long as ``owner`` lives.

        ``last`` is what the last of them has passed. Where that cannot be, they hold the host up.
        """
        if self.device.type != "cuda" or not host.numel():  # ROCm's name, too
            return False
        runtime, address = torch.cuda.cudart(), host.data_ptr()
        if refused := int(runtime.cudaHostRegister(address, host.nbytes, 0)):
            _tell_once(f"memory of the host cannot be pinned (error {refused}): copies wait")
            return False

        def let_go() -> None:
            last.synchronize()
            runtime.cudaHostUnregister(address)

        weakref.finalize(owner, let_go).atexit = False
        return True


@cache
def device_of(device: torch.device) -> Device:
    """Return what this process knows of an accelerator: it has two streams for all buckets."""
    return Device(device)


@cache
def _tell_once(text: str) -> None:
    _LOG.warning(text)


class StagedBucket:
    """Elements on a device that travel by a bucket of the host: their places are the same."""

    def __init__(self, device: Device, host: Bucket, numel: int) -> None:
        """Make the first ``numel`` elements of ``host`` on the device, too. Not collective."""
        self._device = device
        self._host = host.flat[:numel]
        self.flat = device.zeros(numel, host.flat.dtype, (device.down, device.up))
        self._full, self._on_host, self._back = (device.new_event() for _ in range(3))
        device.pin(self._host, self, self._back)

    @classmethod
    def of(cls, device: torch.device, host: Bucket, numel: int) -> "StagedBucket | None":
        """Make one for elements of a device; None for those of the host, which need none."""
        return None if device.type == "cpu" else cls(device_of(device), host, numel)

    def depart(self) -> None:
        """Start for the host, behind all that the caller's stream has to do."""
        device = self._device
        self._full.record(device.current_stream())
        device.down.wait_event(self._full)
        with device.on(device.down):
            self._host.copy_(self.flat, non_blocking=True)
        self._on_host.record(device.down)

    def wait_on_host(self) -> None:
        """Return when the host has all that has departed."""
        self._on_host.synchronize()

    def come_back(self) -> None:
        """Start for the device; the host has them as they are to be there."""
        device = self._device
        with device.on(device.up):
            self.flat.copy_(self._host, non_blocking=True)
        self._back.record(device.up)

    def arrive(self) -> None:
        """Let the caller's stream go on when they are back, and not before."""
        self._device.current_stream().wait_event(self._back)
