"""``hpctrain status``: how it stands with a run, for people and for batch scripts."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import argument, flag, option
from hpctrain.core.errors import LaunchError


def status(
    directory: Annotated[Path, argument("RUN_DIRECTORY", "The run's folder.")],
    *,
    watch: Annotated[
        bool, flag("Tell each change, until the run waits for nobody.", "--watch")
    ] = False,
    interval: Annotated[
        float, option("SECONDS", "With --watch: between two looks.", min=0.1)
    ] = 10.0,
) -> None:
    """Tell whether a run waits, is at work, has stopped or is finished, and which job it is.

    What has ended is told by the run's own last record, or for a script of your own by the exit
    code of its last job: a launcher's says less, and may be 0 after a node was lost. Where Slurm
    is there, its queue tells since when a job waits or runs, why, and when it is to start.

    The exit code is

      0   finished

      1   failed: an error ended it

      3   waiting: a job of it is in the queue, for the first time or again

      4   running: a job is at work

      5   ended without a word: killed, or its node was lost

      6   there is no such run, or it has not begun

      85  stopped: its state is saved, and it wants to go on

    With --watch it is that of the state in which nothing waits or runs any more.

    For instance:

      hpctrain status runs/digits

      hpctrain status runs/digits || echo "not finished"

      hpctrain status runs/digits --watch && hpctrain report runs/digits
    """
    from hpctrain.train.run_status import CODES  # noqa: PLC0415

    told = ""
    with suppress(KeyboardInterrupt):
        while True:
            what, code = _look(directory)
            if what != told:
                typer.echo(f"{time.strftime('%H:%M:%S')}  {what}" if watch else what)
            told = what
            if not watch or code not in (CODES["waiting"], CODES["running"]):
                raise typer.Exit(code)
            time.sleep(interval)


def _look(directory: Path) -> tuple[str, int]:
    """Return how it stands with a run, for people, and its exit code."""
    from hpctrain.train.run_status import CODES  # noqa: PLC0415
    from hpctrain.train.run_status import status as status_of  # noqa: PLC0415

    found = status_of(directory)
    job, state = (0, "") if found.state == "finished" else _queued(directory)
    if not state:
        return found.what, found.code
    waits = state.startswith("PENDING")
    # What Slurm starts again keeps its number.
    again = " again" if waits and job in _known(directory) else ""
    what = "" if found.state == "missing" else f"; {found.what}"
    told = f"{directory}: job {job} is {state.replace('PENDING', f'PENDING{again}', 1)}{what}"
    return told, CODES["waiting" if waits else "running"]


def _queued(directory: Path) -> tuple[int, str]:
    """Return a job of the run that waits or runs, and how it stands with it; none in a job."""
    from hpctrain.cluster.env import scheduler  # noqa: PLC0415
    from hpctrain.launch.slurm.scheduler import in_queue, jobs_of  # noqa: PLC0415

    try:
        jobs = jobs_of(directory) or jobs_of(directory.parent)  # which is an array's
        jobs = sorted({*jobs, *_known(directory)})
        found = in_queue(jobs) if jobs and not scheduler() else {}
    except (LaunchError, OSError, ValueError):  # then the records must do
        return 0, ""
    return min(found.items(), key=lambda each: each[1].startswith("PENDING"), default=(0, ""))


def _known(directory: Path) -> list[int]:
    """Return the jobs that have worked on the run, by its records."""
    from hpctrain.core.records import read  # noqa: PLC0415
    from hpctrain.train.run_directory import RunDirectory  # noqa: PLC0415

    path = RunDirectory(directory).metrics
    records = read(path) if path.exists() else []
    return [int(job) for each in records if (job := str(each.get("job", ""))).isdigit()]
