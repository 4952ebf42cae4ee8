"""Python objects for all ranks of a process set, as named operations."""

import pickle
from typing import TypeVar, cast

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor

from hpctrain.core.errors import HorovodInternalError
from hpctrain.negotiation.request import Kind, Request
from hpctrain.runtime.process_sets import ProcessSet, global_process_set, in_set
from hpctrain.runtime.world import current

T = TypeVar("T")

FIRST_BYTES = 4096
"""Of the first message of a broadcast: most objects fit, and no second one follows."""

_LENGTH_BYTES = 8


class _Refusal(str):
    """Why a rank has nothing to send: it goes in place of the object."""

    __slots__ = ()


def broadcast_object(
    obj: T,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> T:
    """Return the ``obj`` of ``root_rank`` on every rank. Collective.

    May be under way beside other operations, in any order.

    Args:
        obj: anything that cloudpickle takes, of any size; only that of ``root_rank`` counts.
        root_rank: a rank of the world that is in the set.
        name: by which ranks find each other's calls, where several threads make some at once.
        process_set: who takes part.

    Returns:
        A copy, on ``root_rank`` ``obj`` itself.

    Raises:
        ConfigError: ``root_rank`` or this rank is not in the set.
        HorovodInternalError: ``root_rank`` cannot pickle the object; on every rank.
    """
    is_root = current().topology.rank == root_rank
    root = in_set(process_set, root_rank)
    data, failure = _pickled(obj) if is_root else (b"", None)
    try:
        received = _broadcast_bytes(data, root, f"broadcast.{name or 'object'}", process_set)
    except HorovodInternalError as error:
        raise error from failure
    return obj if is_root else cast("T", pickle.loads(received))  # noqa: S301 - of our ranks


def allgather_object(
    obj: T, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> list[T]:
    """Return the objects of all ranks, by rank, on every rank. Collective.

    May be under way beside other operations, in any order.

    Args:
        obj: anything that cloudpickle takes, of any size.
        name: by which ranks find each other's calls, where several threads make some at once.
        process_set: who takes part.

    Raises:
        ConfigError: this rank is not in the set.
        HorovodInternalError: a rank cannot pickle its object; on every rank.
    """
    data, failure = _pickled(obj)
    controller = current().sets.controller(process_set)
    request = Request(Kind.ALLGATHER, f"allgather.{name or 'object'}", [_framed(data)])
    gathered = _bytes_of(controller.run(request)[0])
    pieces: list[memoryview] = []
    while gathered.nbytes:
        length = _LENGTH_BYTES + abs(_length(gathered))
        pieces.append(gathered[:length])
        gathered = gathered[length:]
    try:
        return [pickle.loads(_content(piece)) for piece in pieces]  # noqa: S301 - of our ranks
    except HorovodInternalError as error:
        raise error from failure


def _pickled(obj: object) -> tuple[bytes | _Refusal, BaseException | None]:
    try:
        return cloudpickle.dumps(obj), None
    except Exception as error:  # whatever the object raises: the others wait for an answer
        return _Refusal(
            f"rank {current().topology.rank} cannot pickle its {type(obj).__name__}: {error}"
        ), error


def _framed(data: bytes | _Refusal, num_bytes: int = 0) -> Tensor:
    """Put the length before the bytes, negative before a refusal, and zeros after them."""
    content = data.encode() if isinstance(data, _Refusal) else data
    length = -len(content) if isinstance(data, _Refusal) else len(content)
    head = length.to_bytes(_LENGTH_BYTES, "little", signed=True)
    frame = bytearray(head + content).ljust(num_bytes, b"\0")
    return torch.frombuffer(frame, dtype=torch.uint8)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.numpy().data


def _length(frame: memoryview) -> int:
    return int.from_bytes(frame[:_LENGTH_BYTES], "little", signed=True)


def _content(frame: memoryview) -> memoryview:
    length = _length(frame)
    content = frame[_LENGTH_BYTES : _LENGTH_BYTES + abs(length)]
    if length < 0:
        raise HorovodInternalError(bytes(content).decode())
    return content


def _broadcast_bytes(
    data: bytes | _Refusal, root: int, name: str, process_set: ProcessSet | None
) -> memoryview:
    controller = current().sets.controller(process_set)
    whole = _framed(data, FIRST_BYTES)

    def send(part: Tensor, which: str) -> None:
        kind = Kind.BROADCAST
        controller.run(Request(kind, f"{name}.{which}", [part], in_place=True, root=root))

    send(whole[:FIRST_BYTES], "first")
    num_bytes = _LENGTH_BYTES + abs(_length(_bytes_of(whole)))
    if num_bytes > FIRST_BYTES:
        if len(whole) < num_bytes:
            whole = torch.cat([whole, torch.empty(num_bytes - FIRST_BYTES, dtype=torch.uint8)])
        send(whole[FIRST_BYTES:num_bytes], "rest")
    return _content(_bytes_of(whole))


def broadcast_tensors_(
    tensors: list[Tensor], root_rank: int, name: str, process_set: ProcessSet | None
) -> None:
    """Replace tensors by those of ``root_rank``, all in one operation. Collective.

    Args:
        tensors: dense, on any device; of the same shapes and dtypes on every rank.
        root_rank: a rank of the world that is in the set.
        name: of the operation.
        process_set: who takes part.
    """
    if not tensors:
        return
    controller = current().sets.controller(process_set)
    root = in_set(process_set, root_rank)
    hosts = [tensor.detach().cpu() for tensor in tensors]
    request = Request(Kind.BROADCAST, f"broadcast.{name}", hosts, in_place=True, root=root)
    controller.run(request)
    for tensor, host in zip(tensors, hosts, strict=True):
        if not tensor.is_cpu:
            tensor.detach().copy_(host)
