"""Measure how slow this machine is at the moment, to scale time limits of tests."""

import hashlib
import time

WORK = bytes(1 << 20)
NUM_PIECES = 64
IDLE_S = 0.04
"""Upper limit of the time for ``WORK`` on an idle machine: SHA-256 of 64 MiB."""

MOST = 5.0
"""Upper limit of the factor: a test that hangs must end on a loaded machine too."""


def slowness() -> float:
    """Return the time of a fixed computation relative to an idle machine, from 1 to 5.

    The computation takes about 40 ms of CPU time. Other processes on the same cores increase the
    elapsed time.
    """
    start = time.perf_counter()
    digest = hashlib.sha256()
    for _ in range(NUM_PIECES):
        digest.update(WORK)
    return min(max((time.perf_counter() - start) / IDLE_S, 1.0), MOST)


def scaled(limit_s: float) -> float:
    """Return a time limit in seconds, multiplied by ``slowness()``."""
    return limit_s * slowness()
