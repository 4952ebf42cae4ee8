"""Transfer of values between processes: tensors in shared memory, other values pickled."""

import io
import mmap
import os
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from torch import Tensor

from hpctrain.core.errors import CorruptError, DataError

_ALIGNMENT = 64
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class ShmMessage:
    """A pickled value, and the positions of its tensors in shared memory."""

    payload: bytes  # the value without its tensors and arrays
    pieces: tuple[tuple[int, int], ...]
    """Offset and number of bytes of each tensor and array in the shared memory."""
    num_bytes: int
    """Size of the shared memory, whose descriptor is sent after the message; 0 for none."""


def pack(value: object) -> tuple[ShmMessage, int | None]:
    """Pickle a value, with its tensors and arrays in shared memory.

    Returns the message, and the descriptor of the shared memory or None. The caller must send
    the descriptor and close it.
    """
    arrays: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=arrays.append).dump(value)
    raws = [array.raw() for array in arrays]
    pieces, end = [], 0
    for raw in raws:
        pieces.append((end, raw.nbytes))
        end += -(-raw.nbytes // _ALIGNMENT) * _ALIGNMENT
    message = ShmMessage(file.getvalue(), tuple(pieces), end)
    if not end:
        return message, None
    descriptor = os.memfd_create("hpctrain-batch", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, end)
    with mmap.mmap(descriptor, end) as target:
        for (start, num_bytes), raw in zip(pieces, raws, strict=True):
            target[start : start + num_bytes] = raw
    return message, descriptor


def unpack(message: ShmMessage, descriptor: int | None) -> Any:
    """Unpickle the value of a message, with its tensors in shared memory; close ``descriptor``."""
    if descriptor is None:
        return cloudpickle.loads(message.payload, buffers=[bytearray() for _ in message.pieces])
    try:
        whole = np.frombuffer(mmap.mmap(descriptor, message.num_bytes), np.uint8)
    finally:
        os.close(descriptor)
    views = [whole[start : start + num_bytes] for start, num_bytes in message.pieces]
    return cloudpickle.loads(message.payload, buffers=views)


def portable(error: Exception) -> Exception:
    """Return ``error`` if it can be unpickled, otherwise a ``DataError`` with its text.

    A ``CorruptError`` stays a ``CorruptError`` with the same range of samples.
    """
    try:
        copy = cloudpickle.loads(pickle.dumps(error))  # some errors fail only when unpickled
    except Exception:  # pickling runs methods of a class of another package
        copy = None
    if type(copy) is type(error):
        return error
    text = f"{type(error).__name__}: {error}"
    # Keep the class, because the loader may skip the damaged samples on all ranks.
    if isinstance(error, CorruptError):
        return CorruptError(text, error.start, error.stop)
    made = DataError(text)
    made.__notes__ = list(getattr(error, "__notes__", ()))
    return made


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that passes CPU tensors to ``buffer_callback``, as pickle passes NumPy arrays."""

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
