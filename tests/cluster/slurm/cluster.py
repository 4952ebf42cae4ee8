"""Run a private Slurm: its daemons on the hosts, and the commands of its users."""

import contextlib
import errno
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpctrain.core.python_compat import Self
from hpctrain.launch import mpiexec
from tests.cluster.slurm.job import Job
from tests.cluster.slurm.settings import Settings
from tests.cluster.vcluster.check import search_path, slurm_obstacle
from tests.cluster.vcluster.cluster import LOGIN
from tests.cluster.vcluster.host import Host
from tests.harness.pace import scaled

BLOCK = 64  # ports of a cluster: one for the controller and one for each node

RANGE = range(15000, 32000 - BLOCK, BLOCK)  # below the ephemeral ports of the kernel

BROOM = """
import shutil, sys, time
from pathlib import Path
sys.stdin.read()
directory = Path(sys.argv[1])
for _ in range(100):  # daemons that are about to end may still write
    shutil.rmtree(directory, ignore_errors=True)
    if not directory.exists():
        break
    time.sleep(0.05)
"""
"""Waits until its standard input closes, which the end of its owner does."""


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Make a directory with a short path in /tmp: paths of sockets have at most 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    broom = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BROOM, str(directory)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        directory.chmod(0o755)  # all users must reach munged
        yield directory
    finally:
        broom.communicate()


