"""The daemons of a cluster: what each is started with."""

import os
import sys
from pathlib import Path

from tests.cluster.slurm import accounting
from tests.cluster.slurm.check import search_path
from tests.cluster.slurm.machines import Machines
from tests.cluster.slurm.settings import Settings
from tests.cluster.vcluster.cluster import LOGIN


class Daemons:
    """``munged``, perhaps a data base, ``slurmctld``, and a ``slurmd`` for each node."""

    def __init__(self, settings: Settings, machines: Machines) -> None:
        self._directory = settings.directory
        self._settings, self._machines = settings, machines
        self._conf = str(settings.directory / "slurm.conf")
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
        self._start_munge()
        if self._settings.accounting:
            accounting.start(self._settings, self._machines, self.environ)
        self._on(LOGIN, "slurmctld", "-f", self._conf)
        for node in self._settings.nodes:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Start the one of a node."""
        self._on(node, "slurmd", "-f", self._conf, "-N", node)

    def last_words(self) -> str:
        """Return the ends of all logs."""
        logs = sorted((self._directory / "log").glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in logs)

    def _start_munge(self) -> None:
        folder = self._directory / "munge"
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        files = {"key-file": "key", "socket": "s", "pid-file": "pid", "seed-file": "seed"}
        line = [f"--{option}={folder / name}" for option, name in files.items()]
        self._on(LOGIN, "munged", *line, f"--log-file={folder}/log", "--num-threads=2")

    def _on(self, host: str, *argv: str) -> None:
        self._machines.start(host, argv, self.environ)
