"""Files of tensors in the safetensors format, with checksums.

A file consists of a length, a JSON header with name, dtype, shape and offsets of each tensor, and
the bytes of all tensors. A file contains no code, and other programs can read it. The metadata of
the header have, for each tensor, its dtype, its offset in the whole tensor, and a checksum for
each of its blocks; versions 1 and 2 of the format have these in the manifest.
"""

import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.checkpoint.refusal import damaged
from hpctrain.comm.tensor_arguments import host_bytes, name_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import CheckpointError
from hpctrain.core.units import MIB

BLOCK_BYTES = 4 * MIB  # bytes of a tensor under one crc32; part of version 1 of the format

_HEADER_BYTES = 100 * MIB
_ALIGN = 4096

_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_AS_BYTES = ("complex128",)  # safetensors lacks this dtype; stored as U8 with one more dimension

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_SAFETENSORS, *_AS_BYTES) if hasattr(torch, name)
}
"""The dtypes that a checkpoint can hold, by the name in its manifest."""


def check_storable(path: str, tensor: Tensor) -> None:
    """Raise ``CheckpointError`` unless a tensor is dense, has values and has one of ``DTYPES``."""
    if tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        found = "a nested tensor" if tensor.is_nested else tensor.layout
        raise CheckpointError(
            f"tensors of a checkpoint must be dense and not on the meta device, got {found} on "
            f"{tensor.device} at {path}; convert the tensor, or remove it from the state"
        )
    if name_of(tensor.dtype) not in DTYPES:
        raise CheckpointError(
            f"tensors of a checkpoint must have one of the dtypes {', '.join(DTYPES)}, got "
            f"{name_of(tensor.dtype)} at {path}; convert the tensor"
        )


