"""How slow this machine is now: limits of time in tests are multiplied by it."""

import hashlib
import time

WORK = bytes(1 << 20)
NUM_PIECES = 64
IDLE_S = 0.04
"""Upper limit of the time that the work takes on an idle machine: SHA-256 of 64 MiB."""

MOST = 5.0
"""Limit of the factor: a test that hangs must end on the busiest machine too."""


def slowness() -> float:
    """Measure how many times as long as on an idle machine a fixed work takes now; from 1 to 5.

    Takes about 40 ms of CPU time. Other processes lengthen it by their share of the cores.
    """
    start = time.perf_counter()
    digest = hashlib.sha256()
    for _ in range(NUM_PIECES):
        digest.update(WORK)
    return min(max((time.perf_counter() - start) / IDLE_S, 1.0), MOST)


def scaled(limit_s: float) -> float:
    """Return a limit of time, in seconds, lengthened by how slow the machine is now."""
    return limit_s * slowness()
