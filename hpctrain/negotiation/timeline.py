"""Trace of named operations in a file; records are cheap, and written when asked for.

One row per tensor, as Horovod's timeline has them.
"""

import atexit
import enum
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from hpctrain.comm.communicator import Traffic

RANK = "{rank}"
"""Where a path has this, every rank writes a file of its own."""

_END = b"\n]\n"
_LOG = logging.getLogger(__name__)


class Timelines:
    """Begins and ends timelines of this rank, one at a time. Not collective."""

    def __init__(self, rank: int, size: int) -> None:
        self.current: Timeline | None = None
        """What to record in; to be asked for again for every operation."""
        self._rank, self._size = rank, size

    def start(self, path: str | Path, *, mark_cycles: bool = False) -> None:
        """Record from now on; another timeline ends, the same one goes on.

        Args:
            path: the file. Rank 0 alone records, unless it has ``{rank}``, for which the number
                of each rank is put in. A file that cannot be made is a warning.
            mark_cycles: whether to mark each round of the controller.
        """
        if RANK not in str(path) and self._rank != 0:
            return
        path = Path(str(path).replace(RANK, str(self._rank)))
        if self.current is not None and self.current.path == path:
            return
        self.stop()
        try:
            self.current = Timeline(path, self._rank, self._size, mark_cycles=mark_cycles)
        except OSError as error:
            _LOG.warning("there will be no timeline: %s; name a file that can be made", error)
            return
        atexit.register(self.stop)

    def stop(self) -> None:
        """Write what there is and end the timeline. Harmless without one."""
        ending, self.current = self.current, None
        if ending is not None:
            atexit.unregister(self.stop)
            ending.close()


class What(enum.Enum):
    """What was recorded."""

    NEGOTIATE = "negotiate"
    READY = "ready"
    START = "start"
    PHASE = "phase"
    END = "end"
    """Of the innermost of the three above that is open."""
    CYCLE = "cycle"

    __hash__ = object.__hash__  # Enum's own is a function in Python


Record = tuple[int, What, str, Any, Any]
"""When in nanoseconds of ``time.perf_counter_ns``, what, name of the tensor, two details."""


class _Row(NamedTuple):
    """A tensor in the file."""

    number: int
    open: list[int]
    """When each slice that has not ended began, the outermost first."""


class Events:
    """Turns records into events; keeps which tensors there are and what of each is open."""

    def __init__(self, rank: int, size: int) -> None:
        self._origin_ns = time.perf_counter_ns()
        self._began_us = time.time_ns() // 1000
        self._rank, self._size = rank, size
        self._rows: dict[str, _Row] = {}

    def head(self) -> list[str]:
        """Return the events that a file begins with."""
        about = {
            "start_time_since_epoch_in_micros": self._began_us,
            "rank": self._rank,
            "size": self._size,
        }
        return [
            _metadata("process_name", 0, {"name": f"rank {self._rank}"} | about),
            _metadata("process_sort_index", 0, {"sort_index": 0}),
        ]

    def of(self, record: Record) -> Iterator[str]:
        """Return the events of one record."""
        when, what, name, first, second = record
        if what is What.CYCLE:
            yield f'{{"ph":"i","name":"CYCLE_START","s":"g",{self._place(when, 0)}}}'
            return
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = _Row(len(self._rows) + 1, [])
            yield _metadata("process_name", row.number, {"name": name})
            yield _metadata("process_sort_index", row.number, {"sort_index": row.number})
        place = self._place(when, row.number)
        if what is What.READY:
            yield f'{{"ph":"X","name":"{first}","cat":"RANK_READY","dur":0,{place}}}'
        elif what is What.END:
            yield from self._end(row, when, first)
        else:
            row.open.append(when)
            yield f'{{"ph":"B","name":{_title(what, first)},{place}{_size(second)}}}'

    def _end(self, row: _Row, when: int, moved: Traffic | None) -> Iterator[str]:
        if not row.open:
            return  # it began before the timeline did
        began = row.open.pop()
        place, args = self._place(when, row.number), ""
        if moved is not None and any(moved):
            args = (
                f',"args":{{"node_bytes":{moved.node_bytes},"rail_bytes":{moved.rail_bytes},'
                f'"waited_s":{moved.waited_s:.9f},"rail_s":{moved.rail_s:.9f}}}'
            )
            for title, start, nanoseconds in _parts(began, when, moved):
                inside = self._place(start, row.number)
                yield f'{{"ph":"X","name":"{title}","dur":{nanoseconds / 1000:.3f},{inside}}}'
        yield f'{{"ph":"E",{place}{args}}}'

    def _place(self, when: int, number: int) -> str:
        return f'"ts":{(when - self._origin_ns) / 1000:.3f},"pid":{number},"tid":0'


def _parts(began: int, ended: int, moved: Traffic) -> Iterator[tuple[str, int, int]]:
    """Divide a phase into what it waited, what its rail took and the rest.

    Their lengths are what was measured, all in all; that they follow each other is not: a phase
    may have many waits.
    """
    whole = ended - began
    waited = min(int(moved.waited_s * 1e9), whole)
    rail = min(int(moved.rail_s * 1e9), whole - waited)
    if not moved.node_bytes:
        rail = whole - waited if moved.rail_bytes else 0
    node = whole - waited - rail if moved.node_bytes else 0
    for title, length in (("WAIT", waited), ("RAIL", rail), ("NODE", node)):
        if length:
            yield title, began, length
        began += length


