"""Accelerators: streams, events, pinned host memory, and memory shared between processes."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.node.peer_memory import CudaSegment, Segment
from hpctrain.comm.ops import Combination
from hpctrain.comm.tensor_bucket import BucketStorage
from hpctrain.core.errors import CommError
from hpctrain.core.logs import warn_once


class Device:
    """Streams and memory of one accelerator, of any type that torch supports.

    Args:
        device: the accelerator.
    """

    keeps_apart = "processes cannot share memory of this device type"
    """Reason why processes cannot share memory of the device; empty if they can."""
    without_nccl = "NCCL requires CUDA"
    """Reason why NCCL cannot sum on the device; empty if it can."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down, self.up = self.new_stream(), self.new_stream()

    def new_stream(self) -> torch.Stream:
        """Create a stream that runs concurrently with other streams."""
        return torch.Stream(self.device)

    def new_event(self) -> torch.Event:
        """Create an event; a host thread that waits for the event sleeps."""
        return torch.Event(self.device, blocking=True)

    def current_stream(self) -> torch.Stream:
        """Return the current stream of the caller."""
        return torch.accelerator.current_stream(self.device)

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Return a context in which ``stream`` is the current stream."""
        return stream

    def zeros(self, numel: int, dtype: torch.dtype, users: Sequence[torch.Stream]) -> Tensor:
        """Allocate zeros for use on the streams ``users``.

        The allocator reuses the memory only after the work queued on these streams.
        """
        made = torch.zeros(numel, dtype=dtype, device=self.device)
        for stream in users:
            self.record_use(made, stream)
        return made

    def record_use(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Prevent reuse of the memory of ``tensor`` before work queued on ``stream`` ends."""
        tensor.record_stream(stream)

    def pin(self, host: Tensor, owner: object, last: torch.Event) -> None:
        """Pin ``host`` until ``owner`` is freed, so that copies of ``host`` are asynchronous.

        If pinning is not possible, copies block the host.

        Args:
            host: host memory.
            owner: the memory is unpinned when this object is freed.
            last: event recorded after the last copy.
        """

    def pinned(self, like: Tensor) -> Tensor:
        """Allocate pinned host memory with the shape and dtype of ``like``."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def card(self) -> str:
        """Return a name of this accelerator that is unique over all nodes."""
        return str(self.device)

    def handle_of(self, stream: torch.Stream) -> int:
        """Return the native handle of a stream."""
        return stream.stream_id

    def new_segment(self, num_bytes: int) -> Segment:
        """Allocate memory that other processes can map.

        Raises:
            OSError: the device or the system does not support this.
        """
        raise OSError(f"{self.device.type}: {self.keeps_apart}, asked for {num_bytes} bytes")

    def sum_of(
        self, parts: Sequence[Tensor], how: Combination
    ) -> Callable[[float | None], None] | None:
        """Return a function that replaces each tensor of ``parts`` by the scaled sum of ``parts``.

        Returns None if the accelerator has no kernel for this sum.
        """
        del parts, how
        return None

    def shared_event(
        self, comm: Communicator, members: Sequence[int]
    ) -> tuple[torch.Event, list[torch.Event]]:
        """Create an event that other processes can wait for. Collective over ``comm``.

        Returns:
            The event of this rank, and the events of ``members``.

        Raises:
            CommError: events cannot be shared between processes; on all ranks.
        """
        del comm, members
        raise CommError(f"{self.device.type}: {self.keeps_apart}")


class Makers:
    """Records the streams on which tensors were computed, so that a stream can wait for them.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: torch.Stream | None = None
        self._left: dict[torch.Stream, torch.Event] = {}
        """Other streams, with an event recorded after their last tensor."""

    def note(self) -> None:
        """Record that a tensor was computed on the current stream."""
        stream = self._device.current_stream()
        if self._last is None or not _are_same(stream, self._last):
            self._leave()
            self._last = stream

    def join(self, parts: Sequence[Tensor]) -> None:
        """Make the current stream wait for all recorded streams, and clear the record.

        The memory of ``parts`` is reused only after the work of the current stream.
        """
        stream = self._device.current_stream()
        self.note()  # records the event of the previous stream
        others = [event for one, event in self._left.items() if not _are_same(one, stream)]
        self._left, self._last = {}, None
        for event in others:
            stream.wait_event(event)
        for part in parts if others else ():
            self._device.record_use(part, stream)

    def _leave(self) -> None:
        if self._last is not None:
            if self._last not in self._left:
                self._left[self._last] = self._device.new_event()
            self._left[self._last].record(self._last)


