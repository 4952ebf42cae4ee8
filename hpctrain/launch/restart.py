"""Start a command again after its ranks were lost, on the hosts that are left."""

import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hpctrain.core.errors import LaunchError
from hpctrain.launch import mpiexec
from hpctrain.launch.mpirun import Mpirun
from hpctrain.launch.supervise import session

ANSWER_S = 10.0  # a host on which nothing has run by then is taken for lost


def resumed(words: Sequence[str]) -> list[str]:
    """Return the command that goes on: an ``hpctrain train`` does with the run that there is."""
    if [*words[:2]] != ["hpctrain", "train"]:
        return list(words)
    return [*words, "--set", "checkpoint.resume=auto"]


def hosts_left(hosts: str, mpirun: Mpirun, options: mpiexec.Options) -> str:
    """Return those of ``hosts``, as ``--hosts`` has them, on which a program can be started.

    Raises ``LaunchError``: there is none.
    """
    entries = hosts.split(",")
    with ThreadPoolExecutor(len(entries)) as pool:
        answers = pool.map(lambda entry: _answers(entry, mpirun, options), entries)
    left = [entry for entry, answers_ in zip(entries, answers, strict=True) if answers_]
    if not left:
        raise LaunchError(
            f"a command is started again on hosts that are left, and nothing runs on any of "
            f"{hosts} within {ANSWER_S:g} s; see whether they are up and can be reached"
        )
    return ",".join(left)


def num_places(hosts: str) -> int:
    """Return how many ranks ``hosts`` take."""
    return sum(int(entry.partition(":")[2] or 1) for entry in hosts.split(","))


def _answers(entry: str, mpirun: Mpirun, options: mpiexec.Options) -> bool:
    host = entry.partition(":")[0]
    line = mpiexec.command(["true"], num_ranks=1, mpirun=mpirun, hosts=host, options=options)
    with (
        session(mpiexec.environment()) as environ,
        subprocess.Popen(  # noqa: S603 - the launcher that was found
            line,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process,
    ):
        try:
            return process.wait(ANSWER_S) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return False
