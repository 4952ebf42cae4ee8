"""Facts about the machine that a batch script is submitted from."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.core.errors import LaunchError
from hpctrain.launch.pmi import needed_pmi
from hpctrain.launch.slurm.scheduler import run

ANSWER_S = 10.0
"""Time that Slurm gets to answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LintFacts:
    """Facts beside the script; a check that lacks one is left out."""

    needed_pmi: str = ""
    """What ``srun --mpi=`` must name for the installed MPI; empty where that is not known."""
    default_pmi: str = ""
    """What srun takes without ``--mpi``, MpiDefault of Slurm; empty where that is not known."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script will find set."""
    directory: Path | None = None
    """Where sbatch is called, so where relative names begin; None reads no other file."""


def gather(directory: Path | None = None, environ: Mapping[str, str] | None = None) -> LintFacts:
    """Look at this machine, in about a second.

    Args:
        directory: where sbatch will be called; None is the current one.
        environ: variables of the submission; None for this process's own.
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
    )


def default_pmi(environ: Mapping[str, str]) -> str:
    """Return Slurm's MpiDefault; empty where Slurm does not answer."""
    try:
        done = run(["scontrol", "show", "config"], environ, timeout_s=ANSWER_S)
    except LaunchError:
        return ""
    match = re.search(r"^MpiDefault\s*=\s*(\S+)", done.stdout, re.MULTILINE)
    return match[1] if match else ""
