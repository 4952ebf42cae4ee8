"""``lint``: all checks of a batch script, before it waits in a queue."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hpctrain.core.errors import LaunchError
from hpctrain.core.finding import Finding
from hpctrain.launch.pmi import needed_pmi
from hpctrain.launch.slurm.lint import job_checks, step_checks
from hpctrain.launch.slurm.lint.script import BatchScript, LintFacts
from hpctrain.launch.slurm.scheduler import run

CHECKS: tuple[Callable[[BatchScript], Iterator[Finding]], ...] = (
    job_checks.check_header,
    step_checks.check_start,
    step_checks.check_background,
    step_checks.check_nesting,
    step_checks.check_rendezvous,
    step_checks.check_mpi,
    step_checks.check_kill,
    step_checks.check_cores,
    job_checks.check_tasks,
    job_checks.check_gpus,
    job_checks.check_signal,
    job_checks.check_output,
    job_checks.check_requeue,
    job_checks.check_time,
)
"""All checks. Each knows when to be silent: a value that only a run would tell is no fault."""


def lint(script: str, *, facts: LintFacts | None = None) -> list[Finding]:
    """Check a batch script without running it.

    Its ``#SBATCH`` lines are read as sbatch does, its commands as a shell does as far as that
    can be without a run. Files are read where the script names them: what it sources, and the
    configuration of its run, for the time between two checkpoints.

    Args:
        script: its text.
        facts: about this machine, from ``gather``; None where nothing is known.

    Returns:
        What is wrong, each with what to do; one ``ok`` where nothing is.
    """
    known = BatchScript(script, facts or LintFacts())
    found = [finding for check in CHECKS for finding in check(known)]
    unique = list(dict.fromkeys(found))  # a shell's text is found twice: as text and as commands
    return unique or [Finding("script", "ok", f"{len(CHECKS)} checks found nothing wrong")]


def gather(
    directory: Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    made: Path | None = None,
) -> LintFacts:
    """Look at this machine, in about a second.

    Args:
        directory: where sbatch will be called; None is the current one.
        environ: variables of the submission; None for this process's own.
        made: a folder that will be there when the job begins.
    """
    environ = os.environ if environ is None else environ
    try:
        needed = needed_pmi()
    except LaunchError:  # no MPI here: the job's own environment may have one
        needed = ""
    return LintFacts(
        needed_pmi=needed,
        default_pmi=default_pmi(environ),
        environ=dict(environ),
        directory=directory or Path.cwd(),
        made=made,
    )


def default_pmi(environ: Mapping[str, str]) -> str:
    """Return Slurm's MpiDefault; empty where Slurm does not answer."""
    try:
        done = run(["scontrol", "show", "config"], environ)
    except LaunchError:
        return ""
    match = re.search(r"^MpiDefault\s*=\s*(\S+)", done.stdout, re.MULTILINE)
    return match[1] if match else ""
