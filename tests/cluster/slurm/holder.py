"""A process that holds a cluster for a shell: it ends when somebody asks at its socket."""

import contextlib
import os
import select
import shlex
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.slurm.cluster import ROOT, SlurmCluster
from tests.cluster.vcluster.cluster import LOGIN

READY = "ready\n"

SOCKET = "holder"
"""In the directory of the cluster."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a socket (unix(7), SO_PEERCRED)."""

ON = """\
#!/bin/sh
# Runs a command on a node, or on login: on HOST COMMAND...
host=$1; shift
case $host in
{cases}
esac
echo "no host $host: {hosts}" >&2; exit 2
"""


def launch(directory: Path, options: Sequence[str]) -> str:
    """Start a holder in the background; return what it said if it failed, else nothing.

    Args:
        directory: of the cluster; must not be there.
        options: of the command ``hold``.
    """
    holder = subprocess.Popen(
        [sys.executable, "-m", __package__, "hold", f"--directory={directory}", *options],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout is not None
    said = holder.stdout.readline()
    return "" if said == READY else said + holder.stdout.read()


def hold(cluster: SlurmCluster) -> None:
    """Start a cluster, say so, and keep it until somebody asks for its end."""
    with socket.socket(socket.AF_UNIX) as door, cluster:
        _write_on(cluster)
        door.bind(f"{cluster.directory}/{SOCKET}")
        door.listen()
        sys.stdout.write(READY)
        sys.stdout.flush()
        door.accept()


def release(directory: Path) -> bool:
    """End the cluster of a directory and wait until all is gone; False if there is none."""
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(f"{directory}/{SOCKET}")
        except OSError:
            return False
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _user, _group = _CREDENTIALS.unpack(credentials)
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        holder = os.pidfd_open(pid)
        select.select([holder], [], [])
        os.close(holder)
    return True


def _write_on(cluster: SlurmCluster) -> None:
    variables = f"SLURM_CONF={cluster.directory}/slurm.conf"
    cases = [
        f'{host}) exec {shlex.join(cluster.enter(host, ()))} env -C "$PWD" {variables} "$@" ;;'
        for host in (LOGIN, *cluster.nodes)
    ]
    script = cluster.directory / "on"
    script.write_text(ON.format(cases="\n".join(cases), hosts=" ".join((LOGIN, *cluster.nodes))))
    script.chmod(0o755)
