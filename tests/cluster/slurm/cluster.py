"""A private Slurm: its daemons on the hosts, and the commands of its users."""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hpctrain.launch import mpiexec
from tests.cluster.slurm.check import obstacle
from tests.cluster.slurm.daemons import Daemons, booted
from tests.cluster.slurm.job import Job
from tests.cluster.slurm.own import folder, ports
from tests.cluster.slurm.settings import Settings

ROOT = Path(__file__).parents[3]

UP_S = 60.0
"""Time that the nodes get to report to the controller; they take a second."""


class SlurmCluster:
    """A Slurm of its own on nodes ``n0``, ``n1``, ..., with partitions ``main`` and ``low``.

    ``main`` takes nodes from jobs of ``low``, which are queued again. A requeued job starts anew
    some 6 s later. Several clusters may be up at once. All ends with the block, and with this
    process, however it ends.

        with SlurmCluster(nodes=2) as slurm:
            job = slurm.sbatch("--nodes=2", "--wrap", "srun hostname")
            assert job.wait() == "COMPLETED"
    """

    def __init__(self, *, nodes: int = 4, cpus: int = 4, gpus: int = 0) -> None:
        """Describe a cluster; ``with`` starts it.

        Args:
            nodes: how many, 1 to 60.
            cpus: of each node; more than the machine has, if wanted.
            gpus: of each node; they stand in for real ones: Slurm counts them and tells jobs
                their numbers.
        """
        self.nodes = tuple(f"n{number}" for number in range(nodes))
        self._cpus, self._gpus = cpus, gpus
        self._stack = contextlib.ExitStack()
        self._lost: set[str] = set()
        """Nodes that were killed and not restored."""
        self.directory: Path
        self.environ: dict[str, str]
        """For programs that are to reach the cluster."""

    def __enter__(self) -> Self:
        """Start the cluster.

        Raises:
            RuntimeError: this machine cannot; says why.
        """
        if reason := obstacle():
            raise RuntimeError(reason)
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(
        self,
        line: Sequence[str | Path],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of the cluster does: ``sinfo``, ``srun``, ``hpctrain submit``.

        Args:
            line: the command.
            environ: variables beside ``self.environ``.
            cwd: where it runs; by default ``directory/home``.
            timeout_s: after that it is ended.
            check: whether its failure is an error.

        Raises:
            RuntimeError: it failed; says what it printed.
            TimeoutError: it took longer.
        """
        command = ["env", "-C", str(cwd or self.directory / "home"), *map(str, line)]
        process = subprocess.Popen(
            command,
            env=self.environ | dict(environ or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            said = "".join(process.communicate())
            raise TimeoutError(
                f"`{shlex.join(command[3:])}` took more than {timeout_s:g} s; it printed:\n{said}"
            ) from None
        if check and process.returncode:
            raise RuntimeError(
                f"`{shlex.join(command[3:])}` ended with code {process.returncode}:\n"
                f"{stdout}{stderr}"
            )
        return subprocess.CompletedProcess(command[3:], process.returncode, stdout, stderr)

    def sbatch(
        self,
        *arguments: str | Path,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Job:
        """Submit a job: options and a script, as for ``sbatch``."""
        done = self.run(["sbatch", "--parsable", *arguments], environ=environ, cwd=cwd)
        return self.job(int(done.stdout.split()[-1].partition(";")[0]))

    def job(self, number: int) -> Job:
        """Return the job of a number."""
        return Job(self, number)

    def enter(self, host: str, argv: Sequence[str]) -> list[str]:
        """Write the command line that runs ``argv`` on a node, or on ``login``."""
        return self._daemons.hosts[host].enter(argv)

    def states(self) -> dict[str, str]:
        """Return the state of each node: ``idle``, ``mixed``, ``allocated``, ``down*``, ..."""
        done = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"], check=False)
        return dict(line.split() for line in done.stdout.splitlines())

    def kill_node(self, name: str) -> None:
        """Cut the power of a node; the controller finds out by itself, after half a minute."""
        self._lost.add(name)
        self._daemons.cut(name)

    def restore(self) -> None:
        """Bring every node back that a test took out of service."""
        for name in sorted(self._lost):
            self._daemons.cut(name)  # what may be left of its processes
            self._daemons.start_node(name)
            self._lost.discard(name)
            self._wait_until_up(resume=name)

    def _start(self) -> None:
        self.directory = self._stack.enter_context(folder())
        hosts = self._stack.enter_context(booted(self.nodes))
        Settings(
            directory=self.directory,
            nodes=self.nodes,
            port=self._stack.enter_context(ports()),
            cpus=self._cpus,
            gpus=self._gpus,
        ).write()
        self._daemons = Daemons(self.directory, hosts)
        self.environ = environment() | self._daemons.environ
        self._daemons.start()
        self._wait_until_up()

    def _wait_until_up(self, resume: str = "") -> None:
        give_up = time.monotonic() + UP_S
        while down := self._out_of_service():
            if time.monotonic() > give_up:
                raise RuntimeError(f"nodes do not come up: {down}; {self._daemons.last_words()}")
            if resume in down:  # one that was set down waits to be told
                self.run(["scontrol", "update", f"nodename={resume}", "state=resume"], check=False)
            time.sleep(0.1)

    def _out_of_service(self) -> dict[str, str]:
        states = dict.fromkeys(self.nodes, "unknown") | self.states()
        up = ("idle", "mixed", "allocated", "completing")
        return {
            name: state
            for name, state in states.items()
            if state not in up and name not in self._lost
        }


def environment() -> dict[str, str]:
    """Make the environment of a user: this process's, without marks of a job it may be part of."""
    environ = {k: v for k, v in mpiexec.environment().items() if not k.startswith("SLURM_")}
    return environ | {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": "/var/tmp",  # each node's own: launchers of two clusters must not meet there
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