@cache
def _title(what: What, title: object) -> str:
    text = (title.name if isinstance(title, enum.Enum) else str(title)).upper()
    return json.dumps(f"NEGOTIATE_{text}" if what is What.NEGOTIATE else text)


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f',"args":{{"bytes":{num_bytes}}}'


def _metadata(name: str, number: int, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "name": name, "pid": number, "tid": 0, "args": args})


class TraceFile:
    """An array of events in Chrome's trace format, which Perfetto opens too.

    What follows the last event is written anew with every batch of events: a process that is
    killed leaves a file that any JSON reader takes.
    """

    def __init__(self, path: Path) -> None:
        """Make the file, or empty it.

        Raises:
            OSError: it cannot be written.
        """
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._num_bytes = 0

    def append(self, events: Sequence[str]) -> None:
        """Write some events, each a JSON object.

        Raises:
            OSError: the disk is full, or the like; what was there before is whole.
        """
        if not events:
            return
        text = (",\n" if self._num_bytes else "[\n") + ",\n".join(events)
        data = text.encode()
        try:
            self._write(data + _END)
        except OSError:
            os.ftruncate(self._file, self._num_bytes)
            self._write(_END if self._num_bytes else b"")
            raise
        self._num_bytes += len(data)

    def _write(self, data: bytes) -> None:
        """Write behind the last event."""
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written:], self._num_bytes + written)

    def close(self) -> None:
        """Write nothing more."""
        os.close(self._file)


class Timeline:
    """A trace of the named operations of one rank; every method may be called from any thread.

    Names of phases are Horovod's. What a phase of communication moved is drawn inside it: ``WAIT``
    for other ranks, ``RAIL`` between nodes, ``NODE`` in the memory of the node.
    """

    def __init__(self, path: Path, rank: int, size: int, *, mark_cycles: bool = False) -> None:
        """Make the file.

        Args:
            path: the file, emptied if it exists.
            rank: of this process.
            size: number of ranks.
            mark_cycles: whether ``cycle`` leaves a mark.

        Raises:
            OSError: the file cannot be made.
        """
        self.path = path
        self._mark_cycles = mark_cycles
        self._events = Events(rank, size)
        self._file = TraceFile(path)
        self._file.append(self._events.head())
        self._records: deque[Record] = deque()
        self._writing = threading.Lock()
        self._is_open, self._is_over = True, False
        self._owner = os.getpid()

    def negotiate_start(self, name: str, kind: enum.Enum | str) -> None:
        """Note that this rank has announced an operation of this name."""
        self._add((perf_counter_ns(), What.NEGOTIATE, name, kind, None))

    def rank_ready(self, name: str, rank: int) -> None:
        """Note that ``rank`` is now known to have announced it."""
        self._add((perf_counter_ns(), What.READY, name, rank, None))

    def negotiate_end(self, name: str) -> None:
        """Note that all ranks have announced it."""
        self._add((perf_counter_ns(), What.END, name, None, None))

    def start(self, name: str, kind: enum.Enum | str, num_bytes: int | None = None) -> None:
        """Note that it is carried out now, with ``num_bytes`` of this rank."""
        self._add((perf_counter_ns(), What.START, name, kind, num_bytes))

    def phase_start(self, name: str, phase: str) -> None:
        """Note that a part begins, such as ``MEMCPY_IN_FUSION_BUFFER`` or ``MPI_ALLREDUCE``."""
        self._add((perf_counter_ns(), What.PHASE, name, phase, None))

    def phase_end(self, name: str, moved: Traffic | None = None) -> None:
        """Note that this part is over; ``moved`` is what the communicator did in it."""
        self._add((perf_counter_ns(), What.END, name, moved, None))

    def end(self, name: str) -> None:
        """Note that it is done."""
        self._add((perf_counter_ns(), What.END, name, None, None))

    def cycle(self) -> None:
        """Note that the controller begins another round."""
        if self._mark_cycles:
            self._add((perf_counter_ns(), What.CYCLE, "", None, None))

    def flush(self) -> None:
        """Write what there is: it stays in the file however this process ends."""
        if os.getpid() != self._owner:
            return  # a forked child must not write between the lines of its parent
        with self._writing:
            if self._is_over:
                return
            events: list[str] = []
            for _ in range(len(self._records)):
                events += self._events.of(self._records.popleft())
            try:
                self._file.append(events)
            except OSError as error:
                _LOG.warning("the timeline %s ends here: %s", self.path, error)
                self._is_open = False

    def close(self) -> None:
        """Write what there is and end; nothing is recorded any more. Harmless when repeated."""
        self._is_open = False
        self.flush()
        with self._writing:
            if not self._is_over and os.getpid() == self._owner:
                self._is_over = True
                self._file.close()

    def _add(self, record: Record) -> None:
        if self._is_open:
            self._records.append(record)
