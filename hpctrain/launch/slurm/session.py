"""The folder of mpirun's own files while it runs: a new one for each launch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from hpctrain.cluster.env import ASKED

FOLDER = "PRTE_MCA_prte_local_tmpdir_base"
"""Tells mpirun of Open MPI 5 where to keep them; others do not look at it."""


@contextmanager
def session(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Give the environment of an mpirun that keeps its files apart; remove them in the end.

    Left to itself, Open MPI 5 names their folder after the process id of mpirun, and one that is
    killed leaves it behind: the next one that happens to get this id ends with exit code 213.

    There also lies the file in which the ranks find who asked them to stop.

    Args:
        environ: of mpirun so far; a folder that it names stays.
    """
    try:
        folder = TemporaryDirectory(prefix="hpctrain-mpirun-", ignore_cleanup_errors=True)
    except OSError:  # nor can mpirun have one: it says so itself
        yield dict(environ)
        return
    with folder as name:
        yield {FOLDER: name} | dict(environ) | {ASKED: f"{name}/asked"}
