"""A watchdog that ends tests that hang.

When a test exceeds its time limit, or when another rank has failed in the test, all ranks print
their stacks and exit. ``tests/session.py`` then starts a new session with the tests that follow.
"""

import faulthandler
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mpi4py import MPI

from tests.harness.journal import append
from tests.harness.pace import slowness
from tests.harness.verdict import Voice

HANG_S = float(os.environ.get("TEST_HANG_S", "60"))
"""Limit of a test without the marker ``limit``; 0 disables the limit, for a debugger."""

LAUNCHES = 3
"""Factor on the limit of tests that start ranks: concurrent imports are slow."""

SOON_S = 3.0
"""Time that the other ranks get to finish the test after one rank has failed."""

TICK_S = 0.2
"""Interval at which a rank checks whether another rank has failed."""

GRACE_S = 8.0
"""Longest time between the limit and the end, for ranks that are slow on a loaded machine."""

FORWARD_S = 0.5
"""Time for mpirun to forward the output of the ranks; output after that is dropped."""


class Roll:
    """Shared memory with two flags per rank: "has printed its stacks" and "has failed".

    The constructor is collective. Ranks on different hosts cannot share memory; the
    watchdog then waits for the whole grace period.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.rank, self.size = comm.rank, comm.size
        name = f"{tempfile.gettempdir()}/hpctrain-roll-{os.getpid()}-{time.time_ns()}"
        path = Path(comm.bcast(name))
        with path.open("ab+") as file:
            # truncate() keeps the content if another rank has already set this size
            file.truncate(2 * comm.size)
            self._bytes = mmap.mmap(file.fileno(), 2 * comm.size)
        comm.Barrier()
        path.unlink(missing_ok=True)

    def set_printed(self, has_printed: bool) -> None:
        """Set whether this rank has printed its stacks; False if the test ends normally."""
        self._bytes[self.rank] = has_printed

    @property
    def all_have_printed(self) -> bool:
        """True if every rank has printed its stacks."""
        return 0 not in self._bytes[: self.size]

    def set_failed(self, has_failed: bool) -> None:
        """Set whether this rank has failed and waits for the other ranks."""
        self._bytes[self.size + self.rank] = has_failed

    @property
    def any_has_failed(self) -> bool:
        """True if a rank has failed in the current test."""
        return any(self._bytes[self.size :])


def limit_of(item: pytest.Item) -> float:
    """Return the limit of a test and its fixtures in seconds; 0 means no limit."""
    if (mark := item.get_closest_marker("limit")) and HANG_S:
        return mark.args[0]
    return LAUNCHES * HANG_S if item.get_closest_marker("launches") else HANG_S


class Watchdog:
    """End the session if a test exceeds its time limit, or has failed on another rank."""

    def __init__(
        self, nodeid: str, limit_s: float, voice: Voice, roll: Roll, report: Path | None
    ) -> None:
        self._nodeid, self._limit_s = nodeid, limit_s
        self._voice, self._roll, self._report = voice, roll, report
        self._over = threading.Event()
        self._start_s = time.monotonic()
        self._failed_since_s: float | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._backup(self._limit_s)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()

    def _backup(self, limit_s: float) -> None:
        """Arm a timer signal as a backup: C code that holds the GIL blocks the watchdog thread."""
        if not self._over.is_set():
            faulthandler.dump_traceback_later(limit_s + GRACE_S / 2, file=self._voice.stream)
            signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)

    def _watch(self) -> None:
        tick_s = TICK_S if self._roll.size > 1 else self._limit_s
        while not self._over.wait(tick_s):
            waited_s = time.monotonic() - self._start_s
            if self._is_left_alone():
                self._end(f"still runs {SOON_S:g} s after another rank failed")
                return
            if waited_s >= self._limit_s:
                limit_s = self._limit_s * slowness()
                if waited_s >= limit_s:
                    self._end(f"still runs after {self._limit_s:g} s")
                    return
                self._backup(limit_s - waited_s)
                tick_s = TICK_S

    def _is_left_alone(self) -> bool:
        if not self._roll.any_has_failed:
            self._failed_since_s = None
            return False
        now_s = time.monotonic()
        self._failed_since_s = self._failed_since_s or now_s
        return now_s - self._failed_since_s > SOON_S and (
            now_s - self._failed_since_s > SOON_S * slowness()
        )

    def _end(self, reason: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        if not self._roll.any_has_failed:
            self.record(reason)
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            self._voice.say(f"{self._nodeid} {reason}", *file)
        self._roll.set_printed(True)
        # mpirun kills all ranks when the first one exits, so every rank first waits until all have
        # printed.
        while not self._roll.all_have_printed:
            if self._over.wait(0.05):
                self._roll.set_printed(False)
                return
        time.sleep(FORWARD_S)
        os.kill(os.getpid(), signal.SIGALRM)

    def record(self, reason: str) -> None:
        """Write to the journal the reason why the session may end with this test."""
        if self._report is not None:
            entry = {"ended": self._nodeid, "rank": self._roll.rank, "reason": reason}
            append(self._report, entry)


@contextmanager
def watched(watchdog: Watchdog) -> Iterator[None]:
    """Run a watchdog during the block."""
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
