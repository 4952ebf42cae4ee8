"""Hashes of states, and faster checksums of single tensors."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.tensor_arguments import flat_of, host_bytes
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import CheckpointError

_PIECE_BYTES = 64 << 20
"""Bytes copied at a time from a device, or from memory that is not contiguous."""

_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # wider elements are read as int64
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Odd factors: the golden ratio and the factors of splitmix64, as signed integers."""


def state_hash(state: Mapping[str, Any], comm: Communicator | None = None) -> str:
    """Return a 64-bit hash of a state, as 16 hexadecimal digits.

    The hash depends on names, types, shapes, dtypes and every bit of every value: 0 and -0 differ,
    and so do NaNs. It does not depend on devices, strides, the order of names, or the number of
    ranks. It is text, because JSON rounds numbers above 2^53.

    The hash is SHA-256, cut to 64 bits. With SHA instructions of the CPU, it is the fastest hash
    of the standard library: 1.8 GB/s per core, compared with 0.6 GB/s for BLAKE2b.

    Args:
        state: ``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}``, for
            example: tensors, None, truth values, numbers, text and bytes, in mappings, lists and
            tuples.
        comm: ranks that hold the same state and share the work; with ``comm``, the call is
            collective. Each rank computes the crc32 of every tensor, to detect different states.

    Raises:
        CheckpointError: the state contains an unsupported type, and the error names its path; or
            the ranks hold different states, on every rank.
    """
    leaves = sorted(_leaves(state, ""), key=lambda leaf: leaf[0])
    mine = _assign(leaves, comm.size)[comm.rank] if comm else range(len(leaves))
    digests = {number: _digest(*leaves[number]) for number in mine}
    if comm and comm.size > 1:
        digests = _gathered(digests, leaves, comm)
    whole = hashlib.sha256()
    for number in range(len(leaves)):
        whole.update(digests[number])
    return whole.hexdigest()[:16]


def value_hashes(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the 64-bit hash of each value of a state, by path; see ``state_hash``.

    Raises ``CheckpointError``: the state contains an unsupported type.
    """
    found = {}
    for name, value in values.items():
        whole = hashlib.sha256()
        for leaf in _leaves(value, name):
            whole.update(_digest(*leaf))
        found[name] = whole.hexdigest()[:16]
    return found


def _gathered(
    mine: dict[int, bytes], leaves: list[tuple[str, Any]], comm: Communicator
) -> dict[int, bytes]:
    """Gather the digests of the leaves that each rank has hashed. Collective.

    Raises ``CheckpointError`` on every rank: the ranks hold different ``leaves``.
    """
    whole = hashlib.sha256()
    for path, value in leaves:
        whole.update(_head(path, value))
        if isinstance(value, Tensor):
            whole.update(b"%d" % crc_of(value))
    parts = comm.allgather_object((whole.digest(), mine))
    if len({held for held, _ in parts}) > 1:
        raise CheckpointError(
            "all ranks of comm must have the same state, but names or values differ; find "
            "the difference with hvd.check_replicas(model, optimizer), or hash the state of each "
            "rank without comm"
        )
    return {number: digest for _, part in parts for number, digest in part.items()}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a state with their paths, and ``{}`` or ``[]`` for each container."""
    if isinstance(value, Mapping):
        yield path, {}
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise CheckpointError(
                    f"keys of a state must be str or int, got {key!r} at {path or 'its root'}; "
                    f"convert the keys"
                )
            yield from _leaves(item, f"{path}/{key!r}")
    elif isinstance(value, list | tuple):
        yield path, []
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}/{number}")
    elif isinstance(value, Tensor) and value.layout is not torch.strided:
        raise CheckpointError(
            f"tensors of a state must be dense, got {value.layout} at {path}; call to_dense() "
            f"first"
        )
    elif value is None or isinstance(value, bool | int | float | str | bytes | Tensor):
        yield path, value
    else:
        raise CheckpointError(
            f"a state must contain only tensors and plain Python values, got "
            f"{type(value).__name__} at {path}; convert it, for example with float(), str() "
            f"or torch.from_numpy()"
        )


def _assign(leaves: list[tuple[str, Any]], size: int) -> list[list[int]]:
    """Return the leaves that each rank hashes, about the same number of bytes per rank."""
    weights = [value.nbytes if isinstance(value, Tensor) else 0 for _, value in leaves]
    of_ranks: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for number in sorted(range(len(leaves)), key=lambda n: -weights[n]):
        rank = loads.index(min(loads))
        of_ranks[rank].append(number)
        loads[rank] += weights[number] + 1
    return of_ranks


def _digest(path: str, value: Any) -> bytes:
    found = hashlib.sha256(_head(path, value))
    if isinstance(value, Tensor):
        for piece in _pieces(value.detach()):
            found.update(piece)
    return found.digest()


def _head(path: str, value: Any) -> bytes:
    """Return path, type and value of a leaf as bytes; for tensors, shape instead of elements."""
    if isinstance(value, Tensor):
        return repr((path, str(value.dtype), tuple(value.shape))).encode()
    plain = value.hex() if isinstance(value, float) else value
    return repr((path, type(value).__name__, plain)).encode()


def is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor has values in memory, one for each element."""
    return tensor.layout is torch.strided and not tensor.is_meta


def crc_of(tensor: Tensor) -> int:
    """Return the crc32 of the bytes of a tensor, in the order of its elements."""
    crc = 0
    for piece in _pieces(tensor.detach()):
        crc = crc32(piece, crc)
    return crc


def device_checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor as an int64 scalar on the device that has the tensor.

    An invertible function mixes each element with its index, and the results are added modulo
    2^64, so a change of one element always changes the sum. No data are copied to the host.
    """
    flat = flat_of(tensor)
    flat = flat.view(_LANES.get(flat.itemsize, torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), _PIECE_BYTES // 8):
        words = flat[start : start + _PIECE_BYTES // 8].to(torch.int64)
        index = torch.arange(start, start + len(words), device=flat.device)
        mixed = (words + index * _MIX[0]) * _MIX[1]
        # Shifts of int64 copy the sign bit; the mask makes this shift invertible.
        total += ((mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * _MIX[2]).sum()
    return total


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in the order of its elements."""
    is_copied = not (tensor.is_cpu and tensor.is_contiguous())
    if is_copied and tensor.dim() > 1 and tensor.nbytes > _PIECE_BYTES:
        for part in tensor:
            yield from _pieces(part)
    else:
        yield host_bytes(tensor)
