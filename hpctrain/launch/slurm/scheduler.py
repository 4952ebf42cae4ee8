"""The door to Slurm's commands: what Slurm says of the job that this process is part of."""

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence

from hpctrain.core.errors import LaunchError
from hpctrain.launch.slurm.query import Said, ask

ANSWER_S = 10.0
"""Time that a busy controller gets to answer; a run waits for it once, at its start."""

_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")


def job_end(environ: Mapping[str, str] | None = None) -> float | None:
    """Return when Slurm ends this job, in seconds since 1970; None outside of one, or without.

    Newer versions say it in ``SLURM_JOB_END_TIME``; others are asked, by one call of ``squeue``.
    Not collective: let one rank ask, a controller does not like thousands.

    Raises:
        LaunchError: this is a job, and Slurm does not answer.
    """
    environ = os.environ if environ is None else environ
    end = environ.get("SLURM_JOB_END_TIME", "")
    if end.isdigit():
        return float(end)
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    asked = time.time()  # before the answer: rather stop early
    left = _ask(["squeue", "-h", "-j", job, "-t", "running", "-o", "%A %L"], environ)
    # The first number of an array names all its tasks, each of which has a line.
    lines = dict(line.split(maxsplit=1) for line in left.splitlines() if " " in line)
    seconds = seconds_left(lines.get(job, ""))
    return None if seconds is None else asked + seconds


def seconds_left(text: str) -> float | None:
    """Read a duration of Slurm, ``[[days-]hours:]minutes:seconds``; None for any other word."""
    match = _LEFT.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def restart_count(environ: Mapping[str, str] | None = None) -> int:
    """Return how often Slurm has started this job again; 0 the first time and outside of jobs."""
    environ = os.environ if environ is None else environ
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdigit() else 0


def run(
    line: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    text: str = "",
    timeout_s: float = ANSWER_S,
) -> Said:
    """Run one of Slurm's commands to its end, whatever its exit code.

    Args:
        line: the command, by its name or its path, and its arguments.
        environ: its environment; PATH of it finds the command.
        text: its standard input.
        timeout_s: time that a busy controller gets to answer.

    Raises:
        LaunchError: there is no such command, or it does not end in time.
    """
    environ = os.environ if environ is None else environ
    program = shutil.which(line[0], path=environ.get("PATH"))
    if program is None:
        raise LaunchError(f"asking Slurm needs {line[0]} in PATH, there is none")
    try:
        return ask([program, *line[1:]], environ, text=text, timeout_s=timeout_s)
    except OSError as error:
        raise LaunchError(f"Slurm does not answer: {error}") from None


def _ask(line: list[str], environ: Mapping[str, str]) -> str:
    done = run(line, environ)
    if done.returncode:
        said = done.stderr.strip().partition("\n")[0]
        raise LaunchError(f"Slurm does not answer: {line[0]}: {said}")
    return done.stdout
