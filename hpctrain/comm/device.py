"""Accelerators: their streams and events, and memory of the host that they copy by themselves."""

import logging
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

_LOG = logging.getLogger(__name__)


class Device:
    """The streams and the memory of one accelerator, of whatever kind torch knows."""

    keeps_apart = "processes share no memory of it"
    """Why processes cannot map the memory of others; empty if they may."""
    without_nccl = "NCCL sums what is on CUDA"
    """Why NCCL cannot sum what is there; empty if it can."""

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
            self.record_use(made, stream)
        return made

    def record_use(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Keep memory from being used again before a stream is through with it."""
        tensor.record_stream(stream)

    def pin(self, host: Tensor, owner: object, last: torch.Event) -> None:
        """Let copies to and from ``host`` run beside the host, as long as ``owner`` lives.

        ``last`` is what the last of them has passed. Where that cannot be, they hold the host up.
        """

    def pinned(self, like: Tensor) -> Tensor:
        """Make memory of the host that streams copy from and to by themselves."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def card(self) -> str:
        """Return a name of it that no other accelerator has, on whatever node."""
        return str(self.device)

    def handle_of(self, stream: torch.Stream) -> int:
        """Return what libraries of the accelerator know a stream by."""
        return stream.stream_id

    def new_segment(self, num_bytes: int) -> Segment:
        """Make memory for other processes to map. Raises ``OSError``: that cannot be."""
        raise OSError(f"{self.device.type}: {self.keeps_apart}, asked for {num_bytes} bytes")

    def sum_of(
        self,
        parts: Sequence[Tensor],
        how: Combination,
    ) -> Callable[[float | None], None] | None:
        """Return a function that replaces each part by their sum, times a factor, in one pass.

        None where the accelerator has no kernel for it.
        """
        del parts, how
        return None

    def shared_event(
        self, comm: Communicator, members: Sequence[int]
    ) -> tuple[torch.Event, list[torch.Event]]:
        """Make an event, and return those of some ranks, too. Collective over all.

        ``CommError``, on all ranks, where a stream cannot wait for what another process does.
        """
        del comm, members
        raise CommError(f"{self.device.type}: {self.keeps_apart}")


class Makers:
    """The streams on which parts of a whole were made; whoever takes the whole waits for all."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: torch.Stream | None = None
        self._left: dict[torch.Stream, torch.Event] = {}  # others, and when they were left

    def note(self) -> None:
        """Say that a part was made on the current stream."""
        stream = self._device.current_stream()
        if self._last is None or not _are_same(stream, self._last):
            self._leave()
            self._last = stream

    def join(self, parts: Sequence[Tensor]) -> None:
        """Let the current stream go on behind all of them, and forget them.

        What it reads of the ``parts`` is not used again before.
        """
        stream = self._device.current_stream()
        self.note()  # a stream that is left has recorded what it made
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
    return one == other  # torch defines no right !=


class DeviceBucket(BucketStorage):
    """Elements of a bucket on an accelerator, which the caller's stream fills and reads."""

    def __init__(self, device: Device, flat: Tensor, full: torch.Event) -> None:
        super().__init__(flat)
        self._device, self.makers = device, Makers(device)
        self._full, self._back = full, device.new_event()

    def depart(self) -> None:
        """Let the sum start after all that the caller's stream has queued."""
        self._full.record(self._device.current_stream())

    def arrive(self) -> None:
        """Let the caller's stream continue once the sum is there, and not before."""
        self._device.current_stream().wait_event(self._back)


class CudaDevice(Device):
    """An accelerator of CUDA, or of ROCm, which torch calls so, too."""

    keeps_apart = without_nccl = ""

    def new_stream(self) -> torch.Stream:
        """Make a queue of work that runs beside others."""
        return torch.cuda.Stream(self.device, priority=-1)  # before what backward has queued

    def new_event(self) -> torch.Event:
        """Make what a stream passes; a host that waits for it sleeps."""
        return torch.cuda.Event(blocking=True)

    def current_stream(self) -> torch.Stream:
        """Return the stream on which the caller's work is queued."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Queue what is called inside on another stream."""
        return torch.cuda.stream(stream)

    def pin(self, host: Tensor, owner: object, last: torch.Event) -> None:
        """Register it with the driver."""
        runtime, address = torch.cuda.cudart(), host.data_ptr()
        if not host.numel():
            return
        if refused := int(runtime.cudaHostRegister(address, host.nbytes, 0)):
            _tell_once(
                f"copies between {self.device} and the host wait for each other: memory of the "
                f"host cannot be registered (error {refused}); see ulimit -l"
            )
            return

        def let_go() -> None:
            last.synchronize()
            runtime.cudaHostUnregister(address)

        weakref.finalize(owner, let_go).atexit = False

    def card(self) -> str:
        """Return the name that the driver gives it."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def handle_of(self, stream: Any) -> int:
        """Return the address that CUDA knows a stream by."""
        return int(stream.cuda_stream)

    def new_segment(self, num_bytes: int) -> Segment:
        """Make memory of CUDA's own, and a handle of it."""
        return CudaSegment(num_bytes, self.device)

    def sum_of(
        self, parts: Sequence[Tensor], how: Combination
    ) -> Callable[[float | None], None] | None:
        """Return a kernel of Triton's, which comes with torch for CUDA."""
        try:
            from hpctrain.comm.node.device_sum import slice_sum_of  # noqa: PLC0415 - needs Triton
        except ImportError:
            return None
        return slice_sum_of(parts, how)

    def shared_event(
        self, comm: Communicator, members: Sequence[int]
    ) -> tuple[torch.Event, list[torch.Event]]:
        """Make an event that other processes map."""
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
    """Raise ``CommError`` where a graph captures what is queued: other ranks are not in it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CommError(
            "a CUDA graph captures a backward whose gradients travel to other ranks; capture the "
            "model alone, by torch.cuda.make_graphed_callables, and step outside of it"
        )


@cache
def device_of(device: torch.device) -> Device | None:
    """Return the one of this process: it has two streams for all buckets. None is the host."""
    if device.type == "cpu":
        return None
    return CudaDevice(device) if device.type == "cuda" else Device(device)


@cache
def _tell_once(text: str) -> None:
    _LOG.warning(text)
