"""Listeners for the operations of a communicator: a trace, and a table of statistics."""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Any, NamedTuple, cast

from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.operation_result import Traffic
from hpctrain.comm.owner import Owner
from hpctrain.core.units import format_bytes, format_seconds

_OPERATIONS = {
    *("allreduce_", "allreduce", "reduce_scatter", "all_gather", "alltoall", "broadcast_"),
    *("broadcast_object", "gather_object", "allgather_object", "send", "recv_", "barrier"),
    *("agree", "new_bucket", "reduce_node", "publish"),
}


class ObservedCall(NamedTuple):
    """A completed call of an operation on this rank."""

    rank: int  # this rank in the communicator
    operation: str  # name of the method
    num_bytes: int | None  # bytes of the input tensors of this rank; None without tensors
    seconds: float  # duration of the call, without asynchronous work after its return
    traffic: Traffic  # bytes sent and seconds waited in the call


Listener = Callable[[ObservedCall], object]
"""Called after each operation, on the thread of the operation."""


def observed(comm: Communicator, *listeners: Listener | None) -> Communicator:
    """Return a communicator that reports calls of ``comm``; ``comm`` if there is no listener."""
    present = [listener for listener in listeners if listener is not None]
    if not present:
        return comm
    return cast("Communicator", ObservedCommunicator(comm, present))


class ObservedCommunicator:
    """Reports each operation of a communicator, its groups and its rail to listeners.

    Args:
        comm: the communicator.
        listeners: called after each operation.
        prefix: prefix of the names of operations in reports.
    """

    def __init__(self, comm: Any, listeners: Sequence[Listener], prefix: str = "") -> None:
        self._inside = comm
        self._listeners = tuple(listeners)
        self._prefix = prefix

    @property
    def internode(self) -> Any:
        """``internode`` of the communicator, with the same listeners."""
        found = self._inside.internode
        if found is self._inside:
            return self
        return found and ObservedCommunicator(found, self._listeners, "rail.")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the communicator; calls of an operation are reported."""
        found = getattr(self._inside, name)
        return self._timed(name, found) if name in _OPERATIONS else found

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """Create a group with the same listeners."""
        made = self._inside.group(ranks)
        return None if made is None else observed(made, *self._listeners)

    def _timed(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = self._inside.traffic()
            start = time.perf_counter()
            result = method(*args, **kwargs)
            seconds = time.perf_counter() - start
            moved = self._inside.traffic().since(before)
            observation = ObservedCall(
                self._inside.rank, self._prefix + name, _num_bytes(args), seconds, moved
            )
            for listener in self._listeners:
                listener(observation)
            return result

        return call


def _num_bytes(args: tuple[Any, ...]) -> int | None:
    given = args[0] if args else None
    if isinstance(given, Bucket):
        given = given.flat
    parts: Sequence[object] = given if isinstance(given, list | tuple) else [given]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) < len(parts):
        return None
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def trace(call: ObservedCall) -> None:
    """Print a call to standard error as ``r3 | allreduce_       |   25.0 MiB |    1.84 ms``."""
    size = "" if call.num_bytes is None else format_bytes(call.num_bytes)
    cells = (f"r{call.rank}", f"{call.operation:16}", f"{size:>10}")
    sys.stderr.write(f"{' | '.join(cells)} | {format_seconds(call.seconds):>10}\n")


@dataclass(slots=True)
class Count:
    """Counters of one operation on one rank."""

    calls: int = 0
    num_bytes: int = 0  # bytes of input tensors
    node_bytes: int = 0  # bytes read or written in node memory
    rail_bytes: int = 0  # bytes sent by messages, mostly over the rail
    seconds: float = 0.0
    waited_s: float = 0.0

    def add(self, call: ObservedCall) -> None:
        """Add the bytes and seconds of ``call``."""
        self.calls += 1
        self.num_bytes += call.num_bytes or 0
        self.node_bytes += call.traffic.node_bytes
        self.rail_bytes += call.traffic.rail_bytes
        self.seconds += call.seconds
        self.waited_s += call.traffic.waited_s


class Statistics:
    """A listener that counts the operations of this rank and prints statistics of all ranks.

    Args:
        comm: gathers the counters for the report; must not be an observed communicator.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.counts: dict[str, Count] = {}  # by operation
        self._counting = threading.Lock()
        self._owner = Owner()

    def __call__(self, call: ObservedCall) -> None:
        """Add ``call`` to the counters of its operation."""
        with self._counting:
            self.counts.setdefault(call.operation, Count()).add(call)

    def report(self) -> None:
        """Print the table of all ranks to standard error on rank 0. Collective.

        A no-op in forked children. If a rank does not call this method, the other ranks wait
        until their limit.
        """
        if not self._owner.is_here:
            return
        counts = self._comm.gather_object(self.counts)
        if counts is not None:
            sys.stderr.write(describe(counts))


def describe(counts_by_rank: Sequence[Mapping[str, Count]]) -> str:
    """Return the table with one line per operation, sorted by decreasing time.

    Calls and bytes are means over the ranks. Times are sums over the calls; the table has their
    minimum, mean and maximum over the ranks. Bandwidth is input bytes divided by mean time.
    """
    names = {name: None for counts in counts_by_rank for name in counts}
    lines = [(name, [counts.get(name, Count()) for counts in counts_by_rank]) for name in names]
    lines.sort(key=lambda line: -sum(count.seconds for count in line[1]))
    heads = ["operation", "calls", "input", "node memory", "sent"]
    heads += ["time min", "avg", "max", "waited min", "avg", "max", "bandwidth"]
    rows = [heads] + [_row(name, counts) for name, counts in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    size = len(counts_by_rank)
    text = [f"hpctrain: communication of {size} rank{'s' * (size > 1)}, means per rank"]
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    return "\n".join([*text, ""])


def _row(name: str, counts: Sequence[Count]) -> list[str]:
    calls, num_bytes, node_bytes, rail_bytes, seconds, _ = map(
        fmean, zip(*map(astuple, counts), strict=True)
    )
    row = [name, f"{calls:.10g}"]
    row += [format_bytes(n) if n else "" for n in (num_bytes, node_bytes, rail_bytes)]
    for times in ([count.seconds for count in counts], [count.waited_s for count in counts]):
        row += [format_seconds(value) for value in (min(times), fmean(times), max(times))]
    return [*row, f"{format_bytes(num_bytes / seconds)}/s" if num_bytes and seconds else ""]
