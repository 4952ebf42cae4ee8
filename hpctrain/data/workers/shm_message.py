"""Values of another process: tensors are in memory that both map, the rest is sent as bytes."""

import io
import mmap
import os
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from torch import Tensor

from hpctrain.core.errors import CorruptError, DataError

_ALIGNMENT = 64
_KEPT = 4  # free segments that wait for their next use; more of them were a burst
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class ShmMessage:
    """Message about a value whose tensors are in a segment."""

    payload: bytes  # the value without its tensors and arrays
    pieces: tuple[tuple[int, int], ...]
    """First byte and number of bytes of each of those in the segment."""
    segment: int | None  # number of the segment; None without tensors
    new_bytes: int
    """Size of a segment that the receiver does not know yet; 0 for one that it offered."""


class Outbox:
    """The sender's segments. A segment is written only while the receiver offers it."""

    def __init__(self) -> None:
        self._segments: dict[int, mmap.mmap] = {}
        self._num_made = 0

    def pack(self, value: object, offered: int | None) -> tuple[ShmMessage, int | None]:
        """Write a value, anything that pickles, to the offered segment if it fits, else a new one.

        Then both sides drop the one that was offered. Returns what the receiver needs, and
        the descriptor of a new segment: the caller sends and closes it.
        """
        arrays: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        _Pickler(file, protocol=5, buffer_callback=arrays.append).dump(value)
        raws = [array.raw() for array in arrays]
        pieces, end = [], 0
        for raw in raws:
            pieces.append((end, raw.nbytes))
            end += -(-raw.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not end:
            return ShmMessage(file.getvalue(), tuple(pieces), offered, 0), None
        segment, new_bytes, descriptor = self._room(end, offered)
        target = self._segments[segment]
        for (start, num_bytes), raw in zip(pieces, raws, strict=True):
            target[start : start + num_bytes] = raw
        return ShmMessage(file.getvalue(), tuple(pieces), segment, new_bytes), descriptor

    def forget(self, segments: tuple[int, ...]) -> None:
        """Unmap segments that the receiver has dropped."""
        for segment in segments:
            self._segments.pop(segment).close()

    def _room(self, num_bytes: int, offered: int | None) -> tuple[int, int, int | None]:
        if offered is not None and len(self._segments[offered]) >= num_bytes:
            return offered, 0, None
        # A power of two, so that batches of varying size soon fit; untouched pages cost nothing.
        size = max(mmap.PAGESIZE, 1 << (num_bytes - 1).bit_length())
        descriptor = os.memfd_create("hpctrain-batch", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        mapped = mmap.mmap(descriptor, size)
        if offered is not None:
            self.forget((offered,))
        self._num_made += 1
        self._segments[self._num_made] = mapped
        return self._num_made, size, descriptor


class Inbox:
    """The receiver's segments: free again as soon as no tensor refers to them."""

    def __init__(self) -> None:
        self._segments: dict[int, mmap.mmap] = {}
        self._free: list[int] = []

    def offer(self) -> tuple[int | None, tuple[int, ...]]:
        """Return a free segment for the next value, and those the sender must unmap."""
        surplus = tuple(self._free.pop(0) for _ in range(len(self._free) - _KEPT))
        for segment in surplus:
            del self._segments[segment]
        # The one that was used last is in the cache.
        return (self._free.pop() if self._free else None), surplus

    def take_back(self, offered: int | None) -> None:
        """Keep an offered segment: nothing was written."""
        if offered is not None:
            self._free.append(offered)

    def unpack(self, parcel: ShmMessage, offered: int | None, descriptor: int | None) -> Any:
        """Return the value; its tensors are in the segment, which stays until they are freed."""
        segment = parcel.segment
        if segment != offered and offered is not None:
            del self._segments[offered]
        if segment is None:
            nothing = [bytearray() for _ in parcel.pieces]
            return cloudpickle.loads(parcel.payload, buffers=nothing)
        if descriptor is not None:
            self._segments[segment] = mmap.mmap(descriptor, parcel.new_bytes)
        # All views of this array keep it, so its end is the end of the last tensor.
        whole = np.frombuffer(self._segments[segment], np.uint8)
        weakref.finalize(whole, self._free.append, segment).atexit = False
        views = [whole[start : start + num_bytes] for start, num_bytes in parcel.pieces]
        return cloudpickle.loads(parcel.payload, buffers=views)


def portable(error: Exception) -> Exception:
    """Return an error that another process can make again: it, or one of ours with its text."""
    try:
        copy = cloudpickle.loads(pickle.dumps(error))  # many can be pickled, but not made again
    except Exception:  # whatever a foreign class does when it is pickled
        copy = None
    if type(copy) is type(error):
        return error
    text = f"{type(error).__name__}: {error}"
    # Damaged samples may be skipped, by all ranks or none.
    if isinstance(error, CorruptError):
        return CorruptError(text, error.start, error.stop)
    made = DataError(text)
    made.__notes__ = list(getattr(error, "__notes__", ()))
    return made


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes tensors for arrays: those leave the stream through ``buffer_callback``."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.device.type == "cpu" and obj.layout is torch.strided:
            flat = obj.detach().resolve_conj().resolve_neg().contiguous()
            return _tensor, (_numpy(flat), obj.dtype)
        return super().reducer_override(obj)


def _numpy(tensor: Tensor) -> Any:
    try:
        return tensor.numpy()
    except TypeError:  # numpy has no bfloat16
        return tensor.view(_SAME_SIZE[tensor.element_size()]).numpy()


def _tensor(array: Any, dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
