"""What runs the daemons: the machine itself, hosts of their own name, or a virtual cluster."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tests.cluster.slurm import keeper
from tests.cluster.slurm.mode import Mode
from tests.cluster.vcluster.cluster import LOGIN, NETWORK, VirtualCluster
from tests.cluster.vcluster.host import END_S, Host

LOOPBACK = "127.0.0.1"

POWER_CUT = "rm -rf /dev/shm/* /var/tmp/?*; kill -KILL -1"
"""Ends every process of a host but its first, which no signal from inside reaches."""


class Machines(ABC):
    """Hosts: ``login`` for the controller, and the nodes."""

    clients: Literal["login", "here"] = "here"
    """Where client commands must run to reach the controller."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = tuple(nodes)

    def address(self, host: str) -> str:  # noqa: ARG002 - of all of them
        """Return the address that others reach a host by."""
        return LOOPBACK

    def name(self, host: str) -> str:
        """Return what ``hostname`` says on a host."""
        return host

    @abstractmethod
    def enter(self, host: str, argv: Sequence[str]) -> list[str]:
        """Write the command line that runs ``argv`` on a host."""

    def start(self, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a daemon, by a command that puts it in the background and ends.

        Raises:
            RuntimeError: the command failed; says how.
        """
        done = subprocess.run(
            self.enter(host, argv),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        check(argv[0], host, done.returncode, done.stdout)

    def cut(self, node: str) -> None:
        """Cut the power of a node: its processes are gone, and nobody was told."""
        line = self.enter(node, ["sh", "-c", POWER_CUT])
        subprocess.run(line, check=False, capture_output=True)

    def power_up(self, node: str) -> None:  # noqa: B027 - most have nothing to do
        """Let a node that was cut off be reached again."""

    @abstractmethod
    def close(self) -> None:
        """End all processes on all hosts."""


class Alone(Machines):
    """One machine for all: a daemon has its keeper, and nothing else is its own."""

    def __init__(self, nodes: Sequence[str]) -> None:
        super().__init__(nodes)
        self._keepers: list[tuple[str, subprocess.Popen[str]]] = []

    def name(self, host: str) -> str:  # noqa: ARG002 - of all of them
        """Return the machine's name."""
        return socket.gethostname().split(".")[0]

    def enter(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - all are here
        """Run it here."""
        return list(argv)

    def start(self, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a daemon with its keeper, which takes it along at the end."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, *argv],
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the owner, who ends the cluster in order
        )
        self._keepers.append((host, process))
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline() or '{"code": "unknown", "output": ""}')
        check(argv[0], host, answer["code"], answer["output"])

    def cut(self, node: str) -> None:
        """End all that came of the node's daemon, jobs included."""
        for host, process in self._keepers:
            if host == node:
                _release(process)
        self._keepers = [kept for kept in self._keepers if kept[0] != node]

    def close(self) -> None:
        """End the daemons, the last first."""
        while self._keepers:
            _release(self._keepers.pop()[1])


class Named(Machines):
    """Hosts with names, processes, ``/dev/shm`` and ``/var/tmp`` of their own."""

    def __init__(self, nodes: Sequence[str]) -> None:
        super().__init__(nodes)
        own = [f"{LOOPBACK} {name}" for name in (LOGIN, *nodes)]
        table = [*Path("/etc/hosts").read_text().splitlines(), *own]
        self._hosts: dict[str, Host] = {}
        try:
            login = self._hosts[LOGIN] = Host.boot(LOGIN, table, network=False)
            for name in nodes:
                self._hosts[name] = Host.boot(name, table, inside=login, network=False)
        except BaseException:
            self.close()
            raise

    def enter(self, host: str, argv: Sequence[str]) -> list[str]:
        """Run it in the namespaces of the host."""
        return self._hosts[host].enter(argv)

    def close(self) -> None:
        """End the hosts, the one last that the others are inside of."""
        while self._hosts:
            self._hosts.popitem()[1].end()


class Networked(Machines):
    """Hosts of a virtual cluster, each with a network of its own."""

    clients = "login"

    def __init__(self, nodes: Sequence[str]) -> None:
        super().__init__(nodes)
        self.cluster = VirtualCluster(nodes=len(nodes))
        assert self.cluster.nodes == self.nodes
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self.cluster)

    def address(self, host: str) -> str:
        """Return the address in the cluster's network."""
        return f"{NETWORK}.254" if host == LOGIN else self.cluster.address(host)

    def enter(self, host: str, argv: Sequence[str]) -> list[str]:
        """Run it in the namespaces of the host."""
        return self.cluster.enter(host, argv)

    def cut(self, node: str) -> None:
        """Cut the network first: a power cut says no farewell."""
        self.cluster.silence(node)
        super().cut(node)

    def power_up(self, node: str) -> None:
        """Let frames pass again."""
        self.cluster.restore(node)

    def close(self) -> None:
        """End the cluster."""
        self._stack.close()


MACHINES: dict[Mode, type[Machines]] = {"plain": Alone, "uts": Named, "net": Networked}


def check(program: str, host: str, code: int, output: str) -> None:
    """Judge the start of a daemon.

    Raises:
        RuntimeError: it failed; says what it printed.
    """
    if code != 0:
        raise RuntimeError(f"{program} on {host} ended with code {code}: {output.strip()}")


def _release(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, 9)
        process.wait()
    process.stdout.close()
