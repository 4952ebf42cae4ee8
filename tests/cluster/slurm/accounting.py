"""The data base behind ``sacct``: ``slurmdbd`` and a MariaDB of its own.

Its tables are not worth keeping, so it takes neither durability nor passwords; it listens on the
loopback of its host alone.
"""

import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.slurm.machines import Machines
from tests.cluster.slurm.settings import Settings
from tests.cluster.vcluster.cluster import LOGIN

TABLES = "/usr/share/mysql/mysql_system_tables.sql"
"""What MariaDB keeps about itself."""

START_S = 60.0
"""Time that a data base gets to start; it takes seconds."""


def start(settings: Settings, machines: Machines, environ: Mapping[str, str]) -> None:
    """Start MariaDB and ``slurmdbd``, and make the cluster known to them.

    Raises:
        RuntimeError: one does not start; says what it wrote.
    """
    tables, log = settings.directory / "my", settings.directory / "log/mariadb.log"
    tables.mkdir()
    mariadbd = shlex.join(
        [
            "mariadbd",
            "--no-defaults",
            f"--datadir={tables}",
            f"--tmpdir={settings.directory}/tmp",
            f"--user={settings.user}",
            "--skip-grant-tables",
            "--innodb-buffer-pool-size=16M",
            "--innodb-log-file-size=4M",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-lock-wait-timeout=900",
        ]
    )
    server = shlex.join(
        [
            "--bind-address=127.0.0.1",
            f"--port={settings.database_port}",
            f"--socket={settings.directory}/my.s",
            f"--pid-file={settings.directory}/pid/mariadbd",
        ]
    )
    fill = f"(echo 'create database mysql;'; echo 'use mysql;'; cat {TABLES})"
    _shell(machines, environ, f"{fill} | {mariadbd} --bootstrap >{log} 2>&1 || cat {log}")
    # It has no option to put itself in the background.
    _shell(machines, environ, f"setsid {mariadbd} {server} </dev/null >{log} 2>&1 &")
    _wait_for("ready for connections", log)
    machines.start(LOGIN, ["slurmdbd"], environ)
    _wait_for(" started", settings.directory / "log/slurmdbd.log")
    machines.start(LOGIN, ["sacctmgr", "-i", "-Q", "add", "cluster", "lab"], environ)


def _shell(machines: Machines, environ: Mapping[str, str], script: str) -> None:
    machines.start(LOGIN, ["sh", "-ec", script], environ)


def _wait_for(text: str, log: Path) -> None:
    give_up = time.monotonic() + START_S
    while text not in (said := log.read_text() if log.exists() else ""):
        if time.monotonic() > give_up:
            raise RuntimeError(f"{log.stem} does not start; it wrote:\n{said}")
        time.sleep(0.05)
