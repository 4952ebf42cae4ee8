"""Listeners, which hear of every operation of a communicator: a trace, and a table at the end."""

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
    """One operation of this rank that is over."""

    rank: int  # this rank's number in the communicator
    operation: str  # name of the method
    num_bytes: int | None  # bytes of the tensors that this rank gave; None where it gave none
    seconds: float  # how long the call lasted; work that goes on after it is not in it
    traffic: Traffic  # what the call moved, and how long it waited


Listener = Callable[[ObservedCall], object]
"""Hears of an operation that is over; on any thread that communicates."""


def observed(comm: Communicator, *listeners: Listener | None) -> Communicator:
    """Let ``listeners`` hear of what ``comm`` does; ``comm`` itself where there are none."""
    present = [listener for listener in listeners if listener is not None]
    if not present:
        return comm
    return cast("Communicator", ObservedCommunicator(comm, present))


class ObservedCommunicator:
    """Reports each call of the communicator inside, of its groups and its rail to listeners."""

    def __init__(self, comm: Any, listeners: Sequence[Listener], prefix: str = "") -> None:
        self._inside = comm
        self._listeners = tuple(listeners)
        self._prefix = prefix

    @property
    def internode(self) -> Any:
        """The ranks of the other nodes, with the same listeners."""
        found = self._inside.internode
        if found is self._inside:
            return self
        return found and ObservedCommunicator(found, self._listeners, "rail.")

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
            heard = ObservedCall(
                self._inside.rank, self._prefix + name, _num_bytes(args), seconds, moved
            )
            for listener in self._listeners:
                listener(heard)
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
    """Print an operation as ``r3 | allreduce_       |   25.0 MiB |    1.84 ms``."""
    size = "" if call.num_bytes is None else format_bytes(call.num_bytes)
    cells = (f"r{call.rank}", f"{call.operation:16}", f"{size:>10}")
    sys.stderr.write(f"{' | '.join(cells)} | {format_seconds(call.seconds):>10}\n")


@dataclass(slots=True)
class Count:
    """What one rank has spent on one operation so far."""

    calls: int = 0
    num_bytes: int = 0  # bytes of the tensors that it gave
    node_bytes: int = 0  # bytes that it read or wrote in the memory of its node
    rail_bytes: int = 0  # bytes that it sent by messages, over the rail above all
    seconds: float = 0.0
    waited_s: float = 0.0

    def add(self, call: ObservedCall) -> None:
        """Count one more call."""
        self.calls += 1
        self.num_bytes += call.num_bytes or 0
        self.node_bytes += call.traffic.node_bytes
        self.rail_bytes += call.traffic.rail_bytes
        self.seconds += call.seconds
        self.waited_s += call.traffic.waited_s


class Statistics:
    """A listener that counts the operations of this rank; at the end it tells those of all."""

    def __init__(self, comm: Communicator) -> None:
        """Begin at nothing; ``comm`` gathers the counts at the end, and is not listened to."""
        self._comm = comm
        self.counts: dict[str, Count] = {}  # by operation
        self._counting = threading.Lock()
        self._owner = Owner()

    def __call__(self, call: ObservedCall) -> None:
        """Count ``call``."""
        with self._counting:
            self.counts.setdefault(call.operation, Count()).add(call)

    def report(self) -> None:
        """Print the table of all ranks on the standard error of rank 0; not in forked children.

        Collective: to be called only where every rank is known to come, or the others would wait
        for one that never does.
        """
        if not self._owner.is_here:
            return
        counts = self._comm.gather_object(self.counts)
        if counts is not None:
            sys.stderr.write(describe(counts))


def describe(counts_by_rank: Sequence[Mapping[str, Count]]) -> str:
    """Return the table: a line per operation, the one that took most time first.

    Calls and bytes are means over the ranks, times are sums over the calls, with the smallest, the
    mean and the largest over the ranks. Bandwidth is bytes given by mean time.
    """
    names = {name: None for counts in counts_by_rank for name in counts}
    lines = [(name, [counts.get(name, Count()) for counts in counts_by_rank]) for name in names]
    lines.sort(key=lambda line: -sum(count.seconds for count in line[1]))
    heads = ["operation", "calls", "given", "node memory", "sent"]
    heads += ["time min", "avg", "max", "waited min", "avg", "max", "bandwidth"]
    rows = [heads] + [_row(name, counts) for name, counts in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    size = len(counts_by_rank)
    text = [f"hpctrain: what {size} rank{'s' * (size > 1)} communicated, per rank"]
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
