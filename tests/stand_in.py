"""Replace the accelerator by a device of the host, so that code for accelerators can be tested.

The only stream is the program itself; node memory replaces memory of CUDA.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.device import Device
from hpctrain.comm.node.node_memory import reserve
from hpctrain.comm.node.peer_memory import Segment
from hpctrain.comm.node.segments import map_shared


class Passed:
    """Represent an event or a stream that has always completed."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Passed)

    def __hash__(self) -> int:
        return 0

    def record(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def query(self) -> bool:
        return True


class StandIn(Device):
    """Treat tensors of the host as tensors of an accelerator."""

    keeps_apart = without_nccl = ""

    def new_stream(self) -> Any:
        return Passed()

    new_event = current_stream = new_stream

    def on(self, _: object) -> AbstractContextManager[None]:
        return nullcontext()

    def zeros(self, numel: int, dtype: torch.dtype, *_: object) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def pinned(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def shared_event(self, comm: Any, members: Any) -> Any:
        return Passed(), [Passed() for _ in comm.allgather_object(0)][: len(members)]

    def card(self) -> str:
        return f"the card of process {os.getpid()}"

    def handle_of(self, _: object) -> int:
        return 0

    def new_segment(self, num_bytes: int) -> Segment:
        return FileSegment(num_bytes)


class FileSegment(Segment):
    """Hold anonymous memory, which peers open through the process that owns it."""

    def __init__(self, num_bytes: int) -> None:
        self._file = reserve(num_bytes)
        self.handle = f"/proc/{os.getpid()}/fd/{self._file}".encode()
        super().__init__(torch.frombuffer(map_shared(self._file, num_bytes), dtype=torch.uint8))

    def mapped(self, handle: bytes) -> Tensor:
        file = os.open(handle, os.O_RDWR)
        try:
            return torch.frombuffer(map_shared(file, self.num_bytes), dtype=torch.uint8)
        finally:
            os.close(file)
