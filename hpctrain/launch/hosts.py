"""The hosts of a launch: a list of them, a file of them, the network between them."""

import re
import socket
from collections.abc import Sequence
from pathlib import Path

from hpctrain.core.errors import LaunchError

_LINE = re.compile(r"(?P<host>[\w.-]+)(?:\s+slots\s*=\s*(?P<slots>\d+)|:(?P<places>\d+))?")
"""Horovod's and Open MPI's ``host slots=N``; Hydra's ``host:N``; a host alone has one place."""


def check_hosts(hosts: str | None, num_ranks: int, nodes: int | None) -> None:
    """Check a list of hosts against the ranks to place.

    Raises:
        LaunchError: an entry is not ``host`` or ``host:ranks``, there are too few places, or
            nodes are declared as well.
    """
    if hosts is None:
        return
    if nodes:
        raise LaunchError(
            f"nodes are declared on one host only, got --nodes {nodes} and --hosts {hosts}; "
            "leave one out"
        )
    places = 0
    for entry in hosts.split(","):
        host, _, ranks = entry.partition(":")
        if not host or not (ranks or "1").isdigit():
            raise LaunchError(
                f"hosts are host:ranks with commas between, got {entry!r} in {hosts}"
            )
        places += int(ranks or "1")
    if places < num_ranks:
        raise LaunchError(
            f"every rank needs a place, got {num_ranks} ranks and {places} places in {hosts}; "
            "raise the numbers behind the colons"
        )


def read_hostfile(file: Path) -> str:
    """Read a file with a host on each line, and return them as ``--hosts`` has them.

    A line is ``host slots=4``; ``host:4`` will do, and ``host`` has one place. What stands behind
    ``#`` is a comment.

    Raises:
        LaunchError: there is no such file, a line is something else, or it names no host.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"a host file is text with a host on each line, {file} cannot be read: {error}"
        ) from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        match = _LINE.fullmatch(text)
        if text and match is None:
            raise LaunchError(
                f"a line of a host file is `host slots=N`, got {text!r} in line {number} of "
                f"{file}; correct it, or name the hosts by --hosts a:2,b:2"
            )
        if match is not None:
            hosts.append(f"{match['host']}:{match['slots'] or match['places'] or '1'}")
    if not hosts:
        raise LaunchError(f"a host file names a host at least, {file} names none")
    return ",".join(hosts)


def check_interfaces(interfaces: Sequence[str]) -> None:
    """See whether this host, where the launcher itself runs, has these network interfaces.

    Raises:
        LaunchError: it lacks one. A network such as ``10.0.0.0/24`` is left to the launcher.
    """
    here = [name for _, name in socket.if_nameindex()]
    for name in interfaces:
        if name not in here and "/" not in name:
            raise LaunchError(
                f"a network interface is one that every host has, {name!r} is not on this one: "
                f"it has {', '.join(here)}; name another, or none, and MPI chooses"
            )
