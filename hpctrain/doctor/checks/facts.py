"""Facts of a process and its machine, and of all ranks; gathered once for all checks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpctrain.cluster.env import Launched
from hpctrain.cluster.machine_load import MachineLoad
from hpctrain.cluster.resources import Room
from hpctrain.cluster.topology import Topology
from hpctrain.core.config import Settings
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_ranks
from hpctrain.doctor.checks.check import listed


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """An MPI library that some program of this environment would find."""

    library: Path  # the file, with links followed
    by: str  # what leads to it: ``LD_LIBRARY_PATH``, ``mpirun`` or ``this environment``
    program: Path | None = None  # the ``mpirun`` of PATH that leads to it


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiFacts:
    """The MPI library of a rank, and what else lies around."""

    library: Path | None = None
    """What a process that imports mpi4py loads; None where it was not tried or failed."""
    error: str = ""  # why it could not
    reached: tuple[Reached, ...] = ()  # libraries that other programs would find
    is_wheel: bool = False  # whether a Python package brought the library, and not the site
    srun_types: tuple[str, ...] = ()
    """What ``srun --mpi=list`` offers; empty where there is no srun, or it does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreFacts:
    """The cores of this process."""

    mask: tuple[int, ...] = (0,)  # hardware threads it may use
    quota: float | None = None  # cores' worth of time that its control group allows
    num_granted: int = 1
    """Cores of the machine that the job may use, as far as scheduler and kernel tell."""
    num_siblings: int = 1  # hardware threads of a core


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """Memory of the node, and the ways to share it."""

    rooms: tuple[Room, ...] = ()  # what this process takes from
    shm_bytes: int = 0  # size of /dev/shm; 0 where there is none
    shm_free_bytes: int = 0  # what is left of it
    memfd_error: str = ""  # why anonymous shared memory cannot be had; empty where it can


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """The GPUs of a machine, as nvidia-smi tells of them; empty where there is none."""

    driver: str = ""  # its version
    cuda: str = ""  # the newest version that the driver runs
    runtime: str = ""  # version of CUDA that was installed with torch
    error: str = ""  # why nvidia-smi, which is there, does not tell
    uuids: tuple[str, ...] = ()
    topology: str = ""  # what ``nvidia-smi topo -m`` prints
    has_peermem: bool = False  # whether network cards may reach their memory (GPUDirect RDMA)


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A fast network card."""

    name: str  # such as ``mlx5_0``
    family: str  # folder of /sys/class it is in: ``infiniband`` or ``cxi``
    is_live: bool  # whether a port is active
    speaks_ethernet: bool = False  # whether it is an Ethernet card that can do more (RoCE)

    @property
    def is_fast(self) -> bool:
        """Whether messages could leave by it and not by Ethernet."""
        return self.is_live and not self.speaks_ethernet


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkFacts:
    """Cards, and what they need from the kernel."""

    cards: tuple[Card, ...] = ()
    copy_error: str = ""  # why a process may not read another one's memory; empty where it may


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryFacts:
    """What came of trying a directory."""

    path: Path
    file_system: str = ""  # its kind, such as ``nfs4`` or ``lustre``
    free_bytes: int = 0
    steps: Mapping[str, str] = field(default_factory=dict)
    """What went wrong in ``list``, ``write``, ``lock``, ``hdf5`` and ``hdf5 locked``, empty where
    nothing did; in order, up to the last that ended."""
    hung: str = ""  # the step that did not end in time


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything the checks of one process look at."""

    environ: Mapping[str, str]  # its environment variables
    python: str = ""  # version of the interpreter
    place: str = ""  # system, processor, C library and environment
    versions: Mapping[str, str | None]
    """Installed versions by package, None for one that is missing."""
    mpi: MpiFacts
    cores: CoreFacts
    memory: MemoryFacts
    network: NetworkFacts
    horovod: str | None = None  # version of the Horovod that is installed
    horovod_error: str = ""
    """What keeps it from being loaded and what to do; empty where nothing does, or none asks."""
    load: MachineLoad | None = None  # of the machine; None in a rank, beside which others work
    num_gpus: int = 0  # NVIDIA devices that this process may open
    gpus: GpuFacts = GpuFacts()
    no_peers: tuple[tuple[int, int], ...] = ()
    """Pairs of the GPUs that a rank sees which do not reach each other's memory."""
    directories: tuple[DirectoryFacts, ...] = ()  # the directories that were asked about
    host: str = ""  # name of the machine
    visible: tuple[str, ...] = ()
    """The GPUs that a rank sees, under names that mean the same on its host."""
    by_torch: bool = False  # whether torch named the GPUs; else the environment
    thread_level: str = "MULTIPLE"  # what MPI granted to a rank


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLink:
    """What two ranks measured between them."""

    ranks: tuple[int, int]  # the rank that measured, and the one that answered
    latency_s: float  # of a small message in one direction, the best of many
    bytes_per_s: float  # of a large message, the best of a few
    sent_bytes: int = 0  # what each of the two has sent to the other, about
    clock_s: float = 0.0  # how far the clock of the second rank is ahead of that of the first
    clock_error_s: float = 0.0  # the true difference lies within so much of ``clock_s``

    def with_best_of(self, other: "MeasuredLink") -> "MeasuredLink":
        """Return this link with the better figures of two measurements."""
        return replace(
            self,
            latency_s=min(self.latency_s, other.latency_s),
            bytes_per_s=max(self.bytes_per_s, other.bytes_per_s),
            sent_bytes=self.sent_bytes + other.sent_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """What left one host while messages were measured."""

    host: str
    sent_bytes: int  # to other nodes, in messages of this program, about
    by_interface: Mapping[str, int]  # bytes by name: Ethernet and other interfaces of the kernel
    by_card: Mapping[str, int]  # bytes by name: InfiniBand and its kin, past the kernel
    fast_cards: tuple[str, ...] = ()  # those of the host, whether they count or not


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldFacts:
    """Everything the checks of all ranks look at; those of one process are a world of one."""

    ranks: Sequence[Facts]  # of each rank
    topology: Topology
    launched: Launched | None = None  # what the launcher of rank 0 says
    mpi: str = "no MPI"  # name and version of the MPI library
    settings: Settings = field(default_factory=Settings)  # those of rank 0, which decide
    engine: str = "hpctrain"  # what moves tensors
    node_memory: str = "alone"  # how the ranks of a node share memory, by the plan
    overlap: str = "end"  # when gradients travel, by the plan
    notes: Sequence[str] = ()  # what rank 0 was told while the ranks met
    nccl: str = ""  # version of the NCCL that torch has on rank 0; empty where there is none
    why_not_nccl: str = ""  # why it cannot sum over all ranks; empty if it can
    obstacles: Sequence[Finding] = ()  # what was forced and could not be had
    plan: Sequence[str] = ()  # what the plan says and was chosen by, in sentences
    inside: Sequence[MeasuredLink] = ()  # links of two ranks of a node
    between: Sequence[
        MeasuredLink
    ] = ()  # links of first ranks of nodes; slow ones were measured again
    carried: Sequence[Carried] = ()  # what left each node meanwhile

    @property
    def host_of(self) -> dict[int, str]:
        """The name of a node by its first rank."""
        nodes = zip(self.topology.nodes, self.topology.hosts, strict=True)
        return {ranks[0]: host for ranks, host in nodes}


def by_host(ranks: Sequence[Facts]) -> dict[str, list[int]]:
    """Return the ranks of each host."""
    found: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        found.setdefault(facts.host, []).append(rank)
    return found


def differences(values: Sequence[Mapping[str, str | None]]) -> Iterator[tuple[str, str]]:
    """Yield each name whose value differs between ranks, and which ranks have which."""
    for name in dict.fromkeys(name for of_rank in values for name in of_rank):
        ranks_of: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(values):
            ranks_of.setdefault(of_rank.get(name) or "not set", []).append(rank)
        if len(ranks_of) > 1:
            told = [f"{value} ({format_ranks(ranks)})" for value, ranks in ranks_of.items()]
            yield name, listed(told)
