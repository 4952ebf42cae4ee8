"""``lint``: all checks of a batch script, before it waits in a queue."""

from collections.abc import Callable, Iterator

from hpctrain.core.finding import Finding
from hpctrain.launch.slurm.lint import job_checks, limit, step_checks
from hpctrain.launch.slurm.lint.script import BatchScript, read
from hpctrain.launch.slurm.lint.script_facts import LintFacts

CHECKS: tuple[Callable[[BatchScript, LintFacts], Iterator[Finding]], ...] = (
    job_checks.check_header,
    step_checks.check_nesting,
    step_checks.check_mpi,
    step_checks.check_kill,
    step_checks.check_cores,
    job_checks.check_tasks,
    job_checks.check_gpus,
    job_checks.check_signal,
    job_checks.check_output,
    job_checks.check_requeue,
    limit.check_time,
)
"""All checks. Each knows when to be silent: a value that only a run would tell is no fault."""


def lint(script: str, *, facts: LintFacts | None = None) -> list[Finding]:
    """Check a batch script without running it.

    Its ``#SBATCH`` lines are read as sbatch does, its commands as a shell does as far as that
    can be without a run. Files are read where the script names them: what it sources, and the
    configuration of its run, for the time between two checkpoints.

    Args:
        script: its text.
        facts: about this machine, from ``facts.gather``; None where nothing is known.

    Returns:
        What is wrong, each with what to do; one ``ok`` where nothing is.
    """
    facts = facts or LintFacts()
    known = read(script, facts.environ, facts.directory)
    found = [finding for check in CHECKS for finding in check(known, facts)]
    unique = list(dict.fromkeys(found))  # a shell's text is found twice: as text and as commands
    return unique or [Finding("script", "ok", f"{len(CHECKS)} checks found nothing wrong")]
