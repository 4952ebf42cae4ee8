"""Process that ends all ranks of a node if a rank dies before MPI has started on all ranks.

Under ``hpctrain launch --recover`` the launcher does not end the other ranks when a rank dies, and
``MPI_Init`` waits without a limit, in a call that blocks all threads of the process. So each rank
starts a process ``start_watch.py RANKS``, which counts the ranks of the node until its stdin is
closed.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FAILED = "a rank has died before all ranks had started"
"""Message of the lowest surviving rank."""
LOOK_S = 0.3  # interval of the counts
GONE_S = 3.0  # time for ranks that have started MPI to close their stdin
STARTED_S = 10.0  # time after which a launcher has started all ranks of a node
_A_RANK = b"OMPI_COMM_WORLD_RANK="  # only Open MPI can continue after a rank died


@contextlib.contextmanager
def watched_start(num_ranks: int | None) -> Iterator[None]:
    """Kill this rank inside this context if one of the ``num_ranks`` ranks of its node dies."""
    if not num_ranks or num_ranks == 1:
        yield
        return
    line = [sys.executable, "-I", "-S", __file__, str(num_ranks)]
    with subprocess.Popen(line, stdin=subprocess.PIPE):  # noqa: S603 - leaving closes stdin
        yield


def _watch(num_ranks: int) -> None:
    rank, launcher = os.getppid(), _parent(os.getppid())
    limit = time.monotonic() + STARTED_S  # ranks may be missing until this time
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        alive, now = _ranks_below(launcher), time.monotonic()
        if len(alive) == num_ranks:
            limit = now + GONE_S
        if now < limit:
            continue
        if rank == min(alive, default=rank):
            left = f"{len(alive)} of {num_ranks} remain on {os.uname().nodename}"
            sys.stderr.write(f"hpctrain: {FAILED}, {left}; all ranks end\n")
        else:
            time.sleep(1.0)  # the lowest rank kills all other ranks, unless it is dead too
            alive = [rank]
        for one in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        return


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _ranks_below(launcher: int) -> list[int]:
    """Return the process ids of the living ranks that a process has started."""
    found = []
    for listed in Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in listed.read_text().split():
            with contextlib.suppress(OSError):  # the process has ended; a zombie has no such file
                if _A_RANK in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(int(pid))
    return found


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
