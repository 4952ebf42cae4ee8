"""``HPCTRAIN_TRACE=1``: one aligned line per collective, on standard error."""

import sys
import time
from typing import Any

from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.units import format_bytes, format_seconds

_TRACED = (
    "allreduce_",
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


class TracedCommunicator:
    """A communicator that tells what it does; everything else is the communicator it wraps.

    A line reads ``r3 | allreduce_       |   25.0 MiB |  1.84 ms``; of an operation that is still
    under way when the call returns, the time is that of the call.
    """

    def __init__(self, comm: Communicator) -> None:
        self._traced = comm

    def __getattr__(self, name: str) -> Any:
        """Find everything in the wrapped communicator, with a clock around what moves bytes."""
        found = getattr(self._traced, name)
        return self._timed(name, found) if name in _TRACED else found

    def _timed(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = method(*args, **kwargs)
            seconds = time.perf_counter() - start
            cells = (f"r{self._traced.rank}", f"{name:16}", f"{_size(args):>10}")
            sys.stderr.write(f"{' | '.join(cells)} | {format_seconds(seconds):>10}\n")
            return result

        return call


def _size(args: tuple[Any, ...]) -> str:
    value = args[0] if args else None
    tensor = value.flat if isinstance(value, Bucket) else value
    return format_bytes(tensor.numel() * tensor.itemsize) if isinstance(tensor, Tensor) else ""
