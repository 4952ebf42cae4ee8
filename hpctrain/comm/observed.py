"""A communicator with listeners, which hear of every operation when it is over."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.traffic import Traffic

_OPERATIONS = (
    "allreduce_",
    "allreduce",
    "reduce_scatter",
    "all_gather",
    "alltoall",
    "broadcast_",
    "broadcast_object",
    "gather_object",
    "allgather_object",
    "send",
    "recv_",
    "barrier",
    "agree",
    "new_bucket",
)


class Call(NamedTuple):
    """One operation of this rank that is over."""

    rank: int
    """This rank's number in the communicator."""
    operation: str
    """Name of the method."""
    num_bytes: int | None
    """Bytes of the tensors that this rank gave; None where it gave none."""
    seconds: float
    """How long the call lasted; work that goes on after it is not in it."""
    traffic: Traffic
    """What the call moved, and how long it waited."""


class Listener(Protocol):
    """Hears of operations; it may be called from any thread that communicates."""

    def heard(self, call: Call) -> None:
        """Take note of an operation that is over."""


def observed(comm: Communicator, *listeners: Listener | None) -> Communicator:
    """Let ``listeners`` hear of what ``comm`` does; ``comm`` itself where there are none."""
    present = [listener for listener in listeners if listener is not None]
    if not present:
        return comm
    return cast("Communicator", ObservedCommunicator(comm, present))


class ObservedCommunicator:
    """Does what the communicator inside does; groups of it are heard by the same listeners."""

    def __init__(self, comm: Communicator, listeners: Sequence[Listener]) -> None:
        self._inside = comm
        self._listeners = tuple(listeners)

    def __getattr__(self, name: str) -> Any:
        """Find everything in the communicator inside, with a clock around what moves bytes."""
        found = getattr(self._inside, name)
        return self._timed(name, found) if name in _OPERATIONS else found

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """Make a group as the communicator inside does, with the same listeners."""
        made = self._inside.group(ranks)
        return None if made is None else observed(made, *self._listeners)

    def _timed(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = self._inside.traffic()
            start = time.perf_counter()
            result = method(*args, **kwargs)
            seconds = time.perf_counter() - start
            moved = self._inside.traffic().since(before)
            self._tell(Call(self._inside.rank, name, _num_bytes(args), seconds, moved))
            return result

        return call

    def _tell(self, call: Call) -> None:
        for listener in self._listeners:
            listener.heard(call)


def _num_bytes(args: tuple[Any, ...]) -> int | None:
    given = args[0] if args else None
    if isinstance(given, Bucket):
        given = given.flat
    parts: Sequence[object] = given if isinstance(given, list | tuple) else [given]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) < len(parts):
        return None
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
