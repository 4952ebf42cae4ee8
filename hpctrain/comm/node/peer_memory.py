"""Accelerator memory that all ranks of a node map: a segment per rank, by CUDA IPC.

Segments are allocated by ``cudaMalloc``, because torch's allocator divides its blocks and frees
them at any time, and a peer must not use memory that its owner has freed. The last use by a peer
is not known, so segments are never freed; they are reused when no rank uses them.
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
_ENABLE_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


@cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded. Raises ``OSError`` if there is none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "libcudart" in line or "libamdhip64" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[-1])
    raise OSError("torch has not loaded a CUDA runtime as a shared library")


def _call(name: str, *args: object) -> None:
    if refused := getattr(_runtime(), name)(*args):
        raise OSError(f"{name} failed with {refused}")


class _Memory:
    """Device memory at an address, in a form that ``torch.as_tensor`` can wrap."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Segment:
    """Memory on the accelerators of a node, of one size per rank, which all ranks map.

    Args:
        own: memory of this rank, 1-D bytes.
    """

    handle: bytes  # for peers to map the memory of this rank

    def __init__(self, own: Tensor) -> None:
        self.own, self.num_bytes = own, own.numel()
        self.peers: list[Tensor] = []  # bytes of all ranks, by local rank
        self._owner: weakref.ref[object] | None = None

    def map(self, handles: Sequence[bytes], me: int) -> None:
        """Map the memory of all ranks. Raises ``OSError`` if a rank's memory is not accessible."""
        self.peers = [
            self.own if rank == me else self.mapped(one) for rank, one in enumerate(handles)
        ]

    def mapped(self, handle: bytes) -> Tensor:
        """Map the memory of a peer. Raises ``OSError`` if it is not accessible."""
        raise NotImplementedError

    def lend(self, owner: object) -> None:
        """Assign the zeroed segment to ``owner`` until ``owner`` is freed."""
        self._owner = weakref.ref(owner)
        self.own.zero_()

    @property
    def is_free(self) -> bool:
        """Whether the segment is mapped and has no owner on this rank."""
        return bool(self.peers) and (self._owner is None or self._owner() is None)


class CudaSegment(Segment):
    """CUDA memory that other processes can map by CUDA IPC.

    Args:
        num_bytes: size.
        device: the GPU of this rank.

    Raises:
        OSError: there is not enough memory, or no IPC.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        address, handle = ctypes.c_void_p(), _Handle()
        with torch.cuda.device(device):
            _call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
            try:
                _call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
            except OSError:
                _call("cudaFree", address)
                raise
        self._device, self.handle = device, bytes(memoryview(handle))
        super().__init__(_tensor_at(address, num_bytes, device))

    def mapped(self, handle: bytes) -> Tensor:
        """Map the memory of a peer. Raises ``OSError`` if its GPU is not accessible."""
        address = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            copy = _Handle.from_buffer_copy(handle)
            _call("cudaIpcOpenMemHandle", ctypes.byref(address), copy, _ENABLE_PEER_ACCESS)
        return _tensor_at(address, self.num_bytes, self._device)


def _tensor_at(address: ctypes.c_void_p, num_bytes: int, device: torch.device) -> Tensor:
    memory: Any = _Memory(address.value or 0, num_bytes)
    return torch.as_tensor(memory, device=device)


_segments: WeakKeyDictionary[Communicator, list[Segment]] = WeakKeyDictionary()
"""Segments of each communicator, in the same order on all ranks."""


def segment_for(
    owner: object,
    comm: Communicator,
    members: Sequence[int],
    num_bytes: int,
    make: Callable[[int], Segment],
) -> Segment:
    """Return zeroed memory on the devices of ``members``, the ranks of a node. Collective.

    Raises:
        CommError: on all ranks of ``comm``, if a device is not accessible.
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
        raise CommError(
            f"ranks of a node must be able to map each other's GPU memory, but {refusals[0]}; set "
            f"HPCTRAIN_DEVICE_SUMS=host"
        )
    return made
