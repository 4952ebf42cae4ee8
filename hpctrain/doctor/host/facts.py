"""Facts about this process and its machine, gathered once for all checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.memory import Room
from hpctrain.launch.installed_horovod import Installed


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """An MPI library that some program of this environment would find."""

    library: Path
    """The file, with links followed."""
    by: str
    """What leads to it: ``LD_LIBRARY_PATH``, ``mpirun`` or ``this environment``."""
    program: Path | None = None
    """The ``mpirun`` of PATH that leads to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiFacts:
    """The MPI library of a rank, and what else lies around."""

    library: Path | None = None
    """What a process that imports mpi4py loads; None where it was not tried or failed."""
    error: str = ""
    """Why it could not."""
    reached: tuple[Reached, ...] = ()
    """Libraries that other programs would find."""
    version: str = ""
    """Its vendor and version, ``openmpi5.0.11``; empty where there is none."""
    is_wheel: bool = False
    """Whether a Python package brought the library, and not the site."""
    srun_types: tuple[str, ...] = ()
    """What ``srun --mpi=list`` offers; empty where there is no srun, or it does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreFacts:
    """The cores of this process."""

    mask: tuple[int, ...] = (0,)
    """Hardware threads it may use."""
    num_online: int = 1
    """Hardware threads of the machine."""
    quota: float | None = None
    """Cores' worth of time that its control group allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """A file or folder in /dev/shm that no process uses."""

    path: Path
    num_bytes: int
    maker: str
    """Whose it was, such as ``Open MPI``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """Memory of the node, and the ways to share it."""

    rooms: tuple[Room, ...] = ()
    """What this process takes from."""
    shm_bytes: int = 0
    """Size of /dev/shm; 0 where there is none."""
    shm_free_bytes: int = 0
    """What is left of it."""
    memfd_error: str = ""
    """Why anonymous shared memory cannot be had; empty where it can."""
    leftovers: tuple[Leftover, ...] = ()
    """What ended programs have left in /dev/shm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A fast network card."""

    name: str
    """Such as ``mlx5_0``."""
    family: str
    """Folder of /sys/class it is in: ``infiniband`` or ``cxi``."""
    is_live: bool
    """Whether a port is active."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkFacts:
    """Cards, and what they need from the kernel."""

    cards: tuple[Card, ...] = ()
    memlock_bytes: int | None = None
    """How much memory may be locked, for the card to read; None is without limit."""
    kernel: tuple[int, ...] = ()
    """Version of Linux."""
    copy_error: str = ""
    """Why a process may not read another one's memory; empty where it may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStep:
    """One thing that was tried on a directory."""

    name: str
    """``list``, ``write``, ``lock``, ``hdf5`` or ``hdf5 locked``."""
    error: str = ""
    """What went wrong; empty where nothing did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryFacts:
    """What came of trying a directory."""

    path: Path
    file_system: str = ""
    """Its kind, such as ``nfs4`` or ``lustre``."""
    free_bytes: int = 0
    steps: tuple[JobStep, ...] = ()
    """In order, up to the last that ended."""
    hung: str = ""
    """The step that did not end in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything the checks of one process look at."""

    environ: Mapping[str, str]
    """Its environment variables."""
    python: str = ""
    """Version of the interpreter."""
    versions: Mapping[str, str | None]
    """Installed versions by package, None for one that is missing."""
    requirements: Sequence[str] = ()
    """What hpctrain needs, as its metadata says: ``torch<2.14,>=2.13``."""
    mpi: MpiFacts
    cores: CoreFacts
    memory: MemoryFacts
    network: NetworkFacts
    horovod: Installed | None = None
    """The Horovod that is installed."""
    num_gpus: int = 0
    """NVIDIA devices that this process may open."""
    directories: tuple[DirectoryFacts, ...] = ()
    """The directories that were asked about."""
