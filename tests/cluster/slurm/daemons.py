"""The hosts of a cluster, and the daemon that each runs."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.cluster.slurm.check import search_path
from tests.cluster.vcluster.cluster import LOGIN
from tests.cluster.vcluster.host import Host

POWER_CUT = "rm -rf /dev/shm/* /var/tmp/?*; kill -KILL -1"
"""Ends every process of a host but its first, which no signal from inside reaches."""


@contextlib.contextmanager
def booted(nodes: Sequence[str]) -> Iterator[dict[str, Host]]:
    """Start ``login`` and the nodes, with all of their own but the network.

    Raises:
        RuntimeError: the kernel refused; says why.
    """
    own = [f"127.0.0.1 {name}" for name in (LOGIN, *nodes)]
    table = [*Path("/etc/hosts").read_text().splitlines(), *own]
    hosts: dict[str, Host] = {}
    try:
        for name in (LOGIN, *nodes):
            hosts[name] = Host.boot(name, table, inside=hosts.get(LOGIN), network=False)
        yield hosts
    finally:
        while hosts:  # the one last that the others are inside of
            hosts.popitem()[1].end()


class Daemons:
    """``munged`` and ``slurmctld`` on ``login``, and a ``slurmd`` on each node."""

    def __init__(self, directory: Path, hosts: dict[str, Host]) -> None:
        self._directory, self.hosts = directory, hosts
        self._conf = str(directory / "slurm.conf")
        self.environ = {
            "PATH": f"{Path(sys.executable).parent}:{search_path()}",
            "SLURM_CONF": self._conf,
        }
        """All that a daemon, or a client, must know."""

    def start(self) -> None:
        """Start all.

        Raises:
            RuntimeError: one does not start; says why.
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
        """Start the one of a node."""
        self._on(node, "slurmd", "-f", self._conf, "-N", node)

    def cut(self, node: str) -> None:
        """Cut the power of a node: its processes are gone, and nobody was told."""
        line = self.hosts[node].enter(["sh", "-c", POWER_CUT])
        subprocess.run(line, check=False, capture_output=True)

    def last_words(self) -> str:
        """Return the ends of all logs."""
        logs = sorted((self._directory / "log").glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in logs)

    def _on(self, host: str, *argv: str) -> None:
        """Start a daemon, by a command that puts it in the background and ends."""
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
