"""Memory of an accelerator that all ranks of a node map: a segment per rank, by CUDA's IPC.

Of plain ``cudaMalloc``: torch's allocator hands out parts of what it takes, and frees them when
it likes. A peer may not map what its owner has freed, and nobody knows when the last one has let
go, so segments stay, and serve again once no rank uses them.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import CommError

_HANDLE_BYTES = 64
_PEERS_TOO = 1  # cudaIpcMemLazyEnablePeerAccess


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


@cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded. Raises ``OSError``: there is none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "libcudart" in line or "libamdhip64" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[-1])
    raise OSError("torch has loaded no CUDA runtime as a library of its own")


def _call(name: str, *args: object) -> None:
    if refused := getattr(_runtime(), name)(*args):
        raise OSError(f"{name} failed with {refused}")


class _Memory:
    """Bytes at an address of a device, for torch to look at."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Segment:
    """As many bytes on the accelerator of each rank of a node, mapped by all of them."""

    handle: bytes  # by which a peer maps this rank's

    def __init__(self, own: Tensor) -> None:
        """Take this rank's bytes."""
        self.own, self.num_bytes = own, own.numel()
        self.peers: list[Tensor] = []  # bytes of all ranks, by local rank
        self._owner: weakref.ref[object] | None = None

    def map(self, handles: Sequence[bytes], me: int) -> None:
        """Map those of all ranks. Raises ``OSError``: one cannot be reached."""
        self.peers = [
            self.own if rank == me else self.mapped(one) for rank, one in enumerate(handles)
        ]

    def mapped(self, handle: bytes) -> Tensor:
        """Map the bytes of a peer. Raises ``OSError``: they cannot be reached."""
        raise NotImplementedError

    def lend(self, owner: object) -> None:
        """Let somebody have it, as long as that lives."""
        self._owner = weakref.ref(owner)
        self.own.zero_()

    @property
    def is_free(self) -> bool:
        """Whether nobody here has it."""
        return bool(self.peers) and (self._owner is None or self._owner() is None)


class CudaSegment(Segment):
    """Memory that CUDA lets other processes map."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Make this rank's. Raises ``OSError``: there is too little, or no IPC."""
        address, handle = ctypes.c_void_p(), _Handle()
        with torch.cuda.device(device):
            _call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
            try:
                _call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
            except OSError:
                _call("cudaFree", address)
                raise
        self._device, self.handle = device, bytes(memoryview(handle))
        super().__init__(_seen(address, num_bytes, device))

    def mapped(self, handle: bytes) -> Tensor:
        """Map the bytes of a peer. Raises ``OSError``: its card cannot be reached from here."""
        address = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            copy = _Handle.from_buffer_copy(handle)
            _call("cudaIpcOpenMemHandle", ctypes.byref(address), copy, _PEERS_TOO)
        return _seen(address, self.num_bytes, self._device)


def _seen(address: ctypes.c_void_p, num_bytes: int, device: torch.device) -> Tensor:
    memory: Any = _Memory(address.value or 0, num_bytes)
    return torch.as_tensor(memory, device=device)


_segments: WeakKeyDictionary[Communicator, list[Segment]] = WeakKeyDictionary()
"""By whose ranks they are; in the same order on all of them."""


def segment_for(
    owner: object,
    comm: Communicator,
    members: Sequence[int],
    num_bytes: int,
    make: Callable[[int], Segment],
) -> Segment:
    """Give ``owner`` zeros on the devices of the ranks of its node, the ``members``. Collective.

    ``CommError`` on all ranks of ``comm`` where a device cannot be reached.
    """
    segments = _segments.setdefault(comm, [])
    free = {n for n, one in enumerate(segments) if one.num_bytes == num_bytes and one.is_free}
    on_all = set.intersection(*comm.allgather_object(free))
    if on_all:
        segment = segments[min(on_all)]
    else:
        segment = _new_segment(comm, members, num_bytes, make)
        segments.append(segment)
    segment.lend(owner)
    return segment


def _new_segment(
    comm: Communicator,
    members: Sequence[int],
    num_bytes: int,
    make: Callable[[int], Segment],
) -> Segment:
    made: Segment | str
    try:
        made = make(num_bytes)
    except OSError as error:
        made = str(error)
    given = comm.allgather_object(made if isinstance(made, str) else made.handle)
    refusals = [f"rank {rank}: {one}" for rank, one in enumerate(given) if isinstance(one, str)]
    if isinstance(made, Segment) and not refusals:
        try:
            handles = [one for one in given if isinstance(one, bytes)]
            made.map([handles[rank] for rank in members], members.index(comm.rank))
        except OSError as error:
            refusals = [f"rank {comm.rank}: {error}"]
    refusals = next((texts for texts in comm.allgather_object(refusals) if texts), [])
    if isinstance(made, str) or refusals:
        raise CommError(f"ranks cannot share memory of accelerators: {refusals[0]}")
    return made
