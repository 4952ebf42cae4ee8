"""``hpctrain status``: how it stands with a run, for people and for batch scripts."""

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.core.errors import LaunchError

WAITS, AT_WORK = 3, 4  # exit codes while a job of the run waits in the queue, or runs


def status(
    directory: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIRECTORY", help="The run's folder.", show_default=False),
    ],
) -> None:
    """Tell whether a run waits, is at work, has stopped or is finished, and which job it is.

    What has ended is told by the run's own last record, or for a script of your own by the exit
    code of its last job: a launcher's says less, and may be 0 after a node was lost.

    The exit code is 0 for a finished run, 85 for one that has stopped and wants to go on, 3 where
    a job of it waits in the queue of Slurm, 4 where one is at work, and 1 for one that has failed,
    was ended without a word, or is not there.

    For instance:

      hpctrain status runs/digits

      hpctrain status runs/digits || echo "not finished"
    """
    from hpctrain.train.status import status as status_of  # noqa: PLC0415

    found = status_of(directory)
    job, state = (0, "") if found.state == "finished" else _queued(directory)
    if state:
        what = "" if found.state == "missing" else f"; {found.what}"
        typer.echo(f"{directory}: job {job} is {state}{what}")
        raise typer.Exit(WAITS if state.startswith("PENDING") else AT_WORK)
    typer.echo(found.what)
    raise typer.Exit(found.code)


def _queued(directory: Path) -> tuple[int, str]:
    """Return a job of the run that waits or runs, and how it stands with it; none in a job."""
    from hpctrain.cluster.env import scheduler  # noqa: PLC0415
    from hpctrain.launch.slurm.scheduler import in_queue, jobs_of  # noqa: PLC0415

    try:
        jobs = jobs_of(directory) or jobs_of(directory.parent)  # which is an array's
        found = in_queue(jobs) if jobs and not scheduler() else {}
    except (LaunchError, OSError, ValueError):  # then the records must do
        return 0, ""
    return min(found.items(), key=lambda each: each[1].startswith("PENDING"), default=(0, ""))