@contextlib.contextmanager
def ports() -> Iterator[int]:
    """Claim a block of free ports, and yield the first.

    Raises:
        RuntimeError: no block is free.
    """
    for first in random.Random().sample(RANGE, len(RANGE)):
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                # An abstract name is free again as soon as its owner ends.
                claim.bind(f"\0hpctrain-slurm-{first}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            if all(_is_free(first + k) for k in range(BLOCK)):
                yield first
                return
    raise RuntimeError(f"{BLOCK} free ports in a row are needed, found none in {RANGE}")


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


POWER_CUT = "rm -rf /dev/shm/* /var/tmp/?*; kill -KILL -1"
"""Ends every process of a host but its first, which no signal from inside reaches."""


@contextlib.contextmanager
def booted(nodes: Sequence[str]) -> Iterator[dict[str, Host]]:
    """Start the hosts: ``login`` and the nodes, which share only the network.

    Raises:
        RuntimeError: the kernel refuses to create a host; the message has the reason.
    """
    own = [f"127.0.0.1 {name}" for name in (LOGIN, *nodes)]
    table = [*Path("/etc/hosts").read_text().splitlines(), *own]
    hosts: dict[str, Host] = {}
    try:
        for name in (LOGIN, *nodes):
            hosts[name] = Host.boot(name, table, inside=hosts.get(LOGIN), network=False)
        yield hosts
    finally:
        while hosts:  # the host that contains the others comes last
            hosts.popitem()[1].end()


class Daemons:
    """Run ``munged`` and ``slurmctld`` on ``login``, and a ``slurmd`` on each node."""

    def __init__(self, directory: Path, hosts: dict[str, Host]) -> None:
        self._directory, self.hosts = directory, hosts
        self._conf = str(directory / "slurm.conf")
        self.environ = {
            "PATH": f"{Path(sys.executable).parent}:{search_path()}",
            "SLURM_CONF": self._conf,
        }
        """All that a daemon, or a client, must know."""

    def start(self) -> None:
        """Start all daemons.

        Raises:
            RuntimeError: a daemon does not start; the message has the reason.
        """
        folder = self._directory / "munge"
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_bytes(os.urandom(1024))
        files = {"key-file": "key", "socket": "s", "pid-file": "pid", "seed-file": "seed"}
        line = [f"--{option}={folder / name}" for option, name in files.items()]
        self._on(LOGIN, "munged", *line, f"--log-file={folder}/log", "--num-threads=2")
        self._on(LOGIN, "slurmctld", "-f", self._conf)
        for node in self.hosts:
            if node != LOGIN:
                self.start_node(node)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._on(node, "slurmd", "-f", self._conf, "-N", node)

    def cut(self, node: str) -> None:
        """Simulate a power loss of a node: kill its processes without notice to Slurm."""
        line = self.hosts[node].enter(["sh", "-c", POWER_CUT])
        subprocess.run(line, check=False, capture_output=True)

    def last_words(self) -> str:
        """Return the last lines of all logs."""
        logs = sorted((self._directory / "log").glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in logs)

    def _on(self, host: str, *argv: str) -> None:
        """Start a daemon with a command that forks into the background."""
        done = subprocess.run(
            self.hosts[host].enter(argv),
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"{argv[0]} on {host} ended with code {done.returncode}: {done.stdout.strip()}"
            )


ROOT = Path(__file__).parents[3]

UP_S = 60.0  # time for nodes to report to the controller; usually a second


class SlurmCluster:
    """Run a private Slurm on nodes ``n0``, ``n1``, ..., with partitions ``main`` and ``low``.

    Jobs of ``main`` take nodes from jobs of ``low``, which Slurm then requeues. A requeued job
    restarts about 6 s later. Several clusters may run concurrently. The cluster ends with the
    block, and also with this process, however the process ends.

        with SlurmCluster(nodes=2) as slurm:
            job = slurm.sbatch("--nodes=2", "--wrap", "srun hostname")
            assert job.wait() == "COMPLETED"
    """

    def __init__(self, *, nodes: int = 4, cpus: int = 4, gpus: int = 0) -> None:
        """Describe a cluster; ``with`` starts it.

        Args:
            nodes: number of nodes, 1 to 60.
            cpus: number of CPUs of each node; may be more than the machine has.
            gpus: number of simulated GPUs of each node, which Slurm counts and assigns to jobs.
        """
        self.nodes = tuple(f"n{number}" for number in range(nodes))
        self._cpus, self._gpus = cpus, gpus
        self._stack = contextlib.ExitStack()
        self._lost: set[str] = set()  # nodes that were killed and not restored
        self.directory: Path
        self.environ: dict[str, str]  # environment of programs that use the cluster

    def __enter__(self) -> Self:
        if reason := slurm_obstacle():
            raise RuntimeError(reason)
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self,
        line: Sequence[str | Path],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of the cluster does: ``sinfo``, ``srun``, ``hpctrain submit``.

        Args:
            line: the command.
            environ: variables in addition to ``self.environ``.
            cwd: working directory of the command; by default ``directory/home``.
            timeout_s: time limit of the command; by default 60 s, scaled on slow machines.
            check: whether a non-zero exit code raises an error.

        Raises:
            RuntimeError: the command failed; the message has its output.
            TimeoutError: the command took longer than ``timeout_s``.
        """
        timeout_s = scaled(60.0) if timeout_s is None else timeout_s
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
            os.killpg(process.pid, signal.SIGKILL)  # with all processes that it has started
            message = "".join(process.communicate())
            raise TimeoutError(
                f"`{shlex.join(command[3:])}` took more than {timeout_s:g} s; output:\n{message}"
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
        """Submit a job with the arguments of ``sbatch``: options and a script."""
        done = self.run(["sbatch", "--parsable", *arguments], environ=environ, cwd=cwd)
        return self.job(int(done.stdout.split()[-1].partition(";")[0]))

    def job(self, number: int) -> Job:
        """Return the job with this number."""
        return Job(self, number)

    def enter(self, host: str, argv: Sequence[str]) -> list[str]:
        """Write the command line that runs ``argv`` on a node, or on ``login``."""
        return self._daemons.hosts[host].enter(argv)

    def states(self) -> dict[str, str]:
        """Return the state of each node: ``idle``, ``mixed``, ``allocated``, ``down*``, ..."""
        done = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"], check=False)
        return dict(line.split() for line in done.stdout.splitlines())

    def kill_node(self, name: str) -> None:
        """Simulate a power loss of a node; the controller detects the loss after half a minute."""
        self._lost.add(name)
        self._daemons.cut(name)

    def restore(self) -> None:
        """Return every node to service that a test took out of service."""
        for name in sorted(self._lost):
            self._daemons.cut(name)  # remaining processes
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
        deadline = time.monotonic() + UP_S
        while down := self._out_of_service():
            if time.monotonic() > deadline:
                raise RuntimeError(f"nodes do not come up: {down}; {self._daemons.last_words()}")
            if resume in down:  # a node that was set down must be resumed
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
    """Return the environment of a user: that of this process without variables of a job."""
    environ = {k: v for k, v in mpiexec.environment().items() if not k.startswith("SLURM_")}
    return environ | {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": "/var/tmp",  # local to each node: launchers of two clusters must not share it
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
