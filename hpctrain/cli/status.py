"""``hpctrain status``: the state of a run, for users and for batch scripts."""

import time
from contextlib import suppress
from pathlib import Path

import typer

from hpctrain.cli.options import RunFolder, flag, option
from hpctrain.cluster import env
from hpctrain.core import records
from hpctrain.core.errors import LaunchError
from hpctrain.launch.slurm import scheduler
from hpctrain.train import run_directory
from hpctrain.train import run_status as state

app = typer.Typer()


@app.command()
def status(
    directory: RunFolder,
    *,
    watch: bool = flag("Print each change, until no job of the run waits or runs.", "--watch"),
    interval: float = option(10.0, "SECONDS", "With --watch: time between two checks.", min=0.1),
) -> None:
    """Print the state of a run: waiting, running, stopped or finished.

    The last record of a run shows the reason of its end. For a script without hpctrain train, the
    exit code of the last job shows the reason. The exit code of a launcher is less reliable: it
    may be 0 after a node was lost. If Slurm is available, its queue shows since when a job waits
    or runs, the reason, and the expected start.

    The exit code is

      0   finished

      1   failed: an error ended the run

      3   waiting: a job of the run is in the queue, for the first time or again

      4   running: a job is running

      5   killed: the job ended without a record, or its node was lost

      6   missing: the run does not exist or has not started

      85  stopped: the state is saved, and the run can be continued

    With --watch, the exit code is that of the last state.

    Examples:
      hpctrain status runs/digits

      hpctrain status runs/digits || echo "not finished"

      hpctrain status runs/digits --watch && hpctrain report runs/digits
    """
    last = ""
    with suppress(KeyboardInterrupt):
        while True:
            text, code = _inspect(directory)
            if text != last:
                typer.echo(f"{time.strftime('%H:%M:%S')}  {text}" if watch else text)
            last = text
            if not watch or code not in (state.CODES["waiting"], state.CODES["running"]):
                raise typer.Exit(code)
            time.sleep(interval)


def _inspect(directory: Path) -> tuple[str, int]:
    """Return a description of the state of a run, and its exit code."""
    found = state.status(directory)
    job, queued = (0, "") if found.state == "finished" else _queued(directory)
    if not queued:
        return found.what, found.code
    waits = queued.startswith("PENDING")
    # A requeued job keeps its number.
    again = " again" if waits and job in _known(directory) else ""
    rest = "" if found.state == "missing" else f"; {found.what}"
    text = f"{directory}: job {job} is {queued.replace('PENDING', f'PENDING{again}', 1)}{rest}"
    return text, state.CODES["waiting" if waits else "running"]


def _queued(directory: Path) -> tuple[int, str]:
    """Return the number and state of a pending or running job of the run; (0, "") if none."""
    try:
        jobs = scheduler.jobs_of(directory) or scheduler.jobs_of(directory.parent)  # job array
        jobs = sorted({*jobs, *_known(directory)})
        found = scheduler.in_queue(jobs) if jobs and not env.scheduler() else {}
    except (LaunchError, OSError, ValueError):  # without Slurm, the records show the state
        return 0, ""
    return min(found.items(), key=lambda each: each[1].startswith("PENDING"), default=(0, ""))


def _known(directory: Path) -> list[int]:
    """Return the ids of the jobs in the records of the run."""
    path = run_directory.RunDirectory(directory).metrics
    found = records.read(path) if path.exists() else []
    return [int(job) for each in found if (job := str(each.get("job", ""))).isdigit()]
