"""The command line that starts ranks: the only place that knows the options of ``mpirun``."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpctrain.core.errors import LaunchError
from hpctrain.launch.hosts import check_hosts, check_interfaces
from hpctrain.launch.hydra_wrapper import guarded
from hpctrain.launch.mpirun import Mpirun, find_mpirun

DECLARED = "HPCTRAIN_RANKS_PER_NODE"

FORWARDED = (
    "HPCTRAIN_",
    "HOROVOD_",
    "PYTHON",
    "VIRTUAL_ENV",
    "OMP_",
    "MKL_",
    "CUDA_VISIBLE_",
    "NCCL_",
)
"""Prefixes of what ranks on other hosts are given; PATH and LD_LIBRARY_PATH go as well."""

LOOPBACK = "lo"

OUTER = (
    *("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "HYDRA_", "MPI_LOCAL"),
    *("TORCHELASTIC_", "CROSS_SIZE"),
)
"""Prefixes by which a launcher marks its ranks: one inside another would take them for its own."""

INSIDE = (
    *("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"),
    *("TORCHELASTIC_RUN_ID", "CROSS_SIZE"),
)
"""Variables of which every rank of some launcher has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a user may say about a launch beyond its size and place."""

    binding: Literal["auto", "none"] = "auto"
    """``auto`` gives each rank a core of its own when the ranks fill the machine."""
    tag_output: bool = False
    """Each line of output names its rank."""
    allocated: bool = False
    """A scheduler lends the hosts: it knows their cores, we see those of this one only."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces between the hosts; by default the MPI library chooses."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that every rank gets, on top of those it gets anyway."""
    extra: tuple[str, ...] = ()
    """Further words for ``mpirun``, as it wants them."""


def command(
    argv: Sequence[str],
    *,
    num_ranks: int,
    mpirun: Mpirun | None = None,
    nodes: int | None = None,
    hosts: str | None = None,
    options: Options | None = None,
) -> list[str]:
    """Write the command line that runs ``argv`` on ``num_ranks`` ranks.

    ``mpirun`` is by default what ``find_mpirun`` finds. ``nodes`` declares so many nodes on this
    host; ``hosts`` are real ones with their ranks, ``"a:2,b:2"``, by default this host or those
    that the scheduler lends.

    Raises:
        LaunchError: ranks, nodes and hosts do not fit together, there is no ``mpirun``, or no
            such network interface.
    """
    options = options or Options()
    if not argv:
        raise LaunchError("a launch needs a command, got none; say e.g. `python train.py`")
    if num_ranks < 1:
        raise LaunchError(f"a launch needs at least 1 rank, got {num_ranks}")
    check_hosts(hosts, num_ranks, nodes)
    mpirun = mpirun or find_mpirun()
    write = _openmpi if mpirun.is_openmpi else _hydra
    declared = dict(options.variables)
    if nodes:
        declared[DECLARED] = str(ranks_per_node(num_ranks, nodes))
    local = hosts is None and not options.allocated
    line = [str(mpirun.path), *write(mpirun, num_ranks, declared, options, local=local)]
    if options.interfaces:
        check_interfaces(options.interfaces)
        line += _through(mpirun, options.interfaces)
    if hosts:
        line += ["--host" if mpirun.is_openmpi else "-hosts", hosts]
    program = argv if mpirun.is_openmpi or num_ranks == 1 else guarded(argv)
    return [*line, *options.extra, "-np", str(num_ranks), *program]


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Copy the environment for ``mpirun``, without the marks of a launch we are ourselves part of.

    Open MPI gives ranks a terminal of their own, without a width: ``COLUMNS`` tells ours. Where
    our output goes to a file or a pipe, ``TERM=dumb`` keeps colours and progress bars out of it.
    """
    environ = os.environ if environ is None else environ
    inside = any(name in environ for name in INSIDE)
    kept = {k: v for k, v in environ.items() if not (inside and k.startswith(OUTER))}
    if on_terminal():
        kept.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    else:
        kept["TERM"] = "dumb"
    return kept


def on_terminal() -> bool:
    """Say whether a person sees our output."""
    return sys.__stdout__ is not None and sys.__stdout__.isatty()


