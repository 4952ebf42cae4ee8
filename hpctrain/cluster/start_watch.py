"""Process that ends all ranks of a node if a rank dies before MPI has started on all ranks.

Under ``hpctrain launch --recover`` the launcher does not end the other ranks when a rank dies, and
``MPI_Init`` waits without a limit, in a call that blocks all threads of the process. So on each
node, the first rank that calls ``MPI_Init`` starts a process ``start_watch.py RANKS LAUNCHER``.
This process counts the living ranks of the node until ``MPI_Init`` has returned in that rank,
which happens only after all ranks have called ``MPI_Init``.
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
LOOK_S = 0.3  # time between two counts of the living ranks
GONE_S = 3.0  # time for MPI_Init to return in the first rank after another rank ended normally
_JOINED = b"joined"
STARTED_S = 10.0  # time after which a launcher has started all ranks of a node
_A_RANK = b"OMPI_COMM_WORLD_RANK="  # only Open MPI can continue after a rank died


@contextlib.contextmanager
def watched_start(num_ranks: int | None) -> Iterator[None]:
    """Inside this context, kill all ranks of this node if one of its ``num_ranks`` ranks dies."""
    from hpctrain.cluster.process import claimed  # noqa: PLC0415 - not in the process that watches

    claim = claimed("start watch") if num_ranks and num_ranks > 1 else None
    if claim is None:
        yield
        return
    line = [sys.executable, "-I", "-S", __file__, str(num_ranks), str(os.getppid())]
    with claim:  # also open in the process that watches, until that process ends
        watch = subprocess.Popen(  # noqa: S603
            line, stdin=subprocess.PIPE, pass_fds=[claim.fileno()], start_new_session=True
        )
    try:
        yield
    except BaseException:  # this rank may end now, and other ranks wait for it
        assert watch.stdin is not None
        watch.stdin.close()
        raise
    watch.communicate(_JOINED)


def _watch(num_ranks: int, launcher: int) -> None:
    limit = time.monotonic() + STARTED_S  # ranks may be missing until this time
    watched = [sys.stdin]
    while True:
        if select.select(watched, [], [], LOOK_S)[0]:
            if sys.stdin.buffer.read():
                return
            watched = []  # the rank that started this process has ended
        alive, now = _ranks_below(launcher), time.monotonic()
        if len(alive) == num_ranks:
            limit = now + GONE_S
        if alive and now < limit:
            continue
        if alive:
            left = f"{len(alive)} of {num_ranks} remain on {os.uname().nodename}"
            sys.stderr.write(f"hpctrain: {FAILED}, {left}; all ranks end\n")
        for one in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        return


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
    _watch(int(sys.argv[1]), int(sys.argv[2]))