class EntrySpec(NamedTuple):
    """Name, dtype and shape of a tensor in a file, and its offset in the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize


def write(
    path: Path, tensors: Mapping[str, Tensor], specs: Sequence[EntrySpec]
) -> dict[str, list[int]]:
    """Write tensors to their places in a file, and return the crc32 of each block, by name.

    Several ranks may write one file concurrently. Afterwards one of them calls
    ``write_header``. Returns when the tensors are on disk.

    Args:
        path: the file, created unless it exists.
        tensors: tensors that this rank writes, by name in the file.
        specs: all tensors of the file, in the same order on every rank that writes.

    Raises:
        OSError: the file cannot be written.
    """
    _, places = _header(specs, {})
    with _written(path) as descriptor:
        return {
            name: _write_blocks(descriptor, tensor, places[name])
            for name, tensor in tensors.items()
        }


def write_header(path: Path, specs: Sequence[EntrySpec], crcs: Mapping[str, Sequence[int]]) -> int:
    """Write the header of a file after its tensors, and return the crc32 of the header."""
    header, _ = _header(specs, crcs)
    with _written(path) as descriptor:
        _write_all(descriptor, memoryview(header), 0)
    return crc32(header)


@contextmanager
def _written(path: Path) -> Iterator[int]:
    """Open a file to write; at the end of the block, wait until its contents are on disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(
    specs: Sequence[EntrySpec], crcs: Mapping[str, Sequence[int]]
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file, and the byte offset of each tensor in the file, by name.

    The length of the header does not depend on ``crcs``, which may be empty.
    """
    header: dict[str, Any] = {"__metadata__": {}}
    places, end = {}, 0
    # Tensors with wide elements come first, so every tensor is aligned to its element size.
    for spec in sorted(specs, key=lambda spec: -spec.itemsize):
        dtype, shape = stored_as(spec.dtype, spec.shape)
        places[spec.name] = end
        start, end = end, end + math.prod(spec.shape) * spec.itemsize
        header[spec.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        of_blocks = crcs.get(spec.name) or [0] * -(-(end - start) // BLOCK_BYTES)
        header["__metadata__"][spec.name] = " ".join(
            [spec.dtype, ",".join(map(str, spec.offset)), *(f"{crc:08x}" for crc in of_blocks)]
        )
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    whole = len(text).to_bytes(8, "little") + text
    return whole, {name: len(whole) + start for name, start in places.items()}


def stored_as(dtype: str, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Return the safetensors name of a dtype, and the shape, as in the header of a file."""
    if dtype in _SAFETENSORS:
        return _SAFETENSORS[dtype], list(shape)
    return "U8", [*shape, DTYPES[dtype].itemsize]


def _write_blocks(descriptor: int, tensor: Tensor, place: int) -> list[int]:
    data, crcs = host_bytes(tensor), []
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        crcs.append(crc32(block))
        _write_all(descriptor, block, place + start)
    return crcs


def _write_all(descriptor: int, data: memoryview, place: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, place)
        data, place = data[count:], place + count


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: list[int]
    start: int
    num_bytes: int


class TensorFile:
    """An open file of tensors; its header was checked, so all offsets are inside the file.

    The constructor raises ``CheckpointError`` if the header is damaged or hostile.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.metadata: dict[str, str] = {}  # metadata of each tensor in the header, as text
        self.header_crc = 0
        self._entries = dict(self._read_header())

    def spec(self, name: str) -> tuple[EntrySpec, list[int]]:
        """Return a tensor and the checksums of its blocks, as in the metadata of the file.

        Raises ``CheckpointError``: the header has no valid tensor of this name.
        """
        try:
            dtype, offset, *crcs = self.metadata[name].split(" ")
            shape = self._entries[name].shape[: -1 if dtype in _AS_BYTES else None]
            found = EntrySpec(
                name, dtype, tuple(shape), tuple(map(int, filter(None, offset.split(","))))
            )
            self.check(name, dtype, shape)
            return found, [int(crc, 16) for crc in crcs]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._fault(f"its metadata of {str(name)[:80]} are not valid") from None

    def check(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Compare a tensor in the file with its dtype and shape in the manifest.

        Raises ``CheckpointError``: the file has no tensor of this name, dtype and shape.
        """
        entry = self._entries.get(name)
        expected = stored_as(dtype, shape)
        if entry is None or (entry.dtype, entry.shape) != expected:
            found = f"{entry.dtype} {entry.shape}" if entry else "none"
            raise self._fault(
                f"the manifest has {expected[0]} {expected[1]} for {name}, but the file has "
                f"{found}"
            )

    def read_into(self, name: str, start: int, memory: memoryview, crcs: Sequence[int]) -> None:
        """Fill ``memory`` with bytes of a tensor from ``start``, and compare their checksums.

        Call ``check`` first. ``start`` must be a multiple of BLOCK_BYTES, and ``memory`` must end
        at the end of a block. ``crcs`` are the checksums of all blocks of the tensor. Raises
        ``CheckpointError``: a block has another checksum, or the file ends too early.
        """
        entry = self._entries[name]
        for done in range(0, len(memory), BLOCK_BYTES):
            block = memory[done : done + BLOCK_BYTES]
            self._pread(block, entry.start + start + done)
            number = (start + done) // BLOCK_BYTES
            if crc32(block) != crcs[number]:
                raise self._fault(f"the bytes of {name} have changed in block {number}")

    def _read_header(self) -> Iterator[tuple[str, _Entry]]:
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(self._bytes(0, 8, size), "little")
        if length > (limit := min(size - 8, _HEADER_BYTES)):
            raise self._fault(f"its header must have at most {limit} bytes, got {length}")
        try:
            head = self._bytes(0, 8 + length, size)
            header = json.loads(head[8:])
            self.header_crc, self.metadata = crc32(head), dict(header.pop("__metadata__", {}))
            entries = [(str(name), entry) for name, entry in header.items()]
            entries.sort(key=lambda item: item[1]["data_offsets"])
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
            raise self._fault("its header is not a header of safetensors") from None
        end = 0
        for name, record in entries:
            entry = self._entry(record, end, 8 + length)
            end += entry.num_bytes
            yield name, entry
        if 8 + length + end != size:
            raise self._fault(
                f"its header requires a file of {8 + length + end} bytes, but it has {size}"
            )

    def _entry(self, record: Any, end: int, origin: int) -> _Entry:
        try:
            dtype, shape, (start, stop) = (
                record[key] for key in ("dtype", "shape", "data_offsets")
            )
        except (ValueError, TypeError, KeyError):
            raise self._fault("its header is not a header of safetensors") from None
        if type(start) is not int or type(stop) is not int or not start == end <= stop:
            raise self._fault(
                f"its header must list tensors without gaps and overlaps, but after byte {end} it "
                f"lists a tensor at bytes [{start}, {stop})"
            )
        return _Entry(dtype, shape, origin + start, stop - start)

    def _bytes(self, start: int, length: int, size: int) -> bytes:
        if start + length > size:
            raise self._fault(f"the file ends after {size} bytes")
        data = bytearray(length)
        self._pread(memoryview(data), start)
        return bytes(data)

    def _pread(self, memory: memoryview, offset: int) -> None:
        while memory:
            count = os.preadv(self._descriptor, [memory], offset)
            if count == 0:
                raise self._fault(f"the file ends after {offset} bytes")
            memory, offset = memory[count:], offset + count

    def _fault(self, what: str) -> CheckpointError:
        return damaged(self._path, what)


@contextmanager
def opened(path: Path) -> Iterator[TensorFile]:
    """Open a file of tensors.

    Raises ``CheckpointError``: the file is damaged or is not a regular file. ``OSError``: the file
    cannot be read.
    """
    descriptor = open_regular(path)
    try:
        yield TensorFile(path, descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> int:
    """Open a regular file of a checkpoint for reading; never open a link or a pipe.

    Raises ``CheckpointError``: the file is not a regular file. ``OSError``: the file cannot be
    opened.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CheckpointError(
            f"files of a checkpoint must be regular files, but {path} is a symbolic link; replace "
            f"the link by a copy of its file, or use another checkpoint"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(
            f"files of a checkpoint must be regular files, but {path} is not; use another "
            f"checkpoint"
        )
    return descriptor
