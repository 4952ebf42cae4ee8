"""The door to ``sbatch``: would Slurm take a script, and hand it over."""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from hpctrain.core.errors import LaunchError
from hpctrain.launch.slurm.scheduler import run

ANSWER_S = 120.0
"""Time that a busy controller gets to answer."""

_OTHERS = {"qsub": "PBS", "bsub": "LSF", "flux": "Flux", "ccc_msub": "Bridge", "pjsub": "PJM"}
"""Commands that submit jobs to other schedulers."""


def find_sbatch(environ: Mapping[str, str] | None = None) -> str:
    """Return the path of sbatch.

    Raises:
        LaunchError: there is none; says what works under the scheduler that is there.
    """
    environ = os.environ if environ is None else environ
    path = environ.get("PATH")
    if found := shutil.which("sbatch", path=path):
        return found
    for command, name in _OTHERS.items():
        if shutil.which(command, path=path):
            raise LaunchError(
                f"hpctrain submits to Slurm only, this machine has {name} ({command}) and no "
                "sbatch; inside a job of its own `hpctrain launch -n RANKS hpctrain train "
                "CONFIG.toml` starts the ranks on the nodes of the job"
            )
    raise LaunchError(
        "submitting a job needs sbatch, there is none in PATH; go to a login node of the cluster "
        "or load its Slurm module; without Slurm, `hpctrain launch -n RANKS hpctrain train "
        "CONFIG.toml` starts the ranks here"
    )


def try_out(script: str, environ: Mapping[str, str] | None = None) -> str:
    """Ask Slurm whether it would take a script, and queue nothing.

    Returns:
        What Slurm says about it: when the job would start, and where.

    Raises:
        LaunchError: there is no sbatch, or Slurm refuses; holds Slurm's own words.
    """
    done = run([find_sbatch(environ), "--test-only"], environ, text=script, timeout_s=ANSWER_S)
    said = _words(done.stderr)
    if done.returncode:
        raise LaunchError(f"Slurm would not take this job; it says: {said}")
    return re.sub(r"Job \d+ to start", "the job would start", said)


def submit(path: Path, environ: Mapping[str, str] | None = None) -> int:
    """Hand a script over to Slurm; return the number of its job.

    The job finds the ``hpctrain`` of this environment first, also where nobody has activated it.

    Raises:
        LaunchError: there is no sbatch, or Slurm refuses; holds Slurm's own words.
    """
    environ = os.environ if environ is None else environ
    done = run(
        [find_sbatch(environ), "--parsable", str(path)], _with_ours(environ), timeout_s=ANSWER_S
    )
    match = re.match(r"\d+", done.stdout)
    if done.returncode or match is None:
        said = _words(done.stderr or done.stdout)
        raise LaunchError(f"Slurm has not taken {path}; it says: {said}")
    return int(match[0])


def still_there(jobs: Iterable[int], environ: Mapping[str, str] | None = None) -> list[int]:
    """Return those of the jobs that wait or run.

    Raises:
        LaunchError: Slurm does not answer.
    """
    squeue = Path(find_sbatch(environ)).with_name("squeue")
    # Slurm forgets jobs and then refuses a question about them: so ask for all of this user.
    done = run(
        [str(squeue), "-h", "-u", str(os.getuid()), "-o", "%A %F"], environ, timeout_s=ANSWER_S
    )
    if done.returncode:
        raise LaunchError(f"Slurm does not answer; it says: {_words(done.stderr)}")
    found = {int(word) for word in done.stdout.split() if word.isdigit()}
    return [job for job in jobs if job in found]


def dependency(text: str) -> str:
    """Return what ``--dependency`` takes for a job number, several, or Slurm's own form.

    Raises:
        LaunchError: the text is none of them.
    """
    text = text.strip()
    if re.fullmatch(r"\d+(_\d+)?([,:]\d+(_\d+)?)*", text):
        return "afterok:" + text.replace(",", ":")
    if re.fullmatch(r"[a-z]+(:[\w+]+)*([,?][a-z]+(:[\w+]+)*)*", text):
        return text
    raise LaunchError(
        f"a job starts after a job number such as 12, several such as 12,13, or a condition of "
        f"Slurm such as afterany:12, got {text!r}"
    )


def _with_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """Put the folder of this environment's ``hpctrain`` in front of PATH if another is there."""
    ours = Path(sys.executable).parent / "hpctrain"
    path = environ.get("PATH", os.defpath)
    if not ours.exists() or shutil.which("hpctrain", path=path) == str(ours):
        return dict(environ)
    return {**environ, "PATH": f"{ours.parent}:{path}"}


def _words(stderr: str) -> str:
    """Return what a command of Slurm has said, in one line and without its name."""
    lines = (re.sub(r"^\w+: (error: )?", "", line) for line in stderr.splitlines())
    return "; ".join(dict.fromkeys(line.strip() for line in lines if line.strip()))
