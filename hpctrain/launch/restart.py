"""Restart a failed launch on the remaining hosts."""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from hpctrain.cluster.env import STOPPED
from hpctrain.core.errors import LaunchError
from hpctrain.launch import mpiexec
from hpctrain.launch.mpirun import Mpirun
from hpctrain.launch.program import resolve, start
from hpctrain.launch.stderr import write_line
from hpctrain.launch.supervise import TIMED_OUT, LaunchEnd, session, supervise

MISTAKE = 2  # exit code of a wrong option or configuration; a restart would fail again

ANSWER_S = 10.0  # a host on which no program starts within this time is lost
NUM_ROUNDS = 3  # number of probes of all hosts while no host answers
MOST_AT_ONCE = 64  # number of hosts that are probed concurrently
HERE = "hpctrain: this host is there"
PROBE = ("sh", "-c", f"echo '{HERE}'; exec sleep {ANSWER_S:g}")
"""Command of a probe, which sleeps at its end: mpirun may hang if a program ends at once."""
_PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Command of a user, with the hosts and options to launch its ranks."""

    words: Sequence[str]
    num_ranks: int
    mpirun: Mpirun
    nodes: int | None  # declared nodes, on this host
    hosts: str | None  # in the format of ``--hosts``
    options: Callable[[str | None], mpiexec.Options]  # returns options for a value of ``hosts``

    def line(self) -> list[str]:
        """Return the command line of mpirun; raise the errors of ``mpiexec.command``."""
        return mpiexec.command(
            resolve(self.words),
            num_ranks=self.num_ranks,
            mpirun=self.mpirun,
            nodes=self.nodes,
            hosts=self.hosts,
            options=self.options(self.hosts),
        )

    def run(self, *, restarts: int, timeout_s: float | None) -> int:
        """Run the command and restart it after a failure; return the exit code of the last launch.

        There are at most ``restarts`` restarts, and none after a signal, after ``timeout_s``
        seconds in total, or after an error of the user (exit code ``MISTAKE``).

        Raises:
            LaunchError: the command cannot be started, or no host remains for a restart.
            KeyboardInterrupt: SIGINT has ended the launch, see ``supervise``.
        """
        limit = time.monotonic() + timeout_s if timeout_s else None
        launch, end = self, self.run_once(limit)
        for left in reversed(range(restarts)):
            if end.is_wanted or end.code in (0, STOPPED, MISTAKE):
                break
            launch = launch.again()
            write_line(
                f"the launch failed with code {end.code}; {launch.num_ranks} ranks start "
                f"again on {launch.hosts or 'the same hosts'}, and {left} restarts remain"
            )
            end = launch.run_once(limit)
        if end == (TIMED_OUT, True):
            write_line(f"the launch was ended after {timeout_s:g} s, the limit of --timeout")
        return end.code

    def again(self) -> "Launch":
        """Return the launch to run after this one has failed.

        ``hpctrain train`` resumes its run; other commands are repeated. The new launch uses only
        hosts on which a program can be started now.
        """
        words = self.words
        if [*words[:2]] == ["hpctrain", "train"]:
            words = [*words, "--set", "checkpoint.resume=auto"]
        if not self.hosts:
            return replace(self, words=words)
        hosts = self._hosts_left(self.hosts.split(","))
        places = sum(int(entry.partition(":")[2] or 1) for entry in hosts)
        num_ranks = max(1, min(self.num_ranks, places - self.options(None).spares))
        return replace(self, words=words, hosts=",".join(hosts), num_ranks=num_ranks)

    def run_once(self, limit: float | None) -> LaunchEnd:
        """Run the command once; end the launch when the monotonic clock reaches ``limit``."""
        rest_s = None if limit is None else max(limit - time.monotonic(), 1e-3)
        return supervise(self.line(), environ=mpiexec.environment(), timeout_s=rest_s)

    def _hosts_left(self, hosts: list[str]) -> list[str]:
        with ThreadPoolExecutor(min(len(hosts), MOST_AT_ONCE)) as pool:
            for _ in range(NUM_ROUNDS):
                answers = pool.map(self._answers, hosts)
                if left := [host for host, answer in zip(hosts, answers, strict=True) if answer]:
                    return left
        raise LaunchError(
            f"a restart must have at least one host, but no program starts on "
            f"{', '.join(hosts)} within {ANSWER_S:g} s; check that the hosts are up and "
            f"reachable"
        )

    def _answers(self, entry: str) -> bool:
        host = entry.partition(":")[0]
        options = replace(self.options(host), recover=False, spares=0)
        probe = replace(self, words=PROBE, num_ranks=1, hosts=host, options=lambda _: options)
        limit, output = time.monotonic() + ANSWER_S, b""
        with (
            session(mpiexec.environment()) as environ,
            start(probe.line(), env=environ, **_PIPED) as process,
        ):
            assert process.stdout is not None
            while select.select([process.stdout], [], [], max(limit - time.monotonic(), 0))[0]:
                piece = os.read(process.stdout.fileno(), 4096)
                output += piece
                if not piece or HERE.encode() in output:
                    break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return HERE.encode() in output
