"""All ranks of a run under the lease that rank 0 holds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console

from hpctrain.checkpoint.directory import Shelf
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import CheckpointError
from hpctrain.train.agreed import agreed
from hpctrain.train.lease import TIMES, Holder, Lease
from hpctrain.train.run_directory import RunDirectory
from hpctrain.train.status import last_record


@contextmanager
def held(
    directory: RunDirectory, comm: Communicator, console: Console, *, force: bool
) -> Iterator[Lease | None]:
    """Hold the lease of a run directory while the block lasts. Collective at its begin.

    Waits for a job that is about to end, or takes over from a dead one.

    Args:
        directory: of the run, which is there.
        comm: all ranks.
        console: tells of the wait, on rank 0.
        force: take over also from a job that lives.

    Yields:
        The lease on rank 0, None elsewhere.

    Raises:
        MismatchError: another job holds it and goes on, or the directory cannot be written; on
            all ranks.
    """
    lease = Lease(directory.path) if comm.rank == 0 else None
    told = ""
    try:
        if lease is not None and force and (holder := Holder.read(directory.path)):
            console.print(_losses(directory, holder))
        while True:
            waits_for = ""
            with agreed(comm):
                if lease is not None:
                    with directory.explained():
                        waits_for = lease.attempt(force=force)
            waits_for = comm.broadcast_object(waits_for)
            if not waits_for:
                break
            if waits_for != told:
                console.print(waits_for)
                told = waits_for
            time.sleep(TIMES.look_s)
        yield lease
    finally:
        if lease is not None:
            lease.release()


def _losses(directory: RunDirectory, holder: Holder) -> str:
    """Say what a job loses from which the run is taken."""
    newest, last = None, 0
    with suppress(CheckpointError):
        newest, _ = Shelf(directory.checkpoints).newest()
    with suppress(OSError, ValueError):
        last = last_record(directory.metrics).get("step", 0)
    start = f"the checkpoint of step {newest}" if newest is not None else "the start"
    return (
        f"--force takes {directory.path} from {holder.describe()}, which stops if it still lives; "
        f"the run goes on from {start}, and what was learnt since is lost: its last record is of "
        f"step {last}"
    )
