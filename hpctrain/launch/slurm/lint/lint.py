"""``lint``: all checks of a batch script, before it waits in a queue."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hpctrain.core.errors import LaunchError
from hpctrain.core.finding import Finding
from hpctrain.launch.pmi import needed_pmi
from hpctrain.launch.slurm.lint.rules import RULES
from hpctrain.launch.slurm.lint.script import BatchScript, LintFacts
from hpctrain.launch.slurm.scheduler import run


def lint(script: str, *, facts: LintFacts | None = None) -> list[Finding]:
    """Check the text of a batch script without running it; one ``ok`` where nothing is wrong.

    Its ``#SBATCH`` lines are read as sbatch does, its commands as a shell does as far as that
    can be without a run. Files are read where the script names them: what it sources, and the
    configuration of its run, for the time between two checkpoints.
    """
    known = BatchScript(script, facts or LintFacts())
    found = [Finding(name, *fault) for name, find in RULES.items() for fault in find(known)]
    unique = list(dict.fromkeys(found))  # a shell's text is found twice: as text and as commands
    return unique or [Finding("script", "ok", f"{len(RULES)} checks found nothing wrong")]


def gather(
    directory: Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    made: Path | None = None,
) -> LintFacts:
    """Look at this machine, in about a second.

    ``directory`` is where sbatch will be called, the current one by default; ``made`` a folder
    that will be there when the job begins.
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