def ranks_per_node(num_ranks: int, nodes: int) -> int:
    """Return how many ranks each of ``nodes`` declared nodes holds; the last may hold fewer.

    Raises:
        LaunchError: so many ranks cannot fill so many nodes.
    """
    per_node = -(-num_ranks // max(nodes, 1))
    if nodes < 1 or -(-num_ranks // per_node) != nodes:
        fitting = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise LaunchError(
            f"declared nodes hold equally many ranks (the last may hold fewer), {num_ranks} ranks "
            f"cannot make {nodes}; take {' or '.join(map(str, fitting))} nodes"
        )
    return per_node


def _openmpi(
    mpirun: Mpirun, num_ranks: int, declared: dict[str, str], options: Options, *, local: bool
) -> list[str]:
    line: list[str] = []
    if os.geteuid() == 0:
        line += ["--allow-run-as-root"]
    if local and num_ranks > num_cores():
        line += ["--map-by", "slot:OVERSUBSCRIBE", "--mca", "mpi_yield_when_idle", "1"]
    bind = options.binding == "auto" and local and fills_machine(num_ranks)
    line += ["--bind-to", "core" if bind else "none"]
    if mpirun.is_wheel:
        line += ["--mca", "osc", "^ucx"]  # the wheel's UCX complains at every window
    if mpirun.flavour == "openmpi4" and in_container():
        # Reading a peer's memory is forbidden there: "Read -1, expected N, errno=1".
        line += ["--mca", "btl_vader_single_copy_mechanism", "none"]
    if options.tag_output:
        line += ["--output", "tag"] if mpirun.flavour == "openmpi5" else ["--tag-output"]
    if mpirun.flavour == "openmpi5" and on_terminal():
        line += ["--stream-buffering", "0"]  # else a progress bar waits for the end of its line
    for name, value in declared.items():
        line += ["-x", f"{name}={value}"]
    return line + ([] if local else _forwards(declared))


def _hydra(
    mpirun: Mpirun, num_ranks: int, declared: dict[str, str], options: Options, *, local: bool
) -> list[str]:
    line: list[str] = []
    if mpirun.flavour == "intel":
        if options.binding == "none" or (local and num_ranks > num_cores()):
            line += ["-genv", "I_MPI_PIN", "0"]
    elif options.binding == "auto" and local and fills_machine(num_ranks):
        line += ["-bind-to", "core"]
    if options.tag_output:
        line += ["-prepend-rank"]
    for name, value in declared.items():
        line += ["-genv", name, value]
    return line  # and Hydra hands its whole environment on by itself


def _through(mpirun: Mpirun, interfaces: Sequence[str]) -> list[str]:
    """Write which network interfaces carry messages, and what the launcher itself says."""
    names = ",".join(interfaces)
    if mpirun.flavour == "openmpi5":
        line = ["--mca", "btl_tcp_if_include", names]
        # Its launcher refuses the loopback interface, and needs none on one host.
        cards = ",".join(name for name in interfaces if name != LOOPBACK)
        return line + (["--prtemca", "prte_if_include", cards] if cards else [])
    if mpirun.flavour == "openmpi4":
        return ["--mca", "btl_tcp_if_include", names, "--mca", "oob_tcp_if_include", names]
    if len(interfaces) > 1:
        raise LaunchError(
            f"{mpirun.path} takes one network interface, got {names}; name the one to use"
        )
    return ["-iface", names, "-genv", "FI_TCP_IFACE", names]


def _forwards(declared: Mapping[str, str]) -> list[str]:
    names = [
        name
        for name in sorted(os.environ)
        if name.startswith(FORWARDED) or name in ("PATH", "LD_LIBRARY_PATH")
    ]
    return [word for name in names if name not in declared for word in ("-x", name)]


def num_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Count the cores of this process's affinity mask; two hardware threads are one core."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = cpus / f"cpu{cpu}/topology/thread_siblings_list"
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return len(cores)


def fills_machine(num_ranks: int) -> bool:
    """Say whether every core of the machine gets one rank, the one case where binding helps.

    Left to itself Open MPI binds a lone rank to one core of many, and under ``taskset`` to cores
    outside the mask it was given.
    """
    return num_ranks == num_cores() and len(os.sched_getaffinity(0)) == os.cpu_count()


def in_container() -> bool:
    """Say whether this process runs in a container, as Docker, Podman and Apptainer mark it."""
    marks = ("/.dockerenv", "/run/.containerenv", "/.singularity.d")
    return any(Path(mark).exists() for mark in marks)
