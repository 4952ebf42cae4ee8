"""Timeline of named operations in a file, with one row per operation, as in Horovod.

Records are kept in memory until ``flush``, so recording is cheap.
"""

import atexit
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

from hpctrain.comm.operation_result import Traffic
from hpctrain.core.paths import absolute

RANK = "{rank}"  # if a path contains this, every rank writes a separate file

_END = b"\n]\n"
_LOG = logging.getLogger(__name__)


class Timelines:
    """Starts and stops timelines of this rank, one at a time. Not collective.

    Args:
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.current: Timeline | None = None
        """Timeline that records, or None; may change between two operations."""
        self._rank, self._size = rank, size

    def start(self, path: str | Path, *, mark_cycles: bool = False) -> None:
        """Stop the current timeline and start a new one; a no-op if the path is the same. Local.

        Logs a warning if the file cannot be created.

        Args:
            path: file to write. Only rank 0 records, unless ``path`` contains ``{rank}``, which is
                replaced by the rank.
            mark_cycles: mark each cycle of the controller.
        """
        name = str(absolute(path))
        if RANK not in name and self._rank != 0:
            return
        path = Path(name.replace(RANK, str(self._rank)))
        if self.current is not None and self.current.path == path:
            return
        self.stop()
        try:
            self.current = Timeline(path, self._rank, self._size, mark_cycles=mark_cycles)
        except OSError as error:
            _LOG.warning(
                "the timeline file must be writable, but opening it failed: %s; choose another "
                "file",
                error,
            )
            return
        atexit.register(self.stop)

    def stop(self) -> None:
        """Write all records and close the current timeline, if any."""
        ending, self.current = self.current, None
        if ending is not None:
            atexit.unregister(self.stop)
            ending.close()


class _Row(NamedTuple):
    """The row of one operation in the file."""

    number: int
    open: list[int]  # start of each open slice in ns, outermost first


class Timeline:
    """Writes a trace of the named operations of one rank to a file. Thread-safe.

    Slices of one operation are nested. A slice of communication contains slices for its parts:
    ``WAIT`` for other ranks, ``RAIL`` between nodes, ``NODE`` in the memory of the node.

    The file is an array of events in Chrome's trace format, which Perfetto also opens. Each batch
    of events overwrites the closing bracket of the array and ends with a new bracket, so the file
    is valid JSON even if the process is killed.

    Args:
        path: file to create or truncate.
        rank: this rank.
        size: number of ranks.
        mark_cycles: record ``cycle`` events.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, rank: int, size: int, *, mark_cycles: bool = False) -> None:
        self.path = path
        self._mark_cycles = mark_cycles
        self._origin_ns = perf_counter_ns()
        self._rows: dict[str, _Row] = {}
        about = {
            "start_time_since_epoch_in_micros": time.time_ns() // 1000,
            "rank": rank,
            "size": size,
        }
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._num_bytes = 0
        self._append(_head(0, f"rank {rank}", about))
        # Time in ns, phase of Chrome's format, name of the tensor, title, details.
        self._records: deque[tuple[int, str, str, Any, Any]] = deque()
        self._writing = threading.Lock()
        self._is_open, self._is_over = True, False
        self._owner = os.getpid()

    def begin(self, name: str, title: str, num_bytes: int | None = None) -> None:
        """Record that a slice of operation ``name`` begins; ``num_bytes`` is its size."""
        self._add("B", name, title, num_bytes)

    def end(self, name: str, moved: Traffic | None = None) -> None:
        """Record the end of the innermost slice of ``name``; ``moved`` is the slice's traffic."""
        self._add("E", name, None, moved)

    def rank_ready(self, name: str, rank: int) -> None:
        """Record that ``rank`` has announced operation ``name``."""
        self._add("X", name, rank, None)

    def cycle(self) -> None:
        """Record that the controller begins a cycle; a no-op without ``mark_cycles``."""
        if self._mark_cycles:
            self._add("i", "", None, None)

    def flush(self) -> None:
        """Write all records to the file."""
        if os.getpid() != self._owner:
            return  # a forked child must not write to the file of its parent
        with self._writing:
            if self._is_over:
                return
            events: list[str] = []
            for _ in range(len(self._records)):
                events += self._events(*self._records.popleft())
            try:
                self._append(events)
            except OSError as error:
                _LOG.warning(
                    "the timeline %s ends here, because writing failed: %s", self.path, error
                )
                self._is_open = False

    def close(self) -> None:
        """Write all records and close the file; later records are ignored. Idempotent."""
        self._is_open = False
        self.flush()
        with self._writing:
            if not self._is_over and os.getpid() == self._owner:
                self._is_over = True
                os.close(self._file)

    def _append(self, events: Sequence[str]) -> None:
        """Append events to the file; after an ``OSError``, the file keeps the earlier events."""
        if not events:
            return
        data = ((",\n" if self._num_bytes else "[\n") + ",\n".join(events)).encode()
        try:
            self._write(data + _END)
        except OSError:
            os.ftruncate(self._file, self._num_bytes)
            self._write(_END if self._num_bytes else b"")
            raise
        self._num_bytes += len(data)

    def _write(self, data: bytes) -> None:
        """Write ``data`` after the last event."""
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written:], self._num_bytes + written)

    def _add(self, phase: str, name: str, title: object, details: object) -> None:
        if self._is_open:
            self._records.append((perf_counter_ns(), phase, name, title, details))

    def _events(self, when: int, phase: str, name: str, title: Any, details: Any) -> Iterator[str]:
        """Yield the events of one record, as JSON."""
        if phase == "i":
            yield f'{{"ph":"i","name":"CYCLE_START","s":"g",{self._place(when, 0)}}}'
            return
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = _Row(len(self._rows) + 1, [])
            yield from _head(row.number, name, {})
        place = self._place(when, row.number)
        if phase == "X":
            yield f'{{"ph":"X","name":"{title}","cat":"RANK_READY","dur":0,{place}}}'
        elif phase == "B":
            row.open.append(when)
            size = "" if details is None else f',"args":{{"bytes":{details}}}'
            yield f'{{"ph":"B","name":{_quoted(title)},{place}{size}}}'
        elif row.open:  # a slice may have begun before the timeline
            began, args = row.open.pop(), ""
            if details is not None and any(details):
                args = f',"args":{json.dumps(details._asdict())}'
                for part, start, length in _parts(began, when, details):
                    inside = f'"dur":{length / 1000:.3f},{self._place(start, row.number)}'
                    yield f'{{"ph":"X","name":"{part}",{inside}}}'
            yield f'{{"ph":"E",{place}{args}}}'

    def _place(self, when: int, number: int) -> str:
        return f'"ts":{(when - self._origin_ns) / 1000:.3f},"pid":{number},"tid":0'


def _parts(began: int, ended: int, moved: Traffic) -> Iterator[tuple[str, int, int]]:
    """Divide a slice into waits, transfers between nodes, and work in node memory.

    The lengths are measured sums; the order is not measured, as a slice may contain several waits.
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


_quoted = cache(json.dumps)


def _head(number: int, name: str, about: dict[str, Any]) -> list[str]:
    """Return the events that describe a row."""
    place = {"ph": "M", "pid": number, "tid": 0}
    return [
        json.dumps({"name": "process_name", **place, "args": {"name": name, **about}}),
        json.dumps({"name": "process_sort_index", **place, "args": {"sort_index": number}}),
    ]
