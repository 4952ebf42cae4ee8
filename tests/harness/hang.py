"""No test hangs: after its limit every rank prints its stacks, then all end."""

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

from tests.harness.verdict import Voice

HANG_S = float(os.environ.get("HPCTRAIN_TEST_HANG_S", "60"))
"""Limit of a test without the marker ``limit``; 0 lets it run for ever, for a debugger."""

LAUNCHES = 3
"""Times as long for a test that starts ranks, beside others that do: imports alone take long."""

GRACE_S = 8.0
"""Longest time between the limit and the end, for ranks that a loaded machine keeps waiting."""

FORWARD_S = 0.5
"""Time that mpirun gets to hand on what the ranks have printed: it drops the rest at the end."""


class Roll:
    """Which ranks have printed their stacks: one byte of shared memory for each."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Collective. On several hosts the roll of none is ever full: all take the whole grace."""
        self.rank = comm.rank
        name = f"{tempfile.gettempdir()}/hpctrain-roll-{os.getpid()}-{time.time_ns()}"
        path = Path(comm.bcast(name))
        with path.open("ab+") as file:
            file.truncate(comm.size)  # where it has this size already, nothing is lost
            self.ranks = mmap.mmap(file.fileno(), comm.size)
        comm.Barrier()
        path.unlink(missing_ok=True)

    def sign(self) -> None:
        """Say that this rank has printed."""
        self.ranks[self.rank] = 1

    def withdraw(self) -> None:
        """Say that this rank goes on after all: its test came to an end."""
        self.ranks[self.rank] = 0

    def is_full(self) -> bool:
        """Say whether every rank has printed."""
        return 0 not in self.ranks[:]


def limit_of(item: pytest.Item) -> float:
    """Seconds that this test may take, with its fixtures; 0 means any time."""
    if (mark := item.get_closest_marker("limit")) and HANG_S:
        return mark.args[0]
    return LAUNCHES * HANG_S if item.get_closest_marker("launches") else HANG_S


@contextmanager
def watched(nodeid: str, limit_s: float, voice: Voice, roll: Roll) -> Iterator[None]:
    """After ``limit_s`` print the stacks of this rank; end it when all ranks have done so."""
    over = threading.Event()

    def end() -> None:
        say_stacks(nodeid, limit_s, voice)
        roll.sign()
        # mpirun kills all ranks as soon as the first one ends: nobody goes before all have spoken.
        while not roll.is_full():
            if over.wait(0.05):
                roll.withdraw()
                return
        time.sleep(FORWARD_S)
        os.kill(os.getpid(), signal.SIGALRM)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    # A rank that hangs in C code and holds the GIL runs no timer: faulthandler's own thread still
    # prints, and the default action of SIGALRM still ends the process.
    faulthandler.dump_traceback_later(limit_s + GRACE_S / 2, file=voice.stream)
    signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)
    try:
        yield
    finally:
        over.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def say_stacks(nodeid: str, limit_s: float, voice: Voice) -> None:
    """Print where each thread of this rank stands."""
    faulthandler.cancel_dump_traceback_later()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        voice.say(f"{nodeid} still runs after {limit_s:g} s", *file)
