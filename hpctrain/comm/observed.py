"""Listeners, which hear of every operation of a communicator: a trace, and a table at the end."""

import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator, Owner, Traffic
from hpctrain.comm.plan.plan import Measurement
from hpctrain.core.units import format_bytes, format_seconds

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
    "node_sum",
    "publish",
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
    """Does what the communicator inside does; the same listeners hear of its groups and levels."""

    def __init__(self, comm: Any, listeners: Sequence[Listener], prefix: str = "") -> None:
        self._inside = comm
        self._listeners = tuple(listeners)
        self._prefix = prefix

    @property
    def levels(self) -> Any:
        """The levels inside, if there are any."""
        found = self._inside.levels
        return found and ObservedCommunicator(found, self._listeners)

    @property
    def rail(self) -> Any:
        """The rail of levels, if this rank has one."""
        found = self._inside.rail
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
            self._tell(
                Call(self._inside.rank, self._prefix + name, _num_bytes(args), seconds, moved)
            )
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


class Trace:
    """Prints each operation as ``r3 | allreduce_       |   25.0 MiB |    1.84 ms``."""

    def heard(self, call: Call) -> None:
        """Print the line of ``call``."""
        size = "" if call.num_bytes is None else format_bytes(call.num_bytes)
        cells = (f"r{call.rank}", f"{call.operation:16}", f"{size:>10}")
        sys.stderr.write(f"{' | '.join(cells)} | {format_seconds(call.seconds):>10}\n")


REDUCTIONS = ("allreduce_", "allreduce")
"""Operations whose bandwidth the probe has measured too."""


@dataclass(slots=True)
class Count:
    """What one rank has spent on one operation so far."""

    calls: int = 0
    num_bytes: int = 0
    """Bytes of the tensors that it gave."""
    node_bytes: int = 0
    """Bytes that it read or wrote in the memory of its node."""
    rail_bytes: int = 0
    """Bytes that it sent by messages, over the rail above all."""
    seconds: float = 0.0
    waited_s: float = 0.0

    def add(self, call: Call) -> None:
        """Count one more call."""
        self.calls += 1
        self.num_bytes += call.num_bytes or 0
        self.node_bytes += call.traffic.node_bytes
        self.rail_bytes += call.traffic.rail_bytes
        self.seconds += call.seconds
        self.waited_s += call.traffic.waited_s


class Statistics:
    """Counts the operations of this rank, and at the end tells those of all ranks."""

    def __init__(self, comm: Communicator, best_bandwidth: float | None = None) -> None:
        """Begin at nothing.

        ``comm``, which gathers the counts at the end, is not the one that is listened to;
        ``best_bandwidth`` is the highest that a probe of all-reduce has seen, in bytes a second.
        """
        self._comm = comm
        self._best_bandwidth = best_bandwidth
        self._counts: dict[str, Count] = {}
        self._counting = threading.Lock()
        self._owner = Owner()

    def heard(self, call: Call) -> None:
        """Count ``call``."""
        with self._counting:
            self._counts.setdefault(call.operation, Count()).add(call)

    def report(self) -> None:
        """Print the table of all ranks on the standard error of rank 0.

        Collective: to be called only where every rank is known to come, or the others would wait
        for one that never does. Does nothing in forked children.
        """
        if not self._owner.is_here:
            return
        counts = self._comm.gather_object(self._counts)
        if counts is not None:
            sys.stderr.write(describe(counts, self._best_bandwidth))


def wanted_statistics(
    comm: Communicator, measured: Iterable[Measurement], *, here: bool
) -> Statistics | None:
    """Make the statistics if rank 0 wants them: all ranks count, or none does. Collective.

    ``measured`` is what the probe of the plan has seen.
    """
    if not comm.broadcast_object(here):
        return None
    bandwidths = (m.num_bytes / m.seconds for m in measured if m.what == "tensors" and m.seconds)
    return Statistics(comm, max(bandwidths, default=None))


def describe(
    counts_by_rank: Sequence[Mapping[str, Count]], best_bandwidth: float | None = None
) -> str:
    """Return the table: a line per operation, the one that took most time first.

    ``best_bandwidth`` is in bytes a second; its column is left out without it.

    Returns:
        Lines. Calls and bytes are means over the ranks, times are sums over the calls, with the
        smallest, the mean and the largest over the ranks. Bandwidth is bytes given by mean time.
    """
    names = {name: None for counts in counts_by_rank for name in counts}
    lines = [(name, [counts.get(name, Count()) for counts in counts_by_rank]) for name in names]
    lines.sort(key=lambda line: -sum(count.seconds for count in line[1]))
    heads = ["operation", "calls", "given", "node memory", "sent"]
    heads += ["time min", "avg", "max", "waited min", "avg", "max", "bandwidth"]
    if best_bandwidth is not None:
        heads.append("of probed best")
    rows = [heads] + [_row(name, counts, best_bandwidth) for name, counts in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    size = len(counts_by_rank)
    title = f"hpctrain: what {size} rank{'s' * (size > 1)} communicated, per rank"
    return "\n".join([title, *(_line(row, widths) for row in rows), ""])


def _row(name: str, counts: Sequence[Count], best_bandwidth: float | None) -> list[str]:
    calls, num_bytes, node_bytes, rail_bytes, seconds, _ = map(
        fmean, zip(*map(astuple, counts), strict=True)
    )
    bandwidth = num_bytes / seconds if num_bytes and seconds else None
    row = [name, f"{calls:.10g}"]
    row += [format_bytes(n) if n else "" for n in (num_bytes, node_bytes, rail_bytes)]
    row += _spread([count.seconds for count in counts])
    row += _spread([count.waited_s for count in counts])
    row.append("" if bandwidth is None else f"{format_bytes(bandwidth)}/s")
    if best_bandwidth is not None:
        compared = bandwidth is not None and name in REDUCTIONS
        row.append(f"{bandwidth / best_bandwidth:.0%}" if compared and bandwidth else "")
    return row


def _spread(values: Sequence[float]) -> list[str]:
    return [format_seconds(value) for value in (min(values), fmean(values), max(values))]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
    cells[0] = row[0].ljust(widths[0])
    return "  ".join(cells).rstrip()