def _are_same(one: torch.Stream, other: torch.Stream) -> bool:
    return one == other  # ``!=`` of torch streams does not compare values


class DeviceBucket(BucketStorage):
    """Elements of a bucket on an accelerator, written and read on the caller's stream.

    Args:
        device: the accelerator.
        flat: the elements, 1-D.
        full: event recorded when the bucket is full.
    """

    def __init__(self, device: Device, flat: Tensor, full: torch.Event) -> None:
        super().__init__(flat)
        self._device, self.makers = device, Makers(device)
        self._full, self._back = full, device.new_event()

    def depart(self) -> None:
        """Permit the sum to start after all work queued on the caller's stream."""
        self._full.record(self._device.current_stream())

    def arrive(self) -> None:
        """Make the caller's stream wait for the sum."""
        self._device.current_stream().wait_event(self._back)


class CudaDevice(Device):
    """A CUDA device, or a ROCm device, which torch also names ``cuda``."""

    keeps_apart = without_nccl = ""

    def new_stream(self) -> torch.Stream:
        """Create a stream that runs concurrently with other streams."""
        return torch.cuda.Stream(self.device, priority=-1)  # higher priority than backward

    def new_event(self) -> torch.Event:
        """Create an event; a host thread that waits for the event sleeps."""
        return torch.cuda.Event(blocking=True)

    def current_stream(self) -> torch.Stream:
        """Return the current stream of the caller."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Return a context in which ``stream`` is the current stream."""
        return torch.cuda.stream(stream)

    def pin(self, host: Tensor, owner: object, last: torch.Event) -> None:
        """Pin ``host`` by registering the memory with the CUDA driver."""
        runtime, address = torch.cuda.cudart(), host.data_ptr()
        if not host.numel():
            return
        if refused := int(runtime.cudaHostRegister(address, host.nbytes, 0)):
            warn_once(
                f"copies between {self.device} and the host are synchronous: host memory "
                f"cannot be pinned (error {refused}); check ulimit -l"
            )
            return

        def unpin() -> None:
            last.synchronize()
            runtime.cudaHostUnregister(address)

        weakref.finalize(owner, unpin).atexit = False

    def card(self) -> str:
        """Return the UUID of the device."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def handle_of(self, stream: Any) -> int:
        """Return the ``cudaStream_t`` of a stream as an integer."""
        return int(stream.cuda_stream)

    def new_segment(self, num_bytes: int) -> Segment:
        """Allocate CUDA memory with an IPC handle."""
        return CudaSegment(num_bytes, self.device)

    def sum_of(
        self, parts: Sequence[Tensor], how: Combination
    ) -> Callable[[float | None], None] | None:
        """Return a Triton kernel that sums the parts; None without Triton."""
        try:
            from hpctrain.comm.node.device_sum import slice_sum_of  # noqa: PLC0415 - needs Triton
        except ImportError:
            return None
        return slice_sum_of(parts, how)

    def shared_event(
        self, comm: Communicator, members: Sequence[int]
    ) -> tuple[torch.Event, list[torch.Event]]:
        """Create an interprocess event."""
        made: Any = torch.cuda.Event(interprocess=True)
        try:
            with torch.cuda.device(self.device):
                mine = made.ipc_handle()
        except RuntimeError as error:
            mine = f"rank {comm.rank} has no event of {self.device} for other processes: {error}"
        given = comm.allgather_object(mine)
        if refusals := [one for one in given if isinstance(one, str)]:
            raise CommError(refusals[0])
        mapped: Any = torch.cuda.Event.from_ipc_handle
        return made, [
            made if rank == comm.rank else mapped(self.device, given[rank]) for rank in members
        ]


def require_no_capture(device: torch.device) -> None:
    """Raise ``CommError`` during the capture of a CUDA graph, which cannot include other ranks."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CommError(
            "a CUDA graph must not capture a backward whose gradients are sent to other ranks; "
            "capture only the model, by torch.cuda.make_graphed_callables, and step outside of it"
        )


@cache
def device_of(device: torch.device) -> Device | None:
    """Return the ``Device`` that all buckets of this process share; None for the CPU."""
    if device.type == "cpu":
        return None
    return CudaDevice(device) if device.type == "cuda" else Device(device)
