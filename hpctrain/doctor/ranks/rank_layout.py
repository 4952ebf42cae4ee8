"""Ranks, nodes and the launcher fit together."""

from collections.abc import Sequence

from hpctrain.cluster.env import Launched
from hpctrain.cluster.topology import Topology
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_ranks
from hpctrain.doctor.ranks.all_checks import WORLD
from hpctrain.doctor.ranks.report import RankReport

NODES, HOSTS, LEVEL = "ranks per node", "host names", "MPI threads"


def check_world(launched: Launched | None, topology: Topology, mpi: str) -> list[Finding]:
    """Compare what the launcher says with the world that MPI made.

    Args:
        launched: what the launcher of rank 0 says.
        topology: of the world.
        mpi: name and version of the MPI library.
    """
    ranks, nodes = topology.size, topology.num_nodes
    by = f"{launched.name}{f' --mpi={launched.pmi}' if launched.pmi else ''}" if launched else ""
    told = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    if launched is not None and launched.size not in (ranks, topology.local_size):
        return [
            Finding(
                WORLD,
                "warning",
                f"{by} says {launched.size} ranks ({launched.size_variable}={launched.size}), the "
                f"world of {mpi} has {told}",
                f"start one program on all ranks; if another launch left {launched.size_variable} "
                "behind, unset it",
            )
        ]
    if launched is None:
        return [Finding(WORLD, "ok", f"{told}, no launcher")]
    return [Finding(WORLD, "ok", f"one world of {told}, started by {by}, {mpi}")]


def check_nodes(topology: Topology) -> list[Finding]:
    """Say where nodes hold different numbers of ranks."""
    sizes = [len(ranks) for ranks in topology.nodes]
    if topology.is_homogeneous:
        return [Finding(NODES, "ok", f"{sizes[0]} on every node")]
    few = [host for host, size in zip(topology.hosts, sizes, strict=True) if size == min(sizes)]
    names = ", ".join(few[:4]) + (f" and {len(few) - 4} more" if len(few) > 4 else "")
    return [
        Finding(
            NODES,
            "warning",
            f"nodes hold {min(sizes)} to {max(sizes)} ranks, fewest on {names}: links and memory "
            "are used unevenly",
            "say how many: srun --ntasks-per-node=N, mpirun --map-by ppr:N:node",
        )
    ]


def check_hosts(reports: Sequence[RankReport]) -> list[Finding]:
    """Find machines that share a name, and names that share a machine."""
    machines: dict[str, dict[str, list[int]]] = {}
    hosts: dict[str, set[str]] = {}
    for rank, report in enumerate(reports):
        machines.setdefault(report.host, {}).setdefault(report.machine, []).append(rank)
        hosts.setdefault(report.machine, set()).add(report.host)
    findings = []
    for host, groups in machines.items():
        if len(groups) > 1:
            told = " and ".join(format_ranks(ranks) for ranks in groups.values())
            findings.append(
                Finding(
                    HOSTS,
                    "error",
                    f"{len(groups)} machines are called {host}: {told} are taken for one node and "
                    "cannot share memory",
                    "give every machine a host name of its own (hostnamectl set-hostname; "
                    "containers: --hostname)",
                )
            )
    for machine, names in hosts.items():
        if machine and len(names) > 1:
            findings.append(
                Finding(
                    HOSTS,
                    "note",
                    f"{', '.join(sorted(names)[:4])} are one machine: containers with names of "
                    "their own are nodes of their own, and share its cores",
                )
            )
    return findings or [Finding(HOSTS, "ok", "every node has a name of its own")]


def check_level(reports: Sequence[RankReport], overlap: str) -> list[Finding]:
    """Say whether threads may call MPI.

    Args:
        reports: of all ranks.
        overlap: when gradients travel, of the plan.
    """
    low = [rank for rank, report in enumerate(reports) if report.thread_level != "MULTIPLE"]
    if not low:
        return [Finding(LEVEL, "ok", "MPI_THREAD_MULTIPLE is granted")]
    return [
        Finding(
            LEVEL,
            "warning",
            f"MPI grants MPI_THREAD_{reports[low[0]].thread_level} to {format_ranks(low)}, "
            f"MPI_THREAD_MULTIPLE is asked for: no thread can send gradients beside backward "
            f"(this plan: {overlap})",
            "do not lower mpi4py.rc.thread_level or MPICH_MAX_THREAD_SAFETY, or use an MPI that "
            "was built with MPI_THREAD_MULTIPLE; HPCTRAIN_OVERLAP=end works with this one",
        )
    ]
