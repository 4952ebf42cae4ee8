"""No test hangs: after its limit every rank prints its stacks and ends."""

import faulthandler
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.harness.voice import Voice

HANG_S = float(os.environ.get("HPCTRAIN_TEST_HANG_S", "60"))
"""Limit of a test without the marker ``limit``; 0 lets it run for ever, for a debugger."""

GRACE_S = 3.0
"""Between the stacks and the end: mpirun kills all ranks as soon as the first one ends."""


def limit_of(item: pytest.Item) -> float:
    """Seconds that this test may take, with its fixtures; 0 means any time."""
    mark = item.get_closest_marker("limit")
    return mark.args[0] if mark and HANG_S else HANG_S


@contextmanager
def watched(nodeid: str, limit_s: float, voice: Voice) -> Iterator[None]:
    """Print the stacks of this rank after ``limit_s`` and end it ``GRACE_S`` later."""
    timer = threading.Timer(limit_s, say_stacks, (nodeid, limit_s, voice))
    timer.daemon = True
    timer.start()
    # A rank that hangs in C code and holds the GIL runs no timer: faulthandler's own thread still
    # prints, and the default action of SIGALRM still ends the process.
    faulthandler.dump_traceback_later(limit_s + GRACE_S / 2, file=voice.stream)
    signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)
    try:
        yield
    finally:
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
