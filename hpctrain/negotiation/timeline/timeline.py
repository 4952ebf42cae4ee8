"""Trace of named operations: records are cheap, and written when asked for or by a thread."""

import enum
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns

from hpctrain.comm.communicator import Traffic
from hpctrain.negotiation.timeline.events import Events, Record, What

GATHER_S = 0.05
"""How long after a first record the writer lets others gather."""

_LOG = logging.getLogger(__name__)


class Timeline:
    """A trace of the named operations of one rank; every method may be called from any thread.

    Names of phases are Horovod's. What a phase of communication moved is drawn inside it: ``WAIT``
    for other ranks, ``RAIL`` between nodes, ``NODE`` in the memory of the node.
    """

    def __init__(self, path: Path, rank: int, size: int, *, mark_cycles: bool = False) -> None:
        """Make the file and the thread that writes to it.

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
        self._is_awake = False
        self._wake = threading.Event()
        self._end = threading.Event()
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._write, name="hpctrain-timeline", daemon=True)
        self._thread.start()

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
            events: list[str] = []
            for _ in range(len(self._records)):
                events += self._events.of(self._records.popleft())
            try:
                self._file.append(events)
            except OSError as error:
                _LOG.warning("the timeline %s ends here: %s", self.path, error)
                self._give_up()

    def close(self) -> None:
        """Write what there is and end; nothing is recorded any more. Harmless when repeated."""
        if os.getpid() != self._owner or self._end.is_set():
            return  # a forked child has neither the thread nor a word to say
        self._end.set()
        self._wake.set()
        self._thread.join()

    def _add(self, record: Record) -> None:
        self._records.append(record)
        if not self._is_awake:
            self._is_awake = True
            self._wake.set()

    def _write(self) -> None:
        while not self._end.is_set():
            self._wake.wait()
            self._end.wait(GATHER_S)
            self._wake.clear()
            self._is_awake = False  # before the records are taken: later ones wake us again
            self.flush()
        self.flush()
        with self._writing:
            self._is_awake = True  # nobody wakes a thread that has ended
            self._give_up()
            self._file.close()

    def _give_up(self) -> None:
        """Take no further records."""
        self._records = deque(maxlen=0)


_END = b"\n]\n"


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
