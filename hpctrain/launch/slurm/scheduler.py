"""Calls of Slurm commands: queries about jobs, and submission of jobs."""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpctrain.cluster.env import slurm, slurm_clusters, slurm_number
from hpctrain.core.atomic import explained_writes, publishing
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.core.units import parse_seconds
from hpctrain.launch.program import CompletedProgram, run_to_end

NO_ANSWER = "Slurm does not answer"
ANSWER_S = 10.0
"""Time limit of a query; each run makes only one query, at its start."""

SUBMIT_S = 120.0  # time limit of commands that submit and manage jobs

SCRIPT = "job.sbatch"  # in the run directory: script of the latest job

JOBS = "jobs.txt"  # in the run directory: ids of all jobs, one per line

WITHOUT_SLURM = (
    "without Slurm, --print shows the script and `hpctrain launch -n RANKS -- COMMAND` starts the "
    "ranks here"
)

CLUSTERS = "SLURM_CLUSTERS"
"""Variable that selects the cluster of all Slurm commands; only sbatch reads SBATCH_CLUSTERS."""

UNLIMITED = ("0", "unlimited", "infinite")  # values that mean no time limit

_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
_SIZE = re.compile(r"(\d+)([KMGT]?)B?")
_UNITS_MB = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
_OTHERS = {"qsub": "PBS", "bsub": "LSF", "flux": "Flux", "ccc_msub": "Bridge", "pjsub": "PJM"}
"""Commands that submit jobs to other schedulers."""


class RefusedJobError(LaunchError):
    """Slurm has rejected the submission of a job."""


class NodeShape(NamedTuple):
    """Cores per node and threads per core; each is the minimum over the nodes of a partition."""

    cores: int
    threads_per_core: int

    def cpus_per_task(self, tasks: int) -> int:
        """Return the ``--cpus-per-task`` with which ``tasks`` tasks use all cores of a node."""
        return self.cores // tasks * self.threads_per_core


def node_shape(partition: str | None, environ: Mapping[str, str] = os.environ) -> NodeShape | None:
    """Return the minimum ``NodeShape`` in a partition, by default in Slurm's default partition.

    Returns None if Slurm does not answer.
    """
    line = ["sinfo", "-h", "-N", "-o", "%P %X %Y %Z", *(["-p", partition] if partition else [])]
    try:
        done = run(line, environ)
    except LaunchError:
        return None
    rows = [row.split() for row in done.stdout.splitlines()]
    named = [row for row in rows if len(row) == 4 and (partition or row[0].endswith("*"))]
    shapes = [(int(s) * int(c), int(t)) for _, s, c, t in named if f"{s}{c}{t}".isdigit()]
    return NodeShape(*map(min, zip(*shapes, strict=True))) if shapes else None


