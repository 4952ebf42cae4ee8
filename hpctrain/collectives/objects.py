"""Broadcast and all-gather of Python objects, as named operations."""

import pickle
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor

from hpctrain.comm.tensor_arguments import host_bytes
from hpctrain.core.errors import HorovodInternalError
from hpctrain.core.pickles import unpickled
from hpctrain.negotiation.request import Kind, Request
from hpctrain.runtime.process_sets import ProcessSet, global_process_set, in_set
from hpctrain.runtime.world import current

T = TypeVar("T")

FIRST_BYTES = 4096
"""Size of the first message of a broadcast; larger objects need a second message."""

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class _Refusal:
    """A message that a rank sends instead of an object that it cannot pickle."""

    message: str


def broadcast_object(
    obj: T,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> T:
    """Return the ``obj`` of ``root_rank`` on every rank. Collective.

    May run concurrently with other operations, in any order.

    Args:
        obj: any object that cloudpickle supports, of any size; used only on the root.
        root_rank: a rank of the world that is in the process set.
        name: identifies the call on all ranks, if several threads make calls concurrently.
        process_set: the ranks that take part; None for all.

    Returns:
        A copy; on ``root_rank``, ``obj`` itself.

    Raises:
        ConfigError: ``root_rank`` or this rank is not in the process set.
        HorovodInternalError: ``root_rank`` cannot pickle the object; raised on every rank.
    """
    is_root = current().topology.rank == root_rank
    root = in_set(process_set, root_rank)
    data, failure = _pickled(obj) if is_root else (b"", None)
    received = _broadcast_bytes(data, root, f"broadcast.{name or 'object'}", process_set)
    if is_root and failure is None:
        return obj
    return cast("T", _unpickled(received, failure))


def allgather_object(
    obj: T, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> list[T]:
    """Return the objects of all ranks, by rank, on every rank. Collective.

    May run concurrently with other operations, in any order.

    Args:
        obj: any object that cloudpickle supports, of any size.
        name: identifies the call on all ranks, if several threads make calls concurrently.
        process_set: the ranks that take part; None for all.

    Raises:
        ConfigError: this rank is not in the process set.
        HorovodInternalError: a rank cannot pickle its object; raised on every rank.
    """
    data, failure = _pickled(obj)
    controller = current().sets.controller(process_set)
    request = Request(Kind.ALLGATHER, f"allgather.{name or 'object'}", [_framed(data)])
    gathered = host_bytes(controller.run(request)[0])
    pieces: list[memoryview] = []
    while gathered.nbytes:
        pieces.append(_content(gathered))
        gathered = gathered[_LENGTH_BYTES + pieces[-1].nbytes :]
    return [_unpickled(piece, failure) for piece in pieces]


def _pickled(obj: object) -> tuple[bytes, BaseException | None]:
    """Pickle an object; if that fails, return a pickled ``_Refusal`` and the error."""
    try:
        return cloudpickle.dumps(obj), None
    except Exception as error:  # pickling may raise anything, and the other ranks wait
        rank, kind = current().topology.rank, type(obj).__name__
        return pickle.dumps(_Refusal(f"rank {rank} cannot pickle its {kind}: {error}")), error


def _unpickled(data: memoryview, failure: BaseException | None) -> Any:
    """Unpickle an object; raise an error if a rank has sent a ``_Refusal`` instead.

    ``failure`` is the error of this rank, if any; it becomes the cause of the raised error.
    """
    value = unpickled(data)
    if isinstance(value, _Refusal):
        raise HorovodInternalError(value.message) from failure
    return value


def _framed(data: bytes, num_bytes: int = 0) -> Tensor:
    """Return a tensor with the length of ``data``, the data, and zeros up to ``num_bytes``."""
    frame = bytearray(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    return torch.frombuffer(frame.ljust(num_bytes, b"\0"), dtype=torch.uint8)


def _length(frame: memoryview) -> int:
    return int.from_bytes(frame[:_LENGTH_BYTES], "little")


def _content(frame: memoryview) -> memoryview:
    return frame[_LENGTH_BYTES : _LENGTH_BYTES + _length(frame)]


def _broadcast_bytes(
    data: bytes, root: int, name: str, process_set: ProcessSet | None
) -> memoryview:
    controller = current().sets.controller(process_set)
    whole = _framed(data, FIRST_BYTES)

    def send(part: Tensor, which: str) -> None:
        kind = Kind.BROADCAST
        controller.run(Request(kind, f"{name}.{which}", [part], in_place=True, root=root))

    send(whole[:FIRST_BYTES], "first")
    num_bytes = _LENGTH_BYTES + _length(host_bytes(whole))
    if num_bytes > FIRST_BYTES:
        if len(whole) < num_bytes:
            whole = torch.cat([whole, torch.empty(num_bytes - FIRST_BYTES, dtype=torch.uint8)])
        send(whole[FIRST_BYTES:num_bytes], "rest")
    return _content(host_bytes(whole))


def broadcast_tensors_(
    tensors: list[Tensor], root_rank: int, name: str, process_set: ProcessSet | None
) -> None:
    """Replace tensors by the tensors of ``root_rank``, in one named operation. Collective.

    Args:
        tensors: dense, on any device, with the same shapes and dtypes on every rank.
        root_rank: a rank of the world that is in the process set.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part; None for all.
    """
    if not tensors:
        return
    controller = current().sets.controller(process_set)
    root = in_set(process_set, root_rank)
    given = [tensor.detach() for tensor in tensors]
    controller.run(Request(Kind.BROADCAST, f"broadcast.{name}", given, in_place=True, root=root))