def job_end(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the end of this job in seconds since 1970, or None without a job or a limit.

    The function reads ``SLURM_JOB_END_TIME``, which newer versions of Slurm set, and calls
    ``squeue`` if the variable is missing. Not collective: only one rank should call, because
    thousands of calls overload the controller of Slurm.
    """
    end = slurm("job_end_time", environ)
    if end.isdigit():
        return float(end)
    if not (job := slurm("job_id", environ)):
        return None
    queried = time.time()  # before the call, so that the result is not too late
    done = run(["squeue", "-h", "-j", job, "-t", "running", "-o", "%A %L"], environ)
    if done.returncode:
        raise no_answer(done.stderr)
    # The id of one task of a job array is also the id of the array: squeue then lists all tasks.
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)
    seconds = time_limit_s(lines.get(job, ""))
    return None if seconds is None else queried + seconds


def time_limit_s(text: str) -> float | None:
    """Return the seconds of a time limit of Slurm, or None if it is unlimited or invalid.

    Formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds.
    """
    text = text.strip()
    if match := _DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    parts = text.split(":")
    if len(parts) > 3 or not all(part.isdigit() for part in parts):
        return None
    numbers = [int(part) for part in parts]
    if len(numbers) == 1:
        return 60.0 * numbers[0] or None
    hours = numbers[0] if len(numbers) == 3 else 0
    return float(hours * 3600 + numbers[-2] * 60 + numbers[-1])


def sbatch_time(text: str) -> str:
    """Return a time limit in the format of sbatch; also converts ``90min`` and ``1h30min``."""
    if time_limit_s(text) is not None or text.lower() in UNLIMITED:
        return text
    try:
        minutes, rest = divmod(parse_seconds(text), 60)
    except ConfigError:
        raise ConfigError(
            f'a time limit must be in a format of Slurm, such as "01:30:00" or "1-12", or a '
            f'duration such as "90min", got {text!r}'
        ) from None
    hours, minutes = divmod(int(minutes) + (rest > 0), 60)  # Slurm rounds to minutes
    return f"{hours:02d}:{minutes:02d}:00"


def megabytes(text: str) -> float | None:
    """Return the megabytes of a size in the format of Slurm, such as ``64G``; None if invalid."""
    match = _SIZE.fullmatch(text.upper())
    return float(match[1]) * _UNITS_MB[match[2]] if match else None


def restart_count(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of restarts of this job by Slurm; 0 outside of jobs."""
    return slurm_number("restart_count", environ) or 0


def run(
    line: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    text: str = "",
    timeout_s: float | None = None,
) -> CompletedProgram:
    """Run a command of Slurm; the caller checks its exit code.

    Args:
        line: command and arguments; the command is searched in PATH of ``environ``.
        environ: environment variables of the command.
        text: standard input.
        timeout_s: time limit; by default ``ANSWER_S``.

    Raises:
        LaunchError: the command was not found, or did not end in time.
    """
    program = shutil.which(line[0], path=environ.get("PATH"))
    if program is None:
        raise LaunchError(
            f"Slurm's {line[0]} must be in PATH, but was not found; load the Slurm module"
        )
    try:
        return run_to_end(
            [program, *line[1:]], environ, text=text, timeout_s=timeout_s or ANSWER_S
        )
    except OSError as error:
        raise no_answer(str(error)) from None


def no_answer(output: str) -> LaunchError:
    """Return the error for a command of Slurm that did not reach the controller."""
    return LaunchError(
        f"{NO_ANSWER}: its commands are installed, but do not reach its controller; use a login "
        f"node of the cluster, or set SLURM_CONF to its slurm.conf; {WITHOUT_SLURM}; Slurm "
        f"reports: {_words(output).rpartition('fatal: ')[2]}"
    )


def find_sbatch(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of sbatch. Raises ``LaunchError`` if this machine has no sbatch."""
    path = environ.get("PATH")
    if found := shutil.which("sbatch", path=path):
        return found
    for command, name in _OTHERS.items():
        if shutil.which(command, path=path):
            raise LaunchError(
                f"hpctrain submit must find sbatch of Slurm, but this machine has {name} "
                f"({command}); in a job of {name}, `hpctrain launch -n RANKS -- COMMAND` starts "
                f"the ranks on the nodes of the job"
            )
    raise LaunchError(
        f"Slurm's sbatch must be in PATH, but was not found; use a login node of the cluster, or "
        f"load its Slurm module; {WITHOUT_SLURM}"
    )


def try_out(script: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the estimated start of a job, from ``sbatch --test-only``, without submission.

    Raises:
        RefusedJobError: Slurm refuses the job.
        LaunchError: Slurm does not answer.
    """
    done = run([find_sbatch(environ), "--test-only"], environ, text=script, timeout_s=SUBMIT_S)
    output = _words(done.stderr)
    if re.search("configuration source|contact slurm controller", output, re.IGNORECASE):
        raise no_answer(done.stderr)
    if done.returncode:
        raise RefusedJobError(f"Slurm must accept the job, but sbatch reports: {output}")
    return re.sub(r"Job \d+ to start", "the job would start", output)


def submit(path: Path, environ: Mapping[str, str] = os.environ) -> int:
    """Submit a script and return the job id.

    PATH of the job begins with the directory of the running ``hpctrain``, so the job finds the
    program even if its Python environment is not activated.

    Raises:
        LaunchError: sbatch was not found, a variable selects another cluster for sbatch alone, or
            Slurm rejects the job; the message contains the output of sbatch.
    """
    named, of_all = slurm_clusters(environ)
    if named and named != of_all:
        raise LaunchError(
            f"the cluster of a job must be selected for all Slurm commands, got "
            f"SBATCH_CLUSTERS={named}, which only sbatch reads; unset SBATCH_CLUSTERS, and "
            f"`export {CLUSTERS}={named}`"
        )
    done = run(
        [find_sbatch(environ), "--parsable", str(path)], _with_ours(environ), timeout_s=SUBMIT_S
    )
    match = re.match(r"\d+", done.stdout)
    if done.returncode or match is None:
        output = _words(done.stderr or done.stdout)
        raise LaunchError(f"Slurm must accept {path}, but sbatch reports: {output}")
    return int(match[0])


def submit_in(folder: Path, script: str, environ: Mapping[str, str] = os.environ) -> int:
    """Write a script into a run directory, submit it and return the job id.

    Raises:
        ConfigError: the directory is not writable.
        LaunchError: Slurm refuses the job.
    """
    with explained_writes("the folder of a job", folder, "choose another folder with --name"):
        folder.mkdir(parents=True, exist_ok=True)
        with publishing(folder / SCRIPT) as part:
            part.write_text(script, encoding="utf-8")
        number = submit(folder / SCRIPT, environ)
        with (folder / JOBS).open("a", encoding="utf-8") as file:
            file.write(f"{number}\n")
    return number


def in_queue(jobs: Iterable[int], environ: Mapping[str, str] = os.environ) -> dict[int, str]:
    """Return a human-readable status of each job that is pending or running.

    A status begins with the state: ``PENDING, Priority, since 2026-11-25T09:12:40``.
    """
    squeue = Path(find_sbatch(environ)).with_name("squeue")
    # squeue fails for ids of old jobs, so this call lists all jobs of the user.
    done = run(
        [str(squeue), "-h", "-u", str(os.getuid()), "-o", "%A %F %T %V %S %r"],
        environ,
        timeout_s=SUBMIT_S,
    )
    if done.returncode:
        raise no_answer(done.stderr)
    found: dict[int, str] = {}
    for line in done.stdout.splitlines():
        number, whole, state, queued, start, why = (line.split(maxsplit=5) + [""] * 6)[:6]
        waits = state == "PENDING"
        more = f", {why}" if waits and why else ""
        since = queued if waits else start
        more += f", since {since}" if since[:1].isdigit() else ""
        more += f", expected to start {start}" if waits and start[:1].isdigit() else ""
        # The id of a job array gets the status of one of its tasks; a running task has priority.
        for name in {number, whole} if number.isdigit() and whole.isdigit() else ():
            if found.get(int(name), "PENDING").startswith("PENDING"):
                found[int(name)] = f"{state}{more}"
    return {job: found[job] for job in jobs if job in found}


def state_of(job: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the state of a job, such as ``COMPLETED``; empty if Slurm no longer has a record.

    Raises:
        LaunchError: Slurm does not answer.
    """
    if text := in_queue([job], environ).get(job):
        return text.partition(",")[0]
    shown = run(["scontrol", "--oneliner", "show", "job", str(job)], environ, timeout_s=SUBMIT_S)
    match = re.search(r"JobState=(\w+)", shown.stdout)
    return match[1] if match else ""


def cancel(job: int, environ: Mapping[str, str] = os.environ) -> None:
    """Cancel a job that is pending or running.

    Raises:
        LaunchError: Slurm does not answer.
    """
    run(["scancel", str(job)], environ, timeout_s=SUBMIT_S)


def jobs_of(folder: Path) -> list[int]:
    """Return the ids of the jobs of a run that ``hpctrain submit`` submitted, oldest first."""
    path = folder / JOBS
    return [int(word) for word in path.read_text("utf-8").split()] if path.exists() else []


def dependency(text: str) -> str:
    """Convert a value of ``--after``, job ids or a condition, to ``sbatch --dependency``."""
    text = text.strip()
    if re.fullmatch(r"\d+(_\d+)?([,:]\d+(_\d+)?)*", text):
        return "afterok:" + text.replace(",", ":")
    if re.fullmatch(r"[a-z]+(:[\w+]+)*([,?][a-z]+(:[\w+]+)*)*", text):
        return text
    raise LaunchError(
        f"--after must be a job number such as 12, several such as 12,13, or a condition of "
        f"Slurm such as afterany:12, got {text!r}"
    )


def _with_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with a PATH that finds the running ``hpctrain`` first."""
    ours = Path(sys.executable).parent / "hpctrain"
    path = environ.get("PATH", os.defpath)
    if not ours.exists() or shutil.which("hpctrain", path=path) == str(ours):
        return dict(environ)
    return {**environ, "PATH": f"{ours.parent}:{path}"}


def _words(stderr: str) -> str:
    """Return the output of a command of Slurm in one line, without the name of the command."""
    lines = (re.sub(r"^\w+: (error: )?", "", line) for line in stderr.splitlines())
    return "; ".join(dict.fromkeys(line.strip() for line in lines if line.strip()))
